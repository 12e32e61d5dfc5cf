"""suffix_index in C++ answers what the reference answers, and a drafter over it proposes the same trees."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from drafting import View, budget
from hypothesis import example, given, settings
from hypothesis import strategies as st

from drafters.suffix import SuffixDrafter
from kernels.native import load
from kernels.suffix_index import BARRIER, LONGEST, Index, LookRow, SuffixOps, reference
from spec.drafter import Outcome
from spec.tree import EMPTY_TREE, Proposal

pytestmark = pytest.mark.skipif(load() is None, reason="no compiler here")

TEXT = st.lists(st.integers(0, 3), max_size=80)
WITH_ENDS = st.lists(st.integers(BARRIER, 3), max_size=80)
SCORES = (0.0, 0.2, 0.5, 0.7, 0.9)


@pytest.fixture(scope="module")
def native() -> SuffixOps:
    from kernels.suffix_index.native import NativeSuffix

    return NativeSuffix()


def fed(ops: SuffixOps, text: list[int], size: int) -> Index:
    index = ops.index()
    for at in range(0, len(text), size):
        index.extend(text[at : at + size])
    return index


@settings(max_examples=200, deadline=None)
@given(text=WITH_ENDS, size=st.integers(1, 30), other=TEXT, limit=st.integers(1, 64), shortest=st.integers(1, LONGEST + 1))
@example(text=[0, 0, 0, 0], size=1, other=[0, 0, 0], limit=6, shortest=1)
@example(text=[0, 1] * 40, size=7, other=[0, 1] * 8, limit=6, shortest=16)
def test_matches_are_the_reference_s(
    native: SuffixOps, text: list[int], size: int, other: list[int], limit: int, shortest: int
) -> None:
    mine, theirs = fed(native, text, size), fed(reference, text, size)
    assert mine.tokens == theirs.tokens
    for tail in (text[-LONGEST:], other[-LONGEST:]):
        assert mine.matches(tail, limit, shortest) == theirs.matches(tail, limit, shortest)


Four = tuple[list[int], list[int], list[int] | None, list[int] | None]  # own text, tokens new to it, other texts


def looked(ops: SuffixOps, texts: list[Four], shortest: int) -> list[float]:
    """The rows' scores, found by asking for at least so much."""
    looker = ops.looker(6, 0.5, SCORES)
    rows: list[LookRow] = [
        (fed(ops, own, 9), fed(ops, newer, 9) if newer else None, fed(ops, older, 9) if older else None, shortest, 0)
        for own, _, newer, older in texts
    ]
    looker.watch(rows)
    hopeful = looker.look([own + new for own, new, _, _ in texts])
    assert [row[0].tokens for row in rows] == [own + new for own, new, _, _ in texts]
    scores = [0.0] * len(texts)
    for number in hopeful:
        own, newer, older, _, _ = rows[number]
        low, high = 0, 10**6
        while high - low > 1:
            middle = (low + high) // 2
            looker.watch([(own, newer, older, shortest, middle)])
            low, high = (middle, high) if looker.look([own.tokens]) else (low, middle)
        scores[number] = (low + 1) / 1e6
    return scores


ROW = st.tuples(TEXT, TEXT, st.none() | WITH_ENDS, st.none() | WITH_ENDS)


@settings(max_examples=150, deadline=None)
@given(texts=st.lists(ROW, min_size=1, max_size=4), shortest=st.integers(1, LONGEST + 1))
def test_a_look_is_the_reference_s(native: SuffixOps, texts: list, shortest: int) -> None:  # type: ignore[type-arg]
    assert looked(native, texts, shortest) == looked(reference, texts, shortest)


@pytest.mark.parametrize("ops", ["reference", "native"])
def test_a_look_weighs_length_and_place(ops: str, native: SuffixOps) -> None:
    found = looked(
        native if ops == "native" else reference,
        [
            ([5, 6, 7, 1, 5], [6], None, None),  # "5 6" came before, 7 followed
            ([5, 6, 7, 6, 8, 5], [6], None, None),  # "5 6" -> 7 (16 votes) against "6" -> 8 (4 votes)
            ([1, 2, 3], [4], None, None),
            ([9, 6, 7, 1], [6], [6, 8, BARRIER], None),  # 4 votes here, 2 there
            ([1], [6], [6, BARRIER], [2, 6, 8]),  # the end of a text says nothing
            ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7], None, None),  # lengths past the table count as its last
        ],
        1,
    )
    assert found == pytest.approx([0.5, 0.5 * 16 / 20, 0.0, 0.2 * 4 / 6, 0.2, 0.9], abs=2e-6)


@pytest.mark.parametrize("seed", range(4))
def test_a_drafter_over_either_proposes_the_same(seed: int, native: SuffixOps) -> None:
    """Answers that grow token by token, share a store, end and begin anew."""
    chance = random.Random(seed)
    said: list[list[Proposal]] = []
    hoped: list[list[bool]] = []
    for ops in (reference, native):
        chance.seed(seed)
        drafter, views = SuffixDrafter(tenant_tokens=300, ops=ops), {}
        proposals, hopes = [], []
        for step in range(150):
            while len(views) < 3:
                key = 10 * step + len(views)
                views[key] = View(
                    key, [chance.randrange(6) for _ in range(chance.randint(1, 60))], 1, tenant=chance.choice("ab")
                )
                drafter.open(views[key])
            for view in views.values():
                view.token_ids += [chance.randrange(6) for _ in range(chance.choice((1, 1, 1, 4)))]
            shown = list(views.values())
            found = drafter.hopes(shown)
            hopes.append([i in found for i in range(len(shown))])
            price = chance.choice((0.0, 0.3, 0.6))
            if step % 3 == 0:
                proposals += drafter.propose(shown, [replace(budget(nodes=12, price=price), entry=0.5) for _ in shown])
            if chance.random() < 0.1:
                key, view = views.popitem()
                drafter.observe([Outcome(view, EMPTY_TREE, (), 0, 0, 1, True)], None)  # type: ignore[arg-type]
                drafter.close(key)
        said.append(proposals)
        hoped.append([hope for row in hopes for hope in row])
    assert said[0] == said[1]
    assert hoped[0] == hoped[1]
    assert any(proposal.token_ids for proposal in said[0])
    assert {True, False} == set(hoped[0])
