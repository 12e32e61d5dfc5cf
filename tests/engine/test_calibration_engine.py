"""Calibration in the loop: a target whose text is known, drafters that are right with known chances, the price rule in an engine.

Nothing is fed by hand: what a node's depth, rank, score and drafter are when it is judged is what the engine makes of them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import toy
from engine_kit import Runner, ScriptDrafter, greedy_request, make_engine, quick

import spec.budget
from spec.budget import PriceSpeculator
from spec.calibration import Calibration, confidence_bin
from spec.cost_table import CostTable
from spec.drafter import Budget, Outcome, SequenceView
from spec.speculator import StepRecord
from spec.tree import ROOT, Proposal

LOOP = list(range(10, 18))
SCORES = (0.3, 0.6, 0.9)
DEPTHS = 3
ENOUGH = 300  # nodes after which a cell by itself must be right; its share alone errs by 0.03 or less then


def truth(drafter: str, depth: int, rank: int, score: float) -> float:
    """One boasts, one is shy, both tire with depth; the second guess takes part of what the first leaves."""
    first = (score**2 if drafter == "boaster" else score**0.5) * 0.8 ** (depth - 1)
    return first if rank == 0 else 0.3 * (1.0 - first)


Cell = tuple[str, int, int, float]
CELLS: list[Cell] = list(product(("boaster", "shy"), range(1, DEPTHS + 1), (0, 1), SCORES))


def following(view: SequenceView) -> Sequence[int]:
    last = view.token_ids[-1]
    return [LOOP[(last - LOOP[0] + i) % len(LOOP)] for i in range(1, DEPTHS + 1)]


class KnownChances(ScriptDrafter):
    """Two guesses a depth, the second a leaf; each place has a score drawn at random and chances that follow from it."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__(following, (), name=name)
        self._random = random.Random(seed)

    def _tree(self, following: Sequence[int], budget: Budget) -> Proposal:
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        parent = ROOT
        for depth, true in enumerate(following[: min(budget.max_depth, budget.max_nodes // 2)], 1):
            score, u = self._random.choice(SCORES), self._random.random()
            first = truth(self.name, depth, 0, score)
            right = 0 if u < first else 1 if u < first + truth(self.name, depth, 1, score) else None
            wrong = 30 if self.name == "shy" else 40
            for rank in (0, 1):
                tokens.append(true if rank == right else wrong + 2 * depth + rank)
                parents.append(parent)
                scores.append(score)
            parent = len(tokens) - 2
        return Proposal(tuple(tokens), tuple(parents), tuple(scores), (0, 1) * (len(tokens) // 2))


class Seen(Calibration):
    """Counts what it is told, by cell."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, int, int, int]] = Counter()
        self.after_2000: list[float] = []  # the error of each cell that had nodes, once a node

    def observe(self, drafter: str, depth: int, rank: int, bin_: int, *, greedy: bool, accepted: bool) -> None:
        super().observe(drafter, depth, rank, bin_, greedy=greedy, accepted=accepted)
        self.counts[drafter, depth, rank, bin_] += 1
        if not self.after_2000 and self.counts.total() == 2000:
            self.after_2000 = [self.error(cell, greedy) for cell in CELLS for _ in range(self.count(cell))]

    def count(self, cell: Cell) -> int:
        return self.counts[*cell[:3], confidence_bin(cell[3])]

    def error(self, cell: Cell, greedy: bool) -> float:
        return abs(self.chance(*cell, greedy=greedy) - truth(*cell))


class Cheap(PriceSpeculator):
    """Time is made up so that every node pays: what is judged is not chosen by its estimate."""

    def __init__(self, seen: Seen) -> None:
        costs = CostTable()
        costs.measure(lambda rows, context, sequences: 2.0, max_rows=256, seconds=1.0, clock=lambda: 0.0)
        super().__init__(seen, costs)

    def record(self, step: StepRecord) -> None:
        super().record(replace(step, target_ms=2.0, draft_ms=dict.fromkeys(step.draft_ms, 0.0), total_ms=2.0))


def learnt(temperature: float, requests: int) -> tuple[Seen, Counter[str]]:
    table = toy.script_table(LOOP, vocab=64, peak=40.0)
    table[LOOP[-1], LOOP[0]] = 40.0
    seen = Seen()
    drafters = [KnownChances("boaster", 1), KnownChances("shy", 2)]
    engine = make_engine(
        quick(*toy.table_weights(table)), drafters, speculator=Cheap(seen), num_pages=1100, context=256, max_tree_nodes=16
    )
    runner = Runner(engine)
    prompts = [(LOOP[i % 8],) for i in range(requests)]
    runner.add(*[greedy_request(i, prompt, 240, temperature=temperature, seed=i) for i, prompt in enumerate(prompts)])
    answers = runner.finish()
    for i, prompt in enumerate(prompts):
        assert answers[i].token_ids == [LOOP[(prompt[0] - LOOP[0] + 1 + k) % 8] for k in range(240)]
    return seen, Counter(source for answer in answers.values() for source in answer.sources)


def wrong(seen: Seen, greedy: bool) -> dict[Cell, float]:
    """Cells with enough nodes that are off by a twentieth or more."""
    found = {cell: round(seen.error(cell, greedy), 3) for cell in CELLS if seen.count(cell) >= ENOUGH}
    return {cell: error for cell, error in found.items() if error >= 0.05}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_chances_are_learnt_through_the_engine(temperature: float) -> None:
    greedy = temperature == 0.0
    assert sum(Seen().error(cell, greedy) > 0.1 for cell in CELLS) > 12  # raw scores are off by far, so the test is not blind
    seen, sources = learnt(temperature, 32)
    assert min(sources["boaster"], sources["shy"]) > 500
    assert sum(seen.after_2000) / 2000 < 0.05
    assert sum(seen.count(cell) >= ENOUGH for cell in CELLS) > 15
    assert wrong(seen, greedy) == {}


# --- known faults ----------------------------------------------------------------------------------------------------

_observe = Calibration.observe


def one_depth_off(patch: pytest.MonkeyPatch) -> None:
    def observe(self: Calibration, drafter: str, depth: int, *more: Any, **told: Any) -> None:
        _observe(self, drafter, depth + 1, *more, **told)

    patch.setattr(Calibration, "observe", observe)


def ranks_by_place_among_siblings(patch: pytest.MonkeyPatch) -> None:
    """Of the merged tree instead of the drafter's own."""

    def observe(self: Calibration, drafter: str, depth: int, rank: int, *more: Any, **told: Any) -> None:
        _observe(self, drafter, depth, 1 - rank, *more, **told)

    patch.setattr(Calibration, "observe", observe)


def all_to_one_drafter(patch: pytest.MonkeyPatch) -> None:
    def observe(self: Calibration, drafter: str, *more: Any, **told: Any) -> None:
        _observe(self, "boaster", *more, **told)

    patch.setattr(Calibration, "observe", observe)


def every_node_was_judged(patch: pytest.MonkeyPatch) -> None:
    """Nodes under a rejected one count as rejected too."""

    def judged(outcome: Outcome) -> Any:
        return [(node, node in outcome.path) for node in range(len(outcome.tree))]

    patch.setattr(spec.budget, "judged", judged)


FAULTS = [one_depth_off, ranks_by_place_among_siblings, all_to_one_drafter, every_node_was_judged]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_faults_between_node_and_cell_are_caught(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    seen, _ = learnt(0.0, 16)
    assert len(wrong(seen, True)) > 2
