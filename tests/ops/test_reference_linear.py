"""The reference linear layer against plain definitions: float64 products, and integer loops written out in Python."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from toy import quantize

from kernels.linear import BlockWeight, DenseWeight
from kernels.linear.reference import dequantize, linear, lookup, quantize_rows

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
    """The contract's formula in scalar float32, no torch arithmetic."""
    f = np.float32
    answer = []
    for row in x.numpy():
        outs = []
        for o in range(weight.out_features):
            y = f(0)
            for b in range(weight.in_features // 32):
                block = row[32 * b : 32 * b + 32]
                a = f(np.abs(block).max() / f(127))
                q = [int(np.rint(f(v / a))) if a > 0 else 0 for v in block]
                raw = weight.codes[o, b].tolist()
                codes = raw if weight.bits == 8 else [raw[j % 16] >> (4 * (j // 16)) & 15 for j in range(32)]
                dot = sum(c * v for c, v in zip(codes, q, strict=True))
                d, m = f(weight.scale[o, b].item()), f(weight.minimum[o, b].item())
                y = f(y + f(f(f(d * a) * f(dot)) + f(m * f(a * f(sum(q))))))
            outs.append(y)
        answer.append(outs)
    return answer


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 5])
def test_blocks_are_the_contract_bit_for_bit(bits: int, rows: int) -> None:
    weight = quantize(DenseWeight(random(7, 96)), bits)
    x = random(rows, 96, seed=3) * 3
    x[0, 32:64] = 0.0  # a block of zeros has step 0 and codes 0
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
    block = torch.zeros(1, 32)
    block[0, :6] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    codes, step, total = quantize_rows(block)
    assert step.tolist() == [[1.0]]
    assert codes[0, 0, :6].tolist() == [127, 0, 2, 2, 0, -2]
    assert total.tolist() == [[129.0]]


def test_nibble_order_and_lookup() -> None:
    codes = torch.arange(16, dtype=torch.uint8).reshape(1, 1, 16) | (torch.arange(15, -1, -1, dtype=torch.uint8) << 4)
    weight = BlockWeight(4, codes, torch.tensor([[2.0]]).half(), torch.tensor([[-3.0]]).half())
    want = [2.0 * c - 3.0 for c in [*range(16), *range(15, -1, -1)]]
    assert dequantize(weight).tolist() == [want]
    assert lookup(weight, torch.tensor([0, 0], dtype=torch.int32)).tolist() == [want, want]


def test_lookup_of_dense_rows() -> None:
    weight = DenseWeight(random(9, 5).bfloat16())
    assert torch.equal(lookup(weight, torch.tensor([8, 0, 8])), weight.values[[8, 0, 8]].float())


@pytest.mark.parametrize("bits", [4, 8])
def test_wider_rows_lose_almost_nothing(bits: int) -> None:
    """What is left of the activations' rounding is 1/16 of what 8 bits leave with 12 bits, and 1/256 with 16."""
    weight = quantize(DenseWeight(random(131, 320)), bits)
    x = random(123, 320, seed=3)
    want = x.double() @ dequantize(weight).double().T

    def error(activation_bits: int) -> float:
        got = linear(x, replace(weight, activation_bits=activation_bits)).double()
        return ((got - want).norm() / want.norm()).item()

    assert error(12) < error(8) / 12
    assert error(16) < error(8) / 100


@pytest.mark.parametrize(("bits", "largest"), [(12, 2039), (16, 32512)])
def test_wider_codes_fit_two_bytes(bits: int, largest: int) -> None:
    codes, step, _ = quantize_rows(torch.tensor([[1.0, -1.0, *[0.25] * 30]]), bits)
    assert torch.equal(step, torch.tensor([[1.0]]) / float(largest))
    assert codes[0, 0, :3].tolist() == [largest, -largest, round(largest / 4)]


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
