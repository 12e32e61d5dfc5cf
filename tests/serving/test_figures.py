"""Figures of answers and of /metrics, from the events of a real engine: each counts what its definition says, and both agree.

The definitions are those of docs/speculation.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import toy
from engine_kit import SHAPES, ScriptDrafter, answers_of, greedy_request, make_engine, prompts_of, quick_rand

from kernels.batch import KVTensors, StepInputs
from kernels.decoder import Decoder, DecoderOutput
from server.generation import Generation
from server.metrics import Metrics
from server.ports import TextTools
from server.shapes import speculation
from server.text import StopMatcher, TextStream
from spec.engine import Engine
from spec.request import Request

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
    engine: Engine, requests: Sequence[Request], text: TextTools, stops: Sequence[str] = ()
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
        for event in engine.step():
            made[event.request_id].on_event(event)
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
