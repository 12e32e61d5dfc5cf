"""Which tokens a drafter can say: the frequent ones of the answers, and some always. Knows counts; refuses to know text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafters.training.answers import Conversation
from spec.errors import ConfigError

_STEP = 256  # a chosen size is a multiple of this
_PROMPT_SHARE = 0.1  # a prompt's token counts this much of an answer's


@dataclass(frozen=True, slots=True)
class Frequent:
    token_ids: torch.Tensor  # [K] int64, ascending
    coverage: float  # share of the training answers' tokens that are among them


def choose_tokens(
    conversations: Sequence[Conversation], always: Sequence[int], vocab_size: int, size: int, coverage: float
) -> Frequent:
    """The `size` most frequent tokens, `always` among them; with size 0 as many as hold `coverage` of the answers' tokens."""
    answers = _counts(itertools.chain.from_iterable(c.answer_ids for c in conversations), vocab_size)
    prompts = _counts(itertools.chain.from_iterable(c.prompt_ids for c in conversations), vocab_size)
    rank = answers + _PROMPT_SHARE * prompts
    must = torch.tensor(sorted(set(always)), dtype=torch.int64)
    if must.numel() > vocab_size or (must.numel() and int(must[-1]) >= vocab_size):
        raise ConfigError(f"the tokens to keep always lie outside the target's {vocab_size} tokens")
    rank[must] += rank.sum() + 1
    order = torch.argsort(rank, descending=True, stable=True)  # ties go to the lower id
    covered = answers[order].cumsum(0) / answers.sum()
    if size == 0:
        needed = int(torch.searchsorted(covered, coverage)) + 1
        size = -(-max(needed, must.numel()) // _STEP) * _STEP
    size = min(size, vocab_size)
    if size < must.numel():
        raise ConfigError(
            f"--vocabulary is {size}; {must.numel()} tokens (special, whitespace, digits, punctuation) are always in"
        )
    return Frequent(order[:size].sort().values, float(covered[size - 1]))


def _counts(ids: itertools.chain[int], vocab_size: int) -> torch.Tensor:
    """float64 [vocab_size]"""
    return torch.bincount(torch.tensor(list(ids), dtype=torch.int64), minlength=vocab_size).double()
