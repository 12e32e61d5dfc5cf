"""The order of training data, a function of the seed and the number of the step alone, and padded batches.

So a position in the data is one number, and a run that goes on after a kill sees what an unbroken one would have seen.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from drafters.training.answers import Conversation

_JITTER = 24.0  # tokens: lengths are blurred by so much before conversations of like length are put together


@dataclass(frozen=True, slots=True)
class Batch:
    """B conversations padded to the longest, T tokens."""

    token_ids: torch.Tensor  # [B, T] int64, padded with 0
    lengths: tuple[int, ...]
    wanted: torch.Tensor  # [B, T] bool: the token after this one is part of the answer
    greedy: tuple[bool | None, ...]

    @property
    def answer_tokens(self) -> int:
        return int(self.wanted.sum())


def epoch_plan(lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Every conversation once: batches of at most `batch_tokens` padded tokens, and at least one conversation, shuffled."""
    draw = random.Random(f"{seed} {epoch}")
    ordered = sorted(range(len(lengths)), key=lambda i: lengths[i] + draw.random() * _JITTER)
    batches: list[list[int]] = []
    current: list[int] = []
    longest = 0
    for i in ordered:
        longest = max(longest, lengths[i])
        if current and (len(current) + 1) * longest > batch_tokens:
            batches.append(current)
            current, longest = [], lengths[i]
        current.append(i)
    batches.append(current)
    draw.shuffle(batches)
    return batches


def schedule(
    lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int = 0, place: int = 0
) -> Iterator[tuple[int, int, list[int]]]:
    """(epoch, place in it, conversations) without end, from a position on."""
    while True:
        plan = epoch_plan(lengths, batch_tokens, seed, epoch)
        for at in range(place, len(plan)):
            yield epoch, at, plan[at]
        epoch, place = epoch + 1, 0


def make_batch(conversations: Sequence[Conversation]) -> Batch:
    longest = max(len(c) for c in conversations)
    token_ids = torch.zeros(len(conversations), longest, dtype=torch.int64)
    wanted = torch.zeros(len(conversations), longest, dtype=torch.bool)
    for row, c in enumerate(conversations):
        token_ids[row, : len(c)] = torch.tensor(c.prompt_ids + c.answer_ids)
        wanted[row, max(len(c.prompt_ids) - 1, 0) : len(c) - 1] = True
    return Batch(token_ids, tuple(len(c) for c in conversations), wanted, tuple(c.greedy for c in conversations))
