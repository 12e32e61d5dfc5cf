"""Products with published weight forms on the device. Knows bits and tiles; refuses to know checkpoints.

Weight-only forms share one kernel: a tile of codes becomes small exact numbers (integers, e4m3, e2m1 in halves: all exact in
bfloat16), meets the rows on the tensor cores, and the float32 sums of a group are scaled once. Numbers are taken apart by
integer operations, so that no device feature beyond bfloat16 is needed. Weights are read once for up to 64 rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.float8.triton import from_e4m3
from kernels.interpreter import interpreted
from kernels.linear.formats import (
    INT8_LARGEST,
    MX_BLOCK,
    Float8Weight,
    GroupWeight,
    Int8Weight,
    MxWeight,
    PublishedWeight,
    step_columns,
)

INT4, INT8, E4M3, E2M1 = range(4)  # kinds of codes


@triton.jit
def _numbers(raw, KIND: tl.constexpr):
    """int32 codes -> float32 numbers; E2M1 gives twice the value, which is an integer."""
    if KIND == 2:
        return from_e4m3(raw)
    if KIND == 3:  # sign, 2 exponent bits with bias 1, 1 of mantissa
        exponent = (raw >> 1) & 3
        size = tl.where(exponent == 0, raw & 1, (2 + (raw & 1)) << tl.maximum(exponent - 1, 0))
        return tl.where((raw & 8) != 0, -size, size).to(tl.float32)
    return raw.to(tl.float32)


@triton.jit
def _half_power(exponent):
    """2^(exponent - 128) float32 of int32 0..254, subnormals included."""
    bits = tl.where(exponent > 1, (exponent - 1) << 23, 0x200000 << tl.minimum(exponent, 1))
    return bits.to(tl.float32, bitcast=True)


# The number of rows changes from step to step and is not specialised on: no compilation once the server is ready.
@triton.jit(do_not_specialize=["rows"])
def _weight_only_kernel(
    x_ptr,  # [N, in]
    w_ptr,  # [out, bytes of a row] uint8
    scale_ptr,  # of output o and column k at (o // SCALE_ROWS) * scale_out + (k // GROUP) * scale_group
    zero_ptr,  # [groups, out] int16 or None
    order_ptr,  # [in] int32 or None: the column of x that stored column k multiplies
    bias_ptr,  # [out] float32 or None
    y_ptr,  # [N, out] float32
    rows,
    outs,
    width,
    scale_out,
    scale_group,
    scale_rows,
    group,  # columns of a group, a multiple of BLOCK_K unless it is all of them
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,  # multiply in float32 (the interpreter)
):
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    out = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_in, out_in = row < rows, out < outs
    PACKED: tl.constexpr = 2 if KIND == 0 or KIND == 3 else 1  # columns of a byte
    scale_at = scale_ptr + out // scale_rows * scale_out
    y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, width, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        k_in = k < width
        w_at = w_ptr + out.to(tl.int64)[None, :] * (width // PACKED) + (k // PACKED)[:, None]
        raw = tl.load(w_at, mask=k_in[:, None] & out_in[None, :], other=0).to(tl.int32)
        if PACKED == 2:
            raw = (raw >> (k % 2 * 4)[:, None]) & 15
        number = _numbers(raw, KIND)
        this = start // group
        if zero_ptr is not None:
            zero = tl.load(zero_ptr + this * outs + out, mask=out_in, other=0).to(tl.float32)
            number -= zero[None, :]
        column = k
        if order_ptr is not None:
            column = tl.load(order_ptr + k, mask=k_in, other=0)
        x_at = x_ptr + row.to(tl.int64)[:, None] * width + column[None, :]
        x = tl.load(x_at, mask=row_in[:, None] & k_in[None, :], other=0.0).to(tl.float32)
        if not WIDEN:
            x, number = x.to(tl.bfloat16), number.to(tl.bfloat16)
        scale = tl.load(scale_at + this * scale_group, mask=out_in, other=0)
        if KIND == 3:
            scale = _half_power(scale.to(tl.int32))
        y += tl.dot(x, number, input_precision="ieee") * scale.to(tl.float32)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + out, mask=out_in, other=0.0)[None, :]
    tl.store(y_ptr + row.to(tl.int64)[:, None] * outs + out[None, :], y, mask=row_in[:, None] & out_in[None, :])


@triton.jit
def _quantize_rows_kernel(
    x_ptr,  # [N, in]
    codes_ptr,  # [N, in] int8
    step_ptr,  # [N] float32
    width,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    top = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        k = start + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.abs(tl.load(x_ptr + row * width + k, mask=k < width, other=0.0).to(tl.float32)))
    step = tl.div_rn(tl.max(top, axis=0), LARGEST)
    tl.store(step_ptr + row, step)
    divisor = tl.where(step > 0.0, step, 1.0)
    for start in range(0, width, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * width + k, mask=k < width, other=0.0).to(tl.float32)
        ratio = tl.div_rn(x, tl.full([BLOCK], 1.0, tl.float32) * divisor)
        # Adding 1.5 * 2^23 leaves no room for a fraction: rounds to the nearest integer, halves to even.
        code = ((ratio + 12582912.0) - 12582912.0).to(tl.int32)
        tl.store(codes_ptr + row * width + k, code.to(tl.int8), mask=k < width)


@triton.jit(do_not_specialize=["rows"])
def _int8_kernel(
    codes_ptr,  # [N, in] int8 of the rows
    step_ptr,  # [N] float32
    w_ptr,  # [out, in] int8
    scale_ptr,  # [out] float32
    bias_ptr,  # [out] float32 or None
    y_ptr,  # [N, out] float32
    rows,
    outs,
    width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    out = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_in, out_in = row < rows, out < outs
    dot = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for start in range(0, width, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        k_in = k < width
        q_at = codes_ptr + row.to(tl.int64)[:, None] * width + k[None, :]
        w_at = w_ptr + out.to(tl.int64)[None, :] * width + k[:, None]
        q = tl.load(q_at, mask=row_in[:, None] & k_in[None, :], other=0)
        w = tl.load(w_at, mask=out_in[None, :] & k_in[:, None], other=0)
        dot += tl.dot(q, w, out_dtype=tl.int32)
    step = tl.load(step_ptr + row, mask=row_in, other=0.0)
    scale = tl.load(scale_ptr + out, mask=out_in, other=0.0)
    y = (scale[None, :] * step[:, None]) * dot.to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + out, mask=out_in, other=0.0)[None, :]
    tl.store(y_ptr + row.to(tl.int64)[:, None] * outs + out[None, :], y, mask=row_in[:, None] & out_in[None, :])


def linear(x: torch.Tensor, weight: PublishedWeight, invariant: bool = False) -> torch.Tensor:
    """y [N, out] float32 = x [N, in] @ W^T + bias. `invariant`: one tile height for every row count (Int8Weight always is)."""
    if x.dim() != 2 or x.shape[1] != weight.in_features:
        raise ValueError(f"x is {list(x.shape)}; expected [rows, {weight.in_features}]")
    y = torch.empty(x.shape[0], weight.out_features, dtype=torch.float32, device=x.device)
    if x.shape[0] == 0:
        return y
    if isinstance(weight, Int8Weight):
        _int8(x.contiguous(), weight, y)
    else:
        _weight_only(x.contiguous(), weight, y, 16 if invariant else _tile_rows(x.shape[0]))
    return y


def _tile_rows(rows: int) -> int:
    return 16 if rows <= 16 else 32 if rows <= 32 else 64


def _weight_only(x: torch.Tensor, weight: GroupWeight | Float8Weight | MxWeight, y: torch.Tensor, block_m: int) -> None:
    rows, width = x.shape
    outs = weight.out_features
    zero = order = None
    scale_rows = 1
    if isinstance(weight, GroupWeight):
        kind, codes, scale, group = (INT4 if weight.bits == 4 else INT8), weight.codes, weight.scale, weight.group
        zero, order, strides = weight.zero, weight.order, (1, outs)
    elif isinstance(weight, Float8Weight):
        kind, codes, scale, group = E4M3, weight.values.view(torch.uint8), weight.scale, weight.columns
        scale_rows, strides = weight.rows, (scale.stride(0), 1)
    else:
        kind, codes, scale, group = E2M1, weight.codes, weight.exponent, MX_BLOCK
        strides = (scale.stride(0), 1)
    block_k = step_columns(weight)
    if not block_k:
        raise ValueError(f"groups of {group} columns; a multiple of 16, or all {width} columns, is supported")
    _weight_only_kernel[(triton.cdiv(outs, 64), triton.cdiv(rows, block_m))](
        x, codes, scale, zero, order, weight.bias, y, rows, outs, width, *strides, scale_rows, group,
        KIND=kind, BLOCK_M=block_m, BLOCK_N=64, BLOCK_K=block_k, WIDEN=interpreted(_weight_only_kernel), enable_fp_fusion=False,
    )  # fmt: skip


def _int8(x: torch.Tensor, weight: Int8Weight, y: torch.Tensor) -> None:
    rows, width = x.shape
    codes = torch.empty(rows, width, dtype=torch.int8, device=x.device)
    step = torch.empty(rows, dtype=torch.float32, device=x.device)
    _quantize_rows_kernel[(rows,)](
        x, codes, step, width, LARGEST=INT8_LARGEST, BLOCK=min(2048, triton.next_power_of_2(width)), enable_fp_fusion=False
    )
    block_m = _tile_rows(rows)
    _int8_kernel[(triton.cdiv(weight.out_features, 64), triton.cdiv(rows, block_m))](
        codes, step, weight.codes, weight.scale, weight.bias, y, rows, weight.out_features, width,
        BLOCK_M=block_m, BLOCK_N=64, BLOCK_K=64, enable_fp_fusion=False,
    )  # fmt: skip
