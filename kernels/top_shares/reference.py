"""top_shares in plain torch, on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kernels.decoder import DecoderOutput, Drafted


def top_shares(logits: torch.Tensor, k: int, temperature: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids [R, k] int32, shares [R, k] float32)."""
    best = torch.topk(logits, k, dim=1)
    top = best.values[:, :1]
    scale = 1.0 if temperature is None else temperature.unsqueeze(1)
    total = torch.exp((logits - top) / scale).sum(dim=1, keepdim=True)  # NaN where a logit is, or where the best is infinite
    return best.indices.to(torch.int32), torch.exp((best.values - top) / scale) / total


TopShares = Callable[[torch.Tensor, int, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]


def best_tokens(out: DecoderOutput, k: int, temperature: Sequence[float] | None, best: TopShares = top_shares) -> Drafted:
    """What a decoder's `draft` gives, from what its `forward` gave."""
    if out.logits is None:
        raise ValueError("a pass that drafts needs its logits")
    divisors = None
    if temperature is not None:
        divisors = torch.tensor(temperature, dtype=torch.float32, device=out.logits.device)
    ids, shares = best(out.logits, k, divisors)
    return out.hidden, ids.flatten().tolist(), shares.flatten().tolist()
