"""Triton products with published weight forms, each against its matrix written out in float; rows 1 to 64, odd widths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from device import DEVICE, to_device

from kernels.linear.formats import E2M1, Float8Weight, GroupWeight, Int8Weight, MxWeight, PublishedWeight, reference
from kernels.linear.formats.stacking import stacked
from kernels.linear.formats.triton import linear

# Interpreted: float32 sums of a few hundred products in another order. On a device x is rounded to 8 significant bits too.
RELATIVE = 2e-6 if DEVICE == "cpu" else 4e-3


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows_of(count: int, width: int) -> torch.Tensor:
    return torch.randn(count, width, generator=generator(7)) * 2


def group_weight(
    bits: int, out: int, into: int, group: int, ordered: bool = False, dtype: torch.dtype = torch.float16
) -> GroupWeight:
    g = generator(bits + into)
    count = -(-into // group)
    codes = torch.randint(0, 256, (out, into * bits // 8), dtype=torch.uint8, generator=g)
    scale = (torch.rand(count, out, generator=g) * 0.02 + 0.001).to(dtype)
    zero = torch.randint(0, 2**bits + 1, (count, out), dtype=torch.int16, generator=g)
    order = torch.randperm(into, generator=generator(into)).to(torch.int32) if ordered else None
    return GroupWeight(bits, codes, scale, zero, group, order, torch.randn(out, generator=g))


def float8_weight(out: int, into: int, rows: int, columns: int) -> Float8Weight:
    values = (torch.randn(out, into, generator=generator(3)) * 40).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-out // rows), -(-into // columns), generator=generator(4)) * 0.01
    return Float8Weight(values, scale, rows, columns)


def mx_weight(out: int, into: int) -> MxWeight:
    codes = torch.randint(0, 256, (out, into // 2), dtype=torch.uint8, generator=generator(5))
    return MxWeight(codes, torch.randint(118, 126, (out, into // 32), dtype=torch.uint8, generator=generator(6)))


def int8_weight(out: int, into: int) -> Int8Weight:
    codes = torch.randint(-127, 128, (out, into), generator=generator(8)).to(torch.int8)
    return Int8Weight(codes, torch.rand(out, generator=generator(9)) * 0.01, torch.randn(out, generator=generator(10)))


WEIGHTS: dict[str, PublishedWeight] = {
    "int4, groups of 32": group_weight(4, 70, 160, 32),
    "int4, groups of 128, short last group, bfloat16 scales": group_weight(4, 131, 160, 128, dtype=torch.bfloat16),
    "int4, one group, odd width": group_weight(4, 9, 46, 46, dtype=torch.float32),
    "int4, act order": group_weight(4, 70, 128, 32, ordered=True),
    "int8, groups of 64": group_weight(8, 67, 128, 64),
    "int8, act order, one group": group_weight(8, 5, 77, 77, ordered=True),
    "float8, one scale": float8_weight(70, 99, 70, 99),
    "float8, a scale a row": float8_weight(70, 64, 1, 64),
    "float8, blocks of 128": float8_weight(140, 300, 128, 128),
    "mxfp4": mx_weight(66, 96),
    "int8 rows": int8_weight(67, 101),
    "int8 rows, a narrow one": int8_weight(3, 32),
}


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("name", WEIGHTS)
def test_products_are_the_references(name: str, rows: int) -> None:
    weight = WEIGHTS[name]
    x = rows_of(rows, weight.in_features)
    got, want = linear(to_device(x), to_device(weight)).cpu(), reference.linear(x, weight)
    if isinstance(weight, Int8Weight):
        assert torch.equal(got, want)
    else:
        size = x.norm(dim=1, keepdim=True) * reference.dequantize(weight).norm(dim=1)
        assert ((got - want).abs() / size).max() < RELATIVE


@pytest.mark.parametrize("name", ["int4, act order", "float8, blocks of 128", "mxfp4", "int8 rows"])
def test_a_row_does_not_see_its_neighbours(name: str) -> None:
    weight = to_device(WEIGHTS[name])
    x = to_device(rows_of(64, weight.in_features))
    whole = linear(x, weight, invariant=True)
    for rows in ([0], [5, 63], list(range(20, 37))):
        assert torch.equal(linear(x[rows], weight, invariant=True), whole[rows])


def test_every_e4m3_number() -> None:
    """All 254 finite codes, taken apart by hand: 1 sign, 4 exponent, 3 mantissa bits."""
    codes = [c for c in range(256) if c & 0x7F != 0x7F]
    sizes = [(c & 7) / 8 * 2.0**-6 if c >> 3 & 15 == 0 else (1 + (c & 7) / 8) * 2.0 ** ((c >> 3 & 15) - 7) for c in codes]
    want = [-s if c & 0x80 else s for c, s in zip(codes, sizes, strict=True)]
    weight = Float8Weight(torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None], torch.ones(1, 1), 254, 1)
    assert reference.dequantize(weight).flatten().tolist() == want
    assert linear(to_device(torch.ones(1, 1)), to_device(weight)).flatten().tolist() == want


@pytest.mark.parametrize("exponent", [0, 1, 2, 127, 250])
def test_every_e2m1_number_under_extreme_exponents(exponent: int) -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    weight = MxWeight((codes[0::2] | codes[1::2] << 4).repeat(2)[None], torch.tensor([[exponent]], dtype=torch.uint8))
    numbers = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float64)
    want = (numbers * 2.0 ** (exponent - 127)).repeat(2).float()
    assert torch.equal(reference.dequantize(weight)[0], want)
    assert torch.equal(linear(to_device(torch.eye(32)), to_device(weight))[:, 0].cpu(), want)


def test_rows_of_zeros_and_halves_have_exact_codes() -> None:
    x = torch.zeros(3, 8)
    x[1, :6] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    x[2, 0] = -3.0
    weight = Int8Weight(torch.eye(8).to(torch.int8), torch.ones(8))
    want = torch.zeros(3, 8)
    want[1, :6] = torch.tensor([127.0, 0.0, 2.0, 2.0, 0.0, -2.0])
    want[2, 0] = -3.0
    assert torch.equal(reference.linear(x, weight), want)
    assert torch.equal(linear(to_device(x), to_device(weight)).cpu(), want)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected \[rows, 160\]"):
        linear(torch.zeros(2, 32), WEIGHTS["int4, groups of 32"])
    with pytest.raises(ValueError, match="groups of 24 columns"):
        linear(torch.zeros(1, 48), group_weight(4, 3, 48, 24))
    assert linear(torch.zeros(0, 160), WEIGHTS["int4, groups of 32"]).shape == (0, 70)


STACKS: dict[str, tuple[list[PublishedWeight], bool]] = {
    "groups": ([group_weight(4, 70, 160, 32), group_weight(4, 9, 160, 32)], True),
    "one column order": ([group_weight(4, 70, 128, 32, ordered=True), group_weight(4, 9, 128, 32, ordered=True)], True),
    "two column orders": (
        [
            group_weight(4, 70, 128, 32, ordered=True),
            replace(group_weight(4, 9, 128, 32), order=torch.arange(128, dtype=torch.int32)),
        ],
        False,
    ),
    "other groups": ([group_weight(4, 70, 128, 32), group_weight(4, 9, 128, 64)], False),
    "one scale each": ([float8_weight(70, 64, 70, 64), float8_weight(9, 64, 9, 64)], True),
    "whole blocks": ([float8_weight(64, 64, 32, 32), float8_weight(33, 64, 32, 32)], True),
    "blocks that end inside": ([float8_weight(40, 64, 32, 32), float8_weight(33, 64, 32, 32)], True),
    "mxfp4": ([mx_weight(66, 96), mx_weight(3, 96)], True),
    "int8 rows": ([int8_weight(7, 32), int8_weight(9, 32)], True),
    "two forms": ([int8_weight(7, 32), mx_weight(9, 32)], False),
}


@pytest.mark.parametrize("name", STACKS)
def test_stacked_matrices_are_the_matrices(name: str) -> None:
    weights, possible = STACKS[name]
    joined = stacked(weights, None)
    assert (joined is not None) == possible
    if joined is not None:
        assert torch.equal(reference.dequantize(joined), torch.cat([reference.dequantize(w) for w in weights]))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 32, 64])
@pytest.mark.parametrize("form", ["int4", "int4, act order", "float8", "mxfp4", "int8 rows"])
def test_real_sizes(form: str, rows: int) -> None:
    """A 4096 x 14336 matrix of every form."""
    weight = {
        "int4": lambda: group_weight(4, 4096, 14336, 128),
        "int4, act order": lambda: group_weight(4, 4096, 14336, 128, ordered=True),
        "float8": lambda: float8_weight(4096, 14336, 128, 128),
        "mxfp4": lambda: mx_weight(4096, 14336),
        "int8 rows": lambda: int8_weight(4096, 14336),
    }[form]()
    x = rows_of(rows, 14336)
    got, want = linear(to_device(x), to_device(weight)).cpu(), reference.linear(x, weight)
    assert ((got - want).norm() / want.norm()).item() < RELATIVE
