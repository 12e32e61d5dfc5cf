"""RMSNorm, one row at a time. Knows vectors and a weight; refuses to know layers.

The sum of squares is taken over a one-dimensional tensor per row, so its order cannot depend on how many rows there are.
"""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis. x [..., H] float32, weight [H] float32."""
    rows = x.reshape(-1, x.shape[-1])  # [rows, H]
    out = torch.empty_like(rows)
    for i in range(rows.shape[0]):
        row = rows[i]
        out[i] = row / torch.sqrt((row * row).mean() + eps) * weight
    return out.reshape(x.shape)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual)."""
    total = x + residual
    return rms_norm(total, weight, eps), total
