"""Seeded answers with penalties and log probabilities after a preemption and after a prefix-cache hit (SA-03): as without.

A noise keyed by anything but the absolute position, or counts that start over with the keys, would show. Known faults of that
kind are put in below, or these comparisons could be blind.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import toy
from engine_kit import (
    NOISY,
    OFF,
    SHAPES,
    SWAPPED,
    Answer,
    KeepAll,
    Runner,
    ScriptDrafter,
    Skill,
    answers_of,
    greedy_request,
    make_engine,
    prompts_of,
    quick,
    run,
)

import spec.accept
from drafters.suffix import SuffixDrafter
from kernels.decoder import Decoder
from spec.drafter import Drafter
from spec.engine import Engine
from spec.paging import Paging
from spec.plan import StepPlan
from spec.request import Request
from spec.scheduler import Scheduler
from spec.sequence import Sequence
from spec.shapes import ShapeSpeculator

COUNT = 24
LETTERS = (97, 98, 99, 100)
PROMPTS = [tuple(LETTERS[token % 4] for token in prompt) for prompt in prompts_of([6, 9, 12, 5], seed=3)]
OPTIONS: dict[str, dict[str, Any]] = {
    "penalties": {
        "temperature": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.6, "frequency_penalty": 0.4, "logprobs": 5,
    },
    "filters and words": {
        "temperature": 1.2, "top_k": 40, "min_p": 0.01, "bad_words": ((97, 98), (99,)), "min_tokens": 20, "logprobs": 20,
    },
    "greedy penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.7, "logprobs": 3},
}  # fmt: skip


@cache
def decoder() -> Decoder:
    """Flat enough that noise decides, and with a liking for four letters, so that penalties meet repetition."""
    shape, weights = toy.rand_weights(layers=2, scale_head=1.5)
    weights.lm_head.values[list(LETTERS)] *= 2.0  # type: ignore[union-attr]
    return quick(shape, weights)


def request(number: int, prompt: tuple[int, ...], options: dict[str, Any], count: int = COUNT) -> Request:
    return greedy_request(number, prompt, count, seed=100 + number % 10, **options)


@cache
def alone(number: int, prompt: tuple[int, ...], name: str, count: int = COUNT) -> Answer:
    """No drafts, no neighbours, no cache, room for everything."""
    made = make_engine(decoder(), prefix_cache=False)
    return run(made, [greedy_request(number, prompt, count, seed=100 + number % 10, speculation=OFF, **OPTIONS[name])])[number]


def said(answer: Answer) -> tuple[Any, ...]:
    return answer.token_ids, answer.logprobs, answer.finish_reason


def drafters(skill: Skill | None, name: str) -> list[Drafter]:
    if skill is None:
        return []
    truth = {prompt: alone(i, prompt, name).token_ids for i, prompt in enumerate(PROMPTS)}
    return [ScriptDrafter(answers_of(truth), SHAPES["2x4"], skill), SuffixDrafter()]


def crowded(skill: Skill | None, name: str, page_size: int = 4) -> tuple[Engine, dict[int, Answer]]:
    speculator = KeepAll() if skill is None else ShapeSpeculator("mixed")
    made = make_engine(
        decoder(), drafters(skill, name), speculator=speculator, page_size=page_size, num_pages=80 // page_size, context=80
    )
    return made, run(made, [request(i, prompt, OPTIONS[name]) for i, prompt in enumerate(PROMPTS)])


def interrupted(answers: dict[int, Answer]) -> int:
    """Answers that stood still for a while after their first tokens."""
    return sum(any(later - step > 1 for step, later in pairwise(answer.steps)) for answer in answers.values())


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("skill", [None, NOISY], ids=["plain", "drafted"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_preemption_changes_no_seeded_or_penalised_answer(name: str, skill: Skill | None, page_size: int) -> None:
    made, answers = crowded(skill, name, page_size)
    assert made.stats()["preemptions"] > 0
    assert interrupted(answers) > 0, "nobody was preempted in the middle of an answer"
    assert [said(answers[i]) for i in answers] == [said(alone(i, prompt, name)) for i, prompt in enumerate(PROMPTS)]
    if skill is not None:
        assert sum(answer.accepted for answer in answers.values()) > 10


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("skill", [None, SWAPPED], ids=["plain", "drafted"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_prefix_hit_changes_no_seeded_or_penalised_answer(name: str, skill: Skill | None, page_size: int) -> None:
    """The same prompts again, and second turns whose prompts hold the first answers."""
    speculator = KeepAll() if skill is None else ShapeSpeculator("mixed")
    made = make_engine(decoder(), drafters(skill, name), speculator=speculator, page_size=page_size, num_pages=640 // page_size)
    runner = Runner(made)
    for first in (0, 10):
        runner.add(*[request(first + i, prompt, OPTIONS[name]) for i, prompt in enumerate(PROMPTS)])
        runner.finish()
    turns = [(*prompt, *alone(i, prompt, name).token_ids, 7) for i, prompt in enumerate(PROMPTS)]
    runner.add(*[request(20 + i, turn, OPTIONS[name]) for i, turn in enumerate(turns)])
    answers = runner.finish()
    for i, (prompt, turn) in enumerate(zip(PROMPTS, turns, strict=True)):
        assert answers[10 + i].cached_tokens == (len(prompt) - 1) // page_size * page_size > 0
        assert answers[20 + i].cached_tokens >= (len(turn) - 2) // page_size * page_size
        assert said(answers[i]) == said(answers[10 + i]) == said(alone(i, prompt, name))
        assert said(answers[20 + i]) == said(alone(20 + i, turn, name))


X, Y = 5, 9


@pytest.mark.parametrize("how", ["fresh", "hit", "preempted"])
def test_what_each_penalty_counts(how: str) -> None:
    """SA-03 by hand: x = 5.0, y = 4.5 after every token; the prompt holds x five times and no y."""
    table = toy.script_table([], vocab=64)
    table[:, X], table[:, Y] = 5.0, 4.5
    cases: tuple[tuple[dict[str, Any], list[int]], ...] = (
        ({"presence_penalty": 2.0}, [X, Y, X, X, X, X]),  # the prompt is not counted; then both once
        ({"repetition_penalty": 1.3}, [Y, X, X, X, X, X]),  # the prompt is counted; 4.5 / 1.3 is below 5.0 / 1.3
        ({"frequency_penalty": 0.4}, [X, X, Y, X, Y, X]),
        ({"frequency_penalty": -0.4}, [X] * 6),
    )
    prompt = (X, 1, X, 2, X, 3, X, 4, X)
    pages, shared = (36, False) if how == "preempted" else (96, True)  # three of the four fit until their answers grow
    made = make_engine(quick(*toy.table_weights(table)), num_pages=pages, page_size=1, context=32, prefix_cache=shared)
    runner = Runner(made)
    if how == "hit":
        runner.add(greedy_request(99, prompt, 1))
        runner.finish()
    runner.add(*[greedy_request(i, prompt, 6, **options) for i, (options, _) in enumerate(cases)])
    answers = runner.finish()
    assert [answers[i].token_ids for i in range(4)] == [wanted for _, wanted in cases]
    assert answers[0].cached_tokens == (8 if how == "hit" else 0)
    assert (made.stats()["preemptions"] > 0) == (how == "preempted")
    assert (interrupted(answers) > 0) == (how == "preempted")


# --- known faults ----------------------------------------------------------------------------------------------------

_preempt, _match, _uniform = Scheduler._preempt, Paging.match, spec.accept.uniform


def noise_since_the_restart(patch: pytest.MonkeyPatch) -> None:
    restarted: dict[int, int] = {}

    def preempt(scheduler: Scheduler, sequence: Sequence, plan: StepPlan) -> None:
        restarted[sequence.sampling.seed] = len(sequence.token_ids)
        _preempt(scheduler, sequence, plan)

    def uniform(seed: int, position: int, *more: int) -> float:
        return _uniform(seed, position - restarted.get(seed, 0), *more)

    patch.setattr(Scheduler, "_preempt", preempt)
    patch.setattr(spec.accept, "uniform", uniform)


def counts_since_the_restart(patch: pytest.MonkeyPatch) -> None:
    def preempt(scheduler: Scheduler, sequence: Sequence, plan: StepPlan) -> None:
        _preempt(scheduler, sequence, plan)
        sequence.prompt_len = len(sequence.token_ids)

    patch.setattr(Scheduler, "_preempt", preempt)


def answer_from_the_hit_on(patch: pytest.MonkeyPatch) -> None:
    """What was computed because the cache did not hold it counts as the answer's."""

    def match(paging: Paging, sequence: Sequence) -> int:
        hits = _match(paging, sequence)
        if hits:
            sequence.prompt_len = sequence.num_kv
        return hits

    patch.setattr(Paging, "match", match)


@pytest.mark.parametrize("fault", [noise_since_the_restart, counts_since_the_restart], ids=lambda fault: fault.__name__)
def test_faults_at_a_preemption_are_caught(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = [said(alone(i, prompt, "penalties")) for i, prompt in enumerate(PROMPTS)]
    fault(monkeypatch)
    _, answers = crowded(None, "penalties")
    assert [said(answers[i]) for i in answers] != healthy


def test_a_fault_at_a_hit_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = [said(alone(i, prompt, "penalties")) for i, prompt in enumerate(PROMPTS)]
    answer_from_the_hit_on(monkeypatch)
    runner = Runner(make_engine(decoder()))
    for first in (0, 10):
        runner.add(*[request(first + i, prompt, OPTIONS["penalties"]) for i, prompt in enumerate(PROMPTS)])
        runner.finish()
    assert [said(runner.answers[10 + i]) for i in range(4)] != healthy
