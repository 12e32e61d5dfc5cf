"""The student while it is trained: a few of the target's own layers, its embedding, and the frequent rows of its vocabulary matrix.

The file is described in `drafters.student_file`. Like the target it sees the tokens before a position and nothing else, so a
guess is as good at any depth as the tokens before it are right.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F

from drafters.training.networks import Anchors, Guess
from drafters.training.parts import apply, rms_norm, rotate, split_heads, trainable
from drafters.training.teacher import Lesson, Teacher, dense
from kernels.decoder import DecoderShape, LayerWeights
from kernels.linear import Weight
from spec.errors import ConfigError

FORMAT = "forespeak.student/1"


def chosen_layers(total: int, count: int) -> list[int]:
    """`count` layers spread evenly, the first and the last among them; one layer alone is the last."""
    if count > total:
        raise ConfigError(f"--layers is {count}; the target has {total}")
    if count == 1:
        return [total - 1]
    return [round(i * (total - 1) / (count - 1)) for i in range(count)]


class Layer(nn.Module):
    """One decoder layer of the Llama family, with whatever biases and head norms the target has."""

    def __init__(self, shape: DecoderShape, weights: LayerWeights, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        self.attn_norm = trainable(weights.attention_norm)
        self.mlp_norm = trainable(weights.mlp_norm)
        for name in ("q", "k", "v", "o", "gate", "up", "down"):
            weight: Weight = getattr(weights, name)
            self.register_parameter(name, trainable(dense(weight)))
            self.register_parameter(f"{name}_bias", None if weight.bias is None else trainable(weight.bias))
        self.q_norm = None if weights.q_norm is None else trainable(weights.q_norm)
        self.k_norm = None if weights.k_norm is None else trainable(weights.k_norm)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """x [B, T, H] float32; mask [T, T] bool, None = causal."""
        h = self._norm(x, self.attn_norm)
        q, k, v = (split_heads(self._linear(h, name), self.shape.head_dim) for name in "qkv")
        if self.q_norm is not None:
            q = self._norm(q, self.q_norm)
        if self.k_norm is not None:
            k = self._norm(k, self.k_norm)
        group = self.shape.q_heads // self.shape.kv_heads
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(
            q,
            k.repeat_interleave(group, dim=1),
            v.repeat_interleave(group, dim=1),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.shape.attention_scale,
        )
        x = x + self._linear(mixed.transpose(1, 2).flatten(2), "o").float()
        h = self._norm(x, self.mlp_norm)
        return x + self._linear(F.silu(self._linear(h, "gate")) * self._linear(h, "up"), "down").float()

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return apply(x, getattr(self, name), getattr(self, f"{name}_bias"))

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, self.shape.norm_eps, self.dtype)


class Student(nn.Module):
    def __init__(self, teacher: Teacher, layers: int, share_output: bool) -> None:
        """`share_output`: score with the target's own rows, which then are neither trained nor in the file."""
        super().__init__()
        self.teacher_shape, self.dtype = teacher.shape, teacher.dtype
        self._weights = teacher.weights
        self.sources = chosen_layers(teacher.shape.layers, layers)
        self.layers = nn.ModuleList(Layer(teacher.shape, teacher.weights.layers[i], teacher.dtype) for i in self.sources)
        self.final_norm = trainable(teacher.weights.final_norm)
        self.output = trainable(teacher.output).requires_grad_(not share_output)

    def guesses(self, lesson: Lesson, depths: int, anchors: Anchors) -> Iterator[Guess]:
        """Depth 1 only: teacher forcing covers all depths at once."""
        length = lesson.token_ids.shape[1]
        cos, sin = (t[:length].to(lesson.hidden.device, self.dtype) for t in (self._weights.rope_cos, self._weights.rope_sin))
        mask = self._window(length, lesson.hidden.device)
        x = lesson.embedded.float()
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        states = rms_norm(x, self.final_norm, self.teacher_shape.norm_eps, self.dtype)
        yield Guess(states[lesson.wanted], lesson.place[lesson.wanted])

    def _window(self, length: int, device: torch.device) -> torch.Tensor | None:
        window = self.teacher_shape.sliding_window
        if window is None or window >= length:
            return None
        places = torch.arange(length, device=device)
        back = places[:, None] - places[None, :]
        return (back >= 0) & (back < window)

    def tensors(self) -> dict[str, torch.Tensor]:
        """By their names in the file."""
        return {name: values for name, values in self.named_parameters() if values.requires_grad}

    def metadata(self) -> dict[str, str]:
        return {"format": FORMAT, "layers": str(len(self.layers)), "sources": ",".join(map(str, self.sources))}
