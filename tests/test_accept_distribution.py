"""Sampled speculation keeps the target's distribution, and the test that says so catches every known fault.

Chi-square against exact tables, false alarm 1e-6; see bench/chi_square.py, which runs every combination. Seeds are fixed,
so a result never flickers.
"""

from __future__ import annotations

import numpy as np
import pytest
from mutants import MUTANTS

from bench.chi_square import FALSE_ALARM, FILTERS, KINDS, SHAPES, Case, Fault, p_value, run, simulate, true_cases

SAMPLES = 1000
# every drafter kind under every filter, and each of them on every tree
CASES = [case for case in true_cases(full=False) if case.rule == "rejection"]
FAULTS = [(fault, case) for fault, cases in MUTANTS for case in cases]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rejection_keeps_the_distribution(case: Case) -> None:
    assert run(case, SAMPLES) >= FALSE_ALARM


@pytest.mark.parametrize("name", FILTERS)
def test_exact_keeps_the_distribution_and_the_text(name: str) -> None:
    """One law per filter, and then equality: whatever is drafted in whatever tree, the text is the same."""
    cases = [Case("exact", kind, name, shape) for kind, shape in zip(KINDS, list(SHAPES) * 3, strict=False)]
    assert run(cases[0], SAMPLES) >= FALSE_ALARM
    few = [simulate(case, 60) for case in cases]
    assert all(np.array_equal(tokens, few[0]) for tokens in few)


@pytest.mark.parametrize(("fault", "case"), FAULTS, ids=lambda value: value.name if isinstance(value, Fault) else str(value))
def test_known_faults_are_caught(fault: Fault, case: Case) -> None:
    assert run(case, SAMPLES, fault) < FALSE_ALARM


def test_a_fault_is_taken_out_again() -> None:
    case = FAULTS[0][1]
    healthy = simulate(case, 40)
    for fault, _ in FAULTS:
        with fault.put_in():
            pass
        assert np.array_equal(simulate(case, 40), healthy)


def test_the_statistic_itself() -> None:
    """Against scipy-free arithmetic: 8 fair cells, one shifted; impossible tokens; pooled small cells."""
    fair = np.full(8, 0.125)
    assert p_value(np.full(8, 1000), fair) == 1.0
    assert p_value(np.array([1100, 900, 1000, 1000, 1000, 1000, 1000, 1000]), fair) == pytest.approx(0.00557, rel=0.01)
    assert p_value(np.array([500, 500, 1]), np.array([0.5, 0.5, 0.0])) == 0.0
    assert p_value(np.array([500, 497, 3]), np.array([0.5, 0.499, 0.001])) > 0.5
    assert p_value(np.array([1000, 0]), np.array([1.0, 0.0])) == 1.0
