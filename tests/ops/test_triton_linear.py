"""Triton linear layers: block weights bit for bit with the reference, dense weights within rounding."""

from __future__ import annotations

import pytest
import torch
from device import to_device
from toy import quantize

from kernels.linear import DenseWeight
from kernels.linear.reference import linear as reference
from kernels.linear.triton import linear

# A float32 sum of 577 products of unit size, in another order.
FLOAT32_SUM = 1e-4
# x is rounded to the weight's 8 or 11 significant bits; sums of about sqrt(577) such errors.
SIXTEEN_BIT_INPUT = {torch.bfloat16: 0.25, torch.float16: 0.03}


def random(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "out", "into"), [(1, 131, 96), (5, 64, 320), (64, 70, 64), (65, 3, 32)])
def test_block_weights_equal_the_reference(bits: int, rows: int, out: int, into: int) -> None:
    weight = quantize(DenseWeight(random(out, into), random(out, seed=2)), bits)
    x = random(rows, into, seed=1) * 3
    x[0, :32] = 0.0
    assert torch.equal(linear(to_device(x), to_device(weight)).cpu(), reference(x, weight))


def test_block_codes_round_half_to_even() -> None:
    weight = quantize(DenseWeight(torch.eye(32)), 8)
    x = torch.zeros(1, 32)
    x[0, :6] = torch.tensor([32639.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    assert torch.equal(linear(to_device(x), to_device(weight)).cpu(), reference(x, weight))


@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize(("rows", "out", "into"), [(1, 131, 96), (5, 7, 577), (40, 64, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dense(rows: int, out: int, into: int, dtype: torch.dtype, invariant: bool) -> None:
    weight = DenseWeight(random(out, into).to(dtype), random(out, seed=2))
    x = random(rows, into, seed=1)
    atol = SIXTEEN_BIT_INPUT.get(dtype, FLOAT32_SUM)
    got = linear(to_device(x), to_device(weight), invariant).cpu()
    torch.testing.assert_close(got, reference(x, weight), atol=atol, rtol=0)


@pytest.mark.parametrize("form", ["dense", "4", "8"])
def test_a_row_does_not_see_its_neighbours(form: str) -> None:
    dense = DenseWeight(random(70, 160))
    weight = to_device(dense if form == "dense" else quantize(dense, int(form)))
    x = to_device(random(70, 160, seed=9))
    whole = linear(x, weight, invariant=True)
    for rows in ([0], [5, 69], list(range(7)), list(range(20, 55))):
        assert torch.equal(linear(x[rows], weight, invariant=True), whole[rows])


def test_wrong_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected \[rows, 33\]"):
        linear(torch.zeros(2, 32), DenseWeight(torch.zeros(4, 33)))


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 8, 32, 64])
def test_block_weights_at_real_size(bits: int, rows: int) -> None:
    """A 4096 x 14336 matrix: every row equals the row computed alone, and is near the dense product."""
    dense = DenseWeight(random(4096, 14336) * 0.02)
    weight = to_device(quantize(dense, bits))
    x = to_device(random(rows, 14336, seed=1))
    got = linear(x, weight)
    assert torch.equal(linear(x[rows - 1 :], weight), got[rows - 1 :])
    want = torch.nn.functional.linear(x, to_device(dense.values))
    assert ((got - want).norm() / want.norm()).item() < (0.12 if bits == 4 else 0.02)
