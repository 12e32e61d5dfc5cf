"""Figures of answers and of /metrics, from the events of a real engine: each counts what its definition says, and both agree.

The definitions are those of docs/speculation.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import toy
from engine_kit import SHAPES, ScriptDrafter, answers_of, greedy_request, make_engine, prompts_of, quick_rand

from kernels.batch import KVTensors, StepInputs
from kernels.decoder import Decoder, DecoderOutput
from server.generation import Generation
from server.metrics import Metrics
from server.ports import TextTools
from server.shapes import speculation, timings
from server.text import StopMatcher, TextStream
from spec.engine import Engine
from spec.request import Request, TokenEvent
from spec.stats import PHASES

PROMPTS = prompts_of([5, 12, 8], seed=21)
COUNT = 30


@cache
def decoder() -> Decoder:
    return quick_rand(layers=1)


@cache
def golden(prompt: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(toy.greedy(decoder(), prompt, COUNT))


def drafter(shape: str = "chain") -> ScriptDrafter:
    return ScriptDrafter(answers_of({prompt: golden(prompt) for prompt in PROMPTS}), SHAPES[shape])


def answered(
    engine: Engine,
    requests: Sequence[Request],
    text: TextTools,
    stops: Sequence[str] = (),
    on_step: Callable[[Sequence[TokenEvent], tuple[float, ...]], None] = lambda events, phases: None,
) -> tuple[list[Generation], Metrics]:
    """The requests' answers as the server makes them, and what it counted."""
    metrics = Metrics()
    made = {
        request.id: Generation(
            request,
            TextStream(text.tokenizer),
            StopMatcher(stops) if stops else None,
            lambda: None,
            lambda generation: engine.cancel(generation.request.id),
            metrics,
        )
        for request in requests
    }
    for request in requests:
        engine.add(request)
    while engine.has_work():
        events = engine.step()
        if engine.step_phases:
            metrics.on_step(engine.step_phases)
        on_step(events, engine.step_phases)
        for event in events:
            made[event.request_id].on_event(event, engine.step_phases)
    return list(made.values()), metrics


def counted(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(f"forespeak:{name}", labels) or 0.0


class NoNumbers(Decoder):
    """Its scores are NaN wherever this token stands."""

    def __init__(self, inner: Decoder, token: int) -> None:
        self.inner, self.token, self.shape = inner, token, inner.shape

    def forward(self, inputs: StepInputs, store: KVTensors, need_logits: bool = True) -> DecoderOutput:
        out = self.inner.forward(inputs, store, need_logits)
        hidden = out.hidden.clone()
        hidden[inputs.input_ids == self.token] = float("nan")
        return DecoderOutput(hidden, out.argmax, out.logits)


def test_a_pass_that_delivers_nothing_is_in_no_figure(text: TextTools) -> None:
    """The scores fail at the root of a tree: its nodes were verified, and nothing came of the pass."""
    bad = golden(PROMPTS[0])[6]  # the prompt's pass says one token, the first decoding pass five drafts and this one
    assert golden(PROMPTS[0]).index(bad) == 6
    engine = make_engine(NoNumbers(decoder(), bad), [drafter()])
    (generation,), metrics = answered(engine, [greedy_request(0, PROMPTS[0], COUNT)], text)
    assert generation.error is not None
    assert generation.figures.completion_tokens == 7
    assert engine.stats()["spec_decode_num_draft_tokens"] == {"script": 10}  # the engine's own count has both trees
    figures = speculation([generation.figures])
    assert figures["drafted"] == counted(metrics, "spec_decode_num_draft_tokens_total", drafter="script") == 5
    assert counted(metrics, "spec_decode_num_drafts_total") == 1
    assert figures["accepted"] == counted(metrics, "spec_decode_num_accepted_tokens_total", drafter="script") == 5
    piece = generation.take()
    assert piece is not None
    assert piece.drafted == 5


# --- where the time goes ---------------------------------------------------------------------------------------------


def test_phases_add_up_to_the_time_of_the_steps(text: TextTools) -> None:
    """A clock that ticks once whenever it is asked: every phase has its share, and nothing is lost or counted twice."""
    ticks = itertools.count()
    engine = make_engine(decoder(), [drafter()], chunk_tokens=8, clock=lambda: float(next(ticks)))
    requests = [greedy_request(i, prompt, 20) for i, prompt in enumerate(PROMPTS)]
    spent: list[tuple[float, ...]] = []
    heard: dict[int, list[tuple[float, ...]]] = {request.id: [] for request in requests}

    def on_step(events: Sequence[TokenEvent], phases: tuple[float, ...]) -> None:
        spent.append(phases)
        assert sum(phases) == engine.stats()["step_seconds"]
        for event in events:
            heard[event.request_id].append(phases)

    generations, metrics = answered(engine, requests, text, on_step=on_step)
    totals = dict(zip(PHASES, map(sum, zip(*spent, strict=True)), strict=True))
    assert engine.stats()["phase_seconds"] == totals
    assert min(totals.values()) > 0.0
    assert {phase: counted(metrics, "step_phase_seconds_total", phase=phase) for phase in PHASES} == totals
    assert counted(metrics, "step_seconds_sum") == sum(totals.values())
    assert counted(metrics, "step_seconds_count") == len(spent) == engine.stats()["steps"]
    assert len(spent) > max(len(steps) for steps in heard.values()) > 2  # steps of prompt chunks alone are steps too
    for generation, steps in zip(generations, heard.values(), strict=True):
        assert generation.figures.steps == len(steps)
        told = timings([generation.figures])["phases_ms"]
        assert told == {name: 1e3 * sum(step[i] for step in steps) for i, name in enumerate(PHASES)}
        assert told["verify"] > 0.0
    slowest = max((timings([g.figures])["phases_ms"] for g in generations), key=lambda told: sum(told.values()))
    assert timings([g.figures for g in generations])["phases_ms"] == slowest  # choices of one request share their steps


def test_a_step_without_rows_has_no_phases(text: TextTools) -> None:
    engine = make_engine(decoder())
    engine.add(greedy_request(1, PROMPTS[0], 20))
    assert engine.step_phases == ()
    engine.step()
    assert len(engine.step_phases) == len(PHASES)
    engine.cancel(1)
    assert [event.finish_reason for event in engine.step()] == ["cancelled"]
    assert engine.step_phases == ()


# --- tokens per pass -------------------------------------------------------------------------------------------------


def stop_in(prompt: tuple[int, ...], start: int, stop: int, text: TextTools) -> str:
    """Two visible characters that the answer says between these tokens."""
    said = text.tokenizer.decode(list(golden(prompt)[start:stop]))
    return next(said[i : i + 2] for i in range(len(said) - 1) if said[i : i + 2].isascii())


@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafted"])
def test_tokens_per_pass_can_be_computed_from_the_metrics(text: TextTools, drafted: bool) -> None:
    """Of all requests together, and nothing behind a stop string is in it."""
    stops = [stop_in(PROMPTS[0], 12, 20, text)]
    engine = make_engine(decoder(), [drafter("bushy")] if drafted else [])
    requests = [greedy_request(i, prompt, COUNT) for i, prompt in enumerate(PROMPTS)]
    generations, metrics = answered(engine, requests, text, stops)
    figures = [generation.figures for generation in generations]
    assert generations[0].finish_reason == "stop"
    passes, tokens = counted(metrics, "decode_passes_total"), counted(metrics, "decode_pass_tokens_total")
    assert passes == sum(f.steps - 1 for f in figures)
    assert tokens == sum(f.completion_tokens for f in figures) - len(figures)  # each prompt's pass says one
    assert tokens / passes == pytest.approx(speculation(figures)["acceptance_length"], abs=1e-4)
    assert (tokens / passes > 1.5) if drafted else (tokens == passes)
