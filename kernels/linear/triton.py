"""The linear layer on the device. Knows the weight forms; refuses to know what the rows mean.

Block weights follow the contract's arithmetic: rows and weights as whole numbers, exact integer dots on the tensor cores, one chain of float32
behind them, so the result is the reference's, bit for bit, for any number of rows. Dense weights go to the vendor's library unless `invariant` asks for our own kernel, whose order of sums
does not depend on the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.interpreter import interpreted
from kernels.linear import BLOCK, LARGEST, LEAST, BlockWeight, DenseWeight, LayerWeight
from kernels.linear.formats import PublishedWeight
from kernels.linear.formats import triton as formats
from kernels.linear.reference import row_step


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


@triton.jit
def _nearest(x):
    """To the nearest whole number, halves to even, below 2^22: adding 1.5 * 2^23 leaves no room for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _quantize_kernel(
    x_ptr,  # [N, width]
    parts_ptr,  # [N, 2, width] int8: high and low parts
    step_ptr,  # [N] float32
    width,
    LARGEST: tl.constexpr,  # largest code
    LEAST: tl.constexpr,  # rows of smaller values count as zeros
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros([BLOCK_K], tl.float32)
    broken = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, width, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + row * width + k, mask=k < width, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(x))
        broken += x * 0.0
    largest = tl.max(most, axis=0)
    empty = largest < LEAST
    by = tl.where(empty, 1.0, largest)
    inverse = tl.where(empty, 0.0, tl.div_rn(LARGEST * 1.0, by))
    step = tl.where(empty, 0.0, tl.div_rn(largest, LARGEST * 1.0))
    tl.store(step_ptr + row, tl.where(tl.sum(broken, axis=0) == 0.0, step, float("nan")))
    for start in range(0, width, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + row * width + k, mask=k < width, other=0.0).to(tl.float32)
        code = _nearest(x * inverse).to(tl.int32)
        code += ((code & 255) == 128).to(tl.int32)
        high = (code + 128) >> 8
        at = parts_ptr + row * 2 * width + k
        tl.store(at, high.to(tl.int8), mask=k < width)
        tl.store(at + width, (code - high * 256).to(tl.int8), mask=k < width)


@triton.jit(do_not_specialize=["rows"])
def _block_kernel(
    parts_ptr,  # [N, 2, width] int8 of the rows
    step_ptr,  # [N] float32
    w_ptr,  # [out, blocks, 4 * BITS] uint8
    scale_ptr,  # [out, blocks] float16
    minimum_ptr,  # [out, blocks] float16 or float32
    w_step_ptr,  # [out] float32
    bias_ptr,  # [out] float32 or None
    y_ptr,  # [N, out] float32
    rows,
    outs,
    blocks,
    BITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    out = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_in, out_in = row < rows, out < outs
    k = tl.arange(0, 32)
    w_step = tl.load(w_step_ptr + out, mask=out_in, other=0.0)
    by = tl.where(w_step > 0.0, w_step, 1.0)
    high = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    low = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for block in range(blocks):
        out_at = out.to(tl.int64) * blocks + block
        scale = tl.load(scale_ptr + out_at, mask=out_in, other=0.0).to(tl.float32)
        minimum = tl.load(minimum_ptr + out_at, mask=out_in, other=0.0).to(tl.float32)
        if BITS == 4:
            packed = tl.load(w_ptr + out_at[None, :] * 16 + (k % 16)[:, None], mask=out_in[None, :], other=0)
            code = (packed >> (k // 16 * 4).to(tl.uint8)[:, None]) & 15
            factor = _nearest(tl.div_rn(scale, by) * 256.0).to(tl.int32)
            offset = _nearest(tl.div_rn(minimum, by) * 256.0).to(tl.int32) + 128
            number = (code.to(tl.int32) * factor[None, :] + offset[None, :]) >> 8
        else:
            code = tl.load(w_ptr + out_at[None, :] * 32 + k[:, None], mask=out_in[None, :], other=0)
            value = scale[None, :] * code.to(tl.float32) + minimum[None, :]
            number = _nearest(tl.div_rn(value, tl.broadcast_to(by[None, :], value.shape))).to(tl.int32)
        number = tl.where((w_step > 0.0)[None, :], number, 0).to(tl.int8)
        at = parts_ptr + row.to(tl.int64)[:, None] * (2 * blocks * 32) + block * 32 + k[None, :]
        high += tl.dot(tl.load(at, mask=row_in[:, None], other=0), number, out_dtype=tl.int32)
        low += tl.dot(tl.load(at + blocks * 32, mask=row_in[:, None], other=0), number, out_dtype=tl.int32)
    step = tl.load(step_ptr + row, mask=row_in, other=0.0)
    y = (w_step[None, :] * step[:, None]) * (high.to(tl.float32) * 256.0 + low.to(tl.float32))
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
    outs = weight.out_features
    y = torch.empty(rows, outs, dtype=torch.float32, device=x.device)
    if rows == 0:
        return y
    parts = torch.empty(rows, 2, width, dtype=torch.int8, device=x.device)
    step = torch.empty(rows, dtype=torch.float32, device=x.device)
    _quantize_kernel[(rows,)](x, parts, step, width, LARGEST=LARGEST, LEAST=LEAST, BLOCK_K=1024, enable_fp_fusion=False)
    block_m = _tile_rows(rows)
    _block_kernel[(triton.cdiv(outs, 64), triton.cdiv(rows, block_m))](
        parts, step, weight.codes, weight.scale, weight.minimum, row_step(weight), weight.bias, y, rows, outs, width // BLOCK,
        BITS=weight.bits, BLOCK_M=block_m, BLOCK_N=64, enable_fp_fusion=False,
    )  # fmt: skip
    return y
