"""The keyed uniforms: the published function, well spread, and no two questions sharing noise."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.stats import kstest

from spec.keyed_random import DRAFT, DRAW, RESIDUAL, TEST, philox, uniform


@pytest.mark.parametrize("counter", [(0, 0, 0, 0), (5, 6, 7, 8), (2**64 - 2, 2**64 - 1, 3, 2**63)])
@pytest.mark.parametrize("key", [(0, 0), (11, 12), (2**64 - 1, 2**63)])
def test_philox_is_the_published_function(counter: tuple[int, int, int, int], key: tuple[int, int]) -> None:
    words = np.array([*counter, *key], dtype=np.uint64)
    independent = np.random.Philox(counter=words[:4], key=words[4:])  # numpy counts up before it draws
    assert philox((counter[0] + 1, *counter[1:]), key) == tuple(int(word) for word in independent.random_raw(4))


def test_every_argument_counts() -> None:
    """Streams, positions, siblings, steps and seeds near each other give unrelated numbers: no noise is shared."""
    questions = list(itertools.product((0, 1, 2**63 - 1), (0, 1, 2, 8191), (DRAW, TEST, RESIDUAL, DRAFT), (0, 1, 2), (0, 1, 2)))
    values = [uniform(*question) for question in questions]
    assert len(set(values)) == len(values)
    assert all(0.0 <= value < 1.0 for value in values)
    assert kstest(values, "uniform").pvalue > 1e-6


def test_a_number_depends_on_nothing_but_the_question() -> None:
    first = [uniform(7, position) for position in range(20)]
    uniform(8, 3, TEST)
    assert [uniform(7, position) for position in reversed(range(20))] == first[::-1]


def test_any_seed_is_taken() -> None:
    assert uniform(-1, 0) == uniform(2**64 - 1, 0) != uniform(1, 0)


def test_positions_and_streams_are_uncorrelated() -> None:
    draws = np.array([[uniform(seed, 5, DRAW), uniform(seed, 6, DRAW), uniform(seed, 5, DRAFT)] for seed in range(4000)])
    correlation = np.corrcoef(draws.T)
    assert np.abs(correlation - np.eye(3)).max() < 5 / 4000**0.5
