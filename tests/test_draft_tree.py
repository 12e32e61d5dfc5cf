"""Trees grown in one call are those that grow pass by pass: the same nodes, scores and chain, for every budget, batch and instruction set."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import toy
from drafting import GREEDY, Pool, View, accept_along
from engine_kit import has_native

from drafters import registry
from drafters.at_once import WIDTH, growth_rules
from drafters.growth import PassClock
from drafters.layer_models import LayerModel, load_attention_head
from drafters.model import FAN, ModelDrafter
from drafters.node_inputs import NodeInputs, TargetStates, TokensOnly
from drafters.scoring import OneCallScorer
from drafters.tensor_file import TensorFile
from kernels.batch import KVTensors
from spec.budget import PriceSpeculator
from spec.calibration import BINS, Calibration
from spec.drafter import Budget, ChanceTable, Outcome
from spec.errors import ForespeakError
from spec.merge import merge
from spec.request import SamplingParams, SpeculationPolicy
from spec.tree import EMPTY_TREE, Proposal

if not has_native():
    pytest.skip("no native library: no C++ compiler here", allow_module_level=True)

from kernels.decoder.native import NativeDecoder
from kernels.native import require

PAGES, PAGE = 160, 4


class Frozen(PassClock):
    """Passes take what they are said to take, by power of two of their rows."""

    def __init__(self, ms: Callable[[int], float]) -> None:
        super().__init__()
        self._ms = ms

    def record(self, rows: int, ms: float) -> None:
        pass

    def estimate(self, rows: int) -> float:
        return self._ms((rows - 1).bit_length())


def calibrated(seed: int) -> Calibration:
    """As after some hundred steps: few cells agree with their raw score."""
    rng, found = random.Random(seed), Calibration()
    for _ in range(1500):
        bin_ = rng.randrange(BINS)
        hit = rng.random() < 0.2 + 0.7 * bin_ / BINS
        found.observe("heads", rng.randint(1, 9), rng.randint(0, 4), bin_, greedy=True, accepted=hit)
    return found


@dataclass(frozen=True)
class Case:
    nodes: int
    depth: int
    price: float = 0.0
    prices: tuple[float, ...] = ()
    factor: float = 1.0
    pass_ms: Callable[[int], float] = lambda size: 0.0


CASES = [
    Case(1, 1),
    Case(4, 3, 0.05),
    Case(8, 6, 0.02, (0.05, 0.06, 0.2, 0.08, 0.3)),
    Case(16, 12, 0.0, (0.03,), 0.7, lambda size: 0.15),
    Case(16, 12, 0.01, (0.02, 0.03), 0.4, lambda size: 0.02 * (1 + size)),
    Case(63, 20),
    Case(24, 5, 0.0, (), 1.0, lambda size: 0.5),
]


def budget(case: Case, calibration: Calibration) -> Budget:
    def chance(name: str, depth: int, rank: int, confidence: float) -> float:
        return min(1.0, calibration.chance(name, depth, rank, confidence, greedy=True) * case.factor)

    def table(name: str) -> ChanceTable:
        return ChanceTable(calibration.table(name, True), case.factor)

    return Budget(case.nodes, case.depth, case.price, lambda ms: ms, chance, 0.0, case.prices, table)


@dataclass
class Pair:
    """Two drafters over stores of their own, one grows at once; they see the same texts and states."""

    at_once: ModelDrafter
    by_pass: ModelDrafter
    hidden: int

    def observe(self, outcomes: list[Outcome], states: torch.Tensor) -> None:
        for drafter in (self.at_once, self.by_pass):
            drafter.observe(outcomes, states)

    def compare(self, views: list[View], budgets: list[Budget]) -> list[Proposal]:
        mine = self.at_once.propose(views, budgets)
        theirs = self.by_pass.propose(views, [replace(b, table=None) for b in budgets])
        assert mine == theirs
        return mine


def pair(model: LayerModel | None, decoder: NativeDecoder, ms: Callable[[int], float]) -> Pair:
    shape = decoder.shape
    names = None if model is None else model.token_ids

    def make(at_once: bool) -> ModelDrafter:
        store = KVTensors.allocate(shape.layers, PAGES, shape.kv_heads, shape.head_dim, PAGE, torch.float32)
        store.k.fill_(math.nan)
        store.v.fill_(math.nan)
        inputs: NodeInputs = TokensOnly() if model is None else TargetStates(shape.hidden, torch.device("cpu"))
        grower = decoder.grower(store, growth_rules(FAN, WIDTH, names)) if at_once else None
        return ModelDrafter(
            "heads", decoder, store, Pool(PAGES, PAGE), token_ids=names, inputs=inputs, score=OneCallScorer(decoder, store),
            grower=grower, passes=Frozen(ms), clock=lambda: 0.0,
        )  # fmt: skip

    return Pair(make(True), make(False), shape.hidden)


def decode(pair: Pair, case: Case, lengths: list[int], steps: int, vocab: int, seed: int = 0) -> int:
    """Compare `steps` proposals over views whose text follows the drafts now and then. Returns how many nodes there were."""
    rng = random.Random(seed)
    pool = Pool(PAGES, PAGE)
    views = [View(i, [rng.randrange(vocab) for _ in range(n)], n) for i, n in enumerate(lengths)]
    calibration = calibrated(seed)
    states = torch.Generator().manual_seed(seed)
    counted = 0
    for step in range(steps):
        outcomes, first = [], 0
        for view in views:
            new = len(view.token_ids) - 1 if not step else 1
            outcomes.append(Outcome(view, EMPTY_TREE, (), view.token_ids[-1], first, new, False))
            first += new
        if not step:
            pair.observe(outcomes, torch.randn(first, pair.hidden, generator=states))
        for view in views:
            pool.reserve(view, len(view.token_ids) + case.nodes)
        budgets = [replace(budget(case, calibration), max_nodes=max(1, case.nodes - view.seq_id)) for view in views]
        found = pair.compare(views, budgets)
        outcomes, first = [], 0
        for view, own, proposal in zip(views, budgets, found, strict=True):
            counted += len(proposal.token_ids)
            tree = merge([("heads", proposal)], own.chance, price=0.0, max_nodes=own.max_nodes, max_depth=own.max_depth)
            truth = [rng.randrange(vocab) for _ in range(70)]
            node, depth = -1, 0  # the text takes a random path of the tree, as far as a coin says
            while rng.random() < 0.6 and (below := [i for i, p in enumerate(tree.parents) if p == node]):
                node = rng.choice(below)
                truth[depth], depth = tree.token_ids[node], depth + 1
            path, next_id = accept_along(tree, truth)
            view.token_ids += [tree.token_ids[i] for i in path] + [next_id]
            outcomes.append(Outcome(view, tree, path, next_id, first, 1 + len(tree), False))
            first += 1 + len(tree)
        pair.observe(outcomes, torch.randn(first, pair.hidden, generator=states))
    return counted


def toy_head(isa: str | None) -> tuple[LayerModel | None, NativeDecoder]:
    from kernels.decoder import Fusion
    from kernels.linear import DenseWeight

    shape, weights = toy.rand_weights(4, layers=1, hidden=64, q_heads=2, kv_heads=1, head_dim=32, intermediate=64, vocab=96)
    g = torch.Generator().manual_seed(4)
    fusion = Fusion(torch.ones(64), torch.ones(64), DenseWeight(torch.randn(64, 128, generator=g) / 8))
    ids = torch.randperm(96, generator=g).tolist()
    model = LayerModel(shape, replace(weights, fusion=fusion), tuple(ids))
    return model, NativeDecoder(model.shape, model.weights, 2, isa=isa)


@pytest.mark.parametrize("case", CASES)
def test_trees_of_a_head_with_states(case: Case) -> None:
    model, decoder = toy_head(None)
    assert decode(pair(model, decoder, case.pass_ms), case, [9], 25, 96) > 5


@pytest.mark.parametrize("case", CASES)
def test_trees_of_several_sequences(case: Case) -> None:
    """Backlogs of different lengths, budgets of different sizes, and one pass for all of them."""
    model, decoder = toy_head(None)
    assert decode(pair(model, decoder, case.pass_ms), case, [3, 17, 8, 5], 12, 96, seed=3) > 5


@pytest.mark.parametrize("case", CASES[1:6])
def test_trees_of_a_model_without_states(case: Case) -> None:
    """Its drafted keys survive where they were accepted, so the chain left in the store must be the same one."""
    shape, weights = toy.rand_weights(7, layers=2, hidden=64, q_heads=2, kv_heads=1, head_dim=32, intermediate=64, vocab=96)
    assert decode(pair(None, NativeDecoder(shape, weights, 2), case.pass_ms), case, [6, 11], 12, 96, seed=1) > 5


@pytest.mark.parametrize("isa", require().isas)
def test_every_instruction_set(isa: str) -> None:
    model, decoder = toy_head(isa)
    assert decode(pair(model, decoder, CASES[2].pass_ms), CASES[2], [9, 4], 6, 96) > 5


def test_temperature_shapes_the_scores() -> None:
    model, decoder = toy_head(None)
    both = pair(model, decoder, lambda size: 0.0)
    pool, calibration = Pool(PAGES, PAGE), calibrated(2)
    views = [View(i, [3, 5, 7], 3, sampling=s) for i, s in enumerate((GREEDY, SamplingParams(temperature=0.4, max_tokens=9)))]
    for view in views:
        pool.reserve(view, 20)
    plain, sharp = both.compare(views, [budget(Case(8, 4), calibration)] * 2)
    assert plain.token_ids[0] == sharp.token_ids[0]
    assert sharp.confidence[0] > plain.confidence[0]


def test_states_that_are_not_numbers_end_that_sequence_alone() -> None:
    model, decoder = toy_head(None)
    both = pair(model, decoder, lambda size: 0.0)
    pool, calibration = Pool(PAGES, PAGE), calibrated(2)
    views = [View(i, [3, 5, 7, 11], 4) for i in range(2)]
    for view in views:
        pool.reserve(view, 20)
    states = torch.ones(6, both.hidden)
    states[1] = math.nan
    both.observe([Outcome(view, EMPTY_TREE, (), 11, 3 * view.seq_id, 3, False) for view in views], states)
    sick, well = both.compare(views, [budget(Case(8, 4), calibration)] * 2)
    assert not sick.token_ids
    assert well.token_ids


def test_drawn_drafts_are_not_grown_at_once() -> None:
    """Under the rejection rule they come with the distribution they were drawn from."""
    shape, weights = toy.rand_weights(7, layers=2, hidden=64, q_heads=2, kv_heads=1, head_dim=32, intermediate=64, vocab=96)
    both = pair(None, NativeDecoder(shape, weights, 2), lambda size: 0.0)
    sampling, rule = SamplingParams(temperature=0.9, max_tokens=9, seed=3), SpeculationPolicy(rule="rejection")
    view = View(1, [3, 5, 7], 3, sampling=sampling, policy=rule)
    Pool(PAGES, PAGE).reserve(view, 20)
    (proposal,) = both.at_once.propose([view], [budget(Case(4, 4), calibrated(1))])
    assert proposal.draft_probs is not None


def test_the_price_rule_gives_the_tables_its_chances_are_made_of() -> None:
    from spec.speculator import Limit, Load

    view = View(1, [1, 2, 3], 3)
    rule = PriceSpeculator(calibrated(5))
    (found,) = rule.budgets([view], [Limit(8, 8)], Load(0, 1, 3))
    assert found.table is not None
    table = found.table("heads")
    assert table is not None
    from spec.calibration import COLUMNS, RANKS

    for depth, cell in ((1, 1), (2, 2), (4, 4)):
        for rank in range(RANKS):
            at = (0 if depth == 1 else cell - 1) * RANKS + rank
            assert min(1.0, table.values[at * COLUMNS] * table.factor) == found.chance("heads", depth, rank, -1.0)
            assert min(1.0, table.values[at * COLUMNS + 1] * table.factor) == found.chance("heads", depth, rank, 0.0)
            assert min(1.0, table.values[at * COLUMNS + BINS] * table.factor) == found.chance("heads", depth, rank, 1.0)
    view.policy = SpeculationPolicy(drafters=("suffix",))
    (found,) = rule.budgets([view], [Limit(8, 8)], Load(0, 1, 3))
    assert found.table is None or found.table("heads") is None


@pytest.fixture(scope="module")
def shipped() -> tuple[LayerModel, NativeDecoder]:
    from server.compose import DRAFT_BITS, DRAFT_HEAD_BITS
    from server.models import DEFAULT, resolve
    from spec.models import load_model

    try:
        path = resolve(DEFAULT, Path.home() / ".cache" / "forespeak", fetch=False).weights
    except ForespeakError as missing:
        pytest.skip(f"the default model is not on this machine: {missing}")
    target = load_model(path)
    heads = registry.shipped(target.name, "heads")
    assert heads is not None
    from drafters.layer_models import quantised

    model = load_attention_head(TensorFile.open(heads), target)
    return model, NativeDecoder(model.shape, quantised(model.weights, DRAFT_BITS, DRAFT_HEAD_BITS), 2)


@pytest.mark.parametrize("case", CASES[1:6])
def test_trees_of_the_shipped_head(shipped: tuple[LayerModel, NativeDecoder], case: Case) -> None:
    model, decoder = shipped
    assert decode(pair(model, decoder, case.pass_ms), case, [12, 30], 20, 20_000, seed=8) > 20
