"""Pieces that the trained networks share: normalisation, rotation, trainable copies, the rotary base of a target."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from kernels.decoder import DecoderWeights


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, computed in float32 (Zhang and Sennrich 2019)."""
    return F.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(dtype)


def apply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T in the type of x; the weight is kept in float32."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def split_heads(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[B, T, heads * D] -> [B, heads, T, D]"""
    batch, length, _ = x.shape
    return x.view(batch, length, -1, head_dim).transpose(1, 2)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding (Su et al. 2021) of x [..., D]; cos and sin [..., D/2] pair channel i with i + D/2."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def trainable(values: torch.Tensor) -> nn.Parameter:
    """A float32 parameter with a copy of the values."""
    return nn.Parameter(values.detach().float().clone())


def rope_theta(weights: DecoderWeights) -> float:
    """The rotary base behind a target's tables, to four digits: theta^(-2/D) is the ratio of neighbouring frequencies.

    The fastest channels are those that context extensions leave alone.
    """
    if weights.rope_cos.shape[1] < 2 or weights.rope_cos.shape[0] < 2:
        return 10000.0
    slow, fast = (math.atan2(float(weights.rope_sin[1, i]), float(weights.rope_cos[1, i])) for i in (1, 0))
    theta = (fast / slow) ** weights.rope_cos.shape[1]
    return float(f"{theta:.3e}") if math.isfinite(theta) and theta > 1 else 10000.0


def rope_tables(theta: float, head_dim: int, rows: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [rows, head_dim / 2] float32."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = (torch.arange(rows, dtype=torch.float64)[:, None] * frequencies).to(device)
    return angles.cos().float(), angles.sin().float()
