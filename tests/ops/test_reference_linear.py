"""The reference linear layer against plain definitions: float64 products, and integer loops written out in Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from toy import quantize

from kernels.linear import BlockWeight, DenseWeight
from kernels.linear.reference import dequantize, linear, lookup, quantize_rows, row_numbers

# A float32 sum of `in` products of unit size is off by at most about in * 2^-24; these use in <= 600.
FLOAT32_SUM = 1e-4


def random(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 5, 123])
@pytest.mark.parametrize(("out", "into"), [(1, 1), (7, 33), (131, 96), (3, 577)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dense(rows: int, out: int, into: int, dtype: torch.dtype) -> None:
    x, bias = random(rows, into, seed=1), random(out, seed=2)
    weight = DenseWeight(random(out, into).to(dtype), bias)
    want = x.double() @ weight.values.double().T + bias
    torch.testing.assert_close(linear(x, weight).double(), want, atol=FLOAT32_SUM, rtol=0)


def by_hand(x: torch.Tensor, weight: BlockWeight) -> list[list[np.float32]]:
    """The contract's formula in scalar float32 and Python's whole numbers, no torch arithmetic."""
    f = np.float32
    answer = []
    for row in x.numpy():
        largest = np.abs(row).max()
        inverse = f(f(32639) / largest) if largest > 0 else f(0)
        q = [int(np.rint(f(v * inverse))) for v in row]
        q = [v + (v % 256 == 128) for v in q]
        high = [(v + 128) // 256 for v in q]
        outs = []
        for o in range(weight.out_features):
            numbers, s = row_by_hand(weight, o)
            parts = [
                sum(n * v for n, v in zip(numbers, part, strict=True))
                for part in (high, [a - 256 * b for a, b in zip(q, high, strict=True)])
            ]
            dot = f(f(f(256) * f(parts[0])) + f(parts[1]))
            outs.append(f(f(s * f(largest / f(32639))) * dot))
        answer.append(outs)
    return answer


def row_by_hand(weight: BlockWeight, o: int) -> tuple[list[int], np.float32]:
    f = np.float32
    scale, minimum = ([f(v.item()) for v in t[o]] for t in (weight.scale, weight.minimum))
    blocks = range(len(scale))
    if weight.bits == 8:
        values = [f(f(scale[b] * f(c)) + minimum[b]) for b in blocks for c in weight.codes[o, b].tolist()]
        s = f(max(abs(v) for v in values) / f(127))
        return [int(np.rint(f(v / s))) for v in values], s
    s = f(max(max(abs(minimum[b]), abs(f(f(scale[b] * f(15)) + minimum[b]))) for b in blocks) / f(127))
    numbers = []
    for b in blocks:
        factor, offset = (int(np.rint(f(f(v / s) * f(256)))) for v in (scale[b], minimum[b]))
        raw = weight.codes[o, b].tolist()
        numbers += [((raw[j % 16] >> (4 * (j // 16)) & 15) * factor + offset + 128) >> 8 for j in range(32)]
    return numbers, s


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 5])
def test_blocks_are_the_contract_bit_for_bit(bits: int, rows: int) -> None:
    weight = quantize(DenseWeight(random(7, 96)), bits)
    x = random(rows, 96, seed=3) * 3
    x[-1, 32:64] = 0.0
    x[rows // 2 + 1 :] = 0.0  # a row of zeros has step 0 and codes 0
    assert linear(x, weight).tolist() == np.array(by_hand(x, weight)).tolist()


@pytest.mark.parametrize(("bits", "worst"), [(4, 0.12), (8, 0.02)])
def test_blocks_are_near_the_dense_product(bits: int, worst: float) -> None:
    """Relative error of the whole output: about 1/15/sqrt(3) of a block's spread for 4 bits, far less for 8."""
    dense = DenseWeight(random(131, 320), random(131, seed=5))
    x = random(123, 320, seed=3)
    want = linear(x, dense)
    got = linear(x, quantize(dense, bits))
    assert ((got - want).norm() / want.norm()).item() < worst


def test_codes_round_half_to_even_and_keep_sign() -> None:
    row = torch.zeros(1, 32)
    row[0, :9] = torch.tensor([32639.0, 0.5, 1.5, 2.5, -0.5, -1.5, 128.0, -128.0, 127.5])
    codes, step = quantize_rows(row)
    assert step.tolist() == [1.0]
    assert codes[0, :9].tolist() == [32639, 0, 2, 2, 0, -2, 129, -127, 129]  # no low part is -128


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_no_numbers_gives_no_numbers(broken: float) -> None:
    x = random(3, 64)
    x[1, 40] = broken
    y = linear(x, quantize(DenseWeight(random(5, 64)), 4))
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_and_matrices_of_nothing_give_nothing(bits: int) -> None:
    zeros = torch.zeros(1, 64)
    for tiny in (zeros, zeros + 2.0**-140):
        assert torch.equal(linear(tiny, quantize(DenseWeight(random(5, 64)), bits)), torch.zeros(1, 5))
    assert torch.equal(linear(random(1, 64), quantize(DenseWeight(torch.zeros(5, 64)), bits)), torch.zeros(1, 5))


def test_nibble_order_and_lookup() -> None:
    codes = torch.arange(16, dtype=torch.uint8).reshape(1, 1, 16) | (torch.arange(15, -1, -1, dtype=torch.uint8) << 4)
    weight = BlockWeight(4, codes, torch.tensor([[2.0]]).half(), torch.tensor([[-3.0]]).half())
    want = [2.0 * c - 3.0 for c in [*range(16), *range(15, -1, -1)]]
    assert dequantize(weight).tolist() == [want]
    step = 27.0 / 127
    found = lookup(weight, torch.tensor([0, 0], dtype=torch.int32))
    torch.testing.assert_close(
        found, torch.tensor([want, want]), atol=0.57 * step, rtol=0
    )  # half a step, and the table's own roundings


@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_are_near_the_values_they_stand_for(bits: int) -> None:
    """Half a step, and of tables what rounding factor and offset can add: (15 * 0.5 + 0.5) / 256."""
    weight = quantize(DenseWeight(random(40, 320)), bits)
    numbers, step = row_numbers(weight)
    assert numbers.abs().max() == 127
    off = (step[:, None] * numbers - dequantize(weight)).abs() / step[:, None]
    assert off.max() <= 0.5 + (8 / 256 if bits == 4 else 0.0) + 1e-4


def test_lookup_of_dense_rows() -> None:
    weight = DenseWeight(random(9, 5).bfloat16())
    assert torch.equal(lookup(weight, torch.tensor([8, 0, 8])), weight.values[[8, 0, 8]].float())


@pytest.mark.parametrize("form", ["dense", "4", "8"])
def test_a_row_does_not_see_its_neighbours(form: str) -> None:
    dense = DenseWeight(random(131, 352))
    weight = dense if form == "dense" else quantize(dense, int(form))
    x = random(123, 352, seed=9)
    whole = linear(x, weight)
    for rows in ([0], [5, 122], list(range(7)), list(range(40, 57))):
        assert torch.equal(linear(x[rows], weight), whole[rows])


def test_wrong_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected \[rows, 33\]"):
        linear(torch.zeros(2, 32), DenseWeight(torch.zeros(4, 33)))
