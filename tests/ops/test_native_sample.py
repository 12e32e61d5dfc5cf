"""The C++ sampler: the hand tables, agreement with the reference on random logits, rows that do not know each other."""

from __future__ import annotations

import pytest
import torch
from sample_cases import TABLES, Table, kept, rows

from kernels.native import load
from kernels.sample import reference

LIBRARY = load()
if LIBRARY is None:
    pytest.skip("no native library: no C++ compiler here", allow_module_level=True)

from kernels.sample.native import NativeSample  # noqa: E402

FEW_ULPS = 2e-6  # log and exp of a hand-written probability, by another library

SETTINGS = [
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.6, "top_k": 17},
    {"min_p": 0.05, "top_k": 40, "top_p": 0.7},
    {"top_k": 1, "top_p": 0.8},
    {"temperature": 0.0},
    {"temperature": 3.0, "top_p": 0.999},
]


@pytest.mark.parametrize("isa", LIBRARY.isas)
def test_hand_tables(isa: str) -> None:
    tables = list(TABLES.values())
    got = NativeSample(isa=isa).probabilities(*rows(tables).args())
    for i, name in enumerate(TABLES):
        torch.testing.assert_close(got[i], kept(tables)[i], atol=FEW_ULPS, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
        assert torch.equal(got[i] == 0, kept(tables)[i] == 0), name


def test_draw_walks_ascending_ids() -> None:
    case = rows([Table([0.25, 0.5, 0.25], [])]).repeat(7)
    uniforms = torch.tensor([0.0, 0.2499, 0.2501, 0.7499, 0.7501, 0.9999, 1 - 2.0**-53], dtype=torch.float64)
    assert NativeSample().sample(*case.args(), uniforms).tolist() == [0, 0, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53])
def test_removed_tokens_are_never_drawn(uniform: float) -> None:
    tables = list(TABLES.values())
    uniforms = torch.full((len(tables),), uniform, dtype=torch.float64)
    drawn = NativeSample().sample(*rows(tables, 9).args(), uniforms)
    assert drawn.dtype == torch.int32
    assert all(kept(tables, 9)[i, token] > 0 for i, token in enumerate(drawn.tolist()))


def case_of(vocab: int, ties: bool) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(3)
    case = rows([Table([1.0], [], **s) for s in SETTINGS])  # type: ignore[arg-type]
    logits = torch.randn(len(SETTINGS), vocab, generator=g) * 3
    return (logits.round() if ties else logits, *case.args()[1:])


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab", [131, 5000])
def test_agrees_with_the_reference(vocab: int, ties: bool) -> None:
    args = case_of(vocab, ties)
    got, want = NativeSample().probabilities(*args), reference.probabilities(*args)
    torch.testing.assert_close(got, want, atol=FEW_ULPS, rtol=FEW_ULPS)
    assert torch.equal(got == 0, want == 0)
    uniforms = torch.rand(len(SETTINGS), dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    assert NativeSample().sample(*args, uniforms).tolist() == reference.sample(*args, uniforms).tolist()


def test_a_row_is_itself_alone_and_on_every_machine() -> None:
    args = case_of(3000, False)
    uniforms = torch.linspace(0, 0.999, len(SETTINGS), dtype=torch.float64)
    together = NativeSample(threads=2)
    probabilities, drawn = together.probabilities(*args), together.sample(*args, uniforms)
    for isa in LIBRARY.isas:
        for i in range(len(SETTINGS)):
            row = tuple(a[i : i + 1].clone() for a in args)
            assert torch.equal(NativeSample(isa=isa).probabilities(*row)[0], probabilities[i])
            assert NativeSample(isa=isa).sample(*row, uniforms[i : i + 1].clone()).tolist() == drawn[i : i + 1].tolist()


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0, -1.0, 2.5]]).repeat(20_000, 1)
    settings = rows([Table([1.0], [], temperature=0.9, top_k=4)]).repeat(20_000).args()[1:]
    uniforms = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    drawn = NativeSample().sample(logits, *settings, uniforms).bincount(minlength=5) / 20_000
    want = reference.probabilities(logits[:1], *(s[:1] for s in settings))[0]
    assert float((drawn - want).abs().max()) < 0.015  # four standard deviations of a share of one half


def test_nothing_finite_is_no_crash() -> None:
    logits = torch.full((2, 40), -float("inf"))
    logits[1] = float("nan")
    settings = rows([Table([1.0], []), Table([1.0], [])]).args()[1:]
    drawn = NativeSample().sample(logits, *settings, torch.zeros(2, dtype=torch.float64))
    assert all(0 <= t < 40 for t in drawn.tolist())
