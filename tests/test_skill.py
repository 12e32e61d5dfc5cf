"""A sequence on which a drafter does worse than usual is told from one that had bad luck."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from spec.calibration import Calibration
from spec.skill import Skill
from spec.tree import DraftTree

ONE = DraftTree((7,), (-1,), (1,), (("d",),), (((0, 0),),))


class Known(Calibration):
    def cell_chance(self, drafter: str, depth: int, rank: int, bin_: int, greedy: bool) -> float:
        return 0.4


def factors_after(chance: Callable[[int], float], sequences: int, judgements: int, seed: int = 0) -> list[float]:
    """The factor of every sequence after so many judged nodes of each, in turn."""
    rng, skill, known = random.Random(seed), Skill(), Known()
    for _ in range(judgements):
        skill.step()
        for seq_id in range(sequences):
            skill.record(seq_id, ONE, [(0, rng.random() < chance(seq_id))], known, True)
    return [skill.factors(seq_id)["d"] for seq_id in range(sequences)]


@pytest.mark.parametrize("sequences", [1, 16])
def test_sequences_that_are_alike_keep_their_chances(sequences: int) -> None:
    found = [factor for seed in range(8) for factor in factors_after(lambda _: 0.4, sequences, 300, seed)]
    assert min(found) > 0.85
    assert sum(found) / len(found) > 0.95


def test_a_sequence_that_is_worse_is_found_out() -> None:
    found = factors_after(lambda seq_id: 0.04 if seq_id % 2 else 0.76, 16, 60)
    assert max(found[1::2]) < 0.45
    assert min(found[0::2]) == 1.0


def test_a_first_sequence_is_found_out_soon() -> None:
    """Before anything is known of differences, they are believed to be large."""
    assert factors_after(lambda _: 0.0, 1, 40)[0] < 0.35


def test_differences_that_come_late_are_found_out_too() -> None:
    """Many sequences alike, then one on which nothing is accepted."""
    rng, skill, known = random.Random(3), Skill(), Known()
    for seq_id in range(50):
        for _ in range(60):
            skill.step()
            skill.record(seq_id, ONE, [(0, rng.random() < 0.4)], known, True)
        skill.forget(seq_id)
    for _ in range(120):
        skill.step()
        skill.record(99, ONE, [(0, False)], known, True)
    assert skill.factors(99)["d"] < 0.4


def test_a_drafter_without_judgements_has_no_factor() -> None:
    skill = Skill()
    assert skill.factors(1) == {}
    skill.record(1, ONE, [], Known(), True)
    assert skill.factors(1) == {}
