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

# The same block sums with the two float products fused instead of rounded one by one; inputs of unit size, up to 20 blocks.
FUSED = 2e-5
# A float32 sum of `in` <= 600 products of unit size is off by at most about in * 2^-24.
FLOAT32_SUM = 1e-4

ROW_BITS = {"fine": 12, "wide": 16}
SIZES = [(1, 32), (7, 96), (16, 64), (131, 192), (40, 576)]


def random(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def blocks(out: int, into: int, form: str) -> BlockWeight:
    """4 and 8 bits, each with free minimums and with minimums that are a constant times the scale; rows of 8, 12 or 16 bits."""
    dense = DenseWeight(random(out, into))
    weight = replace(quantize(dense, int(form[0])), activation_bits=ROW_BITS.get(form.rsplit(" ")[-1], 8))
    form = form.removesuffix(" fine").removesuffix(" wide")
    if form == "4 offset":
        return replace(weight, minimum=(weight.scale.float() * -8).half())
    if form == "8 free":
        return replace(weight, minimum=weight.minimum + 0.25 * random(*weight.minimum.shape, seed=5))
    return weight


FORMS = ["4", "4 offset", "8", "8 free", "4 fine", "4 offset fine", "4 wide", "4 offset wide", "8 wide", "8 free wide"]


@pytest.mark.parametrize("isa", LIBRARY.isas)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("out", "into"), SIZES)
def test_blocks_follow_the_reference(out: int, into: int, form: str, isa: str) -> None:
    weight = replace(blocks(out, into, form), bias=random(out, seed=2))
    x = random(5, into, seed=3) * 3
    x[0, 32:64] = 0.0
    torch.testing.assert_close(linear(x, weight, isa=isa), reference.linear(x, weight), atol=FUSED, rtol=FUSED)


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
    """Two to eight rows take pairs of blocks: an odd last block, and more pairs than are unpacked ahead."""
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
def test_quantised_rows_are_the_reference_bit_for_bit(isa: str) -> None:
    x = random(9, 160) * torch.logspace(-6, 6, 9).unsqueeze(1)
    x[3, :32] = 0.0
    x[4, 32:64] = torch.arange(32) + 0.5  # ties of the rounding
    codes, step, total = quantize_rows(x, isa)
    want_codes, want_step, want_total = reference.quantize_rows(x)
    assert torch.equal(codes.float(), want_codes)
    assert torch.equal(step, want_step)
    assert torch.equal(total.float(), want_total)


def test_a_step_below_the_normal_numbers_means_the_same_everywhere() -> None:
    """The step is rounded so coarsely that codes leave their range; every instruction set cuts them alike."""
    x = torch.full((1, 32), 190 * 2.0**-149)
    found = [quantize_rows(x, isa) for isa in LIBRARY.isas]
    assert all(torch.equal(a, b) for other in found for a, b in zip(other, found[0], strict=True))
    assert found[0][0].abs().max() == 127


def test_extreme_codes_do_not_saturate() -> None:
    """All codes and inputs at their largest: the sums that a 16-bit intermediate would clip."""
    for bits, codes in (
        (4, torch.full((16, 2, 16), 255, dtype=torch.uint8)),
        (8, torch.full((16, 2, 32), 255, dtype=torch.uint8)),
    ):
        ones = torch.ones(16, 2)
        weight = BlockWeight(bits, codes, ones.half(), torch.zeros(16, 2, dtype=torch.float16 if bits == 4 else torch.float32))
        for sign in (1.0, -1.0):
            x = torch.full((3, 64), sign)
            want = sign * 64 * (15.0 if bits == 4 else 255.0)
            for isa in LIBRARY.isas:
                torch.testing.assert_close(linear(x, weight, isa=isa), torch.full((3, 16), want), atol=0, rtol=1e-6)


LARGEST_PAIRS = [(4, 8), (4, 12), (4, 16), (8, 8), (8, 16)]


@pytest.mark.parametrize("minimum", [0.0, 1.0, "offset"])
@pytest.mark.parametrize(("bits", "row_bits"), LARGEST_PAIRS)
def test_the_largest_codes_of_both_sides_are_exact(bits: int, row_bits: int, minimum: float | str) -> None:
    """Weights of the lowest and the highest code, rows of the largest codes (all, of either sign, at the ends of a block, with low
    parts of either sign): whatever clips a code, a part of one or a sum of them is off by whole numbers. Row counts of every path."""
    count_blocks, largest = 3, LARGEST[row_bits]
    rows = torch.full((6, 32 * count_blocks), float(largest))
    rows[1] *= -1
    rows[2, 1::2] *= -1
    rows[3] = 0.0
    rows[3, ::32], rows[3, 31::32] = largest, -largest
    rows[4, 1:] = 8.0
    rows[5, 1:] = -9.0
    rows[4:, ::32] = largest
    x = rows.repeat(46, 1)[:273].contiguous()  # a code is its value: every step is 1
    sums = rows.reshape(6, count_blocks, 32).double().sum(-1)
    for code in (0, 2**bits - 1):
        shift = -(2 ** (bits - 1)) if minimum == "offset" else 0
        more = 0.0 if minimum == "offset" else float(minimum)
        want = torch.zeros(6)
        for b in range(count_blocks):  # the two fused products of a block; float64 holds them
            want = (want.double() + ((code + shift) * sums[:, b]).float().double()).float()
            want = (want.double() + more * sums[:, b]).float()
        codes = torch.full((17, count_blocks, 4 * bits), code * 17 if bits == 4 else code, dtype=torch.uint8)
        lowest = torch.full((17, count_blocks), more + shift, dtype=torch.float16 if bits == 4 else torch.float32)
        matrix = PackedMatrix(BlockWeight(bits, codes, torch.ones(17, count_blocks).half(), lowest, activation_bits=row_bits))
        for count in (1, 2, 4, 5, 8, 9, 12, 13, 16, 17, 257, 273):
            expected = want[torch.arange(count) % 6].unsqueeze(1).expand(count, 17)
            for isa in LIBRARY.isas:
                assert torch.equal(matrix.linear(x[:count], isa=isa), expected), (code, count, isa)


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
    with pytest.raises(ValueError, match="not one of"):
        linear(random(1, 64), weight, isa="mmx")
    assert issubclass(NativeError, ValueError)
