"""The C++ linear layer: the reference's numbers, and the same bits for every row count, thread count and instruction set."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from toy import quantize

from kernels.linear import LARGEST, BlockWeight, DenseWeight, Weight, reference
from kernels.native import load
from kernels.native.library import NativeError

LIBRARY = load()
if LIBRARY is None:
    pytest.skip("no native library: no C++ compiler here", allow_module_level=True)

from kernels.linear.native import PackedMatrix, linear, quantize_rows  # noqa: E402

# A float32 sum of `in` <= 600 products of unit size is off by at most about in * 2^-24.
FLOAT32_SUM = 1e-4

SIZES = [(1, 32), (7, 96), (16, 64), (131, 192), (40, 576), (33, 1536)]


def random(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def blocks(out: int, into: int, form: str) -> BlockWeight:
    """4 and 8 bits, each with free minimums and with minimums that are a constant times the scale."""
    weight = quantize(DenseWeight(random(out, into)), int(form[0]))
    if form == "4 offset":
        return replace(weight, minimum=(weight.scale.float() * -8).half())
    if form == "4 negative":  # as some files have it: the scale below zero
        return replace(weight, scale=-weight.scale, minimum=(weight.scale.float() * 8).half())
    if form == "8 free":
        return replace(weight, minimum=weight.minimum + 0.25 * random(*weight.minimum.shape, seed=5))
    return weight


FORMS = ["4", "4 offset", "4 negative", "8", "8 free"]


@pytest.mark.parametrize("isa", LIBRARY.isas)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("out", "into"), SIZES)
def test_blocks_are_the_reference_bit_for_bit(out: int, into: int, form: str, isa: str) -> None:
    weight = replace(blocks(out, into, form), bias=random(out, seed=2))
    x = random(5, into, seed=3) * 3
    x[0, 32:64] = 0.0
    x[1] = 0.0
    x[2] *= torch.logspace(-6, 6, into)
    assert torch.equal(linear(x, weight, isa=isa), reference.linear(x, weight))


@pytest.mark.parametrize("isa", LIBRARY.isas)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("out", "into"), [(1, 1), (7, 33), (131, 96), (3, 577)])
def test_dense(out: int, into: int, dtype: torch.dtype, isa: str) -> None:
    weight = DenseWeight(random(out, into).to(dtype), random(out, seed=2))
    x = random(5, into, seed=1)
    want = x.double() @ weight.values.double().T + weight.bias
    torch.testing.assert_close(linear(x, weight, isa=isa).double(), want, atol=FLOAT32_SUM, rtol=0)


def every_weight() -> list[Weight]:
    dense = random(67, 192)
    return [*(blocks(67, 192, form) for form in FORMS), *(DenseWeight(dense.to(t)) for t in (torch.float32, torch.bfloat16))]


@pytest.mark.parametrize("weight", every_weight(), ids=[*FORMS, "float32", "bfloat16"])
def test_a_row_does_not_know_its_neighbours(weight: Weight) -> None:
    matrix = PackedMatrix(weight)
    x = random(64, 192, seed=4)
    alone = torch.cat([matrix.linear(x[i : i + 1]) for i in range(64)])
    for rows in range(1, 65):
        for threads in (1, 2, 3):
            got = matrix.linear(x[:rows], threads)
            assert torch.equal(got, alone[:rows]), (rows, threads)
    shifted = matrix.linear(x[5:50].contiguous())
    assert torch.equal(shifted, alone[5:50])


@pytest.mark.parametrize("weight", every_weight(), ids=[*FORMS, "float32", "bfloat16"])
def test_instruction_sets_agree_bit_for_bit(weight: Weight) -> None:
    matrix = PackedMatrix(weight)
    for rows in (*range(1, 10), 11, 16, 17, 40):
        x = random(rows, 192, seed=rows)
        first = matrix.linear(x, isa=LIBRARY.isas[0])
        for isa in LIBRARY.isas[1:]:
            assert torch.equal(first, matrix.linear(x, isa=isa)), (rows, isa)


@pytest.mark.parametrize("into", [32, 96, 1536])
@pytest.mark.parametrize("form", FORMS)
def test_few_rows_of_odd_and_long_inputs_agree_bit_for_bit(form: str, into: int) -> None:
    """An odd last block, and more inputs than are expanded ahead."""
    matrix = PackedMatrix(blocks(37, into, form))
    for rows in range(1, 10):
        x = random(rows, into, seed=rows)
        alone = torch.cat([matrix.linear(x[i : i + 1]) for i in range(rows)])
        for isa in LIBRARY.isas:
            assert torch.equal(matrix.linear(x, isa=isa), alone), (rows, isa)


@pytest.mark.parametrize("form", FORMS)
def test_lookup_is_the_matrix(form: str) -> None:
    weight = blocks(37, 96, form)
    ids = torch.tensor([0, 36, 16, 15, 36])
    assert torch.equal(PackedMatrix(weight).lookup(ids), reference.lookup(weight, ids))


@pytest.mark.parametrize("isa", LIBRARY.isas)
@pytest.mark.parametrize("rows", [1, 9, 20])
def test_quantised_rows_are_the_reference_bit_for_bit(isa: str, rows: int) -> None:
    x = random(rows, 160) * torch.logspace(-6, 6, rows).unsqueeze(1)
    x[0] = torch.arange(160) + 0.5  # ties of the rounding
    x[0, 5] = 32639.0
    x[rows // 2 + 1 :: 4] = 0.0
    x[rows // 2 + 2 :: 4] *= 2.0**-120
    codes, step = quantize_rows(x, isa)
    want_codes, want_step = reference.quantize_rows(x)
    assert torch.equal(codes.float(), want_codes)
    assert torch.equal(step, want_step)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("isa", LIBRARY.isas)
def test_a_row_that_is_no_numbers_gives_no_numbers(isa: str, broken: float) -> None:
    for rows in (1, 2, 8, 16, 40):
        x = random(rows, 96)
        x[rows // 2, 70] = broken
        y = linear(x, blocks(37, 96, "4"), isa=isa)
        assert y[rows // 2].isnan().all()
        assert torch.equal(y[: rows // 2], reference.linear(x[: rows // 2], blocks(37, 96, "4")))


@pytest.mark.parametrize(("bits", "minimum"), [(4, 0.0), (4, -8.0), (4, -15.0), (8, 0.0), (8, -128.0), (8, -255.0)])
def test_the_largest_numbers_of_both_sides_are_exact(bits: int, minimum: float) -> None:
    """Weights of the lowest and the highest code, rows of the largest codes (all, of either sign, in turn, with low parts of either sign):
    whatever clips a byte, a part or a sum of them is off by whole numbers. Row counts of every path."""
    count_blocks = 3
    rows = torch.full((6, 32 * count_blocks), float(LARGEST))
    rows[1] *= -1
    rows[2, 1::2] *= -1
    rows[3] = 0.0
    rows[3, ::32], rows[3, 31::32] = LARGEST, -LARGEST
    rows[4, 1:] = 8.0
    rows[5, 1:] = -9.0
    x = rows.repeat(46, 1)[:273].contiguous()  # a code is its value: every step is 1
    for code in (0, 2**bits - 1):
        codes = torch.full((17, count_blocks, 4 * bits), code * 17 if bits == 4 else code, dtype=torch.uint8)
        lowest = torch.full((17, count_blocks), minimum, dtype=torch.float16 if bits == 4 else torch.float32)
        weight = BlockWeight(bits, codes, torch.ones(17, count_blocks).half(), lowest)
        matrix, want = PackedMatrix(weight), reference.linear(rows, weight)
        for count in (1, 2, 3, 4, 5, 8, 9, 12, 13, 16, 17, 257, 273):
            expected = want[torch.arange(count) % 6]
            for isa in LIBRARY.isas:
                assert torch.equal(matrix.linear(x[:count], isa=isa), expected), (code, count, isa)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_widest_matrix_of_the_largest_numbers_is_exact(bits: int) -> None:
    into = 65_536
    codes = torch.full((1, into // 32, 4 * bits), 255, dtype=torch.uint8)
    weight = BlockWeight(
        bits,
        codes,
        torch.ones(1, into // 32).half(),
        torch.zeros(1, into // 32, dtype=torch.float16 if bits == 4 else torch.float32),
    )
    x = torch.full((3, into), float(LARGEST)) * torch.tensor([[1.0], [-1.0], [1.0]])
    matrix, want = PackedMatrix(weight), reference.linear(x, weight)
    for rows in (1, 2, 3):
        for isa in LIBRARY.isas:
            assert torch.equal(matrix.linear(x[:rows], isa=isa), want[:rows]), (rows, isa)


@pytest.mark.parametrize("form", FORMS)
def test_more_rows_than_travel_together_agree_bit_for_bit(form: str) -> None:
    """257 rows: tiles pass by once more for the last one, with one row and with several of a group left over."""
    matrix = PackedMatrix(blocks(37, 96, form))
    x = random(270, 96, seed=7)
    alone = torch.cat([matrix.linear(x[i : i + 1]) for i in range(270)])
    for rows in (256, 257, 270):
        for threads in (1, 3):
            assert torch.equal(matrix.linear(x[:rows], threads), alone[:rows]), (rows, threads)


def test_refusals_name_the_fault() -> None:
    with pytest.raises(ValueError, match="expected a contiguous CPU tensor"):
        linear(random(3, 64).T.contiguous().T, DenseWeight(random(2, 64)))
    with pytest.raises(ValueError, match=r"expected \[rows, 64\]"):
        linear(random(3, 32), DenseWeight(random(2, 64)))
    weight = blocks(16, 64, "4")
    with pytest.raises(ValueError, match="do not belong together"):
        PackedMatrix(replace(weight, scale=weight.scale[:, :1]))
    with pytest.raises(NativeError, match="could not be packed"):  # its sums would not fit 32 bits
        PackedMatrix(quantize(DenseWeight(torch.zeros(1, 65_568)), 8))
    with pytest.raises(ValueError, match="not one of"):
        linear(random(1, 64), weight, isa="mmx")
    assert issubclass(NativeError, ValueError)
