"""What a trainable drafter must offer the loop, and the choice among them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from drafters.training.teacher import Lesson


@dataclass(frozen=True, slots=True)
class Anchors:
    """Positions from which a network guesses further than one token. A row with fewer than Q is filled with useless ones."""

    position: torch.Tensor  # [B, Q] int64
    useful: torch.Tensor  # [B, Q] bool


@dataclass(frozen=True, slots=True)
class Guess:
    """Guesses of one depth. Row i is judged by row `place[i]` of the lesson's `aim`."""

    states: torch.Tensor  # [n, H], normalised: scores are states @ output^T
    place: torch.Tensor  # [n] int64


class Network(Protocol):
    """A module over a target's states. `output` [K, H] is its matrix of the frequent tokens; float32 parameters throughout."""

    output: nn.Parameter

    def guesses(self, lesson: Lesson, depths: int, anchors: Anchors) -> Iterator[Guess]:
        """One guess a depth, 1 .. depths. The tokens behind an anchor are the answer's own: earlier guesses were accepted."""


def choose_anchors(wanted: torch.Tensor, share: float, generator: torch.Generator | None) -> Anchors:
    """A random `share` of the wanted positions of the fullest row (all of them, without a generator), each row ascending."""
    count = int(wanted.sum(1).max())
    quantity = max(1, int(share * count))
    if generator is None:
        draw = torch.arange(wanted.shape[1], 0, -1, dtype=torch.float32).expand(wanted.shape)
    else:
        draw = torch.rand(wanted.shape, generator=generator)
    draw = draw.to(wanted.device).masked_fill(~wanted, -1.0)
    position = draw.topk(quantity, dim=1).indices.sort(dim=1).values
    return Anchors(position, wanted.gather(1, position))
