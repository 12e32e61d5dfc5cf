"""Merging proposals: an oracle by enumeration, prices, limits, credit, and the law of drawn nodes."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from drafting import View, paths, raw_chance
from hypothesis import given, settings
from hypothesis import strategies as st

from spec.calibration import confidence_bin
from spec.errors import ConfigError
from spec.merge import as_chain, build, gather, merge, well_formed
from spec.rejection import walk
from spec.request import SamplingParams, SpeculationPolicy
from spec.shapes import SHAPES, ShapeSpeculator, parse_shape
from spec.speculator import Limit, Load
from spec.tree import EMPTY_TREE, DraftProbs, DraftTree, Proposal


@st.composite
def proposals(draw: st.DrawFn, tokens: int = 4, most: int = 10) -> Proposal:
    """A well-formed deterministic proposal: distinct siblings, ranks by order."""
    count = draw(st.integers(0, most))
    ids: list[int] = []
    parents: list[int] = []
    used: dict[int, list[int]] = {}
    for i in range(count):
        parent = draw(st.integers(-1, i - 1))
        free = [t for t in range(tokens) if t not in used.get(parent, [])]
        if not free:
            continue
        while parent >= len(ids):
            parent = draw(st.integers(-1, len(ids) - 1))
            free = [t for t in range(tokens) if t not in used.get(parent, [])]
            if not free:
                break
        if not free:
            continue
        token = draw(st.sampled_from(free))
        used.setdefault(parent, []).append(token)
        ids.append(token)
        parents.append(parent)
    confidence = tuple(draw(st.sampled_from([0.1, 0.25, 0.5, 0.75, 1.0])) for _ in ids)
    ranks = tuple(sum(1 for p in parents[:i] if p == parents[i]) for i in range(len(ids)))
    return Proposal(tuple(ids), tuple(parents), confidence, ranks)


def joined(offers: list[tuple[str, Proposal]], depth: int) -> dict[tuple[int, ...], float]:
    """Oracle: path -> chance given the parent, the largest of its sources."""
    found: dict[tuple[int, ...], float] = {}
    for _, proposal in offers:
        for path, confidence in zip(paths(proposal), proposal.confidence, strict=True):
            if len(path) <= depth:
                found[path] = max(found.get(path, 0.0), confidence)
    return found


def worth(path: tuple[int, ...], chances: dict[tuple[int, ...], float]) -> float:
    f = 1.0
    for i in range(1, len(path) + 1):
        f *= chances[path[:i]]
    return f


@settings(max_examples=200, deadline=None)
@given(
    offers=st.lists(proposals(), min_size=1, max_size=3),
    price=st.sampled_from([0.0, 0.05, 0.2, 0.5]),
    nodes=st.integers(0, 8),
    depth=st.integers(1, 5),
)
def test_the_tree_is_the_best_there_is(offers: list[Proposal], price: float, nodes: int, depth: int) -> None:
    named = [(f"d{i}", proposal) for i, proposal in enumerate(offers)]
    tree = merge(named, raw_chance, price=price, max_nodes=nodes, max_depth=depth)
    assert tree == merge(named, raw_chance, price=price, max_nodes=nodes, max_depth=depth)
    chances = joined(named, depth)
    got = paths(tree)
    assert len(set(got)) == len(got) <= nodes
    assert set(got) <= set(chances)
    assert [chances[path] for path in got] == list(tree.chances)
    assert all(worth(path, chances) >= price for path in got)
    # No closed set of as many nodes is worth more: f never grows downwards, so the best set is the top of the list.
    best = sorted((worth(path, chances) for path in chances), reverse=True)[:nodes]
    assert sum(worth(path, chances) for path in got) == pytest.approx(sum(f for f in best if f >= price))
    for path, names in zip(got, tree.sources, strict=True):
        claimed = {name: dict(zip(paths(p), p.confidence, strict=True)).get(path) for name, p in named}
        assert set(names) == {name for name, c in claimed.items() if c is not None}
        assert claimed[names[0]] == chances[path]  # the credited one is the most confident


@settings(max_examples=100, deadline=None)
@given(offers=st.lists(proposals(), min_size=1, max_size=3))
def test_the_likeliest_path_comes_first_and_siblings_best_first(offers: list[Proposal]) -> None:
    tree = merge([(f"d{i}", p) for i, p in enumerate(offers)], raw_chance, price=0.0, max_nodes=63, max_depth=63)
    for children in tree.children():
        assert [tree.chances[i] for i in children] == sorted((tree.chances[i] for i in children), reverse=True)
    node, length = -1, 0
    while below := tree.children()[node + 1]:
        assert below[0] == length  # first children follow each other: accepting them moves nothing
        node, length = below[0], length + 1


def test_credit_goes_to_every_source_the_surest_first() -> None:
    shy = Proposal((5, 6), (-1, 0), (0.3, 0.9), (0, 0))
    bold = Proposal((5,), (-1,), (0.8,), (2,))
    tree = merge([("shy", shy), ("bold", bold)], raw_chance, price=0.0, max_nodes=4, max_depth=4)
    assert tree.sources == (("bold", "shy"), ("shy",))
    assert tree.origins == (((2, confidence_bin(0.8)), (0, confidence_bin(0.3))), ((0, confidence_bin(0.9)),))
    assert tree.chances == (0.8, 0.9)


def test_calibrated_chances_decide_not_raw_scores() -> None:
    boaster = Proposal((1,), (-1,), (0.99,), (0,))
    modest = Proposal((2,), (-1,), (0.4,), (0,))

    def chance(drafter: str, depth: int, rank: int, confidence: float) -> float:
        return 0.05 if drafter == "boaster" else 0.6

    tree = merge([("boaster", boaster), ("modest", modest)], chance, price=0.1, max_nodes=4, max_depth=4)
    assert tree.token_ids == (2,)


@pytest.mark.parametrize(
    "flawed",
    [
        Proposal((1, 2), (-1, 1), (0.9, 0.9), (0, 0)),
        Proposal((1, 2), (-1,), (0.9, 0.9), (0, 0)),
        Proposal((-4,), (-1,), (0.9,), (0,)),
        Proposal((512,), (-1,), (0.9,), (0,)),
        Proposal((1,), (-1,), (0.9,), (0,), draft_probs=()),
    ],
)
def test_malformed_proposals_cost_only_themselves(flawed: Proposal) -> None:
    assert not well_formed(flawed, 512)
    good = Proposal((7,), (-1,), (0.5,), (0,))
    found = gather([("bad", flawed), ("good", good)], raw_chance, max_depth=4, vocab_size=512)
    assert [node.token for node in found.nodes] == [7]


def test_a_score_that_is_no_number_is_worth_nothing() -> None:
    tree = merge([("d", Proposal((7,), (-1,), (float("nan"),), (0,)))], raw_chance, price=0.0, max_nodes=4, max_depth=4)
    assert tree == EMPTY_TREE


# --- drawn nodes -----------------------------------------------------------------------------------------------------

P1 = np.array([0.45, 0.3, 0.15, 0.1])  # the target at the root
P2 = np.array([0.1, 0.2, 0.3, 0.4])  # the target one token on
Q = np.array([0.2, 0.25, 0.25, 0.3])  # the drafter, at both
Q_PROBS = DraftProbs(torch.arange(4), torch.tensor(Q, dtype=torch.float32))


def law(certain: Proposal, nodes: int) -> tuple[np.ndarray, set[bool]]:
    """Frequencies of the first two tokens when chains of two draws are merged with `certain`; were all trees chains?"""
    counts = np.zeros((4, 4))
    rng = np.random.default_rng(nodes)
    chains = set()
    for seed in range(3000):
        x1, x2 = rng.choice(4, p=Q), rng.choice(4, p=Q)
        # the second draw's score depends on the first draw, as a model's does
        scores = (0.5, 0.3 + 0.15 * x1)
        drawn = Proposal((int(x1), int(x2)), (-1, 0), scores, (0, 0), draft_probs=(Q_PROBS, Q_PROBS))
        offers = [("suffix", certain), ("model", drawn)]
        tree = merge(offers, raw_chance, price=0.2, max_nodes=nodes, max_depth=4)
        chains.add(tree.parents == tuple(range(-1, len(tree) - 1)))
        rule = walk(tree, seed, 10)
        node = next(rule)
        while True:
            try:
                node = rule.send((P1 if node < 0 else P2).copy())
            except StopIteration as stop:
                walked = stop.value
                break
        text = [tree.token_ids[i] for i in walked.path] + [walked.next_id]
        if len(text) == 1:
            text.append(int(rng.choice(4, p=P2)))
        counts[text[0], text[1]] += 1
    return counts, chains


@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("certain", [(), (0,), (1, 3), (3, 3)])
def test_drawn_and_certain_nodes_together_keep_the_distribution(certain: tuple[int, ...], nodes: int) -> None:
    offer = Proposal(certain, tuple(range(-1, len(certain) - 1)), (0.55, 0.6)[: len(certain)], (0,) * len(certain))
    counts, chains = law(offer, nodes)
    expected = 3000 * np.outer(P1, P2)
    assert float(((counts - expected) ** 2 / expected).sum()) < 58.0  # chi-square, 15 degrees, false alarm 1e-6
    assert chains == {not certain}  # which verification runs does not depend on what was drawn


def test_a_twin_of_a_draw_is_verified_once_and_credits_both() -> None:
    drawn = Proposal((2, 1), (-1, 0), (0.5, 0.5), (0, 0), draft_probs=(Q_PROBS, Q_PROBS))
    certain = Proposal((2, 3, 0), (-1, -1, 0), (0.6, 0.4, 0.9), (0, 1, 0))
    tree = merge([("s", certain), ("m", drawn)], raw_chance, price=0.0, max_nodes=8, max_depth=4)
    assert Counter(paths(tree)) == Counter([(2,), (2, 1), (2, 0), (3,)])
    assert tree.draft_probs is not None
    at = {path: i for i, path in enumerate(paths(tree))}
    assert tree.draft_probs[at[(2,)]] is Q_PROBS
    assert tree.draft_probs[at[(3,)]] is None
    assert set(tree.sources[at[(2,)]]) == {"s", "m"}


def test_draws_alone_are_a_chain_only_where_nothing_else_was_offered() -> None:
    drawn = Proposal((2, 1), (-1, 0), (0.5, 0.9), (0, 0), draft_probs=(Q_PROBS, Q_PROBS))
    alone = merge([("m", drawn)], raw_chance, price=0.0, max_nodes=2, max_depth=4)
    assert alone.parents == (-1, 0)
    weak = Proposal((3,), (-1,), (0.1,), (0,))
    both = merge([("s", weak), ("m", drawn)], raw_chance, price=0.0, max_nodes=2, max_depth=4)
    assert sorted(both.token_ids) == [2, 3]
    assert both.parents == (-1, -1)


# --- fixed shapes ----------------------------------------------------------------------------------------------------


def full(width: int, depth: int) -> Proposal:
    """Every node has `width` children, scores falling with rank."""
    ids: list[int] = []
    parents: list[int] = []
    ranks: list[int] = []
    level = [-1]
    for _ in range(depth):
        below = []
        for parent, rank in itertools.product(level, range(width)):
            below.append(len(ids))
            ids.append(10 + rank)
            parents.append(parent)
            ranks.append(rank)
        level = below
    return Proposal(tuple(ids), tuple(parents), tuple(0.9 - 0.2 * r for r in ranks), tuple(ranks))


def shaped(shape: str, proposal: Proposal, policy: SpeculationPolicy | None = None, limit: int = 63) -> DraftTree:
    speculator = ShapeSpeculator(shape)
    view = View(1, [1, 2], 2, policy=policy or SpeculationPolicy())
    budgets = speculator.budgets([view], [Limit(limit, limit)], Load(0, 1, 2))
    (tree,) = speculator.admit([view], budgets, {"d": [proposal]})
    assert len(tree) <= budgets[0].max_nodes
    return tree


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_trees_have_the_shape_asked_for(shape: object) -> None:
    shape = parse_shape(shape.name)  # type: ignore[attr-defined]
    tree = shaped(shape.name, full(3, 4))
    for node, children in enumerate(tree.children(), -1):
        depth = 0 if node < 0 else tree.depths[node]
        assert len(children) <= (shape.widths[depth] if depth < len(shape.widths) else 0)
    expected = {"none": 0, "chain:1": 1, "chain:4": 4, "chain:8": 4, "wide": 3, "2x4": 8, "4x3": 9, "mixed": 16}
    assert len(tree) == expected[shape.name]


def test_shapes_by_number_and_unknown_ones() -> None:
    assert parse_shape("chain:13").widths == (1,) * 13
    assert parse_shape("3x5").max_nodes == 15
    assert parse_shape("wide:5").widths == (5,)
    for bad in ("", "chain:", "chain:0", "chain:99", "9x9", "bush", "0x3"):
        with pytest.raises(ConfigError, match="known are"):
            parse_shape(bad)


def test_shapes_honour_policy_and_limits() -> None:
    assert len(shaped("mixed", full(3, 3), SpeculationPolicy(max_nodes=2))) == 2
    assert len(shaped("mixed", full(3, 3), limit=1)) == 1
    assert shaped("mixed", full(3, 3), SpeculationPolicy(mode="off")) == EMPTY_TREE
    assert shaped("mixed", full(3, 3), SpeculationPolicy(drafters=("other",))) == EMPTY_TREE
    sampled = View(1, [1], 1, sampling=SamplingParams(max_tokens=4))
    budgets = ShapeSpeculator("none").budgets([sampled], [Limit(8, 8)], Load(0, 1, 1))
    assert budgets[0].max_nodes == 0
    assert not budgets[0].wants("d")


def test_merging_costs_microseconds() -> None:
    """An order above the cost on an idle core: catches a wrong algorithm, not a slow machine."""
    offers = [("a", full(2, 3)), ("b", full(1, 4))]
    best = 1.0
    for _ in range(50):
        began = time.perf_counter()
        merge(offers, raw_chance, price=0.05, max_nodes=8, max_depth=8)
        best = min(best, time.perf_counter() - began)
    assert best < 6e-4


@settings(max_examples=100, deadline=None)
@given(
    scores=st.lists(st.sampled_from((0.0, 0.2, 0.5, 0.9, 1.0, 1.5)), min_size=1, max_size=12),
    depth=st.integers(1, 14),
    count=st.integers(0, 12),
)
def test_a_lone_chain_is_the_tree_that_gathering_makes(scores: list[float], depth: int, count: int) -> None:
    size = len(scores)
    chain = Proposal(tuple(range(3, 3 + size)), tuple(range(-1, size - 1)), tuple(scores), (0,) * size)
    found = gather([("d", chain)], raw_chance, max_depth=depth)
    lone = as_chain("d", chain, raw_chance, max_depth=depth)
    assert lone is not None
    assert lone.paths == [node.path for node in found.nodes]
    count = min(count, len(found.nodes))
    assert lone.tree(count) == build(found, found.best_first()[:count])


def test_only_a_sound_chain_is_taken_as_one() -> None:
    sound = Proposal((5, 6, 7), (-1, 0, 1), (0.5,) * 3, (0,) * 3)
    assert as_chain("d", sound, raw_chance, max_depth=9, vocab_size=8) is not None
    assert as_chain("d", sound, raw_chance, max_depth=9, vocab_size=7) is None
    for other in (replace(sound, parents=(-1, 0, 0)), replace(sound, ranks=(0,)), replace(sound, draft_probs=(None,) * 3)):
        assert as_chain("d", other, raw_chance, max_depth=9) is None
