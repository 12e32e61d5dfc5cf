"""Sequences on which drafts bring nothing are asked seldom, and again as soon as it pays."""

from __future__ import annotations

import random

import pytest

from spec.patience import Patience


def asked(patience: Patience, steps: int, gain: float, cost: float, seq_id: int = 1) -> int:
    """Questions in so many steps that bring `gain` each."""
    count = 0
    for _ in range(steps):
        patience.step()
        if patience.allow(seq_id):
            count += 1
            patience.record(seq_id, gain, cost)
    return count


@pytest.mark.parametrize("cost", [0.02, 0.06, 0.25])
def test_vain_questions_become_rare(cost: float) -> None:
    patience = Patience()
    asked(patience, 200, 0.0, cost)
    assert asked(patience, 1000, 0.0, cost) * cost / 1000 < 0.0075, "tokens a step"


def test_questions_that_pay_are_asked_every_step() -> None:
    assert asked(Patience(), 500, 0.4, 0.06) == 500


@pytest.mark.parametrize("chance", [0.3, 0.5])
def test_bad_luck_is_no_reason_to_rest(chance: float) -> None:
    """Questions that pay on the whole and tell nothing of the next one: whatever the latest brought, the next one pays too."""
    patience, rng = Patience(), random.Random(1)
    asked_in, steps = 0, 4000
    for step in range(steps):
        patience.step()
        if patience.allow(1):
            asked_in += step >= steps // 2
            patience.record(1, 1.0 if rng.random() < chance else 0.0, 0.7 * chance)
    assert asked_in > 0.95 * steps / 2


def test_a_barren_stretch_is_a_reason_to_rest() -> None:
    """The same mean, in stretches: a low mean foretells the next question's vanity."""
    patience = Patience()
    vain = paying = 0
    for step in range(6000):
        patience.step()
        pays = step // 300 % 2 == 1
        if patience.allow(1):
            patience.record(1, 0.6 if pays else 0.0, 0.2)
            if step >= 1200:
                vain, paying = vain + (not pays), paying + pays
    assert vain < 0.25 * 2400
    assert paying > 0.85 * 2400


def test_one_success_ends_the_rest() -> None:
    patience = Patience()
    asked(patience, 300, 0.0, 0.06)
    while not patience.allow(1):
        patience.step()
    patience.record(1, 3.0, 0.06)
    assert asked(patience, 20, 1.0, 0.06) == 20


def test_a_new_sequence_is_believed_to_be_like_the_others() -> None:
    patience = Patience()
    fresh = asked(Patience(), 40, 0.0, 0.06)
    for seq_id in range(2, 60):
        asked(patience, 100, 0.0, 0.06, seq_id)
    assert asked(patience, 40, 0.0, 0.06, 99) < fresh


def test_rests_end_together() -> None:
    """The first question of a step costs more than the next ones."""
    patience = Patience()
    asked_in: dict[int, set[int]] = {1: set(), 2: set(), 3: set()}
    for step in range(600):
        patience.step()
        for seq_id, steps in asked_in.items():
            if step >= 7 * seq_id and patience.allow(seq_id):
                steps.add(step)
                patience.record(seq_id, 0.0, 0.06)
    late = [{step for step in steps if step > 300} for steps in asked_in.values()]
    assert late[0] == late[1] == late[2]
    assert 0 < len(late[0]) < 60


def test_forgotten_sequences_and_bounds() -> None:
    patience, chance = Patience(), random.Random(0)
    for seq_id in range(10_000):
        patience.record(seq_id, chance.random() - 0.5, 0.1)
    patience.record(-1, -1.0, 10.0)
    patience.forget(-1)
    patience.forget(-1)
    assert patience.allow(-1)
