"""Published weight forms in plain torch: the matrix itself, and the product. Knows bits; refuses to know checkpoints."""

from __future__ import annotations

import torch

from kernels.linear.formats import (
    E2M1,
    INT8_LARGEST,
    MX_BLOCK,
    Float8Weight,
    GroupWeight,
    Int8Weight,
    MxWeight,
    PublishedWeight,
)


def linear(x: torch.Tensor, weight: PublishedWeight) -> torch.Tensor:
    """y [N, out] float32 = x [N, in] float32 @ W^T + bias. Weight-only forms multiply in float32."""
    if x.dim() != 2 or x.shape[1] != weight.in_features:
        raise ValueError(f"x is {list(x.shape)}; expected [rows, {weight.in_features}]")
    if isinstance(weight, Int8Weight):
        codes, step = quantize_rows(x)
        # |dot| < 2^24 up to 1040 columns only, so float64, which holds every sum of the format's widths exactly
        dot = (codes.double() @ weight.codes.double().T).float()  # [N, out]
        y = (weight.scale * step.unsqueeze(1)) * dot
    else:
        values = dequantize(weight)
        y = x.new_empty(x.shape[0], weight.out_features)
        for i in range(x.shape[0]):
            y[i] = torch.mv(values, x[i].clone())  # one row at a time, as everywhere: no order of sums chosen by the row count
    return y if weight.bias is None else y + weight.bias


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [N, in] -> codes int8 [N, in], step float32 [N]."""
    step = x.abs().amax(dim=-1) / INT8_LARGEST
    codes = torch.round(x / torch.where(step > 0, step, torch.ones_like(step)).unsqueeze(-1))  # half to even
    return codes.to(torch.int8), step


def dequantize(weight: PublishedWeight) -> torch.Tensor:
    """The matrix W, float32 [out, in]."""
    if isinstance(weight, GroupWeight):
        return _groups(weight)
    if isinstance(weight, Float8Weight):
        out, into = weight.values.shape
        scale = weight.scale.repeat_interleave(weight.rows, 0)[:out].repeat_interleave(weight.columns, 1)[:, :into]
        return weight.values.float() * scale
    if isinstance(weight, MxWeight):
        table = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float64, device=weight.codes.device)
        powers = torch.tensor([2.0 ** (e - 127) for e in range(255)], dtype=torch.float64, device=table.device)
        power = powers[weight.exponent.long()].repeat_interleave(MX_BLOCK, 1)
        return (table[unpack_nibbles(weight.codes).long()] * power).float()
    return weight.scale.unsqueeze(1) * weight.codes.float()


def group_codes(weight: GroupWeight) -> torch.Tensor:
    """uint8 [out, in], in stored order."""
    return unpack_nibbles(weight.codes) if weight.bits == 4 else weight.codes


def _groups(weight: GroupWeight) -> torch.Tensor:
    scale, zero = (t.float().T.repeat_interleave(weight.group, 1)[:, : weight.in_features] for t in (weight.scale, weight.zero))
    values = scale * (group_codes(weight).float() - zero)
    if weight.order is None:
        return values
    natural = torch.empty_like(values)
    natural[:, weight.order.long()] = values
    return natural


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [out, n] -> [out, 2n], low nibble first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [out, 2n], 0..15 -> [out, n], low nibble first."""
    return codes[..., 0::2] | codes[..., 1::2] << 4
