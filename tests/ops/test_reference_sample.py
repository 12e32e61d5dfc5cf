"""The processed distribution: hand tables, the draw's edges, and the draw against its own probabilities."""

from __future__ import annotations

import pytest
import torch
from sample_cases import TABLES, Table, kept, rows
from scipy.stats import chisquare

from kernels.sample.reference import argmax, probabilities, sample

# log and exp of a hand-written probability: a few roundings.
FEW_ULPS = 2e-6
FALSE_ALARM = 1e-6


@pytest.mark.parametrize("name", TABLES)
def test_hand_table(name: str) -> None:
    table = TABLES[name]
    got = probabilities(*rows([table]).args())
    torch.testing.assert_close(got, kept([table]), atol=FEW_ULPS, rtol=0)
    assert torch.equal(got == 0, kept([table]) == 0)


def test_a_row_does_not_see_its_neighbours() -> None:
    tables = list(TABLES.values())
    together = probabilities(*rows(tables, 7).args())
    for i, table in enumerate(tables):
        assert torch.equal(probabilities(*rows([table], 7).args())[0], together[i])


def test_draw_walks_ascending_ids() -> None:
    case = rows([Table([0.25, 0.5, 0.25], [])]).repeat(7)
    uniforms = torch.tensor([0.0, 0.2499, 0.2501, 0.7499, 0.7501, 0.9999, 1 - 2.0**-53], dtype=torch.float64)
    assert sample(*case.args(), uniforms).tolist() == [0, 0, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-53])
def test_removed_tokens_are_never_drawn(uniform: float) -> None:
    tables = list(TABLES.values())
    drawn = sample(*rows(tables, 9).args(), torch.full((len(tables),), uniform, dtype=torch.float64))
    assert drawn.dtype == torch.int32
    assert all(kept(tables, 9)[i, token] > 0 for i, token in enumerate(drawn.tolist()))


def test_greedy_settings_agree_on_random_logits() -> None:
    logits = torch.randn(5, 515, generator=torch.Generator().manual_seed(0)) * 8
    best = argmax(logits).tolist()
    assert best == logits.argmax(-1).tolist()
    half = torch.full((5,), 0.5, dtype=torch.float64)
    for settings in (
        {"temperature": 0.0},
        {"temperature": 1e-45},
        {"temperature": 1e-5},
        {"top_k": 1},
        {"top_p": 1e-9},
        {"min_p": 1.0},
        {"top_k": 1, "top_p": 0.8},
        {"min_p": 1.0, "top_p": 0.1},
    ):
        case = rows([Table([1.0], [], **settings)]).repeat(5)
        assert sample(logits, *case.args()[1:], half).tolist() == best, settings


def test_huge_logits_and_tiny_temperature_stay_finite() -> None:
    logits = torch.tensor([[3e38, -3e38, 3e38, 0.0]])
    case = rows([Table([1.0], [], temperature=1e-38)])
    assert probabilities(logits, *case.args()[1:]).tolist() == [[0.5, 0.0, 0.5, 0.0]]


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.6, "top_k": 17}, {"min_p": 0.05}],
    ids=["plain", "top_p", "top_k", "min_p"],
)
def test_draws_follow_their_probabilities(settings: dict[str, float]) -> None:
    g = torch.Generator().manual_seed(11)
    logits = torch.randn(1, 40, generator=g) * 1.5
    case = rows([Table([1.0], [], **settings)])  # type: ignore[arg-type]
    count = 4000
    uniforms = torch.rand(count, generator=g, dtype=torch.float64)
    args = case.repeat(count).args()[1:]
    drawn = torch.bincount(sample(logits.repeat(count, 1), *args, uniforms).long(), minlength=40)
    want = probabilities(logits, *case.args()[1:])[0].double()
    assert drawn[want == 0].sum() == 0
    support = want > 0
    expected = want[support] / want[support].sum() * count
    assert chisquare(drawn[support].double().numpy(), expected.numpy()).pvalue > FALSE_ALARM
