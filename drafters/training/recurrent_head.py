"""The recurrent head while it is trained: one gated cell, reused at every depth ("forespeak.heads/1").

The arithmetic is written down in `drafters.head_models`; this is it with gradients, over many positions at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F

from drafters.training.networks import Anchors, Guess
from drafters.training.parts import apply, rms_norm, trainable
from drafters.training.teacher import Lesson, Teacher

FORMAT = "forespeak.heads/1"


class RecurrentHead(nn.Module):
    def __init__(self, teacher: Teacher, width: int, generator: torch.Generator) -> None:
        """The cell starts as a small random change of the state, the output rows come from the target's vocabulary matrix."""
        super().__init__()
        hidden = teacher.shape.hidden
        width = width or 2 * hidden
        self.eps, self.dtype = teacher.shape.norm_eps, teacher.dtype

        def matrix(rows: int, columns: int, spread: float) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, columns, generator=generator) * spread)

        self.state_norm = nn.Parameter(torch.ones(hidden))
        self.token_norm = nn.Parameter(torch.ones(hidden))
        # States come normalised by the target, with its final norm's gain; this one restores that size.
        size = float(teacher.weights.final_norm.float().square().mean().sqrt())
        self.output_norm = nn.Parameter(torch.full((hidden,), size))
        self.gate = matrix(width, 2 * hidden, 0.02)
        self.up = matrix(width, 2 * hidden, 0.02)
        self.down = matrix(hidden, width, 0.01)
        self.output = trainable(teacher.output)

    def guesses(self, lesson: Lesson, depths: int, anchors: Anchors) -> Iterator[Guess]:
        length = lesson.token_ids.shape[1]
        before = F.pad(lesson.hidden, (0, 0, 1, 0))[:, :length].float()
        first = self._advance(before, lesson.embedded)
        yield Guess(self._read(first[lesson.wanted]), lesson.place[lesson.wanted])
        rows = torch.arange(len(first), device=first.device)[:, None]
        state = first[rows, anchors.position]
        for depth in range(2, depths + 1):
            at = anchors.position + depth - 1
            inside = at < length
            at = at.clamp(max=length - 1)
            useful = anchors.useful & inside & lesson.wanted[rows, at]
            state = self._advance(state, lesson.embedded[rows, at])
            yield Guess(self._read(state[useful]), lesson.place[rows, at][useful])

    def _advance(self, state: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """States [..., H] float32 after one more token."""
        z = torch.cat((self._norm(state, self.state_norm), self._norm(embedded, self.token_norm)), dim=-1)
        return state + apply(F.silu(apply(z, self.gate)) * apply(z, self.up), self.down).float()

    def _read(self, state: torch.Tensor) -> torch.Tensor:
        return self._norm(state, self.output_norm)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, self.eps, self.dtype)

    def tensors(self) -> dict[str, torch.Tensor]:
        """By their names in the file."""
        return dict(self.named_parameters())

    def metadata(self) -> dict[str, str]:
        return {"format": FORMAT, "norm_eps": f"{self.eps:g}"}
