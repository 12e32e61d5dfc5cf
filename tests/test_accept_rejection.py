"""The rejection rule by hand: thresholds, residuals, siblings, block verification; and which q is not believed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from acceptance import accept_one, generate, tree, view

from spec import rejection
from spec.keyed_random import RESIDUAL, TEST
from spec.rejection import Walked
from spec.tree import DraftProbs, DraftTree

V = 4


def probs(*values: float, ids: list[int] | None = None) -> DraftProbs:
    return DraftProbs(torch.tensor(ids or list(range(len(values)))), torch.tensor(values))


class Noise:
    """Scripted answers by (stream, depth, index); anything not scripted is an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, length: int = 10) -> None:
        self.script: dict[tuple[int, int, int], float] = {}

        def uniform(seed: int, position: int, stream: int = 0, index: int = 0, step: int = 0) -> float:
            assert step == length, "noise is keyed by the step's root"
            return self.script[stream, position - length, index]

        monkeypatch.setattr(rejection, "uniform", uniform)


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> Noise:
    return Noise(monkeypatch)


def decide(drafted: DraftTree, law: dict[int, list[float]]) -> Walked:
    """Run the rule with `law[node]` as the target's distribution at each node (-1 the root)."""
    walk = rejection.walk(drafted, seed=0, length=10)
    node = next(walk)
    while True:
        try:
            node = walk.send(np.array(law[node]) if node in law else None)
        except StopIteration as end:
            return end.value


P = [0.5, 0.25, 0.125, 0.125]  # exact in binary, like Q
Q = [0.125, 0.625, 0.125, 0.125]
RATIO = 0.4  # p / q of token 1


@pytest.mark.parametrize(("test", "path"), [(RATIO - 1e-6, (0,)), (RATIO + 1e-6, ())])
def test_a_drawn_child_is_accepted_with_p_over_q(noise: Noise, test: float, path: tuple[int, ...]) -> None:
    chain = tree([1], draft_probs=(probs(*Q),))  # block verification: w_1 = 0.4
    star = tree([1, 2], (-1, -1), draft_probs=(probs(*Q), None))  # the rejection leaves token 2 no chance
    noise.script = {(TEST, 0, 0): test, (TEST, 0, 1): 0.0, (RESIDUAL, 0, 0): 0.0, (RESIDUAL, 1, 0): 0.0}
    for one in (chain, star):
        kept = decide(one, {-1: P, 0: [0.0, 0.0, 1.0, 0.0]})
        assert kept == Walked(path, 2 if path else 0)


def test_a_child_drawn_with_more_mass_in_p_is_always_accepted(noise: Noise) -> None:
    noise.script = {(TEST, 0, 0): 1 - 2**-53, (RESIDUAL, 1, 0): 0.99}
    assert decide(tree([0], draft_probs=(probs(*Q),)), {-1: P, 0: P}) == Walked((0,), 3)


@pytest.mark.parametrize("draw", [0.0, 0.999999])
def test_the_residual_is_what_p_has_more_than_q(noise: Noise, draw: float) -> None:
    """max(p - q, 0) = (0.375, 0, 0, 0): only token 0 may come; softmax of it would give every token a chance."""
    drafted = tree([1, 3], (-1, -1), draft_probs=(probs(*Q), None))
    noise.script = {(TEST, 0, 0): 0.9, (TEST, 0, 1): 0.0, (RESIDUAL, 0, 0): draw}
    assert decide(drafted, {-1: P}) == Walked((), 0)


@pytest.mark.parametrize(("test", "path"), [(1 / 6 - 1e-6, (1,)), (1 / 6 + 1e-6, ())])
def test_a_point_mass_is_accepted_with_what_is_left_of_p(noise: Noise, test: float, path: tuple[int, ...]) -> None:
    drafted = tree([1, 2], (-1, -1))
    noise.script = {(TEST, 0, 0): 0.25, (TEST, 0, 1): test, (RESIDUAL, 0, 0): 0.7, (RESIDUAL, 1, 0): 0.0}
    kept = decide(drafted, {-1: P, 1: P})  # token 1 refused at 0.25: p becomes (4, 0, 1, 1) / 6
    assert kept.path == path
    assert kept.next_id == 0


@pytest.mark.parametrize(("test", "path"), [(0.3 - 1e-6, (1,)), (0.3 + 1e-6, ())])
def test_earlier_siblings_are_removed_from_q(noise: Noise, test: float, path: tuple[int, ...]) -> None:
    """Token 1 refused: p becomes (.25, 0, .15, .1) / .5 = (.5, 0, .3, .2), and q, of which token 1 was drawn already,
    (0, 0, 1, 0). With the sibling left in, q(2) would be .4 and the chance .75.
    """
    p, q = [0.25, 0.1, 0.55, 0.1], probs(0.0, 0.6, 0.4, 0.0)
    drafted = tree([1, 2], (-1, -1), draft_probs=(q, q))
    noise.script = {(TEST, 0, 0): 0.2, (TEST, 0, 1): test, (RESIDUAL, 0, 0): 0.0, (RESIDUAL, 1, 0): 0.0}
    assert decide(drafted, {-1: p, 1: p}) == Walked(path, 0)


def test_rules_stop_asking_where_the_target_has_no_answer(noise: Noise) -> None:
    noise.script = {(TEST, 0, 0): 0.1, (TEST, 1, 0): 0.1}
    assert decide(tree([1]), {-1: P}) == Walked((0,), None)
    assert decide(tree([1, 2], draft_probs=(probs(*Q), probs(*Q))), {-1: P}) == Walked((0,), None)
    noise.script = {(TEST, 0, 0): 0.9, (RESIDUAL, 0, 0): 0.0}
    assert decide(tree([1, 2], draft_probs=(probs(*Q), probs(*Q))), {-1: P}) == Walked((), 0)
    assert decide(tree([1, 2]), {}) == Walked((), None)


# --- block verification ------------------------------------------------------------------------------------------------


def test_block_verification_by_hand(noise: Noise) -> None:
    """Two drawn tokens: w_1 = 0.4, w_2 = min(1, 0.4 * 0.5 / 0.125) = 1, so the second token saves the first."""
    drafted = tree([1, 0], draft_probs=(probs(*Q), probs(*Q)))
    law = {-1: P, 0: P, 1: [0.0, 0.0, 0.0, 1.0]}
    noise.script = {(TEST, 0, 0): 0.999, (TEST, 1, 0): 0.999, (RESIDUAL, 2, 0): 0.5}
    assert decide(drafted, law) == Walked((0, 1), 3)


@pytest.mark.parametrize(("test", "path"), [(1 / 9 - 1e-6, (0,)), (1 / 9 + 1e-6, ())])
def test_block_verifications_middle_chance(noise: Noise, test: float, path: tuple[int, ...]) -> None:
    """w_1 = 0.4; leftover at 1 = max(0.4 p - q, 0) = (0.075, 0, 0, 0): chance 0.075 / (0.075 + 0.6) = 1/9; w_2 = 0.16."""
    drafted = tree([1, 1], draft_probs=(probs(*Q), probs(*Q)))
    noise.script = {(TEST, 0, 0): test, (TEST, 1, 0): 0.16 + 1e-6, (RESIDUAL, 0, 0): 0.9, (RESIDUAL, 1, 0): 0.9}
    kept = decide(drafted, {-1: P, 0: P, 1: P})
    assert kept == Walked(path, 0)


def test_block_verification_is_used_on_drawn_chains_only() -> None:
    assert rejection.is_drawn_chain(tree([1, 2], draft_probs=(probs(*Q), probs(*Q))))
    assert rejection.is_drawn_chain(tree([1, 2], draft_probs=(None, probs(*Q))))
    assert not rejection.is_drawn_chain(tree([1, 2]))
    assert not rejection.is_drawn_chain(tree([1, 2], draft_probs=(None, None)))
    assert not rejection.is_drawn_chain(tree([1, 2], (-1, -1), draft_probs=(probs(*Q), probs(*Q))))
    assert not rejection.is_drawn_chain(tree([]))


def accepted_on_average(rule: Any, count: int = 1500) -> float:
    rng = np.random.default_rng(4)
    law = rng.dirichlet(np.ones(6), size=6)
    drafter = rng.dirichlet(np.ones(6), size=6)
    told = [DraftProbs(torch.arange(6), torch.from_numpy(row)) for row in drafter]
    total = 0
    for seed in range(count):
        tokens = [int(rng.choice(6, p=drafter[0]))]
        for _ in range(4):
            tokens.append(int(rng.choice(6, p=drafter[tokens[-1]])))
        drafted = tree(tokens, draft_probs=tuple(told[last] for last in (0, *tokens[:-1])))
        walk = rule(drafted, seed, 10)
        node = next(walk)
        while True:
            try:
                node = walk.send(law[0 if node < 0 else tokens[node]])
            except StopIteration as end:
                total += len(end.value.path)
                break
    return total / count


def test_block_verification_accepts_more() -> None:
    assert accepted_on_average(rejection.block) > accepted_on_average(rejection.recursive) + 0.02


# --- a q that cannot be true -------------------------------------------------------------------------------------------

WRONG = {
    "nan": probs(float("nan"), 0.5, 0.25, 0.25),
    "infinite": probs(float("inf"), 0.5, 0.25, 0.25),
    "negative": probs(-0.5, 1.0, 0.25, 0.25),
    "no mass on the node": probs(0.5, 0.0, 0.25, 0.25),
    "no mass at all": probs(0.0, 0.0, 0.0, 0.0),
    "ids beyond the vocabulary": probs(0.5, 0.5, ids=[1, V + 3]),
    "negative ids": probs(0.5, 0.5, ids=[1, -1]),
    "lengths differ": DraftProbs(torch.tensor([1, 2, 3]), torch.tensor([0.5, 0.5])),
    "empty": DraftProbs(torch.tensor([], dtype=torch.int64), torch.tensor([])),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("siblings", [0, 1], ids=["chain", "star"])
def test_a_wrong_q_is_tested_as_a_point_mass(noise: Noise, name: str, siblings: int) -> None:
    bad = WRONG[name]
    drafted = tree([1, 2][: siblings + 1], [-1] * (siblings + 1), draft_probs=(bad, None)[: siblings + 1])
    for test, path in ((P[1] - 1e-6, (0,)), (P[1] + 1e-6, ())):
        noise.script = {(TEST, 0, 0): test, (TEST, 0, 1): 0.999, (RESIDUAL, 0, 0): 0.0, (RESIDUAL, 1, 0): 0.0}
        assert decide(drafted, {-1: P, 0: P}) == Walked(path, 0)


def test_padding_ids_in_a_chain_count_as_its_end(noise: Noise) -> None:
    drafted = tree([1, V + 2, 0], draft_probs=(probs(*Q), probs(*Q), probs(*Q)))
    noise.script = {(TEST, 0, 0): RATIO - 1e-6, (TEST, 1, 0): 0.0, (RESIDUAL, 1, 0): 0.0}
    assert decide(drafted, {-1: P, 0: P}) == Walked((0,), 0)
    noise.script[TEST, 0, 0] = RATIO + 1e-6
    noise.script[RESIDUAL, 0, 0] = 0.0
    assert decide(drafted, {-1: P, 0: P}) == Walked((), 0)


# --- through accept ----------------------------------------------------------------------------------------------------

TABLE = torch.randn(V, V, generator=torch.Generator().manual_seed(6))


def test_the_same_drafts_and_seed_give_the_same_text() -> None:
    def drafts(now: Any) -> DraftTree:
        return tree([1, 2, 3], (-1, 0, -1), draft_probs=(probs(*Q), None, probs(*Q)))

    texts = [generate(TABLE, view([0], rule="rejection", temperature=1.0, seed=4), 30, drafts) for _ in range(2)]
    assert texts[0] == texts[1]
    assert texts[0] != generate(TABLE, view([0], rule="rejection", temperature=1.0, seed=5), 30, drafts)


def test_options_hold_under_rejection_too() -> None:
    drafted = tree([1, 1, 2], (-1, 0, -1), draft_probs=(probs(*Q), probs(*Q), None))
    for seed in range(100):
        kept = accept_one(TABLE, view([0], rule="rejection", temperature=1.5, seed=seed, logit_bias={1: -100.0}), drafted)
        assert 0 not in kept.path
        assert kept.next_id != 1
