"""Log probabilities for the caller: those of the raw model, whatever options chose the token. Knows logits, not options."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spec.request import TokenLogprob


def raw_logprobs(logits: torch.Tensor, chosen: Sequence[int], counts: Sequence[int]) -> list[TokenLogprob]:
    """One entry per row of `logits` [M, V] float32: the chosen token and the `counts[i]` best (ties: lower id first)."""
    if not chosen:
        return []
    scores = torch.log_softmax(logits.float(), dim=-1)
    picked = scores.gather(1, torch.tensor(chosen, dtype=torch.int64, device=scores.device).unsqueeze(1)).squeeze(1).tolist()
    best = min(max(counts), scores.shape[1])
    values, ids = torch.topk(scores, best, dim=-1)
    entries = []
    for value, row_values, row_ids, count in zip(picked, values.tolist(), ids.tolist(), counts, strict=True):
        ranked = sorted(zip(row_ids, row_values, strict=True), key=lambda pair: (-pair[1], pair[0]))
        entries.append(TokenLogprob(chosen=value, top=tuple(ranked[:count])))
    return entries
