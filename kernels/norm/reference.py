"""RMSNorm. Knows vectors and a weight; refuses to know layers.

The mean of squares is taken over a one-dimensional tensor per row, so its order cannot depend on how many rows there are;
every other operation is elementwise and rounds once.
"""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis. x [..., H] float32, weight [H] float32."""
    rows = x.reshape(-1, x.shape[-1])  # [rows, H]
    if rows.shape[0] == 0:
        return x.clone()
    mean = torch.stack([square.mean() for square in (rows * rows).unbind(0)])  # [rows]
    return (rows / torch.sqrt(mean + eps).unsqueeze(-1) * weight).reshape(x.shape)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual)."""
    total = x + residual
    return rms_norm(total, weight, eps), total
