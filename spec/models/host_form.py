"""Published weight forms -> the two forms that every kernel reads. Knows both sides' numbers; refuses to know files.

exact        MxWeight (its values are half integers times a power of two) where float16 can hold the powers, bfloat16 beyond
rounded      GroupWeight in order: scales and, with 4 bits, `-scale * zero` become float16 (relative error at most 2^-11), as for Q4_K;
             Int8Weight: scales become float16; Float8Weight: values become bfloat16 (at most 2^-9)
requantised  GroupWeight whose columns are out of order, so that a block of 32 mixes groups: 8 bits, at most 1/254 of a block's largest

That is the form. What the C++ and Triton kernels multiply with is `kernels.linear`'s: one grid of 255 steps an output, and rows of 16 bits
with one step, which is finer than the 8 bits of such checkpoints.
"""

from __future__ import annotations

import torch

from kernels.linear import BLOCK, BlockWeight, Weight
from kernels.linear.formats import E2M1, Float8Weight, GroupWeight, Int8Weight, PublishedWeight
from kernels.linear.formats.reference import dequantize, group_codes, unpack_nibbles
from spec.models.blocks import quantise
from spec.models.source import Form

# exponents e whose 2^(e - 128) is a float16 above zero
_HALF_EXPONENTS = (128 - 24, 128 + 15)


def host_form(weight: PublishedWeight, form: Form, vocabulary: bool) -> Weight:
    """Widths that are not a multiple of 32 become dense bfloat16."""
    if weight.in_features % BLOCK or isinstance(weight, Float8Weight):
        return form.dense(dequantize(weight).to(torch.bfloat16), weight.bias, vocabulary)
    if isinstance(weight, GroupWeight):
        if weight.order is not None or (weight.group % BLOCK and weight.group < weight.in_features):
            return quantise(dequantize(weight), 8, weight.bias)
        return _from_groups(weight)
    if isinstance(weight, Int8Weight):
        scale = weight.scale.half()[:, None].expand(-1, weight.in_features // BLOCK).contiguous()
        return _signed(weight.codes, scale, weight.bias)
    low, high = torch.aminmax(weight.exponent)
    if int(low) < _HALF_EXPONENTS[0] or int(high) > _HALF_EXPONENTS[1]:
        return form.dense(dequantize(weight).to(torch.bfloat16), weight.bias, vocabulary)
    doubled = torch.tensor([2 * v for v in E2M1] + [-2 * v for v in E2M1]).to(torch.int8)
    scale = torch.ldexp(torch.ones(weight.exponent.shape), weight.exponent.to(torch.int32) - 128).half()
    return _signed(doubled[unpack_nibbles(weight.codes).long()], scale, weight.bias)


def _from_groups(weight: GroupWeight) -> BlockWeight:
    out, into = weight.out_features, weight.in_features
    codes = group_codes(weight).reshape(out, -1, BLOCK)
    repeat = min(weight.group, into) // BLOCK
    scale, zero = (
        t.T.float().repeat_interleave(repeat, 1)[:, : into // BLOCK].contiguous() for t in (weight.scale, weight.zero)
    )
    minimum = -scale * zero
    if weight.bits == 4:
        return BlockWeight(4, codes[..., :16] | codes[..., 16:] << 4, scale.half(), minimum.half(), weight.bias)
    return BlockWeight(8, codes, scale.half(), -scale.half().float() * zero, weight.bias)


def _signed(codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> BlockWeight:
    """codes int8 [out, in], scale float16 [out, in / 32]"""
    blocks = (codes.view(torch.uint8) ^ 0x80).reshape(codes.shape[0], -1, BLOCK)
    return BlockWeight(8, blocks.contiguous(), scale, scale.float() * -128, bias)
