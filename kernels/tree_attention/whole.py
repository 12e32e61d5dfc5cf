"""Attention over keys and values that are whole numbers with steps, one node at a time. Knows the arithmetic of whole.h; refuses to know pages.

Scores are exact but for three roundings, whatever computes them. Weights are made whole within a chunk of positions, relative to
the largest of the chunk, so a chunk's bounds are part of the arithmetic.
"""

from __future__ import annotations

import torch

from kernels.linear.reference import quantize_rows
from kernels.tree_attention import CHUNK

LOG2_E = 1.44269504  # scores count powers of two

Vectors = tuple[torch.Tensor, torch.Tensor]  # numbers [L, Hkv, D], steps [L, Hkv]


def attend_node(q: torch.Tensor, keys: Vectors, values: Vectors, first: int, sinks: torch.Tensor | None) -> torch.Tensor:
    """out [Hq, D] of q [Hq, D] (scaled) over keys at positions first, first + 1, ..."""
    heads, dim = q.shape
    kv_heads = keys[0].shape[1]
    scores = _scores(q.reshape(kv_heads, -1, dim), *keys)  # [Hkv, G, L]
    top = torch.full(scores.shape[:2], -torch.inf) if sinks is None else (sinks * LOG2_E).reshape(kv_heads, -1)
    mass = torch.zeros_like(top) if sinks is None else torch.ones_like(top)
    sums = torch.zeros(*top.shape, dim)
    begin, length = 0, scores.shape[-1]
    while begin < length:
        end = min(length, (first + begin) // CHUNK * CHUNK + CHUNK - first)
        part = scores[..., begin:end]
        high = part.amax(-1)
        weights = torch.exp2(part - high[..., None])
        new = torch.maximum(top, high)
        keep, take = torch.exp2(top - new), torch.exp2(high - new)
        mass = mass * keep + weights.sum(-1) * take
        mixed = _mixed(weights, values[0][begin:end], values[1][begin:end])
        sums = sums * keep[..., None] + mixed * take[..., None]
        top, begin = new, end
    return (sums / mass[..., None]).reshape(heads, dim)


def _scores(q: torch.Tensor, numbers: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """q [Hkv, G, D] by keys -> [Hkv, G, L]."""
    codes, step = _whole(q)
    step = step * LOG2_E
    dots = (codes.double() @ numbers.double().permute(1, 2, 0)).float()  # float64 holds every sum of these products
    return (steps.T[:, None, :] * step[..., None]) * dots


def _mixed(weights: torch.Tensor, numbers: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Weights [Hkv, G, L] of values -> [Hkv, G, D]."""
    codes, step = _whole(weights * steps.T[:, None, :])
    return step[..., None] * (codes.double() @ numbers.double().transpose(0, 1)).float()


def _whole(x: torch.Tensor) -> Vectors:
    codes, step = quantize_rows(x.flatten(0, -2))
    return codes.reshape(x.shape), step.reshape(x.shape[:-1])
