"""Rotary position embedding, halves convention. Knows tables of cosines and sines; refuses to know how they were scaled.

Only products, sums and differences, each rounded once: a row's bits cannot depend on the other rows.
"""

from __future__ import annotations

import torch


def rope(x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + D/2) of x [N, H, D] by the angle of `positions` [N]. cos, sin [max_position, D/2] float32."""
    half = x.shape[-1] // 2
    c = cos[positions.long()].unsqueeze(1)  # [N, 1, D/2]
    s = sin[positions.long()].unsqueeze(1)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1)
