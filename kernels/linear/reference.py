"""The linear layer, one row at a time. Knows the weight forms; refuses to know what the rows mean.

A library matrix-matrix product picks its summation order by the number of rows, so it is not used. A dense row is a
matrix-vector product, the same call on the same shapes for every row; a quantised row is two exact whole sums, in any order.
"""

from __future__ import annotations

import torch

from kernels.linear import LARGEST, LEAST, TABLE_SHIFT, BlockWeight, DenseWeight, LayerWeight, Weight
from kernels.linear.formats import PublishedWeight
from kernels.linear.formats import reference as formats


def linear(x: torch.Tensor, weight: LayerWeight) -> torch.Tensor:
    """y [N, out] float32 = x [N, in] float32 @ W^T + bias."""
    if isinstance(weight, PublishedWeight):
        return formats.linear(x, weight)
    if x.dim() != 2 or x.shape[1] != weight.in_features:
        raise ValueError(f"x is {list(x.shape)}; expected [rows, {weight.in_features}]")
    y = _dense(x, weight) if isinstance(weight, DenseWeight) else _blocks(x, weight)
    return y if weight.bias is None else y + weight.bias


def _dense(x: torch.Tensor, weight: DenseWeight) -> torch.Tensor:
    values = weight.values.float()  # [out, in]
    y = x.new_empty(x.shape[0], weight.out_features)
    for i in range(x.shape[0]):
        row = x[i].clone()  # a library may order sums by the address: a fresh tensor always has the same alignment
        y[i] = torch.mv(values, row)  # [out]
    return y


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [N, in] -> codes q [N, in] (whole numbers in float32), step a [N]. A row that is not finite has codes 0 and step NaN."""
    largest = x.abs().amax(dim=-1)
    most = torch.full_like(largest, LARGEST)  # a number over a tensor would be its reciprocal times the number: two roundings
    codes_by = torch.where(largest < LEAST, 0.0, most / largest)
    step = torch.where(largest < LEAST, 0.0, largest / most)
    finite = x.isfinite().all(dim=-1)
    codes = torch.round(torch.where(finite[:, None], x, 0.0) * torch.where(finite, codes_by, 0.0)[:, None])  # half to even
    return codes + (codes % 256 == 128), torch.where(finite, step, torch.nan)


def unpack_codes(weight: BlockWeight) -> torch.Tensor:
    """Weight codes as small integers in float32 [out, in/32, 32]."""
    if weight.bits == 8:
        return weight.codes.float()
    if weight.bits == 4:
        return torch.cat((weight.codes & 15, weight.codes >> 4), dim=-1).float()
    raise ValueError(f"BlockWeight has {weight.bits} bits; expected 4 or 8")


def row_step(weight: BlockWeight) -> torch.Tensor:
    """Steps s [out] float32 of the matrix's rows."""
    if weight.bits == 8:
        return _values(weight).abs().amax(dim=-1) / 127.0
    minimum = weight.minimum.float()
    return torch.maximum(minimum.abs(), (weight.scale.float() * 15.0 + minimum).abs()).amax(dim=-1) / 127.0


def row_numbers(weight: BlockWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrix as the contract's whole numbers -127..127 in float32 [out, in] and steps s [out]."""
    step = row_step(weight)
    by = torch.where(step > 0, step, 1.0)[:, None]
    if weight.bits == 8:
        return torch.round(_values(weight) / by), step
    unit = float(1 << TABLE_SHIFT)
    factor = torch.round(weight.scale.float() / by * unit)[..., None]
    offset = torch.round(weight.minimum.float() / by * unit)[..., None] + unit / 2
    return torch.floor((unpack_codes(weight) * factor + offset) / unit).flatten(1), step  # exact: below 2^24


def _blocks(x: torch.Tensor, weight: BlockWeight) -> torch.Tensor:
    numbers, s = row_numbers(weight)
    q, a = quantize_rows(x)
    high = torch.floor((q + 128.0) / 256.0)
    low = q - 256.0 * high
    w = numbers.double().T  # float64 holds every sum of these products, in any order
    high_sum, low_sum = ((part.double() @ w).float() for part in (high, low))
    return (s * a[:, None]) * (256.0 * high_sum + low_sum)


def lookup(weight: Weight, ids: torch.Tensor) -> torch.Tensor:
    """Rows `ids` [N] of the matrix as float32 [N, in], as `linear` reads them: the embedding of tokens."""
    ids = ids.long()
    if isinstance(weight, DenseWeight):
        return weight.values[ids].float()
    numbers, step = row_numbers(BlockWeight(weight.bits, weight.codes[ids], weight.scale[ids], weight.minimum[ids]))
    return step[:, None] * numbers


def dequantize(weight: BlockWeight | PublishedWeight) -> torch.Tensor:
    """The matrix as published, float32 [out, in]; of blocks, scale * code + minimum."""
    return formats.dequantize(weight) if isinstance(weight, PublishedWeight) else _values(weight)


def _values(weight: BlockWeight) -> torch.Tensor:
    values = weight.scale.float().unsqueeze(-1) * unpack_codes(weight) + weight.minimum.float().unsqueeze(-1)
    return values.reshape(weight.codes.shape[0], -1)
