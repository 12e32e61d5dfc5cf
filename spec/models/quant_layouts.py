"""Published integer layouts -> `GroupWeight`. Knows how bits lie in the tensors; refuses to know names and files.

All pack small unsigned numbers into int32 words from the lowest bits up. What differs is the axis and the order:

gptq     qweight [in * bits / 32, out] packs along `in`; qzeros [groups, out * bits / 32] along `out`; stored zero points are one less
         than meant (format v2: as meant); g_idx [in] names each column's group
awq      qweight [in, out / 8] and qzeros [groups, out / 8] pack along `out`, eight outputs a word in the order 0 2 4 6 1 3 5 7
packed   weight_packed [out, in * bits / 32] along `in`; zero points [out * bits / 32, groups] along `out`; both offset by half the range
"""

from __future__ import annotations

import torch

from kernels.linear.formats import GroupWeight
from kernels.linear.formats.reference import pack_nibbles

_AWQ_PLACE = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word the output of this number lies


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [n, m] -> uint8 [n, m * 32 / bits]: the numbers of every word, lowest bits first."""
    octets = words.contiguous().view(torch.uint8)  # [n, 4 m], little-endian
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)


def from_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None,
    bits: int,
    group: int,
    zero_shift: int,
    bias: torch.Tensor | None,
) -> GroupWeight:
    """Raises ValueError when g_idx does not put `group` columns into every group but the last."""
    codes = unpack_words(qweight.T, bits)  # [out, in]
    zero = unpack_words(qzeros, bits).to(torch.int16) + zero_shift
    order = column_order(g_idx, group) if g_idx is not None else None
    return _group_weight(codes, scales, zero, bits, group, order, bias)


def from_awq(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, group: int, bias: torch.Tensor | None
) -> GroupWeight:
    codes, zero = (_natural(unpack_words(words, 4)) for words in (qweight, qzeros))
    return _group_weight(codes.T, scales, zero.to(torch.int16), 4, group, None, bias)


def from_packed(
    packed: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    g_idx: torch.Tensor | None,
    bits: int,
    group: int,
    width: int,
    bias: torch.Tensor | None,
) -> GroupWeight:
    """scale [out, groups]. Codes and zero points are offset by the same half range, so their difference is as meant."""
    codes = unpack_words(packed, bits)[:, :width]
    order = column_order(g_idx, group) if g_idx is not None else None
    if zero is None:
        zeros = torch.full(scale.T.shape, 1 << (bits - 1), dtype=torch.int16)
    else:
        zeros = unpack_words(zero.T, bits)[:, : codes.shape[0]].to(torch.int16)  # [groups, out]
    return _group_weight(codes, scale.T, zeros, bits, group, order, bias)


def column_order(g_idx: torch.Tensor, group: int) -> torch.Tensor | None:
    """int32 [in]: columns sorted by group, or None where they already are. Raises ValueError on groups of other sizes."""
    count = g_idx.shape[0]
    order = torch.argsort(g_idx, stable=True)
    if not torch.equal(g_idx[order].long(), torch.arange(count) // group):
        raise ValueError(f"does not name groups of {group} columns")
    return None if torch.equal(order, torch.arange(count)) else order.to(torch.int32)


def _natural(codes: torch.Tensor) -> torch.Tensor:
    """[n, out] in the order of awq's words -> outputs in order."""
    return codes.reshape(codes.shape[0], -1, 8)[:, :, _AWQ_PLACE].flatten(1)


def _group_weight(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    bits: int,
    group: int,
    order: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> GroupWeight:
    """codes [out, in] in the checkpoint's column order."""
    if order is not None:
        codes = codes[:, order.long()]
    packed = pack_nibbles(codes) if bits == 4 else codes
    return GroupWeight(bits, packed.contiguous(), scale.contiguous(), zero.contiguous(), group, order, bias)
