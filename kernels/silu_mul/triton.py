"""SwiGLU's elementwise half on the device. Knows two matrices, maybe halves of one; refuses to know where they come from."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _silu_mul_kernel(
    gate_ptr,  # [N, I], rows `gate_stride` apart
    up_ptr,  # [N, I], rows `up_stride` apart
    out_ptr,  # [N, I]
    gate_stride,
    up_stride,
    width,  # I
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    # exp of a non-positive number only: it cannot overflow
    small = tl.exp(-tl.abs(gate))
    sigmoid = tl.where(gate >= 0, 1.0, small) / (1.0 + small)
    tl.store(out_ptr + row * width + column, (gate * sigmoid * up).to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate: torch.Tensor, up: torch.Tensor, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """gate * sigmoid(gate) * up; both [N, I] with contiguous rows (halves of one matrix will do)."""
    rows, width = gate.shape
    out = torch.empty(rows, width, dtype=out_dtype, device=gate.device)
    if rows:
        block = min(1024, triton.next_power_of_2(width))
        _silu_mul_kernel[(rows, triton.cdiv(width, block))](
            gate, up, out, gate.stride(0), up.stride(0), width, BLOCK=block, enable_fp_fusion=False
        )
    return out
