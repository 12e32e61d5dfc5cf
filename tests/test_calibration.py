"""Calibration: scripted targets, shrinkage, drift, bounds, and the file it survives a restart in."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
from drafting import GREEDY, View
from hypothesis import given, settings
from hypothesis import strategies as st

from spec.calibration import BINS, EDGES, Calibration, confidence_bin
from spec.drafter import UNKNOWN, Outcome
from spec.skill import Skill, judged
from spec.tree import EMPTY_TREE, DraftTree


def truth(drafter: str, depth: int, rank: int, confidence: float) -> float:
    """Scripted: one drafter boasts, one is shy, both tire with depth; later ranks are as good as the first leaves them."""
    first = confidence**2 if drafter == "boaster" else confidence**0.5
    first *= 0.95 ** (depth - 1)
    return first if rank == 0 else 0.3 * (1.0 - first)


CELLS = [(d, depth, rank, c) for d in ("boaster", "shy") for depth in (1, 2, 3) for rank in (0, 1) for c in (0.3, 0.6, 0.9)]


@pytest.mark.parametrize("greedy", [True, False])
def test_estimates_are_within_a_twentieth_after_2000_nodes(greedy: bool) -> None:
    rng = random.Random(5)
    calibration = Calibration()
    picked = [rng.choice(CELLS) for _ in range(2000)]
    before = sum(abs(calibration.chance(*cell, greedy=greedy) - truth(*cell)) for cell in picked) / 2000
    for cell in picked:
        drafter, depth, rank, confidence = cell
        hit = rng.random() < truth(*cell)
        calibration.observe(drafter, depth, rank, confidence_bin(confidence), greedy=greedy, accepted=hit)
    errors = [abs(calibration.chance(*cell, greedy=greedy) - truth(*cell)) for cell in picked]
    assert before > 0.15  # the raw scores are off by far, so the test is not blind
    assert sum(errors) / 2000 < 0.05
    busy = CELLS[:6]
    for cell in busy:  # cells with some hundreds of nodes: each by itself
        for _ in range(400):
            hit = rng.random() < truth(*cell)
            calibration.observe(*cell[:3], confidence_bin(cell[3]), greedy=greedy, accepted=hit)
    assert all(abs(calibration.chance(*cell, greedy=greedy) - truth(*cell)) < 0.05 for cell in busy)


def test_greedy_and_sampled_are_told_apart() -> None:
    calibration = Calibration()
    for _ in range(300):
        calibration.observe("d", 1, 0, 9, greedy=True, accepted=True)
        calibration.observe("d", 1, 0, 9, greedy=False, accepted=False)
    assert calibration.cell_chance("d", 1, 0, 9, True) > 0.9
    assert calibration.cell_chance("d", 1, 0, 9, False) < 0.1


def test_a_rare_cell_borrows_from_its_relatives() -> None:
    calibration = Calibration()
    for _ in range(500):
        calibration.observe("d", 1, 0, confidence_bin(0.9), greedy=True, accepted=False)
    assert calibration.chance("d", 5, 0, 0.9, greedy=True) < 0.2  # same score at another depth
    assert calibration.chance("d", 1, 2, 0.9, greedy=True) < 0.4  # same score at another rank
    assert calibration.chance("d", 1, 0, 0.1, greedy=True) == pytest.approx(Calibration().chance("d", 1, 0, 0.1, greedy=True))
    assert calibration.chance("other", 1, 0, 0.9, greedy=True) > 0.8  # nothing is known of another drafter


def test_before_anything_is_seen_the_score_itself_is_believed() -> None:
    calibration = Calibration()
    for confidence in (0.005, 0.05, 0.3, 0.7, 0.99, 1.0):
        assert calibration.chance("d", 1, 0, confidence, greedy=True) == pytest.approx(confidence, abs=0.06)
    assert calibration.chance("d", 1, 0, UNKNOWN, greedy=True) == pytest.approx(0.45)
    assert calibration.chance("d", 1, 3, UNKNOWN, greedy=True) < 0.1


def test_an_unknown_score_is_the_mean_of_what_was_seen() -> None:
    calibration = Calibration()
    rng = random.Random(1)
    for _ in range(2000):
        high = rng.random() < 0.25
        calibration.observe("d", 2, 0, 14 if high else 5, greedy=True, accepted=rng.random() < (0.9 if high else 0.1))
    assert calibration.chance("d", 2, 0, UNKNOWN, greedy=True) == pytest.approx(0.3, abs=0.05)


def test_drift_is_followed_and_fading_is_by_observation() -> None:
    calibration = Calibration(memory=200)
    for accepted in (True, False):
        for _ in range(1500):
            calibration.observe("d", 1, 0, 8, greedy=True, accepted=accepted)
        assert abs(calibration.cell_chance("d", 1, 0, 8, True) - accepted) < 0.05


@settings(max_examples=60, deadline=None)
@given(
    nodes=st.lists(
        st.tuples(st.integers(-3, 99), st.integers(-3, 99), st.integers(-3, 99), st.booleans(), st.booleans()), max_size=60
    ),
    ask=st.tuples(st.integers(-3, 99), st.integers(-3, 99), st.floats(-1, 2) | st.just(float("nan"))),
)
def test_any_cell_has_a_chance_strictly_between_impossible_and_sure(
    nodes: list[tuple[int, int, int, bool, bool]], ask: tuple[int, int, float]
) -> None:
    calibration = Calibration()
    for depth, rank, bin_, greedy, accepted in nodes:
        calibration.observe("d", depth, rank, bin_, greedy=greedy, accepted=accepted)
    for greedy in (True, False):
        assert 0.0 < calibration.chance("d", *ask, greedy=greedy) < 1.0


def test_memory_is_bounded_in_drafters() -> None:
    calibration = Calibration(max_drafters=3)
    for i in range(10):
        calibration.observe(f"d{i}", 1, 0, 3, greedy=True, accepted=True)
    assert len(calibration.dump()["drafters"]) == 3
    calibration.chance("d9", 1, 0, 0.5, greedy=True)


# --- which nodes count -----------------------------------------------------------------------------------------------

TREE = DraftTree((1, 2, 3, 4, 5), (-1, 0, 0, 1, -1), (0.5,) * 5, (("a",),) * 5, (((0, 1),),) * 5)


@pytest.mark.parametrize(
    ("path", "next_id", "finished", "expected"),
    [
        ((), 9, False, {0: False, 4: False}),
        ((0,), 9, False, {0: True, 4: False, 1: False, 2: False}),
        ((0, 1), 9, False, {0: True, 4: False, 1: True, 2: False, 3: False}),
        ((0, 1), 9, True, {0: True, 4: False, 1: True, 2: False}),  # it ended on node 1: node 3 was not judged
        ((), 9, True, {}),
        ((), None, False, {}),
    ],
)
def test_only_children_of_accepted_nodes_are_judged(
    path: tuple[int, ...], next_id: int | None, finished: bool, expected: dict[int, bool]
) -> None:
    outcome = Outcome(View(1, [1]), TREE, path, next_id, 0, 6, finished)
    assert dict(judged(outcome)) == expected


def test_every_source_of_a_node_learns() -> None:
    tree = DraftTree((1,), (-1,), (0.5,), (("a", "b"),), (((0, 4), (2, 9)),))
    calibration = Calibration()
    for _ in range(200):
        calibration.record(tree, [(0, True)], greedy=True)
    assert calibration.cell_chance("a", 1, 0, 4, True) > 0.9
    assert calibration.cell_chance("b", 1, 2, 9, True) > 0.9
    calibration.record(EMPTY_TREE, [], greedy=True)


def test_skill_tells_sequences_apart_and_is_bounded() -> None:
    calibration, skill = Calibration(), Skill()
    tree = DraftTree((1,), (-1,), (0.5,), (("a",),), (((0, confidence_bin(0.5)),),))
    assert skill.factors(1) == {}
    for _ in range(60):
        skill.record(1, tree, [(0, True)], calibration, True)
        skill.record(2, tree, [(0, False)], calibration, True)
    assert skill.factors(1)["a"] == 1.0
    assert skill.factors(2)["a"] < 0.4
    skill.forget(1)
    assert skill.factors(1) == {}
    for seq_id in range(10, 6000):
        skill.record(seq_id, tree, [(0, True)], calibration, True)
    assert skill.factors(2) == {}  # the oldest went


def test_a_drafter_that_had_bad_luck_is_believed_again_in_time() -> None:
    """It is not asked meanwhile, so nothing it does could clear it."""
    calibration, skill = Calibration(), Skill()
    tree = DraftTree((1,), (-1,), (0.5,), (("a",),), (((0, confidence_bin(0.5)),),))
    for _ in range(60):
        skill.record(1, tree, [(0, False)], calibration, True)
    spoilt = skill.factors(1)["a"]
    assert spoilt < 0.4
    for _ in range(256):
        skill.step()
    later = skill.factors(1)["a"]
    for _ in range(2000):
        skill.step()
    assert spoilt < later < 0.8
    assert skill.factors(1)["a"] > 0.98
    skill.record(1, tree, [(0, True)], calibration, True)  # what was seen long ago weighs no more now that it is judged again
    assert skill.factors(1)["a"] > 0.98


# --- the file --------------------------------------------------------------------------------------------------------


def filled() -> Calibration:
    rng = random.Random(2)
    calibration = Calibration()
    for drafter, depth, rank, confidence in [rng.choice(CELLS) for _ in range(500)]:
        calibration.observe(drafter, depth, rank, confidence_bin(confidence), greedy=True, accepted=rng.random() < 0.4)
    return calibration


def test_a_restart_knows_what_was_known(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "calibration.json"
    calibration = filled()
    calibration.save(path)
    calibration.save(path)
    assert [p.name for p in path.parent.iterdir()] == ["calibration.json"]  # no partial file is left
    again = Calibration()
    assert again.load(path, pytest.fail)
    for cell in CELLS:
        assert again.chance(*cell, greedy=True) == pytest.approx(calibration.chance(*cell, greedy=True), abs=1e-3)
    assert path.stat().st_size < 64_000


def test_no_file_is_no_news(tmp_path: Path) -> None:
    assert not Calibration().load(tmp_path / "none.json", pytest.fail)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"format": 99, "edges": [], "drafters": {}}',
        json.dumps({"format": 1, "edges": list(EDGES), "drafters": {"d": {}}}),
        json.dumps({"format": 1, "edges": list(EDGES), "drafters": 7}),
        "[" * 100_000,
    ],
)
def test_a_broken_file_is_noticed_and_not_used(tmp_path: Path, text: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(text)
    calibration = filled()
    before = calibration.dump()
    notices: list[str] = []
    assert not calibration.load(path, notices.append)
    assert len(notices) == 1
    assert str(path) in notices[0]
    assert calibration.dump() == before


@pytest.mark.parametrize("cell", [[-1, 1.0, 1.0], [10**9, 1, 1], [0, 1.0, 2.0], [0, float("inf"), 1.0], [0, "x", 0], [0, 1.0]])
def test_impossible_counts_are_refused(cell: list[object]) -> None:
    data = filled().dump()
    data["drafters"]["boaster"]["finest"][0] = cell
    with pytest.raises(ValueError, match=r"cell|not a calibration|unpack"):
        Calibration().restore(data)


def test_bins_cover_everything_in_order() -> None:
    bins = [confidence_bin(i / 1000) for i in range(1001)]
    assert bins == sorted(bins)
    assert set(bins) == set(range(BINS))
    assert confidence_bin(float("nan")) == 0


def test_asking_costs_microseconds() -> None:
    """An order above the cost on an idle core."""
    calibration = filled()
    began = time.perf_counter()
    for _ in range(200):
        calibration.chance("shy", 2, 0, 0.6, greedy=True)
    assert (time.perf_counter() - began) / 200 < 5e-5
    assert GREEDY.temperature == 0.0
