"""norm in C++. The decoder calls the same code without this wrapper."""

from __future__ import annotations

import torch

from kernels.native import require
from kernels.native.tensors import address


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, isa: str | None = None) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis. x [..., H] float32, weight [H] float32."""
    out = torch.empty_like(x)
    _call(x, None, weight, eps, out, None, isa)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, isa: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual)."""
    out, total = torch.empty_like(x), torch.empty_like(x)
    _call(x, residual, weight, eps, out, total, isa)
    return out, total


def _call(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    total: torch.Tensor | None,
    isa: str | None,
) -> None:
    library = require()
    width = weight.numel()
    if x.shape[-1] != width or (residual is not None and residual.shape != x.shape):
        raise ValueError(f"x {list(x.shape)} and its residual must end in the weight's {width} values")
    library.c.fs_rms_norm(
        library.isa(isa),
        address(x, torch.float32, "x"),
        None if residual is None else address(residual, torch.float32, "residual"),
        address(weight, torch.float32, "weight"),
        x.numel() // width,
        width,
        eps,
        out.data_ptr(),
        None if total is None else total.data_ptr(),
    )
