"""The attention head while it is trained: one decoder layer over (state, token) pairs (EAGLE, Li et al. 2024).

The file's kind is "forespeak.heads/2", its arithmetic is written down in `drafters.layer_models`. Position t takes the target's state
at t - 1 and the token at t and guesses the token at t + 1. Further guesses take the head's own last state instead; they see the
first pass's keys up to their anchor, and then the keys of their own chain.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F

from drafters.training.networks import Anchors, Guess
from drafters.training.parts import apply, rms_norm, rope_tables, rope_theta, rotate, split_heads, trainable
from drafters.training.teacher import Lesson, Teacher, dense

FORMAT = "forespeak.heads/2"
_FC_NOISE = 0.02
_MASKED = -1e9
KV = tuple[torch.Tensor, torch.Tensor]


class AttentionHead(nn.Module):
    def __init__(self, teacher: Teacher, width: int, generator: torch.Generator) -> None:
        """Attention, norms and the first `width` channels of the MLP come from the target's last layer, the output rows from its
        vocabulary matrix; the joint of state and token passes the state through at first."""
        super().__init__()
        shape, last = teacher.shape, teacher.weights.layers[-1]
        hidden = shape.hidden
        self.heads, self.kv_heads, self.head_dim = shape.q_heads, shape.kv_heads, shape.head_dim
        self.eps, self.dtype = shape.norm_eps, teacher.dtype
        self.scale = shape.head_dim**-0.5
        self.theta = rope_theta(teacher.weights)
        self._device = teacher.device
        self._tables = rope_tables(self.theta, self.head_dim, 1024, self._device)
        joint = torch.randn(hidden, 2 * hidden, generator=generator) * _FC_NOISE
        joint[:, :hidden] += torch.eye(hidden)
        self.feature_norm = nn.Parameter(torch.ones(hidden))
        self.token_norm = nn.Parameter(torch.ones(hidden))
        self.fc = nn.Parameter(joint)
        self.attn_norm = trainable(last.attention_norm)
        self.q, self.k, self.v, self.o = (trainable(dense(weight)) for weight in (last.q, last.k, last.v, last.o))
        self.mlp_norm = trainable(last.mlp_norm)
        width = min(width or shape.intermediate, shape.intermediate)
        self.gate, self.up = (trainable(dense(weight)[:width]) for weight in (last.gate, last.up))
        self.down = trainable(dense(last.down)[:, :width])
        self.output_norm = trainable(teacher.weights.final_norm)
        self.output = trainable(teacher.output)

    def guesses(self, lesson: Lesson, depths: int, anchors: Anchors) -> Iterator[Guess]:
        length = lesson.token_ids.shape[1]
        cos, sin = self._rotary(length)
        before = F.pad(lesson.hidden, (0, 0, 1, 0))[:, :length]  # the state before the first token is 0
        first, keys, values = self._first(before, lesson.embedded, cos, sin)
        yield Guess(first[lesson.wanted], lesson.place[lesson.wanted])
        if depths == 1:
            return
        rows = torch.arange(len(first), device=first.device)[:, None]  # [B, 1]
        hide = self._hide(anchors.position, length)
        state = first[rows, anchors.position]  # [B, Q, H]
        chain: list[KV] = []
        for depth in range(2, depths + 1):
            at = anchors.position + depth - 1
            inside = at < length
            at = at.clamp(max=length - 1)
            useful = anchors.useful & inside & lesson.wanted[rows, at]
            state = self._later(state, lesson.embedded[rows, at], cos[at], sin[at], (keys, values), chain, hide)
            yield Guess(state[useful], lesson.place[rows, at][useful])

    def _first(
        self, before: torch.Tensor, embedded: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """States [B, T, H] of a whole batch, and keys and values [B, heads, T, D]."""
        x = self._joint(before, embedded)
        q, k, v = self._project(x, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return self._rest(x, mixed), k, v

    def _later(
        self,
        state: torch.Tensor,
        embedded: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        past: KV,
        chain: list[KV],
        hide: torch.Tensor,
    ) -> torch.Tensor:
        """States [B, Q, H] of one more token behind each anchor; its keys join `chain`."""
        x = self._joint(state, embedded)
        q, k, v = self._project(x, cos[:, None], sin[:, None])
        chain.append((k, v))
        batch, heads, count, _ = q.shape
        keys, values = past
        scores = torch.baddbmm(
            hide.expand(batch, heads, count, -1).reshape(batch * heads, count, -1),
            q.flatten(0, 1),
            keys.flatten(0, 1).transpose(1, 2),
            alpha=self.scale,
        ).view(batch, heads, count, -1)
        own = [(q * key).sum(-1, keepdim=True) * self.scale for key, _ in chain]
        weights = torch.softmax(torch.cat([scores, *own], dim=-1).float(), dim=-1).to(self.dtype)
        length = keys.shape[2]
        mixed = weights[..., :length] @ values
        for m, (_, value) in enumerate(chain):
            mixed = mixed + weights[..., length + m : length + m + 1] * value
        return self._rest(x, mixed)

    def _joint(self, state: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        parts = (self._norm(state, self.feature_norm), self._norm(embedded, self.token_norm))
        return apply(torch.cat(parts, dim=-1), self.fc).float()

    def _project(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries and keys, and values, all [B, heads, T, D]."""
        h = self._norm(x, self.attn_norm)
        q, k, v = (split_heads(apply(h, weight), self.head_dim) for weight in (self.q, self.k, self.v))
        group = self.heads // self.kv_heads
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)

    def _rest(self, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        x = x + apply(mixed.transpose(1, 2).flatten(2), self.o).float()
        h = self._norm(x, self.mlp_norm)
        x = x + apply(F.silu(apply(h, self.gate)) * apply(h, self.up), self.down).float()
        return self._norm(x, self.output_norm)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, self.eps, self.dtype)

    def _rotary(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._tables[0].shape[0] < length:
            self._tables = rope_tables(self.theta, self.head_dim, 2 * length, self._device)
        return self._tables[0][:length].to(self.dtype), self._tables[1][:length].to(self.dtype)

    def _hide(self, anchor: torch.Tensor, length: int) -> torch.Tensor:
        """[B, 1, Q, T]: -1e9 at keys behind the anchor."""
        behind = torch.arange(length, device=anchor.device) > anchor[:, :, None]
        return torch.zeros(behind.shape, dtype=self.dtype, device=anchor.device).masked_fill_(behind, _MASKED)[:, None]

    def tensors(self) -> dict[str, torch.Tensor]:
        """By their names in the file."""
        return dict(self.named_parameters())

    def metadata(self) -> dict[str, str]:
        return {
            "format": FORMAT,
            "norm_eps": f"{self.eps:g}",
            "q_heads": str(self.heads),
            "kv_heads": str(self.kv_heads),
            "head_dim": str(self.head_dim),
            "rope_theta": f"{self.theta:g}",
        }
