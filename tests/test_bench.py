"""The bench's own arithmetic and clockwork: who asks when, what a figure means, how to run without a technique."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_rand_checkpoint
from toy_engine import ToyEngine

from bench import techniques
from server.commands.bench import figures
from server.commands.bench.command import alternate
from server.commands.bench.in_process import InProcess
from server.commands.bench.order import Order
from server.commands.bench.records import Answer, Run
from server.commands.bench.techniques import TECHNIQUES, everything, parse_without, without
from server.commands.bench.traffic import Admission, Batches, Message, Traffic, poisson_arrivals
from server.commands.bench.workshop import Workshop
from server.prompts import Prompt, read_prompts
from server.settings import Settings
from spec.errors import ConfigError
from spec.request import Request, SamplingParams, TokenEvent

STEP = 0.01


class Clock:
    """Time passes in engine steps and in waits only."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


class TimedToy:
    """The toy engine; each of its steps takes ten milliseconds of a clock."""

    def __init__(self, clock: Clock, batch: int = 64) -> None:
        self._toy = ToyEngine({"step_ms": 0.0, "run": 4.0, "batch": float(batch)})
        self._clock = clock

    def add(self, request: Request) -> None:
        self._toy.add(request)

    def step(self) -> Sequence[TokenEvent]:
        self._clock.now += STEP
        return self._toy.step()

    def stats(self) -> Mapping[str, Any]:
        return {}


def prompt(number: int, *later: str) -> Prompt:
    return Prompt(str(number), "all", ({"role": "user", "content": f"question {number}"},), later=later)


def toy_lane(
    clock: Clock, heard: list[Sequence[Message]] | None = None, admission: Admission | None = None, **options: Any
) -> InProcess:
    def encode(messages: Sequence[Message]) -> list[int]:
        if heard is not None:
            heard.append(messages)
        return list("/".join(m["content"] for m in messages).encode())[-400:]

    return InProcess(
        "toy", TimedToy(clock), encode, lambda ids: bytes(ids).decode(), lambda n: SamplingParams(max_tokens=9, seed=n),
        clock=clock, wait=clock.wait, admission=admission, **options,
    )  # fmt: skip


def answer(times: Sequence[float], tokens: Sequence[int] | None, **fields: Any) -> Answer:
    total = len(times) if tokens is None else sum(tokens)
    base = Answer(
        0,
        0,
        "all",
        due=1.0,
        chunk_times=tuple(times),
        chunk_tokens=None if tokens is None else tuple(tokens),
        tokens=total,
        finish_reason="stop",
    )
    return replace(base, **fields)


# ---- traffic


def test_arrivals_are_the_seeds() -> None:
    first, again, other = (poisson_arrivals(4.0, 4000, seed) for seed in (7, 7, 8))
    assert first == again != other
    gaps = [b - a for a, b in zip([0.0, *first], first, strict=False)]
    assert min(gaps) > 0
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.05)  # as exponential gaps are
    assert poisson_arrivals(8.0, 4000, 7) == pytest.approx([t / 2 for t in first])


def test_open_loop_asks_on_schedule_whatever_the_engine_does() -> None:
    runs = []
    for seed in (3, 3, 4):
        clock = Clock()
        lane = toy_lane(clock, seed=seed)
        runs.append(lane.run({i: prompt(i) for i in range(20)}, Traffic(rate=50.0), "r", lambda: None))
    one, same, other = ([(a.due, a.chunk_times) for a in run.answers] for run in runs)
    assert one == same != other
    assert [due for due, _ in one] == [100.0 + t for t in poisson_arrivals(50.0, 20, 3)]
    for due, times in one:
        # Taken by the first step that begins after it was asked: waiting for the step under way is part of its time.
        assert STEP <= times[0] - due <= 2 * STEP + 1e-9


def test_a_closed_loop_never_has_more_than_its_users() -> None:
    clock = Clock()
    run = toy_lane(clock).run({i: prompt(i) for i in range(10)}, Traffic(users=3), "r", lambda: None)
    edges = sorted(
        [(a.due, 1) for a in run.answers] + [(a.chunk_times[-1], -1) for a in run.answers], key=lambda e: (e[0], e[1])
    )
    together = list(itertools.accumulate(step for _, step in edges))
    assert max(together) == 3
    assert len(run.answers) == 10
    assert run.seconds == pytest.approx(4 * 3 * STEP)  # 1 + 4 + 4 tokens are three steps; ten answers by three users


def test_the_next_turn_follows_the_answer() -> None:
    heard: list[Sequence[Message]] = []
    run = toy_lane(Clock(), heard).run({5: prompt(5, "and then", "at last")}, Traffic(users=1), "r", lambda: None)
    assert [(a.prompt, a.turn) for a in run.answers] == [(5, 0), (5, 1), (5, 2)]
    assert [m["role"] for m in heard[2]] == ["user", "assistant", "user", "assistant", "user"]
    assert heard[1][1]["content"] == run.answers[0].text
    assert heard[2][3]["content"] == run.answers[1].text
    assert [m["content"] for m in heard[2]][::2] == ["question 5", "and then", "at last"]
    assert all(b.due >= a.chunk_times[-1] for a, b in itertools.pairwise(run.answers))


def test_a_refusal_is_counted_and_ends_its_conversation_only() -> None:
    long = Prompt("1", "all", ({"role": "user", "content": "x"},), later=("never asked",))

    def encode(messages: Sequence[Message]) -> list[int]:
        return [97] * (600 if messages[0]["content"] == "x" else 5)

    clock = Clock()
    lane = InProcess(
        "toy", TimedToy(clock), encode, lambda ids: "", lambda n: SamplingParams(max_tokens=4), clock=clock, wait=clock.wait
    )
    run = lane.run({0: long, 1: prompt(1, "more")}, Traffic(users=1), "r", lambda: None)
    assert [a.finish_reason for a in run.answers] == ["rejected", "length", "length"]
    found = figures.summary([run], {"ttft": 1000})
    assert (found["answers"], found["rejected"], found["errors"]) == (3, 1, 0)
    assert found["goodput"]["share"] == pytest.approx(2 / 3, abs=1e-3)
    assert found["first_error"] == "too long"


def test_static_batches_begin_when_the_last_one_has_ended() -> None:
    clock = Clock()
    prompts = {i: prompt(i) for i in range(6)}
    run = toy_lane(clock, admission=Batches(2)).run(prompts, Traffic(users=6), "r", lambda: None)
    batches = [run.answers[i : i + 2] for i in range(0, 6, 2)]
    for before, after in itertools.pairwise(batches):
        assert min(a.chunk_times[0] for a in after) > max(a.chunk_times[-1] for a in before)
    assert run.answers[-1].queue_seconds == pytest.approx(2 * 3 * STEP + 0.001)  # it had asked at the start


def test_lanes_take_turns_on_the_same_conversations() -> None:
    seen: list[tuple[str, list[int], str]] = []

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, prompts: Mapping[int, Prompt], traffic: Traffic, repeat: str, *rest: object) -> Run:
            seen.append((self.name, list(prompts), repeat))
            return Run((), 1.0)

    prompts = {i: prompt(i) for i in range(3)}
    runs = alternate([Recorder("a"), Recorder("b")], prompts, Traffic(users=1), 2, lambda: None)
    assert [name for name, _, _ in seen] == list("abbaab" + "baabba")
    assert [numbers for _, numbers, _ in seen[:6]] == [[0], [0], [1], [1], [2], [2]]
    assert {repeat for _, _, repeat in seen[6:]} == {"repeat 1"}
    assert [run.seconds for run in runs[0]] == [3.0, 3.0]
    seen.clear()
    alternate([Recorder("a")], prompts, Traffic(rate=1.0), 1, lambda: None)
    assert seen == [("a", [0, 1, 2], "repeat 0")]


# ---- figures


def test_latencies_of_one_answer() -> None:
    each = answer([1.5, 1.6, 1.9], [1, 3, 2])
    assert figures.ttft_ms(each) == pytest.approx(500)
    assert figures.e2e_ms(each) == pytest.approx(900)
    assert figures.tpot_ms(each) == pytest.approx(400 / 5)
    assert figures.chunk_gaps_ms(each) == pytest.approx([100, 300])
    assert figures.token_gaps_ms(each) == pytest.approx([100, 0, 0, 300, 0])
    assert figures.token_gaps_ms(answer([1.5, 1.6], None)) is None
    assert figures.tpot_ms(answer([1.5], [1])) is None
    assert figures.tpot_ms(answer([1.5], [4])) is None  # all at once: no time that could be shared out
    assert figures.ttft_ms(replace(each, finish_reason="error")) is None


@pytest.mark.parametrize(("percent", "expected"), [(0, 1.0), (50, 2.5), (90, 3.7), (100, 4.0)])
def test_percentiles_lie_between_values(percent: float, expected: float) -> None:
    assert figures.percentile([4.0, 1.0, 3.0, 2.0], percent) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({}, True),
        ({"ttft": 501}, True),
        ({"ttft": 499}, False),
        ({"tpot": 81, "e2e": 901, "gap": 301}, True),
        ({"tpot": 79}, False),
        ({"gap": 299}, False),
        ({"ttft": 501, "e2e": 899}, False),
    ],
)
def test_goodput_asks_for_every_limit(limits: dict[str, float], kept: bool) -> None:
    each = answer([1.5, 1.6, 1.9], [1, 3, 2])
    assert figures.keeps(each, limits) is kept
    assert not figures.keeps(replace(each, finish_reason="rejected"), limits)
    found = figures.summary([Run((each, replace(each, finish_reason="error")), 2.0)], limits)["goodput"]
    assert (found["share"], found["answers_per_second"]) == (kept / 2, kept / 2)


def test_limits_are_read_or_refused() -> None:
    assert figures.parse_limits("ttft=500, tpot=50") == {"ttft": 500.0, "tpot": 50.0}
    for wrong in ("ttft", "speed=3", "ttft=-1", "ttft=x", "ttft=nan"):
        with pytest.raises(ConfigError, match="--limit"):
            figures.parse_limits(wrong)


def test_acceptance_by_drafter_position_and_category() -> None:
    one = answer(
        [1, 2, 3],
        [1, 3, 2],
        passes=2,
        passed_tokens=5,
        drafted_by={"a": 4, "b": 2},
        accepted_by={"a": 3},
        accepted_per_position=(2, 1),
    )
    two = answer([1, 2], [1, 1], passes=1, passed_tokens=1, drafted_by={"b": 2}, accepted_by={}, category="qa")
    found = figures.summary([Run((one, two), 1.0)], {})
    assert found["acceptance_length"] == 2.0
    assert found["acceptance_per_position"] == [0.6667, 0.3333]
    assert found["by_drafter"] == {
        "a": {"drafted": 4, "accepted": 3, "acceptance": 0.75},
        "b": {"drafted": 4, "accepted": 0, "acceptance": 0.0},
    }
    rows = figures.by_category([Run((one, two), 1.0)], None)
    assert rows["all"]["acceptance_length"] == 2.5
    assert rows["all"]["acceptance_per_position"] == [1.0, 0.5]
    assert rows["qa"]["by_drafter"] == {"b": {"drafted": 2, "accepted": 0, "acceptance": 0.0}}


def test_phase_shares_are_of_all_runs() -> None:
    runs = [Run((), 1.0, {"verify": 3.0, "draft": 1.0}), Run((), 1.0, {"verify": 3.0, "draft": 1.0})]
    assert figures.summary(runs, {})["phase_shares"] == {"verify": 0.75, "draft": 0.25}


def test_ratios_are_taken_within_a_repeat() -> None:
    def run(rate: float) -> Run:
        return Run((answer([0.0, 1 / rate], [1, 1], token_ids=(1, 2)),), 1.0)

    ours, base = [run(2), run(30), run(400)], [run(1), run(10), run(100)]
    found = figures.comparison(ours, base)
    assert found["decode_speedup"] == 3.0
    assert found["identical"] is True
    base[1] = Run((replace(base[1].answers[0], token_ids=(1, 3)),), 1.0)
    assert figures.comparison(ours, base)["identical"] is False


# ---- prompts


def test_sharegpt_conversations(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    talks = [
        {"id": "a", "conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "ONE"}, {"from": "human", "value": "two"}]},
        {"id": "b", "conversations": [{"from": "gpt", "value": "I begin"}]},
        {"id": "c", "conversations": [{"from": "system", "value": "be brief"}, {"from": "user", "value": "three"}, {"from": "gpt", "value": "x"}]},
    ]  # fmt: skip
    path.write_text(json.dumps(talks, indent=1))
    first, last = read_prompts(path, turns="all")
    assert (first.id, first.messages, first.later) == ("a", ({"role": "user", "content": "one"},), ("two",))
    assert (last.id, [m["role"] for m in last.messages], last.later) == ("c", ["system", "user"], ())
    assert [p.later for p in read_prompts(path)] == [(), ()]
    path.write_text("\n".join(json.dumps(talk) for talk in talks))
    assert [p.id for p in read_prompts(path)] == ["a", "c"]
    path.write_text(json.dumps([talks[0], {"id": "d", "conversations": [{"from": "human"}]}]))
    with pytest.raises(ConfigError, match='item 2: every turn of a conversation needs a string "from"'):
        read_prompts(path)


def test_spec_bench_turns(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"question_id": 81, "category": "writing", "turns": ["one", "two"]}))
    [item] = read_prompts(path, turns="all")
    assert (item.id, item.category, item.later) == ("81", "writing", ("two",))


# ---- techniques


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("rand")
    return Settings(
        model=str(write_rand_checkpoint(folder / "model")), backend="reference", kv_memory=2**24, threads=1, drafters="suffix",
        tree_shape="chain:4", chunk_tokens=32, cache_dir=str(folder / "cache"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def full(settings: Settings) -> tuple[Workshop, Run]:
    workshop = Workshop(lambda n: SamplingParams(max_tokens=14, temperature=0.8, seed=n), 0)
    lane = workshop.lane("full", everything(settings))
    return workshop, lane.run(talks(), Traffic(users=3), "r", lambda: None)


def talks() -> dict[int, Prompt]:
    """Conversations that share a beginning of more than two pages."""
    shared = "one two three one two three one two three one two three "
    return {i: Prompt(str(i), "all", ({"role": "user", "content": shared + str(i)},), later=("and again",)) for i in range(4)}


@pytest.mark.parametrize("name", [name for name in TECHNIQUES if name != "quantised-weights"])
def test_without_a_technique_the_text_is_the_same_and_the_work_is_not(
    full: tuple[Workshop, Run], settings: Settings, name: str
) -> None:
    workshop, whole = full
    setup = without(everything(settings), [name], 3)
    run = workshop.lane(name, setup).run(talks(), Traffic(users=3), "r", lambda: None)
    assert [(a.prompt, a.turn, a.token_ids, a.finish_reason) for a in run.answers] == [
        (a.prompt, a.turn, a.token_ids, a.finish_reason) for a in whole.answers
    ]

    def starts(each: Run) -> list[tuple[float, float]]:
        return sorted((a.chunk_times[0], a.chunk_times[-1]) for a in each.answers)

    if name == "speculation":
        assert sum(sum(a.drafted_by.values()) for a in whole.answers) > 0
        assert not any(a.drafted_by for a in run.answers)
    elif name == "prefix-cache":
        assert sum(a.cached_tokens for a in whole.answers) > 0
        assert sum(a.cached_tokens for a in run.answers) == 0
    elif name == "batching":
        assert all(later[0] > earlier[1] for earlier, later in itertools.pairwise(starts(run)))
        assert not all(later[0] > earlier[1] for earlier, later in itertools.pairwise(starts(whole)))
    elif name == "continuous-batching":
        ordered = starts(run)
        batches = [ordered[i : i + 3] for i in range(0, len(ordered), 3)]
        assert all(min(a[0] for a in after) > max(b[1] for b in before) for before, after in itertools.pairwise(batches))
    elif name == "chunked-prefill":
        assert setup.settings.chunk_tokens > 10_000
    else:
        assert name == "kv-cache"
        assert all(a.passes == a.tokens - 1 for a in run.answers)


def test_without_a_kv_cache_every_token_computes_the_whole_text(full: tuple[Workshop, Run], settings: Settings) -> None:
    from server.compose import make_engine

    workshop, _ = full
    setup = without(everything(settings), ["kv-cache"], 1)
    inner = make_engine(workshop.parts(setup.settings))
    outer = setup.wrap(inner)
    outer.add(Request(5, tuple(range(97, 107)), SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)))
    events: list[TokenEvent] = []
    while not events or events[-1].finish_reason is None:
        events += outer.step()
    assert [e.request_id for e in events] == [5] * len(events)
    assert [e.started for e in events].count(True) == 1
    assert sum(len(e.token_ids) for e in events) == 6
    assert inner.stats()["prompt_tokens"] == 6 * 10  # and what was said meanwhile
    assert inner.stats()["row_steps"] == 0  # nothing ever went on from keys that were there


def test_the_ladder_is_written_between_the_marks_of_its_page_and_nowhere_else(tmp_path: Path) -> None:
    figures = dict.fromkeys(techniques.FIGURES, 1234.5)
    rungs = [
        techniques.Rung("kv-cache", 4, dict.fromkeys(techniques.FIGURES, 3.04), figures, dict.fromkeys(figures, 9.876), True),
        techniques.Rung("speculation", 1, figures, figures, dict.fromkeys(figures, None), True),
    ]
    page = tmp_path / "page.md"
    page.write_text("above\n<!-- ladder -->\nold\n<!-- end of ladder -->\nbelow\n")
    for _ in range(2):
        techniques.write_page(rungs, "Taken then.", page)
        lines = page.read_text().splitlines()
        assert (lines[:2], lines[-2:]) == (["above", "<!-- ladder -->"], ["<!-- end of ladder -->", "below"])
        assert "| none of them | 3.04 | 3.04 | 3.04 | 3.04 |" in lines
        assert "| + kv cache | " + " | ".join(["1,234 (9.88 ×)"] * 4) + " |" in lines
        assert "| + speculation, one user | " + " | ".join(["1,234"] * 4) + " |" in lines
        assert lines[-3].endswith("Taken then. The text was identical on every rung that must keep it.")
    page.write_text("no marks")
    with pytest.raises(ConfigError, match="has no <!-- ladder -->"):
        techniques.write_page(rungs, "", page)
    assert all(mark in techniques.PAGE.read_text() for mark in techniques.MARKS)


def test_unknown_techniques_are_named() -> None:
    assert parse_without("prefix-cache, speculation") == ("prefix-cache", "speculation")
    with pytest.raises(ConfigError, match="--without 'magic': techniques are speculation, "):
        parse_without("magic")


def test_an_order_keeps_seeds_in_range() -> None:
    order = Order(Path("x"), seed=2**63 - 1)
    assert 0 <= order.sampling(5).seed < 2**63
    assert math.isfinite(order.sampling(0).temperature)


# ---- the ladder


def test_the_ladder_begins_with_nothing_and_ends_with_everything(settings: Settings) -> None:
    assert sorted(techniques.LADDER) == sorted(TECHNIQUES)
    ground = techniques.setup_with(settings, (), 6)
    assert (ground.settings.weights, ground.settings.prefix_cache, ground.settings.drafters) == ("bfloat16", False, "none")
    assert ground.admission == Batches(1)
    assert ground.wrap is not everything(settings).wrap
    batched = techniques.setup_with(settings, techniques.LADDER[:3], 6)
    assert (batched.settings.weights, batched.admission) == ("native", Batches(6))
    assert batched.settings.chunk_tokens > 10_000
    assert techniques.setup_with(settings, techniques.LADDER, 6) == everything(settings)


def test_a_rung_is_measured_beside_the_one_below(full: tuple[Workshop, Run], settings: Settings) -> None:
    workshop, _ = full
    rung = techniques.climb(workshop, settings, talks(), "prefix-cache", 2, 1)
    assert rung.identical
    assert rung.below["cached_tokens"] == 0
    assert rung.figures["cached_tokens"] > 0
    assert rung.figures["tokens"] == rung.below["tokens"] == 4 * 2 * 14
    assert rung.ratios["tokens_per_second"] == pytest.approx(
        rung.figures["tokens_per_second"] / rung.below["tokens_per_second"], rel=0.01
    )


def test_the_workload_shares_a_beginning_and_has_long_documents() -> None:
    prompts = techniques.workload(10)
    assert {p.messages[0]["content"] for p in prompts.values()} == {techniques.SYSTEM}
    long = [i for i, p in prompts.items() if len(p.messages[1]["content"]) > 4000]
    assert long == [4, 9]
    assert all(p.later for i, p in prompts.items() if i not in long)
    assert len({p.messages[1]["content"] for p in prompts.values()}) == 10


def test_names_of_techniques_may_stand_in_any_order() -> None:
    full = everything(Settings())
    one, other = (without(full, names, 4).admission for names in itertools.permutations(("batching", "continuous-batching")))
    assert [one.room(running, waiting) for running in range(6) for waiting in range(6)] == [
        other.room(running, waiting) for running in range(6) for waiting in range(6)
    ]


def test_nothing_said_is_not_identical() -> None:
    assert figures.comparison([Run((), 1.0)], [Run((), 1.0)])["identical"] is False
