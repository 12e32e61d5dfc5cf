"""Rotary tables: positions x channels of cos and sin (Su et al. 2021), with the published context extensions.

linear: position interpolation (Chen et al. 2023). yarn: Peng et al. 2023, attention factor included in the tables.
llama3: the frequency bands of the Llama 3.1 release. float32 throughout, as the checkpoints were trained.
"""

from __future__ import annotations

import math

import torch

from spec.models.config import RopeConfig


def rope_tables(
    rope: RopeConfig, head_dim: int, rows: int, divisors: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each [rows, head_dim / 2] float32. `divisors` [head_dim / 2] are a GGUF file's own frequency factors."""
    frequencies = inverse_frequencies(rope, head_dim)
    if divisors is not None:
        frequencies = frequencies / divisors
    angles = torch.arange(rows, dtype=torch.float32)[:, None] * frequencies
    scale = rope.attention_factor if rope.kind == "yarn" else 1.0
    return angles.cos() * scale, angles.sin() * scale


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] float32 radians per position."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(plain, rope, head_dim)
    return plain


def _llama3(plain: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Wavelengths above the low band are stretched by `factor`, those below the high band are kept, a line in between."""
    turns = rope.original_context * plain / (2 * math.pi)  # full turns within the pretraining context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn(plain: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Channels that turn more than beta_fast times in the pretraining context are kept, fewer than beta_slow stretched."""

    def channel(turns: float) -> float:
        return head_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return plain / rope.factor * stretched + plain * (1 - stretched)


def yarn_attention_factor(factor: float, mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """The paper's 0.1 ln(factor) + 1, or the ratio of two such terms where a config gives both weights."""

    def term(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return term(mscale) / term(mscale_all_dim)
    return term(1.0)
