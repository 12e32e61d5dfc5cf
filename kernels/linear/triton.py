"""The linear layer on the device. Knows the weight forms; refuses to know what the rows mean.

Block weights follow the contract's arithmetic: int8 activations per block of 32, exact integer dots on the tensor cores,
float32 sums over blocks in ascending order without fused multiply-add, so the result is the reference's, bit for bit, for
any number of rows. Dense weights go to the vendor's library unless `invariant` asks for our own kernel, whose order of sums
does not depend on the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.interpreter import interpreted
from kernels.linear import BLOCK, LARGEST, BlockWeight, DenseWeight, LayerWeight
from kernels.linear.formats import PublishedWeight
from kernels.linear.formats import triton as formats


# The number of rows changes from step to step and is not specialised on: no compilation once the server is ready.
@triton.jit(do_not_specialize=["rows"])
def _dense_kernel(
    x_ptr,  # [N, in]
    w_ptr,  # [out, in]
    bias_ptr,  # [out] float32 or None
    y_ptr,  # [N, out] float32
    rows,
    outs,
    width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,  # multiply in float32 (the interpreter)
):
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    out = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, width, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x_at = x_ptr + row.to(tl.int64)[:, None] * width + k[None, :]
        w_at = w_ptr + out.to(tl.int64)[None, :] * width + k[:, None]
        x = tl.load(x_at, mask=(row < rows)[:, None] & (k < width)[None, :], other=0.0).to(w_ptr.dtype.element_ty)
        w = tl.load(w_at, mask=(out < outs)[None, :] & (k < width)[:, None], other=0.0)
        if WIDEN:
            x, w = x.to(tl.float32), w.to(tl.float32)
        y += tl.dot(x, w, input_precision="ieee")
    if bias_ptr is not None:
        y += tl.load(bias_ptr + out, mask=out < outs, other=0.0)[None, :]
    tl.store(y_ptr + row.to(tl.int64)[:, None] * outs + out[None, :], y, mask=(row < rows)[:, None] & (out < outs)[None, :])


@triton.jit(do_not_specialize=["count"])
def _quantize_kernel(
    x_ptr,  # [N, blocks, 32]
    codes_ptr,  # [N, blocks, 32] int16
    step_ptr,  # [N, blocks] float32
    total_ptr,  # [N, blocks] int32
    count,  # N * blocks
    LARGEST: tl.constexpr,  # largest code
    TILE: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = block < count
    at = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(x_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
    step = tl.div_rn(tl.max(tl.abs(x), axis=1), LARGEST * 1.0)
    ratio = tl.div_rn(x, tl.where(step > 0.0, step, 1.0)[:, None])
    # Adding 1.5 * 2^23 leaves no room for a fraction: rounds to the nearest integer, halves to even.
    code = ((ratio + 12582912.0) - 12582912.0).to(tl.int32)
    tl.store(codes_ptr + at, code.to(tl.int16), mask=inside[:, None])
    tl.store(step_ptr + block, step, mask=inside)
    tl.store(total_ptr + block, tl.sum(code, axis=1), mask=inside)


@triton.jit
def _exact_dot(q, code, ROW_BITS: tl.constexpr):
    """[rows, 32] int16 x [32, out] int8 -> int32; wider rows in two int8 parts."""
    if ROW_BITS == 8:
        return tl.dot(q.to(tl.int8), code, out_dtype=tl.int32)
    high = (q + 128) >> 8
    low = (q - high * 256).to(tl.int8)
    return 256 * tl.dot(high.to(tl.int8), code, out_dtype=tl.int32) + tl.dot(low, code, out_dtype=tl.int32)


@triton.jit(do_not_specialize=["rows"])
def _block_kernel(
    codes_ptr,  # [N, blocks, 32] int16 of the rows
    step_ptr,  # [N, blocks] float32
    total_ptr,  # [N, blocks] int32
    w_ptr,  # [out, blocks, 4 * BITS] uint8
    scale_ptr,  # [out, blocks] float16
    minimum_ptr,  # [out, blocks] float16 or float32
    bias_ptr,  # [out] float32 or None
    y_ptr,  # [N, out] float32
    rows,
    outs,
    blocks,
    BITS: tl.constexpr,
    ROW_BITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    out = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_in, out_in = row < rows, out < outs
    k = tl.arange(0, 32)
    y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in range(blocks):
        row_at = row.to(tl.int64) * blocks + block
        out_at = out.to(tl.int64) * blocks + block
        q = tl.load(codes_ptr + row_at[:, None] * 32 + k[None, :], mask=row_in[:, None], other=0)
        step = tl.load(step_ptr + row_at, mask=row_in, other=0.0)
        total = tl.load(total_ptr + row_at, mask=row_in, other=0)
        scale = tl.load(scale_ptr + out_at, mask=out_in, other=0.0).to(tl.float32)
        minimum = tl.load(minimum_ptr + out_at, mask=out_in, other=0.0).to(tl.float32)
        if BITS == 4:
            packed = tl.load(w_ptr + out_at[None, :] * 16 + (k % 16)[:, None], mask=out_in[None, :], other=0)
            code = ((packed >> (k // 16 * 4).to(tl.uint8)[:, None]) & 15).to(tl.int8)
            dot = _exact_dot(q, code, ROW_BITS)
        else:
            raw = tl.load(w_ptr + out_at[None, :] * 32 + k[:, None], mask=out_in[None, :], other=128)
            code = (raw.to(tl.int32) - 128).to(tl.int8)
            dot = _exact_dot(q, code, ROW_BITS) + 128 * total[:, None]
        y += (scale[None, :] * step[:, None]) * dot.to(tl.float32) + minimum[None, :] * (step * total.to(tl.float32))[:, None]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + out, mask=out_in, other=0.0)[None, :]
    tl.store(y_ptr + row.to(tl.int64)[:, None] * outs + out[None, :], y, mask=row_in[:, None] & out_in[None, :])


def linear(x: torch.Tensor, weight: LayerWeight, invariant: bool = False) -> torch.Tensor:
    """y [N, out] float32 = x [N, in] @ W^T + bias. A 16-bit dense weight sees x in its own type."""
    if isinstance(weight, PublishedWeight):
        return formats.linear(x, weight, invariant)
    if x.dim() != 2 or x.shape[1] != weight.in_features:
        raise ValueError(f"x is {list(x.shape)}; expected [rows, {weight.in_features}]")
    if isinstance(weight, BlockWeight):
        return _blocks(x.contiguous(), weight)
    if invariant:
        return _dense(x.contiguous(), weight)
    y = torch.nn.functional.linear(x.to(weight.values.dtype), weight.values).float()
    return y if weight.bias is None else y + weight.bias


def _tile_rows(rows: int) -> int:
    return 16 if rows <= 16 else 32 if rows <= 32 else 64


def _dense(x: torch.Tensor, weight: DenseWeight) -> torch.Tensor:
    rows, width = x.shape
    outs = weight.out_features
    y = torch.empty(rows, outs, dtype=torch.float32, device=x.device)
    if rows:
        # One tile height for every row count: the instruction, and with it the order of the sums, stays the same.
        grid = (triton.cdiv(outs, 64), triton.cdiv(rows, 16))
        _dense_kernel[grid](
            x,
            weight.values,
            weight.bias,
            y,
            rows,
            outs,
            width,
            BLOCK_M=16,
            BLOCK_N=64,
            BLOCK_K=64,
            WIDEN=interpreted(_dense_kernel),
            enable_fp_fusion=False,
        )
    return y


def _blocks(x: torch.Tensor, weight: BlockWeight) -> torch.Tensor:
    rows, width = x.shape
    blocks, outs = width // BLOCK, weight.out_features
    y = torch.empty(rows, outs, dtype=torch.float32, device=x.device)
    if rows == 0:
        return y
    codes = torch.empty(rows, width, dtype=torch.int16, device=x.device)
    step = torch.empty(rows, blocks, dtype=torch.float32, device=x.device)
    total = torch.empty(rows, blocks, dtype=torch.int32, device=x.device)
    bits = weight.activation_bits
    _quantize_kernel[(triton.cdiv(rows * blocks, 32),)](
        x, codes, step, total, rows * blocks, LARGEST=LARGEST[bits], TILE=32, enable_fp_fusion=False
    )
    block_m = _tile_rows(rows)
    _block_kernel[(triton.cdiv(outs, 64), triton.cdiv(rows, block_m))](
        codes, step, total, weight.codes, weight.scale, weight.minimum, weight.bias, y, rows, outs, blocks,
        BITS=weight.bits, ROW_BITS=bits, BLOCK_M=block_m, BLOCK_N=64, enable_fp_fusion=False,
    )  # fmt: skip
    return y
