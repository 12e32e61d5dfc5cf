"""Edits of one node's raw logits: penalties, bias, bad words, min_tokens. Knows the node's token path; draws nothing.

What is counted: repetition_penalty (Keskar et al. 2019, CTRL) counts prompt and answer; presence_penalty and
frequency_penalty (OpenAI) count the answer only. Nodes between the root and the node at hand count as answer, so a drafted
token is penalised exactly as if it had been committed before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import torch

from spec.request import SamplingParams

BANNED = float("-inf")


def has_edits(sampling: SamplingParams) -> bool:
    """True when some option other than a grammar changes logits before the temperature."""
    return bool(
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
        or sampling.logit_bias
        or sampling.bad_words
        or sampling.min_tokens > 0
    )


class PathEdits:
    """Counts along one root-to-node path. `extend` moves one node down; `apply` edits that node's logits in place.

    `end_ids` are the tokens that would end the answer. Ids outside the vocabulary are ignored: a padding id cannot be drawn.
    """

    def __init__(self, sampling: SamplingParams, token_ids: Sequence[int], prompt_len: int, end_ids: Collection[int]) -> None:
        self._sampling = sampling
        self._answered = len(token_ids) - prompt_len
        self._end_ids = sorted(end_ids)
        self._seen: set[int] = set(token_ids) if sampling.repetition_penalty != 1.0 else set()
        counts_answer = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        self._counts: Counter[int] | None = Counter(token_ids[prompt_len:]) if counts_answer else None
        longest = max((len(word) for word in sampling.bad_words), default=1) - 1
        self._tail = list(token_ids[max(len(token_ids) - longest, 0) :]) if longest > 0 else []

    def extend(self, token: int) -> None:
        self._answered += 1
        self._seen.add(token)
        if self._counts is not None:
            self._counts[token] += 1
        self._tail.append(token)

    def apply(self, logits: torch.Tensor, may_end: bool = False) -> None:
        """Edit one row [V] float32 in place. Float arithmetic is per element, so no other row can change a bit of it.

        `may_end` lifts min_tokens: a grammar that is complete allows nothing but the end.
        """
        options = self._sampling
        if options.repetition_penalty != 1.0:
            ids = _inside(self._seen, logits)
            values = logits[ids]
            logits[ids] = torch.where(values > 0, values / options.repetition_penalty, values * options.repetition_penalty)
        if self._counts:
            ids = _inside(self._counts, logits)
            counts = torch.tensor([self._counts[i] for i in ids.tolist()], dtype=logits.dtype, device=logits.device)
            logits[ids] -= options.frequency_penalty * counts + options.presence_penalty
        if options.logit_bias:
            ids = _inside(options.logit_bias, logits)
            bias = torch.tensor([options.logit_bias[i] for i in ids.tolist()], dtype=logits.dtype, device=logits.device)
            logits[ids] += bias
        banned = [word[-1] for word in options.bad_words if word and self._ends_with(word[:-1])]
        if self._answered < options.min_tokens and not may_end:
            banned += self._end_ids
        if banned:
            logits[_inside(banned, logits)] = BANNED

    def _ends_with(self, prefix: Sequence[int]) -> bool:
        return not prefix or tuple(self._tail[-len(prefix) :]) == tuple(prefix)


def _inside(ids: Collection[int], logits: torch.Tensor) -> torch.Tensor:
    """The ids that name a token of the vocabulary, ascending, as an index."""
    size = logits.shape[-1]
    return torch.tensor(sorted(i for i in set(ids) if 0 <= i < size), dtype=torch.int64, device=logits.device)
