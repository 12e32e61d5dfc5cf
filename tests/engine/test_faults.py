"""Trouble stays where it is: a drafter's costs speed, a request's ends that request, and everybody else's text is the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
import toy
from engine_kit import (
    SHAPES,
    KeepAll,
    Runner,
    ScriptDrafter,
    answers_of,
    greedy_request,
    make_engine,
    prompts_of,
    quick_rand,
    run,
)

from kernels.batch import KVTensors, StepInputs
from kernels.decoder import Decoder, DecoderOutput
from spec.accept import Acceptance, ScoredRow, accept
from spec.config import EngineConfig
from spec.drafter import Budget, Outcome, SequenceView
from spec.drafting import MAX_FAULTS
from spec.engine import Engine
from spec.errors import ConfigError
from spec.pages import PagePool
from spec.request import TokenEvent
from spec.speculator import Limit, Load, StepRecord
from spec.target import TargetModel, TargetScores
from spec.tree import DraftProbs, DraftTree, Proposal

PROMPTS = prompts_of([5, 12], seed=1)
COUNT = 12


@cache
def decoder() -> Decoder:
    return quick_rand(layers=1)


@cache
def golden(prompt: tuple[int, ...], count: int = COUNT) -> tuple[int, ...]:
    return tuple(toy.greedy(decoder(), prompt, count))


def truth() -> Callable[[SequenceView], Sequence[int]]:
    return answers_of({prompt: golden(prompt) for prompt in PROMPTS})


class Faulty(ScriptDrafter):
    """Raises in one method, from its second call on."""

    def __init__(self, method: str) -> None:
        super().__init__(truth(), SHAPES["chain"], name="faulty")
        self.method = method
        self.calls = 0

    def _maybe(self, method: str) -> None:
        if method == self.method:
            self.calls += 1
            if self.calls > 1:
                raise RuntimeError("no luck")

    def open(self, view: SequenceView) -> None:
        self._maybe("open")
        super().open(view)

    def close(self, seq_id: int) -> None:
        self._maybe("close")
        super().close(seq_id)

    def hopes(self, views: Sequence[SequenceView]) -> list[int]:
        self._maybe("hopes")
        return list(range(len(views)))

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Proposal]:
        self._maybe("propose")
        return super().propose(views, budgets)

    def observe(self, outcomes: Sequence[Outcome], hidden: torch.Tensor) -> None:
        self._maybe("observe")


@pytest.mark.parametrize("method", ["open", "hopes", "propose", "observe", "close"])
def test_a_drafter_that_raises_costs_speed_only(method: str, caplog: pytest.LogCaptureFixture) -> None:
    faulty = Faulty(method)
    good = ScriptDrafter(truth(), SHAPES["chain"], name="good")
    engine = make_engine(decoder(), [faulty, good])
    runner = Runner(engine)
    with caplog.at_level(logging.WARNING):
        for number in range(MAX_FAULTS + 3):
            runner.add(greedy_request(number, PROMPTS[number % 2], COUNT))
            runner.finish()
    for number, answer in runner.answers.items():
        assert tuple(answer.token_ids) == golden(PROMPTS[number % 2])
    assert engine.stats()["drafter_faults"] == {"faulty": MAX_FAULTS, "good": 0}
    assert len([line for line in caplog.messages if "switched off" in line]) == 1
    calls = faulty.calls
    runner.add(greedy_request(99, PROMPTS[0], COUNT))
    last = runner.finish()[99]
    assert faulty.calls == calls, "it is not asked any more"
    assert "good" in last.sources
    assert good.opened == set()


GARBAGE = {
    "beyond the vocabulary": Proposal((512,), (-1,), (0.5,), (0,)),
    "negative": Proposal((-3,), (-1,), (0.5,), (0,)),
    "huge": Proposal((2**70,), (-1,), (0.5,), (0,)),
    "too many": Proposal((1,) * 64, (-1,) * 64, (0.5,) * 64, (0,) * 64),
    "over budget": Proposal((1,) * 17, (-1,) * 17, (0.5,) * 17, (0,) * 17),
    "nan": Proposal((1,), (-1,), (float("nan"),), (0,)),
    "infinite": Proposal((1,), (-1,), (float("inf"),), (0,)),
    "child first": Proposal((1, 2), (1, -1), (0.5, 0.5), (0, 0)),
    "own parent": Proposal((1,), (0,), (0.5,), (0,)),
    "no such parent": Proposal((1,), (-2,), (0.5,), (0,)),
    "lengths": Proposal((1, 2), (-1,), (0.5, 0.5), (0, 0)),
    "negative rank": Proposal((1,), (-1,), (0.5,), (-1,)),
    "too deep": Proposal((1,) * 14, tuple(range(-1, 13)), (0.5,) * 14, (0,) * 14),
    "probs": Proposal((1, 2), (-1, -1), (0.5, 0.5), (0, 1), (DraftProbs(torch.tensor([1]), torch.tensor([1.0])),)),
}


class Hopeful(ScriptDrafter):
    """Has hope for some sequences only."""

    def __init__(self, name: str, wanted: Sequence[int]) -> None:
        super().__init__(truth(), SHAPES["chain"], name=name)
        self.wanted = wanted
        self.asked: set[int] = set()

    def hopes(self, views: Sequence[SequenceView]) -> list[int]:
        return [i for i, view in enumerate(views) if view.seq_id in self.wanted]

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Proposal]:
        self.asked |= {view.seq_id for view in views}
        return super().propose(views, budgets)


@pytest.mark.parametrize(("wanted", "other"), [((), ()), ((1,), ()), ((), (1,)), ((0,), (1,))])
def test_only_sequences_with_hope_are_asked_about(wanted: tuple[int, ...], other: tuple[int, ...]) -> None:
    one, two = Hopeful("one", wanted), Hopeful("two", other)
    engine = make_engine(decoder(), [one, two])
    answers = run(engine, [greedy_request(i, p, COUNT) for i, p in enumerate(PROMPTS)])
    assert [tuple(answers[i].token_ids) for i in (0, 1)] == [golden(p) for p in PROMPTS]
    assert one.asked == two.asked == {*wanted, *other}
    assert {i for i in (0, 1) if answers[i].drafted} == {*wanted, *other}


def test_a_drafter_that_cannot_tell_is_always_asked() -> None:
    silent, plain = Hopeful("silent", ()), ScriptDrafter(truth(), SHAPES["chain"], name="plain")
    engine = make_engine(decoder(), [silent, plain])
    answers = run(engine, [greedy_request(i, p, COUNT) for i, p in enumerate(PROMPTS)])
    assert all(answers[i].accepted > 0 for i in (0, 1))
    assert silent.asked == {0, 1}


class Garbage(ScriptDrafter):
    """Proposes one fixed thing for the first sequence, drafts well for the others."""

    def __init__(self, proposal: Proposal) -> None:
        super().__init__(truth(), SHAPES["chain"], name="garbage")
        self.proposal = proposal
        self.closed: list[int] = []

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Proposal]:
        good = super().propose(views, budgets)
        return [self.proposal if view.seq_id == 0 else tree for view, tree in zip(views, good, strict=True)]

    def close(self, seq_id: int) -> None:
        super().close(seq_id)
        self.closed.append(seq_id)


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_from_a_drafter_costs_its_nodes_only(what: str) -> None:
    drafter = Garbage(GARBAGE[what])
    engine = make_engine(decoder(), [drafter])
    answers = run(engine, [greedy_request(i, p, COUNT) for i, p in enumerate(PROMPTS)])
    for i, prompt in enumerate(PROMPTS):
        assert tuple(answers[i].token_ids) == golden(prompt)
    assert answers[0].drafted == 0
    assert answers[1].accepted > 0, "the other sequence keeps its drafter"
    assert engine.stats()["drafter_faults"] == {"garbage": 1}
    assert drafter.closed == [0, 1], "closed for the first sequence at once"


def test_the_wrong_number_of_proposals_is_a_fault() -> None:
    class Short(ScriptDrafter):
        def propose(self, views: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Proposal]:
            return super().propose(views, budgets)[:-1]

    engine = make_engine(decoder(), [Short(truth(), SHAPES["chain"])])
    answers = run(engine, [greedy_request(i, p, COUNT) for i, p in enumerate(PROMPTS)])
    assert [tuple(answers[i].token_ids) for i in (0, 1)] == [golden(p) for p in PROMPTS]
    assert engine.stats()["drafter_faults"] == {"script": MAX_FAULTS}


class Overdone(KeepAll):
    """A speculator with one fault."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def passed(self, steps: int, sequences: int, load: Load, target_ms: float, total_ms: float) -> None: ...

    def rests(self, views: Sequence[SequenceView]) -> bool:
        if self.fault == "rests raises":
            raise RuntimeError("no rest")
        return False

    def budgets(self, views: Sequence[SequenceView], limits: Sequence[Limit], load: Load) -> list[Budget]:
        if self.fault == "budgets raises":
            raise RuntimeError("no budget")
        budgets = super().budgets(views, limits, load)
        if self.fault == "budget too large":
            return [replace(budget, max_nodes=1000) for budget in budgets]
        if self.fault == "tree too deep":
            return [replace(budget, max_depth=min(budget.max_depth, 2)) for budget in budgets]
        return budgets

    def admit(
        self, views: Sequence[SequenceView], budgets: Sequence[Budget], proposals: Mapping[str, Sequence[Proposal]]
    ) -> list[DraftTree]:
        if self.fault == "admit raises":
            raise RuntimeError("no tree")
        trees = super().admit(views, budgets, proposals)
        if self.fault == "too few trees":
            return trees[1:]
        return [DraftTree((1, 2, 3), (-1, 0, 1))] * len(trees) if self.fault == "tree too deep" else trees

    def refused(self, sequences: int) -> Sequence[str]:
        if self.fault == "refused raises":
            raise RuntimeError("no refusal")
        return ()

    def record(self, step: StepRecord) -> None:
        if self.fault == "record raises":
            raise RuntimeError("no record")


@pytest.mark.parametrize(
    "fault",
    [
        "rests raises", "refused raises", "budgets raises", "budget too large", "admit raises", "too few trees", "tree too deep",
        "record raises",
    ],
)  # fmt: skip
def test_a_speculator_in_trouble_costs_speed_only(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    drafter = ScriptDrafter(truth(), SHAPES["chain"])
    engine = make_engine(decoder(), [drafter], speculator=Overdone(fault))
    answers = run(engine, [greedy_request(i, p, COUNT) for i, p in enumerate(PROMPTS)])
    assert [tuple(answers[i].token_ids) for i in (0, 1)] == [golden(p) for p in PROMPTS]
    assert engine.stats()["speculator_faults"] == MAX_FAULTS
    assert drafter.opened == set()
    assert len([line for line in caplog.messages if "switched off" in line]) == 1


class Poisoned:
    """A decoder that gives NaN to every row holding one token, as a broken weight or a broken key would."""

    def __init__(self, inner: Decoder, token: int) -> None:
        self.inner = inner
        self.shape = inner.shape
        self.token = token

    def forward(self, inputs: StepInputs, store: KVTensors, need_logits: bool) -> DecoderOutput:
        out = self.inner.forward(inputs, store, need_logits)
        bad = inputs.input_ids == self.token
        hidden, logits = out.hidden.clone(), None if out.logits is None else out.logits.clone()
        hidden[bad] = float("nan")
        if logits is not None:
            logits[bad[inputs.score_rows]] = float("nan")
        return DecoderOutput(hidden, out.argmax, logits)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("shape", [None, SHAPES["chain"]], ids=["plain", "chain"])
def test_scores_that_are_no_numbers_end_that_request(temperature: float, shape: tuple[int, ...] | None) -> None:
    place = next(i for i, token in enumerate(golden(PROMPTS[0])) if i > 3 and token not in golden(PROMPTS[0])[:i])
    bad_token = golden(PROMPTS[0])[place]
    assert bad_token not in golden(PROMPTS[1])
    drafters = [] if shape is None else [ScriptDrafter(truth(), shape)]
    engine = make_engine(Poisoned(decoder(), bad_token), drafters)
    # A logit_bias that changes nothing keeps the greedy token but needs logits.
    options = {} if temperature == 0.0 else {"logit_bias": {511: 0.0}}
    answers = run(engine, [greedy_request(i, p, COUNT, **options) for i, p in enumerate(PROMPTS)])
    assert (answers[0].finish_reason, answers[0].error_code) == ("error", "scores_not_finite")
    assert tuple(answers[0].token_ids) == golden(PROMPTS[0])[: place + 1]
    assert tuple(answers[1].token_ids) == golden(PROMPTS[1])
    assert engine.stats()["finished"] == {"error": 1, "length": 1}


@pytest.mark.parametrize("place", [2, 11], ids=["in the middle", "at the end"])
def test_a_prompt_that_cannot_be_scored_ends_that_request(place: int) -> None:
    """Wherever in the prompt the numbers fail, also when only the prompt was asked for; the other request never knows."""
    bad = next(
        i for i, token in enumerate(PROMPTS[1]) if i >= place and PROMPTS[1].count(token) == 1 and token not in PROMPTS[0]
    )
    engine = make_engine(Poisoned(decoder(), PROMPTS[1][bad]), chunk_tokens=4)
    answers = run(engine, [greedy_request(0, PROMPTS[0], COUNT), greedy_request(1, PROMPTS[1], 0, prompt_logprobs=1)])
    assert (answers[1].finish_reason, answers[1].error_code) == ("error", "scores_not_finite")
    assert not answers[1].token_ids
    assert tuple(answers[0].token_ids) == golden(PROMPTS[0])


def test_an_exception_about_one_row_ends_that_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaking(rows: Sequence[ScoredRow], scores: TargetScores, **options: object) -> list[Acceptance]:
        if any(row.view.seq_id == 0 and len(row.view.token_ids) > 8 for row in rows):
            raise ValueError("cannot read this row")
        return accept(rows, scores, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("spec.step.accept", breaking)
    engine = make_engine(decoder(), [ScriptDrafter(truth(), (1,))])
    answers = run(engine, [greedy_request(i, p, COUNT) for i, p in enumerate(PROMPTS)])
    assert (answers[0].finish_reason, answers[0].error_code) == ("error", "internal_error")
    assert tuple(answers[0].token_ids) == golden(PROMPTS[0])[: len(answers[0].token_ids)] != ()
    assert tuple(answers[1].token_ids) == golden(PROMPTS[1])


def test_a_failing_commit_ends_that_request(monkeypatch: pytest.MonkeyPatch) -> None:
    from spec.commit import commit

    def breaking(sequence, *rest):  # type: ignore[no-untyped-def]
        if sequence.seq_id == 0 and sequence.num_generated == 3:
            raise ValueError("cannot commit this row")
        return commit(sequence, *rest)

    monkeypatch.setattr("spec.step.commit", breaking)
    engine = make_engine(decoder())
    answers = run(engine, [greedy_request(i, p, COUNT) for i, p in enumerate(PROMPTS)])
    assert (answers[0].finish_reason, len(answers[0].token_ids)) == ("error", 3)
    assert tuple(answers[1].token_ids) == golden(PROMPTS[1])


def test_keys_of_a_broken_pass_are_not_shared() -> None:
    engine = make_engine(Poisoned(decoder(), PROMPTS[1][11]))
    answer = run(engine, [greedy_request(1, PROMPTS[1], COUNT)])[1]
    assert answer.finish_reason == "error"
    assert engine.pool.cached == 0


def test_sizes_that_do_not_fit_are_refused() -> None:
    shape = decoder().shape
    store = KVTensors.allocate(shape.layers, 8, shape.kv_heads, shape.head_dim, 4, torch.float32)
    target = TargetModel(decoder(), store)
    for config, pool, message in (
        (EngineConfig(num_pages=9, page_size=4, context=64), None, "8 pages of 4"),
        (EngineConfig(num_pages=8, page_size=8, context=64), None, "8 pages of 4"),
        (EngineConfig(num_pages=8, page_size=4, context=64), PagePool(7), "7 pages"),
        (EngineConfig(num_pages=8, page_size=4, context=100_000), None, "positions end at 1024"),
    ):
        with pytest.raises(ConfigError, match=message):
            Engine(config, target, [], KeepAll(), (), pool=pool)


def test_events_say_when_a_request_started_and_how_long_it_waited() -> None:
    now = 100.0
    shape = decoder().shape
    store = KVTensors.allocate(shape.layers, 32, shape.kv_heads, shape.head_dim, 4, torch.float32)
    config = EngineConfig(num_pages=32, page_size=4, context=64, max_sequences=1)
    engine = Engine(config, TargetModel(decoder(), store), [], KeepAll(), (), clock=lambda: now)
    engine.add(greedy_request(1, PROMPTS[0], 2))
    engine.add(greedy_request(2, PROMPTS[1], 2))
    events: list[TokenEvent] = []
    while engine.has_work():
        now += 1.0
        events += engine.step()
    assert [(e.request_id, e.started, e.queue_seconds) for e in events] == [
        (1, True, 1.0),
        (1, False, 0.0),
        (2, True, 3.0),
        (2, False, 0.0),
    ]


@pytest.mark.parametrize("patient", [True, False])
def test_looks_become_rarer_where_nothing_comes_of_them_and_a_newcomer_is_looked_at_at_once(patient: bool) -> None:
    looks: list[tuple[int, ...]] = []

    class Looking(Hopeful):
        def hopes(self, views: Sequence[SequenceView]) -> list[int]:
            looks.append(tuple(view.seq_id for view in views))
            return super().hopes(views)

    speculator = KeepAll()
    speculator.patient = patient
    engine = make_engine(decoder(), [Looking("one", ())], speculator=speculator)
    steps = 200
    engine.add(greedy_request(0, PROMPTS[0], steps + 10))
    for _ in range(steps):
        engine.step()
    if not patient:
        assert len(looks) == steps - 1, "one that wants every position gets it"
        return
    assert steps / 4 <= len(looks) < steps / 2, "one step in four, after a while"
    engine.add(greedy_request(1, PROMPTS[1], 10))
    seen = len(looks)
    while not any(1 in views for views in looks[seen:]):
        assert engine.has_work()
        engine.step()
    began = len(looks)
    for _ in range(4):
        engine.step()
    assert began < len(looks) <= began + 2, "and half of what was learnt of vain looks still counts: it is one of two"


def test_newcomers_among_many_do_not_make_everybody_look_at_every_step() -> None:
    """Sixteen at once, a new one every four steps; a look costs every one of them."""
    looks: list[int] = []

    class Looking(Hopeful):
        def hopes(self, views: Sequence[SequenceView]) -> list[int]:
            looks.append(len(views))
            return super().hopes(views)

    speculator = KeepAll()
    speculator.patient = True
    engine = make_engine(decoder(), [Looking("one", ())], speculator=speculator, num_pages=400)
    steps = 400
    for i in range(16):
        engine.add(greedy_request(i, PROMPTS[0], 4 + 4 * i))
    for step in range(steps):
        if step % 4 == 0:
            engine.add(greedy_request(100 + step, PROMPTS[1], 60))
        engine.step()
    assert max(looks) >= 14
    assert len(looks) < 0.75 * steps
