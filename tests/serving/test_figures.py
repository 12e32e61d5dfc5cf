"""Figures of answers and of /metrics, from the events of a real engine: each counts what its definition says, and both agree.

The definitions are those of docs/speculation.md.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import pytest
import toy
from engine_kit import (
    NOISY,
    ORACLE,
    SHAPES,
    KeepAll,
    ScriptDrafter,
    Skill,
    answers_of,
    greedy_request,
    make_engine,
    prompts_of,
    quick_rand,
)

from kernels.batch import KVTensors, StepInputs
from kernels.decoder import Decoder, DecoderOutput
from server.generation import Generation
from server.metrics import Metrics
from server.ports import TextTools
from server.shapes import speculation, timings
from server.text import StopMatcher, TextStream
from spec.drafter import Budget, SequenceView
from spec.engine import Engine
from spec.request import PHASES, Request, TokenEvent
from spec.tree import DraftTree, Proposal

PROMPTS = prompts_of([5, 12, 8], seed=21)
COUNT = 30


@cache
def decoder() -> Decoder:
    return quick_rand(layers=1)


@cache
def golden(prompt: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(toy.greedy(decoder(), prompt, COUNT))


def drafter(shape: str = "chain", skill: Skill = ORACLE) -> ScriptDrafter:
    return ScriptDrafter(answers_of({prompt: golden(prompt) for prompt in PROMPTS}), SHAPES[shape], skill)


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


# --- acceptance by position ------------------------------------------------------------------------------------------


class Watching(KeepAll):
    """Remembers what every tree offered: (sequence, place in the answer, the tokens of the way to each node)."""

    def __init__(self) -> None:
        super().__init__()
        self.offered: list[tuple[int, int, set[tuple[int, ...]]]] = []

    def admit(
        self, views: Sequence[SequenceView], budgets: Sequence[Budget], proposals: Mapping[str, Sequence[Proposal]]
    ) -> list[DraftTree]:
        trees = super().admit(views, budgets, proposals)
        for view, tree in zip(views, trees, strict=True):
            ways: list[tuple[int, ...]] = []
            for token, parent in zip(tree.token_ids, tree.parents, strict=True):
                ways.append(((*ways[parent], token)) if parent >= 0 else (token,))
            self.offered.append((view.seq_id, len(view.token_ids) - view.prompt_len, set(ways)))
        return trees


@pytest.mark.parametrize("stop", [False, True], ids=["whole", "stop string"])
@pytest.mark.parametrize("shape", ["chain", "bushy", "2x4", "wide"])
def test_positions_have_their_denominators(text: TextTools, shape: str, stop: bool) -> None:
    """By definition, from the trees and the text: a position is judged in a pass when all before it were delivered drafts, a draft
    stood there, and the target's token for it was delivered."""
    watching = Watching()
    engine = make_engine(decoder(), [drafter(shape, NOISY)], speculator=watching)
    requests = [greedy_request(i, prompt, COUNT) for i, prompt in enumerate(PROMPTS)]
    stops = [stop_in(prompt, 12, 24, text) for prompt in PROMPTS] if stop else []
    generations, metrics = answered(engine, requests, text, stops)
    judged: dict[int, Counter[int]] = {request.id: Counter() for request in requests}
    accepted: dict[int, Counter[int]] = {request.id: Counter() for request in requests}
    drafts: Counter[int] = Counter()
    for seq_id, start, ways in watching.offered:
        answer = golden(PROMPTS[seq_id])[: generations[seq_id].figures.completion_tokens]
        if not ways or start >= len(answer):
            continue
        drafts[seq_id] += 1
        for depth in range(len(answer) - start):
            before = answer[start : start + depth]
            if any(way[:-1] == before for way in ways):
                judged[seq_id][depth] += 1
            accepted[seq_id][depth] += answer[start : start + depth + 1] in ways
    for generation in generations:
        figures, number = speculation([generation.figures]), generation.request.id
        assert figures["drafts"] == drafts[number]
        assert figures["judged_per_position"] == [judged[number][i] for i in range(len(figures["judged_per_position"]))]
        assert sum(figures["judged_per_position"]) == judged[number].total()
        assert sum(figures["accepted_per_position"]) == accepted[number].total() == figures["accepted"]
        assert figures["accepted_per_position"] == [accepted[number][i] for i in range(len(figures["accepted_per_position"]))]
    whole = speculation([generation.figures for generation in generations])
    for position, count in enumerate(whole["judged_per_position"]):
        assert counted(metrics, "spec_decode_num_judged_per_pos_total", position=str(position)) == count
    assert counted(metrics, "spec_decode_num_drafts_total") == whole["drafts"]
    assert 0 < whole["accepted_per_position"][0] < whole["judged_per_position"][0]  # not blind: some were refused
    if not stop:  # without text the engine's own counts are the same
        stats = engine.stats()["spec_decode_num_judged_per_pos"]
        assert stats[: len(whole["judged_per_position"])] == whole["judged_per_position"]
        assert sum(stats) == sum(whole["judged_per_position"])
