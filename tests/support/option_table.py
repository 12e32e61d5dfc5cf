"""Every option a request may carry, and answers as a client gets them: engine, text, stop strings, choices.

`PAIRS` is generated: no option, each alone, every two that do not set the same field.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import toy
from checkpoint_tokenizer import IM_END, VOCABULARY, build_tokenizer
from engine_kit import KeepAll, make_engine, prompts_of, quick
from serving import toy_text

from kernels.decoder import Decoder
from kernels.linear import DenseWeight
from server.generation import Generation
from server.metrics import Metrics
from server.text import StopMatcher, TextStream
from server.tokenizer import Tokenizer
from spec.drafter import Drafter, SequenceView
from spec.engine import Engine
from spec.grammar import GrammarCompiler
from spec.request import FinishReason, GrammarSpec, Request, SamplingParams, SpeculationPolicy, TokenLogprob
from spec.speculator import Speculator

A, B, C = b"abc"
BASE: dict[str, Any] = {"max_tokens": 16, "temperature": 1.0, "seed": 11}
SCHEMA = {"type": "object", "properties": {"k": {"enum": ["y", "zz"]}}, "required": ["k"], "additionalProperties": False}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.4},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.4},
    "min_p": {"min_p": 0.3},
    "seed": {"seed": 2**63 - 1},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "presence_penalty": {"presence_penalty": 1.9},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "logit_bias": {"logit_bias": {A: -100.0, B: 2.0, 400: 1.0}},
    "bad_words": {"bad_words": ((A,), (B, B), (C, B, A))},
    "min_tokens": {"min_tokens": 12},
    "stop_token_ids": {"stop_token_ids": (C,)},
    "ignore_eos": {"ignore_eos": True},
    "logprobs": {"logprobs": 3},
    "logprobs 20": {"logprobs": 20},
    "max_tokens": {"max_tokens": 3},
    "regex": {"grammar": GrammarSpec("regex", r"[abc](ab|bc){1,3}[abc]{2}xyz[abc]{0,9}")},
    "json_object": {"grammar": GrammarSpec("json_object")},
    "json_schema": {"grammar": GrammarSpec("json_schema", json.dumps(SCHEMA))},
    "lark": {"grammar": GrammarSpec("grammar", 'start: /[abc]{2,5}/ "xy" tail\ntail: "z" /[bc]{1,6}/ | /[ab]{1,4}/')},
    "stop": {"stop": ("ca", "Yu", "ab", "lu", "cc", "Wa", "aI", "s")},
    "n 2": {"n": 2},
    "n 8": {"n": 8},
}
PAIRS: list[tuple[str, ...]] = [
    (), *((name,) for name in OPTIONS), *(p for p in combinations(OPTIONS, 2) if not OPTIONS[p[0]].keys() & OPTIONS[p[1]].keys())
]  # fmt: skip
PROMPTS = prompts_of((4 + i % 9 for i in range(len(PAIRS))), seed=3)


@cache
def decoder() -> Decoder:
    """RAND with a liking for a, b, c and the end token, so that stops, words and grammars meet real choices."""
    shape, weights = toy.rand_weights(layers=1, scale_head=2.0)
    assert isinstance(weights.lm_head, DenseWeight)
    liking = weights.lm_head.values.new_zeros(VOCABULARY)
    liking[[A, B, C, IM_END]] = 5.0
    return quick(shape, replace(weights, lm_head=replace(weights.lm_head, bias=liking)))


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(build_tokenizer().to_str(), (IM_END,), VOCABULARY)


@cache
def tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        made = toy_text(Path(folder)).tokenizer
    assert isinstance(made, Tokenizer)
    return made


def options_of(names: Sequence[str]) -> dict[str, Any]:
    """Of two options for one field the later one wins."""
    merged = dict(BASE)
    for name in names:
        merged |= OPTIONS[name]
    return merged


@dataclass
class Heard:
    """One choice as its client has it. What is compared must be equal to the bit."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    stop_token: int | None
    error_code: str | None
    counted: int  # tokens in `usage`
    accepted: int = field(compare=False)
    sources: frozenset[str] = field(compare=False)


def make(
    drafters: Sequence[Drafter] = (), *, speculator: Speculator | None = None, num_pages: int = 400, max_sequences: int = 40
) -> Engine:
    return make_engine(
        decoder(), drafters, speculator=speculator or KeepAll(), eos_ids=(IM_END,), num_pages=num_pages, page_size=4,
        context=64, max_sequences=max_sequences, grammars=compiler(),
    )  # fmt: skip


def hear(engine: Engine, cases: Sequence[tuple[int, Mapping[str, Any]]], policy: SpeculationPolicy) -> dict[int, list[Heard]]:
    """Every case, (number, options), to its end, all at once; by number its choices. Request ids are 100 * number + choice."""
    meter = Metrics()
    running: dict[int, Generation] = {}
    ended: list[Generation] = []
    for number, case in cases:
        options = dict(case)
        stops, n = options.pop("stop", ()), options.pop("n", 1)
        for choice in range(n):  # as the service begins them
            sampling = SamplingParams(**options | {"seed": (options["seed"] + choice) % 2**63})
            request = Request(100 * number + choice, PROMPTS[number], sampling, policy)
            stream, matcher = TextStream(tokenizer()), StopMatcher(stops) if stops else None
            running[request.id] = Generation(request, stream, matcher, lambda: None, ended.append, meter)
            engine.add(request)
    while engine.has_work():
        for event in engine.step():
            running[event.request_id].on_event(event)
        engine.check()
        while ended:
            engine.cancel(ended.pop().request.id)  # no effect when the engine ended it itself
    engine.idle_check()
    heard: dict[int, list[Heard]] = {number: [] for number, _ in cases}
    for key, made in running.items():
        assert made.ended
        heard[key // 100].append(_heard(made))
    return heard


def _heard(made: Generation) -> Heard:
    piece = made.take()
    ids, logprobs = (tuple(piece.token_ids), tuple(piece.logprobs)) if piece is not None else ((), ())
    return Heard(
        ids, piece.text if piece is not None else "", logprobs, made.finish_reason, made.stop_token,
        None if made.error is None else made.error.code, made.figures.completion_tokens, made.figures.accepted,
        frozenset(name for name, (_, accepted) in made.figures.by_drafter.items() if accepted),
    )  # fmt: skip


def truth_of(plain: Mapping[int, Sequence[Heard]]) -> Any:
    """What really comes next in each choice, for drafters that know the answers."""

    def truth(view: SequenceView) -> Sequence[int]:
        answer = plain[view.seq_id // 100][view.seq_id % 100].token_ids
        return answer[len(view.token_ids) - view.prompt_len :]

    return truth
