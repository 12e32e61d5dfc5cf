"""The Triton sampler: the hand tables, agreement with the reference on random logits, and blocks that cut a row."""

from __future__ import annotations

import pytest
import torch
from device import DEVICE, to_device
from sample_cases import TABLES, Table, kept, rows

from kernels.sample import reference
from kernels.sample.triton import probabilities, sample

# log and exp of a hand-written probability, by another library: a few roundings.
FEW_ULPS = 2e-6


def test_hand_tables() -> None:
    tables = list(TABLES.values())
    got = probabilities(*rows(tables, device=DEVICE).args()).cpu()
    for i, name in enumerate(TABLES):
        torch.testing.assert_close(got[i], kept(tables)[i], atol=FEW_ULPS, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
        assert torch.equal(got[i] == 0, kept(tables)[i] == 0), name


def test_draw_walks_ascending_ids() -> None:
    case = rows([Table([0.25, 0.5, 0.25], [])], device=DEVICE).repeat(7)
    uniforms = torch.tensor([0.0, 0.2499, 0.2501, 0.7499, 0.7501, 0.9999, 1 - 2.0**-53], dtype=torch.float64)
    for block in (2, 4096):
        assert sample(*case.args(), to_device(uniforms), block=block).tolist() == [0, 0, 1, 1, 2, 2, 2]


def test_removed_tokens_are_never_drawn() -> None:
    tables = list(TABLES.values())
    uniforms = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64).repeat(len(tables) // 2)
    drawn = sample(*rows(tables, 9, DEVICE).args(), to_device(uniforms))
    assert drawn.dtype == torch.int32
    assert all(kept(tables, 9)[i, token] > 0 for i, token in enumerate(drawn.tolist()))


SETTINGS = [
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.6, "top_k": 17},
    {"min_p": 0.05, "top_k": 40, "top_p": 0.7},
    {"temperature": 0.0},
]


@pytest.mark.parametrize("ties", [False, True])
def test_agrees_with_the_reference_across_blocks(ties: bool) -> None:
    g = torch.Generator().manual_seed(3)
    case = rows([Table([1.0], [], **s) for s in SETTINGS])  # type: ignore[arg-type]
    logits = torch.randn(len(SETTINGS), 77, generator=g) * 3
    if ties:
        logits = logits.round()
    args = (logits, *case.args()[1:])
    got, want = probabilities(*to_device(args), block=64).cpu(), reference.probabilities(*args)
    assert torch.equal(got > 0, want > 0)
    torch.testing.assert_close(got, want, atol=FEW_ULPS, rtol=FEW_ULPS)
    uniforms = torch.rand(len(SETTINGS), generator=g, dtype=torch.float64)
    assert sample(*to_device((*args, uniforms)), block=64).tolist() == reference.sample(*args, uniforms).tolist()


@pytest.mark.gpu
def test_real_vocabulary() -> None:
    g = torch.Generator().manual_seed(5)
    settings = [{"temperature": 0.8, "top_p": 0.95, "top_k": 200}, {"top_p": 0.9}, {"temperature": 0.0}, {"min_p": 0.1}]
    case = rows([Table([1.0], [], **s) for s in settings])  # type: ignore[arg-type]
    args = (torch.randn(4, 128_256, generator=g) * 4, *case.args()[1:])
    got, want = probabilities(*to_device(args)).cpu(), reference.probabilities(*args)
    assert ((got > 0) != (want > 0)).sum() <= 4  # a token at the very edge of top_p may fall to either side
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
