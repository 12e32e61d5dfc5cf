"""The linear layer, one row at a time. Knows the weight forms; refuses to know what the rows mean.

A library matrix-matrix product picks its summation order by the number of rows, so it is not used. A dense row is a
matrix-vector product, the same call on the same shapes for every row; a quantised row is exact integers and then a loop
over blocks, in which every operation rounds once.
"""

from __future__ import annotations

import torch

from kernels.linear import BLOCK, LARGEST, BlockWeight, DenseWeight, LayerWeight, Weight
from kernels.linear.formats import PublishedWeight
from kernels.linear.formats import reference as formats

_DOT_BYTES = 1 << 26  # block dot products held at once; only bounds memory, the values are exact integers


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


def quantize_rows(x: torch.Tensor, bits: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows [N, in] -> codes q [N, in/32, 32] (integers in float32), step a [N, in/32], sum of codes [N, in/32]."""
    blocks = x.reshape(x.shape[0], -1, BLOCK)
    step = blocks.abs().amax(dim=-1) / float(LARGEST[bits])
    codes = torch.round(blocks / torch.where(step > 0, step, torch.ones_like(step)).unsqueeze(-1))  # half to even
    return codes, step, codes.sum(dim=-1)


def unpack_codes(weight: BlockWeight) -> torch.Tensor:
    """Weight codes as small integers in float32 [out, in/32, 32]."""
    if weight.bits == 8:
        return weight.codes.float()
    if weight.bits == 4:
        return torch.cat((weight.codes & 15, weight.codes >> 4), dim=-1).float()
    raise ValueError(f"BlockWeight has {weight.bits} bits; expected 4 or 8")


def _blocks(x: torch.Tensor, weight: BlockWeight) -> torch.Tensor:
    # |dot| <= 32 * 127 * 255 < 2^24 with 8-bit rows: float32 holds every partial sum exactly, in any order. Wider rows take float64.
    exact = torch.float32 if weight.activation_bits == 8 else torch.float64
    w = unpack_codes(weight).permute(1, 2, 0).to(exact).contiguous()  # [blocks, 32, out]
    d = weight.scale.float()  # [out, blocks]
    m = weight.minimum.float()
    out, blocks = d.shape
    y = x.new_zeros(x.shape[0], out)
    rows = max(1, _DOT_BYTES // (8 * out * blocks))
    for start in range(0, x.shape[0], rows):
        q, a, total = quantize_rows(x[start : start + rows], weight.activation_bits)
        dot = torch.bmm(q.transpose(0, 1).to(w.dtype), w).float()  # [blocks, rows, out]
        part = y[start : start + rows]
        for b in range(blocks):
            step = a[:, b, None]  # [rows, 1]
            part += (d[:, b] * step) * dot[b] + m[:, b] * (step * total[:, b, None])
    return y


def lookup(weight: Weight, ids: torch.Tensor) -> torch.Tensor:
    """Rows `ids` [N] of the matrix as float32 [N, in]: the embedding of tokens."""
    ids = ids.long()
    if isinstance(weight, DenseWeight):
        return weight.values[ids].float()
    rows = BlockWeight(weight.bits, weight.codes[ids], weight.scale[ids], weight.minimum[ids])
    return dequantize(rows)


def dequantize(weight: BlockWeight | PublishedWeight) -> torch.Tensor:
    """The matrix itself, float32 [out, in]; of blocks, scale * code + minimum."""
    if isinstance(weight, PublishedWeight):
        return formats.dequantize(weight)
    values = weight.scale.float().unsqueeze(-1) * unpack_codes(weight) + weight.minimum.float().unsqueeze(-1)
    return values.reshape(weight.codes.shape[0], -1)
