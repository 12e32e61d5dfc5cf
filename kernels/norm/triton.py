"""RMSNorm on the device, one program a row. Knows rows of one length; refuses to know layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # [N, H] any float
    residual_ptr,  # [N, H] float32 or None
    weight_ptr,  # [H] float32
    out_ptr,  # [N, H] any float
    total_ptr,  # [N, H] float32 or None; may be residual_ptr
    eps,
    width,  # H
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + at, mask=inside, other=0.0)
        tl.store(total_ptr + at, x, mask=inside)
    mean = tl.sum(x * x, axis=0) / width
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    y = tl.div_rn(x, tl.sqrt_rn(mean + eps)) * weight
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis of x [..., H]."""
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    _launch(x, None, weight, out, None, eps)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out_dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual) in one pass; the sum is float32."""
    x, residual = x.contiguous(), residual.contiguous()
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    total = torch.empty_like(residual)
    _launch(x, residual, weight, out, total, eps)
    return out, total


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor | None,
    eps: float,
) -> None:
    width = x.shape[-1]
    rows = x.numel() // width
    if rows == 0:
        return
    block = triton.next_power_of_2(width)
    warps = min(16, max(1, block // 256))
    _rms_norm_kernel[(rows,)](x, residual, weight, out, total, eps, width, BLOCK=block, num_warps=warps, enable_fp_fusion=False)
