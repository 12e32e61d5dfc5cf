"""The attention head in an engine: every proposal is what its formula says of the target's own states, whatever happened before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from engine_kit import OFF, KeepAll, Runner, greedy_request, make_engine, prompts_of, quick, run
from safetensors.torch import save_file

from drafters.layer_models import HEADS_FORMAT, LayerModel, load_attention_head
from drafters.model import ModelDrafter
from drafters.node_inputs import TargetStates
from drafters.scoring import OneCallScorer
from drafters.suffix import SuffixDrafter
from drafters.tensor_file import TensorFile
from kernels.batch import KVTensors, PackedInputs, StepInputs
from kernels.decoder import Decoder, DecoderOutput, DecoderShape, DecoderWeights, Drafted
from kernels.decoder.reference import ReferenceDecoder
from spec.drafter import Budget, Outcome, SequenceView
from spec.engine import Engine
from spec.errors import ModelFileError
from spec.pages import PagePool
from spec.request import SpeculationPolicy
from spec.shapes import ShapeSpeculator
from spec.speculator import Speculator
from spec.tree import Proposal

COUNT = 16
SHAPE, WEIGHTS = toy.rand_weights(layers=2)
HIDDEN, VOCAB = SHAPE.hidden, SHAPE.vocab_size
IDS = [t for t in range(VOCAB) if t % 3 != 2]


class Target:
    shape: DecoderShape = SHAPE
    weights: DecoderWeights = WEIGHTS


@cache
def decoder() -> Decoder:
    return quick(SHAPE, WEIGHTS)


@cache
def golden(prompt: tuple[int, ...], count: int = COUNT) -> tuple[int, ...]:
    return tuple(toy.greedy(decoder(), prompt, count))


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """A random head of 2 query heads and 1 key head of 16 channels, an MLP of 64."""
    g = torch.Generator().manual_seed(seed)

    def matrix(out: int, into: int, gain: float = 1.5) -> torch.Tensor:
        return torch.randn(out, into, generator=g) * gain / into**0.5

    names = ("feature_norm", "token_norm", "attn_norm", "mlp_norm", "output_norm")
    found = {name: 1 + 0.1 * torch.randn(HIDDEN, generator=g) for name in names}
    found |= {
        "fc": matrix(HIDDEN, 2 * HIDDEN),
        "q": matrix(32, HIDDEN, 3),
        "k": matrix(16, HIDDEN, 3),
        "v": matrix(16, HIDDEN, 3),
    }
    found |= {"o": matrix(HIDDEN, 32, 3), "gate": matrix(64, HIDDEN), "up": matrix(64, HIDDEN), "down": matrix(HIDDEN, 64)}
    found |= {"output": matrix(len(IDS), HIDDEN, 6), "token_ids": torch.tensor(IDS, dtype=torch.int32)}
    return found


METADATA = {"format": HEADS_FORMAT, "q_heads": "2", "kv_heads": "1", "head_dim": "16", "rope_theta": "10000"}


def write(path: Path, changes: dict[str, torch.Tensor] | None = None, **metadata: str) -> TensorFile:
    save_file(tensors() | (changes or {}), path, metadata=METADATA | metadata)
    return TensorFile.open(path)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> LayerModel:
    return load_attention_head(write(tmp_path_factory.mktemp("heads") / "heads.safetensors"), Target())


class Counting:
    """Notes the nodes of each pass."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.shape = inner, inner.shape
        self.passes: list[int] = []

    def forward(
        self, inputs: StepInputs, store: KVTensors, need_logits: bool, features: torch.Tensor | None = None
    ) -> DecoderOutput:
        self.passes.append(inputs.num_nodes)
        return self.inner.forward(inputs, store, need_logits, features)

    def draft(
        self,
        inputs: PackedInputs,
        store: KVTensors,
        features: torch.Tensor | None,
        k: int,
        temperature: Sequence[float] | None = None,
    ) -> Drafted:
        self.passes.append(inputs.nodes)
        found: Drafted = self.inner.draft(inputs, store, features, k, temperature)
        return found


class Checked(ModelDrafter):
    """Compares every node it proposes with the formula, computed from nothing each time."""

    def __init__(self, model: LayerModel, pool: PagePool, page_size: int, most_pending: int = 4096) -> None:
        shape = model.shape
        store = KVTensors.allocate(1, pool.total, shape.kv_heads, shape.head_dim, page_size, torch.float32)
        store.k.fill_(float("nan"))
        store.v.fill_(float("nan"))
        self.counting = Counting(quick(shape, model.weights))
        self.states = TargetStates(HIDDEN, torch.device("cpu"), most_pending)
        score = OneCallScorer(self.counting, store)
        super().__init__("heads", self.counting, store, pool, token_ids=model.token_ids, inputs=self.states, score=score, fan=3)
        self.oracle = ReferenceDecoder(shape, model.weights)
        self.checked = 0
        self.exact = True  # off where keys of pages may have been made without their states
        self.starts: dict[int, int] = {}  # by sequence, the first position whose state was told

    def observe(self, outcomes: Sequence[Outcome], hidden: torch.Tensor) -> None:
        for outcome in outcomes:
            self.starts.setdefault(
                outcome.view.seq_id, outcome.view.num_kv - outcome.num_nodes + len(outcome.tree) - len(outcome.path)
            )
        super().observe(outcomes, hidden)

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Proposal]:
        proposals = super().propose(views, budgets)
        for view, proposal in zip(views, proposals, strict=True):
            self.checked += len(proposal.token_ids)
            if self.exact:
                self._check(list(view.token_ids), self.starts[view.seq_id], proposal)
        return proposals

    def _check(self, text: list[int], start: int, proposal: Proposal) -> None:
        count, places = len(text), range(64)
        target = decoder().forward(
            toy.step_inputs([toy.Row(text, places, 0, score=[count - 1])], 16), toy.new_store(SHAPE, 64), False
        )
        store = toy.new_store(self.oracle.shape, 64)
        features = torch.cat((torch.zeros(1, HIDDEN), target.hidden[:-1]))
        features[start] = 0.0  # a cached prefix ends before it, and nobody told its last state
        inputs = toy.step_inputs([toy.Row(text, places, 0, score=[count - 1])], 16)
        out = self.oracle.forward(inputs, store, True, features)
        paths: list[tuple[int, ...]] = []
        scored = {(): (out.logits[0], out.hidden[-1])}  # type: ignore[index]
        for token, parent, rank, share in zip(
            proposal.token_ids, proposal.parents, proposal.ranks, proposal.confidence, strict=True
        ):
            above = paths[parent] if parent >= 0 else ()
            if above not in scored:
                state = scored[above[:-1]][1]
                for depth in range(len(above)):  # keys of other branches may lie there
                    at = scored[above[:depth]][1]
                    row = toy.Row([above[depth]], places, count + depth)
                    out = self.oracle.forward(toy.step_inputs([row], 16), store, True, at.unsqueeze(0))
                assert torch.equal(at, state)
                scored[above] = (out.logits[0], out.hidden[0])  # type: ignore[index]
            want = torch.softmax(scored[above][0], dim=0)
            assert IDS[int(want.topk(rank + 1).indices[-1])] == token
            assert share == pytest.approx(float(want.topk(rank + 1).values[-1]), rel=1e-3)
            paths.append((*above, token))


def engine_with(
    head: LayerModel,
    speculator: Speculator,
    *,
    num_pages: int = 96,
    page_size: int = 4,
    most_pending: int = 4096,
    **settings: int,
) -> tuple[Engine, Checked]:
    pool = PagePool(num_pages)
    drafter = Checked(head, pool, page_size, most_pending)
    engine = make_engine(
        decoder(), [drafter], speculator=speculator, num_pages=num_pages, page_size=page_size, pool=pool, **settings
    )
    return engine, drafter


class Plain(ShapeSpeculator):
    """All steps but every n-th pass as plain decoding, nobody being asked."""

    def __init__(self, shape: str, every: int) -> None:
        super().__init__(shape)
        self._every, self._steps = every, 0

    def rests(self, views: Sequence[SequenceView]) -> bool:
        self._steps += 1
        return self._steps % self._every != 0


@pytest.mark.parametrize("every", [2, 5, 12, 19])
def test_states_of_plain_steps_are_known_when_drafts_are_wanted_again(head: LayerModel, every: int) -> None:
    """Sequences come and go in the middle of a rest; every draft after it is the formula's of the target's own states."""
    prompts, counts = prompts_of([4, 6, 18, 3], seed=8), (40, 9, 40, 23)
    engine, drafter = engine_with(head, Plain("4x3", every))
    runner = Runner(engine)
    runner.add(*[greedy_request(i, prompts[i], counts[i]) for i in range(3)])
    for _ in range(15):
        runner.step()
    runner.add(greedy_request(3, prompts[3], counts[3]))
    for _ in range(6):
        runner.step()
    engine.cancel(2)
    runner.finish()
    for i in (0, 1, 3):
        assert tuple(runner.answers[i].token_ids) == golden(prompts[i], counts[i])
    assert drafter.checked > 0
    assert engine.stats()["drafter_faults"] == {"heads": 0}
    assert not drafter.states._runs


@pytest.mark.parametrize("shape", ["chain:4", "4x3", "mixed"])
@pytest.mark.parametrize("chunk", [256, 5])
def test_every_draft_is_the_formulas_and_no_text_changes(head: LayerModel, shape: str, chunk: int) -> None:
    """Prompts in one chunk and in many, three sequences side by side."""
    prompts = prompts_of([1, 6, 18], seed=1)
    engine, drafter = engine_with(head, ShapeSpeculator(shape), chunk_tokens=chunk)
    answers = run(engine, [greedy_request(i, p, COUNT) for i, p in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        assert tuple(answers[i].token_ids) == golden(prompt)
        assert answers[i].drafted > 0
    assert drafter.checked > 3 * COUNT
    assert engine.stats()["drafter_faults"] == {"heads": 0}


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_prefix_hit_finds_its_keys_filled(head: LayerModel, page_size: int) -> None:
    prompt, other = prompts_of([3 * page_size + 13, 13], seed=2)
    engine, drafter = engine_with(head, ShapeSpeculator("2x4"), page_size=page_size, num_pages=384 // page_size)
    runner = Runner(engine)
    for number in range(3):
        runner.add(greedy_request(number, prompt, COUNT), greedy_request(10 + number, other, COUNT))
        runner.finish()
    assert runner.answers[2].cached_tokens > 0
    assert all(tuple(runner.answers[number].token_ids) == golden(prompt) for number in range(3))
    assert engine.stats()["drafter_faults"] == {"heads": 0}
    assert drafter.checked > 0


def test_preemption_eviction_and_cancelling(head: LayerModel) -> None:
    prompts = prompts_of([6, 9, 12, 5, 20, 8], seed=3)
    engine, drafter = engine_with(head, ShapeSpeculator("2x4"), num_pages=20, context=64, chunk_tokens=8)
    drafter.exact = False
    runner = Runner(engine)
    for turn in range(2):
        runner.add(*[greedy_request(10 * turn + i, p, COUNT) for i, p in enumerate(prompts)])
        for _ in range(3):
            runner.step()
        engine.cancel(10 * turn + 4)  # in the middle of its prompt or before
        engine.cancel(10 * turn)
        runner.finish()
    assert engine.stats()["preemptions"] > 0
    for number, answer in runner.answers.items():
        if number % 10 not in (0, 4):
            assert tuple(answer.token_ids) == golden(prompts[number % 10])
    assert drafter.checked > 0
    assert not drafter.states._runs  # nothing of a sequence that left is kept
    assert engine.stats()["drafter_faults"] == {"heads": 0}


class Resting(ShapeSpeculator):
    """Wants no drafts but in every n-th step."""

    def __init__(self, every: int) -> None:
        super().__init__("2x4")
        self.every, self.steps = every, 0

    def budgets(self, views, limits, load):  # type: ignore[no-untyped-def]
        self.steps += 1
        found = super().budgets(views, limits, load)
        if self.steps % self.every == 0:
            return found
        return [replace(budget, chance=lambda *_: 0.0) for budget in found]


def test_nothing_is_computed_until_drafts_are_wanted(head: LayerModel) -> None:
    prompt = prompts_of([10], seed=4)[0]
    engine, drafter = engine_with(head, Resting(8))
    answer = run(engine, [greedy_request(0, prompt, 24)])[0]
    assert tuple(answer.token_ids) == golden(prompt, 24)
    assert answer.drafted > 0
    assert drafter.checked > 0
    assert drafter.counting.passes[0] == len(prompt) + 8  # prompt, what seven plain steps said, and the root: one pass
    engine, drafter = engine_with(head, Resting(10_000))
    run(engine, [greedy_request(0, prompt, 24)])
    assert drafter.counting.passes == []


def test_states_do_not_pile_up(head: LayerModel) -> None:
    """With room for 12 states they are worked off in the background, and drafts made later are right all the same."""
    prompt = prompts_of([60], seed=5)[0]
    engine, drafter = engine_with(head, Resting(20), most_pending=12, chunk_tokens=16)
    runner = Runner(engine)
    runner.add(greedy_request(0, prompt, 48))
    while engine.has_work():
        runner.step()
        assert drafter.states.pending(0) <= 12 + 16
    assert tuple(runner.answers[0].token_ids) == golden(prompt, 48)
    assert drafter.checked > 0


def test_requests_without_speculation_leave_nothing_behind(head: LayerModel) -> None:
    prompt = prompts_of([20], seed=6)[0]
    engine, drafter = engine_with(head, KeepAll())
    run(engine, [greedy_request(0, prompt, COUNT, speculation=OFF)])
    run(engine, [greedy_request(1, prompt, COUNT, speculation=SpeculationPolicy(drafters=("suffix",)))])
    assert drafter.counting.passes == []
    assert not drafter.states._runs


def test_states_nobody_told_are_zeros(head: LayerModel) -> None:
    """A prefix computed for a request without speculation: the head drafts on without its states, and no text changes."""
    prompt = prompts_of([33], seed=7)[0]
    pool = PagePool(96)
    shape = head.shape
    store = KVTensors.allocate(1, 96, shape.kv_heads, shape.head_dim, 4, torch.float32)
    drafter = ModelDrafter(
        "heads", quick(shape, head.weights), store, pool, token_ids=head.token_ids, inputs=TargetStates(HIDDEN, store.k.device)
    )
    engine = make_engine(decoder(), [SuffixDrafter(), drafter], speculator=ShapeSpeculator("4x3"), pool=pool)
    run(engine, [greedy_request(0, prompt, COUNT, speculation=OFF)])
    answer = run(engine, [greedy_request(1, prompt, COUNT)])[1]
    assert answer.cached_tokens == 32
    assert tuple(answer.token_ids) == golden(prompt)
    assert answer.drafted > 0
    assert not any(engine.stats()["drafter_faults"].values())


# --- trouble ---------------------------------------------------------------------------------------------------------


class Sick(Counting):
    def forward(
        self, inputs: StepInputs, store: KVTensors, need_logits: bool, features: torch.Tensor | None = None
    ) -> DecoderOutput:
        out = super().forward(inputs, store, need_logits, features)
        if len(self.passes) < 4:
            return out
        if len(self.passes) % 2:
            raise RuntimeError("out of luck")
        return DecoderOutput(out.hidden, out.argmax, torch.full_like(out.logits, float("nan")))  # type: ignore[arg-type]


def test_trouble_costs_drafts_only(head: LayerModel) -> None:
    prompts = prompts_of([6, 9], seed=8)
    pool = PagePool(96)
    store = KVTensors.allocate(1, 96, head.shape.kv_heads, head.shape.head_dim, 4, torch.float32)
    sick = Sick(quick(head.shape, head.weights))
    inputs = TargetStates(HIDDEN, store.k.device)
    drafter = ModelDrafter("heads", sick, store, pool, token_ids=head.token_ids, inputs=inputs)
    engine = make_engine(decoder(), [drafter], speculator=ShapeSpeculator("2x4"), pool=pool)
    answers = run(engine, [greedy_request(i, p, 40) for i, p in enumerate(prompts)])
    assert [tuple(answers[i].token_ids) for i in range(2)] == [golden(p, 40) for p in prompts]
    calls = len(sick.passes)
    run(engine, [greedy_request(9, prompts[0], 40)])
    assert len(sick.passes) == calls  # given up


@pytest.mark.parametrize(
    ("changes", "metadata", "says"),
    [
        ({"q": torch.zeros(32, HIDDEN + 1)}, {}, rf"q has shape \[32, {HIDDEN + 1}\]; \[32, {HIDDEN}\]"),
        ({"fc": torch.zeros(HIDDEN, HIDDEN)}, {}, rf"fc has shape \[{HIDDEN}, {HIDDEN}\]; \[{HIDDEN}, {2 * HIDDEN}\]"),
        ({"output": torch.zeros(7, HIDDEN)}, {}, rf"output has shape \[7, {HIDDEN}\]; \[{len(IDS)}, {HIDDEN}\]"),
        ({"down": torch.full((HIDDEN, 64), float("nan"))}, {}, "down holds values that are not finite"),
        ({"token_ids": torch.tensor([*IDS[:-1], VOCAB])}, {}, f"{VOCAB} tokens"),
        ({}, {"head_dim": "32"}, r"q has shape \[32, 96\]; \[64, 96\]"),
        ({}, {"q_heads": "two"}, "q_heads is 'two'"),
        ({}, {"kv_heads": "3"}, "divide evenly"),
        ({}, {"norm_eps": "-1"}, "norm_eps"),
        ({}, {"rope_theta": "nan"}, "rope_theta"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, changes: dict[str, torch.Tensor], metadata: dict[str, str], says: str
) -> None:
    with pytest.raises(ModelFileError, match=rf"bad\.safetensors: .*{says}"):
        load_attention_head(write(tmp_path / "bad.safetensors", changes, **metadata), Target())
