"""Block-quantised weights: GGUF block types -> values or the canonical forms of `kernels.linear`, and dense -> blocks.

Knows bits and layouts (ggml's block structs); refuses to know files and layers. Everything is vectorised over blocks and
cut into row chunks, so that temporaries stay small.

Every type is first read as ``value = scale * code + minimum`` with float32 scale and minimum, which is exact for all of
them. Turning that into a `BlockWeight` (float16 scale) is

- exact for Q4_0, Q4_1 (bits 4) and Q8_0, Q5_0, Q5_1 (bits 8);
- rounded for Q4_K (bits 4) and Q5_K (bits 8): their scales are products of a float16 and a 6-bit integer, 17 bits of
  mantissa, rounded to float16 (relative error at most 2**-11; the minimum of Q4_K too, that of Q5_K stays exact);
- rounded for Q6_K (bits 8): it has a scale per 16 values where the canonical form has one per 32. The half with the larger
  scale keeps its grid, the other half is rounded to the finer 1/3 or smaller fraction of that grid.

These are the matrices as the model has them (`dequantize`, the float32 reference of `forespeak eval`); the products round them once more, to
one grid an output (`kernels.linear`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.linear import BLOCK, BlockWeight

CHUNK_VALUES = 1 << 22


@dataclass(frozen=True, slots=True)
class Groups:
    """value = scale * code + minimum over groups of `width` values of a row. bits 4 packs codes as `BlockWeight` does."""

    bits: int
    codes: torch.Tensor  # uint8 [rows, groups, width] (bits 8) or [rows, groups, width / 2] (bits 4)
    scale: torch.Tensor  # float32 [rows, groups]
    minimum: torch.Tensor  # float32 [rows, groups]

    def values(self) -> torch.Tensor:
        """float32 [rows, groups * width]"""
        codes = self.codes
        if self.bits == 4:
            codes = torch.cat((codes & 15, codes >> 4), dim=-1)
        return torch.addcmul(self.minimum[..., None], codes.float(), self.scale[..., None]).flatten(1)


def _half(raw: torch.Tensor, offset: int) -> torch.Tensor:
    """float32 [rows, blocks] of the float16 at byte `offset` of every block."""
    return raw[..., offset : offset + 2].view(torch.float16).squeeze(-1).float()


def _join(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return torch.cat((low, high), dim=-1)


def _q4_0(raw: torch.Tensor) -> Groups:
    scale = _half(raw, 0)
    return Groups(4, raw[..., 2:], scale, scale * -8)


def _q4_1(raw: torch.Tensor) -> Groups:
    return Groups(4, raw[..., 4:], _half(raw, 0), _half(raw, 2))


def _five_bits(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """`low` [..., 16] holds the nibbles of values j and j + 16, bit j of the 32-bit `high` [..., 4] the fifth bit of j."""
    bits = (high[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return _join(low & 15, low >> 4) | bits.flatten(-2) << 4


def _q5_0(raw: torch.Tensor) -> Groups:
    scale = _half(raw, 0)
    return Groups(8, _five_bits(raw[..., 6:], raw[..., 2:6]), scale, scale * -16)


def _q5_1(raw: torch.Tensor) -> Groups:
    return Groups(8, _five_bits(raw[..., 8:], raw[..., 4:8]), _half(raw, 0), _half(raw, 2))


def _q8_0(raw: torch.Tensor) -> Groups:
    scale = _half(raw, 0)
    return Groups(8, raw[..., 2:] ^ 0x80, scale, scale * -128)  # flipping the sign bit adds 128


def _k_scales(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and minimum, float32 [rows, blocks * 8], of the 256-value blocks of Q4_K and Q5_K (6-bit pairs in 12 bytes)."""
    packed = raw[..., 4:16]
    first, second, mixed = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = _join(first & 63, (mixed & 15) | (first >> 6) << 4)
    minimums = _join(second & 63, (mixed >> 4) | (second >> 6) << 4)
    return (_half(raw, 0)[..., None] * scales).flatten(1), (_half(raw, 2)[..., None] * minimums).neg().flatten(1)


def _k_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[rows, blocks, 128] -> codes [rows, blocks * 8, 32]: 32 bytes hold one sub-block low and the next one high."""
    rows, blocks = packed.shape[:2]
    quads = packed.reshape(rows, blocks, 4, 1, 32)
    return torch.cat((quads & 15, quads >> 4), dim=3).reshape(rows, blocks * 8, 32)


def _q4_k(raw: torch.Tensor) -> Groups:
    codes = _k_nibbles(raw[..., 16:])
    return Groups(4, codes[..., :16] | codes[..., 16:] << 4, *_k_scales(raw))


def _q5_k(raw: torch.Tensor) -> Groups:
    high = (raw[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1  # bit s: sub-block s
    codes = _k_nibbles(raw[..., 48:]) | high.flatten(1, 2) << 4
    return Groups(8, codes, *_k_scales(raw))


def _q6_k(raw: torch.Tensor) -> Groups:
    """16-wide groups: 128 bytes of low nibbles, 64 of high bit pairs, 16 signed scales, one float16."""
    rows, blocks = raw.shape[:2]
    low = raw[..., :128].reshape(rows, blocks, 2, 1, 64)
    low = torch.cat((low & 15, low >> 4), dim=3).reshape(rows, blocks, 2, 4, 32)
    high = raw[..., 128:192].reshape(rows, blocks, 2, 1, 32) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3
    codes = (low | high << 4).reshape(rows, blocks * 16, 16)
    scale = (_half(raw, 208)[..., None] * raw[..., 192:208].view(torch.int8)).flatten(1)
    return Groups(8, codes, scale, scale * -32)


# type -> (values in a block, bytes of a block, reader)
_READERS: dict[str, tuple[int, int, Callable[[torch.Tensor], Groups]]] = {
    "Q4_0": (32, 18, _q4_0),
    "Q4_1": (32, 20, _q4_1),
    "Q5_0": (32, 22, _q5_0),
    "Q5_1": (32, 24, _q5_1),
    "Q8_0": (32, 34, _q8_0),
    "Q4_K": (256, 144, _q4_k),
    "Q5_K": (256, 176, _q5_k),
    "Q6_K": (256, 210, _q6_k),
}
BLOCK_TYPES = tuple(_READERS)


def dequantise(block_type: str, raw: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """uint8 [out, bytes of a row] -> [out, in] of `dtype`; float32 is exact up to one rounding of the final sum."""
    values, size, read = _READERS[block_type]
    width = raw.shape[1] // size * values
    result = torch.empty(raw.shape[0], width, dtype=dtype)
    for rows in _chunks(raw.shape[0], width):
        result[rows] = read(_split(raw[rows], size)).values()
    return result


def to_block_weight(block_type: str, raw: torch.Tensor, bias: torch.Tensor | None = None) -> BlockWeight:
    """uint8 [out, bytes of a row] -> the canonical form. See the module's head for what is exact."""
    values, size, read = _READERS[block_type]
    width = raw.shape[1] // size * values
    bits = 4 if block_type.startswith("Q4") else 8
    weight = _empty(raw.shape[0], width, bits, bias)
    for rows in _chunks(raw.shape[0], width):
        groups = read(_split(raw[rows], size))
        if block_type == "Q6_K":
            groups = _pair(groups)
        weight.codes[rows], weight.scale[rows], weight.minimum[rows] = groups.codes, groups.scale, groups.minimum
    return weight


def quantise(values: torch.Tensor, bits: int, bias: torch.Tensor | None = None) -> BlockWeight:
    """Dense [out, in], `in` a multiple of 32 -> blocks, to nearest. bits 8: symmetric, 255 levels. bits 4: from min to max."""
    weight = _empty(values.shape[0], values.shape[1], bits, bias)
    for rows in _chunks(*values.shape):
        x = _split(values[rows].float(), BLOCK)
        if bits == 8:
            scale = (x.abs().amax(-1) / 127).half()
            minimum = scale.float() * -128
        else:
            scale = ((x.amax(-1) - x.amin(-1)) / 15).half()
            minimum = x.amin(-1).half().float()
        step = torch.where(scale == 0, 1.0, scale.float())
        codes = ((x - minimum[..., None]) / step[..., None]).round_().clamp_(0, 255 if bits == 8 else 15).to(torch.uint8)
        if bits == 4:
            codes = codes[..., :16] | codes[..., 16:] << 4
        weight.codes[rows], weight.scale[rows], weight.minimum[rows] = codes, scale, minimum
    return weight


def _split(rows: torch.Tensor, size: int) -> torch.Tensor:
    """[n, m * size] -> [n, m, size]"""
    return rows.reshape(rows.shape[0], -1, size)


def _chunks(rows: int, width: int) -> list[slice]:
    step = max(1, CHUNK_VALUES // width)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _empty(rows: int, width: int, bits: int, bias: torch.Tensor | None) -> BlockWeight:
    blocks = width // BLOCK
    return BlockWeight(
        bits,
        torch.empty(rows, blocks, BLOCK * bits // 8, dtype=torch.uint8),
        torch.empty(rows, blocks, dtype=torch.float16),
        torch.empty(rows, blocks, dtype=torch.float16 if bits == 4 else torch.float32),
        bias,
    )


def _pair(groups: Groups) -> Groups:
    """Two 16-wide groups of Q6_K -> one of 32 with 255 levels on the grid ``larger scale / k``, k the largest that fits."""
    rows, count = groups.scale.shape
    scale = _split(groups.scale, 2)
    signed = groups.codes.reshape(rows, count // 2, 2, -1).float() - 32
    larger = scale.abs().amax(-1, keepdim=True)
    ratio = scale / torch.where(larger == 0, 1.0, larger)
    units = signed * ratio[..., None]  # values in steps of the larger scale, at most 32
    k = (127 / units.abs().amax((-1, -2)).clamp(min=1.0)).floor()
    codes = (units * k[..., None, None]).round_().add_(128).to(torch.uint8).reshape(rows, count // 2, BLOCK)
    joined = (larger.squeeze(-1) / k).half().float()
    return Groups(8, codes, joined, joined * -128)
