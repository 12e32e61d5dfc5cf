"""Drafters at rest: what they are told of, and when they are asked again."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
import torch
import toy
from drafting import Pool, View, budget
from engine_kit import ScriptDrafter, greedy_request, has_native, make_engine, prompts_of, quick_rand, run

from drafters.model import ModelDrafter
from drafters.state_run import StateRun, row_address
from drafters.suffix import SuffixDrafter
from spec.drafter import Budget, SequenceView
from spec.shapes import ShapeSpeculator
from spec.tree import Proposal

WIDTH = 3


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("by_address", [True, False])
def test_a_run_of_states_is_a_table_with_zeros(seed: int, by_address: bool) -> None:
    rng = random.Random(seed)
    run, table = StateRun(WIDTH, torch.device("cpu")), dict[int, torch.Tensor]()
    at = kept = rng.randrange(5)
    for _ in range(60):
        at += rng.choice((0, 0, 0, 3))  # sometimes nobody told
        count = rng.choice((1, 1, 2, 90))
        states = torch.randn(count + 2, WIDTH)
        run.add(at, states, 1, count, row_address(states) if by_address else 0)
        table |= {at + i: states[1 + i] for i in range(count)}
        at += count
        if rng.random() < 0.2:
            kept = max(kept, at - rng.randrange(1, 100))
            run.forget_before(kept)
        first = rng.randrange(kept, at)
        found = run.rows(first, at - first)
        assert torch.equal(found, torch.stack([table.get(i, torch.zeros(WIDTH)) for i in range(first, at)]))
    assert len(run) <= at - kept
    assert torch.equal(run.rows(-1, 1), torch.zeros(1, WIDTH))


def test_a_sequence_on_which_no_pass_pays_is_asked_about_less_and_less() -> None:
    shape, weights = toy.rand_weights(3, layers=1, hidden=64, q_heads=2, kv_heads=1, head_dim=32, intermediate=64, vocab=96)
    decoder, pool = toy.decoder(shape, weights, native=has_native()), Pool(64, 4)
    ticks = iter(range(10_000))
    drafter = ModelDrafter("model", decoder, toy.new_store(shape, 64, 4), pool, clock=lambda: next(ticks) * 1e-3)
    view = View(1, [1, 2, 3], 3)
    pool.reserve(view, 100)
    drafter.open(view)
    asked = []
    for step in range(60):
        dear = step > 0  # the first pass is free: nothing was measured
        if drafter.hopes([view]):
            asked.append(step)
            drafter.propose([view], [budget(pass_price=lambda ms, dear=dear: 1e3 * dear * ms)])  # type: ignore[misc]
        view.token_ids.append(step)
    gaps = [b - a for a, b in pairwise(asked)]
    assert asked[:2] == [0, 1]
    assert gaps[1:4] == [2, 4, 8]
    assert max(gaps) == 16
    while not drafter.hopes([view]):
        view.token_ids.append(1)
    (proposal,) = drafter.propose([view], [budget()])
    assert proposal.token_ids
    assert drafter.hopes([view])  # a pass that pays ends the pause


class Refusing(ShapeSpeculator):
    """Lets one drafter draft nothing."""

    def __init__(self, shape: str, name: str) -> None:
        super().__init__(shape)
        self._refused, self.asked = name, 0

    def refused(self, sequences: int) -> set[str]:
        return {self._refused}

    def budgets(self, views, limits, load) -> list[Budget]:  # type: ignore[no-untyped-def]
        self.asked += 1
        return super().budgets(views, limits, load)


class Silent(SuffixDrafter):
    """Has never hope."""

    def hopes(self, views: object) -> list[int]:
        return []


class Blunt(ScriptDrafter):
    """Cannot tell whether it has hope."""

    def propose(self, views: object, budgets: list[Budget]) -> list[Proposal]:
        raise AssertionError("a refused drafter was asked")

    def watch(self, views: list[SequenceView], steps: list[torch.Tensor], behind: int) -> None:
        for view in views:
            assert len(view.token_ids) > behind
        self.told = getattr(self, "told", 0) + len(steps)


def test_a_refused_drafter_does_not_make_steps_long() -> None:
    """One that cannot tell makes every step a question; not while it is refused, and it is told of each plain step all the same."""
    rule = Refusing("chain:2", "script")
    blunt = Blunt(lambda view: (), (1, 1))
    engine = make_engine(quick_rand(), [Silent(), blunt], speculator=rule)
    answers = run(engine, [greedy_request(0, prompts_of([7])[0], 30)])
    assert len(answers[0].token_ids) == 30
    assert rule.asked == 0
    assert blunt.told >= 26  # the prompt's pass and the last one are told as outcomes
    assert not any(math.isnan(s) for s in engine.stats()["drafter_faults"].values())
    assert engine.stats()["drafter_faults"] == {"suffix": 0, "script": 0}
