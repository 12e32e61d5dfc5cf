"""A tiny engine for the engine process, without torch: starts in a moment, answers like the real one, fails on demand.

The next token is a hash of (seed or 0 at temperature 0, position, last token), so an answer is a function of its request whatever
happened before, as with the real engine. Steps deliver runs of up to 4 tokens, the drafted ones marked "toy".

`Settings.tree_shape` carries the options: "step_ms=5,run=4,load_ms=0,batch=64,fail=0,fail_file=PATH". A prompt holding the byte token of one of these letters
fails in the step that would deliver its 6th token: `!` raises, `#` stops the process (SIGSTOP), `$` kills it (SIGKILL).
"""

from __future__ import annotations

import os
import signal
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from server.settings import Settings
from server.wire import Ready
from spec.errors import ConfigError, RequestError
from spec.request import Request, StepCounts, TokenEvent, TokenLogprob

VOCABULARY = 512
CONTEXT = 512
START, END = 257, 258
FAULTS = {ord("!"): "raise", ord("#"): "stop", ord("$"): "kill"}
FAULT_AT = 6


def next_token(request: Request, position: int, last: int) -> int:
    """Lower-case letters and spaces, most of the time."""
    seed = request.sampling.seed if request.sampling.temperature > 0 else 0
    value = zlib.crc32(f"{seed}/{position}/{last}/{request.prompt_ids[-1]}".encode())
    return 32 if value % 6 == 0 else 97 + value % 26


@dataclass
class _Answer:
    request: Request
    tokens: list[int]
    started: bool = False
    prompt_done: int = 0
    arrived: float = field(default_factory=time.perf_counter)


class ToyEngine:
    def __init__(self, options: dict[str, float]) -> None:
        self._options = options
        self._answers: dict[int, _Answer] = {}
        self._events: list[TokenEvent] = []
        self._seen: set[tuple[str, tuple[int, ...]]] = set()
        self._queries = self._hits = 0
        self.step_phases: tuple[float, ...] = ()

    def add(self, request: Request) -> None:
        if len(request.prompt_ids) >= CONTEXT:
            raise RequestError("too long", code="context_length_exceeded", param="messages")
        if request.sampling.grammar is not None and request.sampling.grammar.source == "refuse":
            raise RequestError("the grammar cannot be used", code="invalid_grammar", param="response_format")
        self._answers[request.id] = _Answer(request, list(request.generated_ids))

    def cancel(self, request_id: int) -> None:
        if self._answers.pop(request_id, None) is not None:
            self._events.append(TokenEvent(request_id, finish_reason="cancelled"))

    def has_work(self) -> bool:
        return bool(self._answers or self._events)

    def step(self) -> Sequence[TokenEvent]:
        start = time.perf_counter()
        time.sleep(self._options["step_ms"] / 1e3)
        events, self._events = self._events, []
        for answer in list(self._answers.values())[: int(self._options["batch"])]:
            events.append(self._advance(answer))
        seconds = time.perf_counter() - start
        self.step_phases = (0.1 * seconds, 0.6 * seconds, 0.1 * seconds, 0.1 * seconds, 0.1 * seconds)
        return events

    def _advance(self, answer: _Answer) -> TokenEvent:
        request, sampling = answer.request, answer.request.sampling
        cached = 0
        if not answer.started:
            key = (request.tenant, request.prompt_ids)
            cached = len(request.prompt_ids) // 16 * 16 if key in self._seen else 0
            cached = min(cached, (len(request.prompt_ids) - 1) // 16 * 16)
            self._seen.add(key)
            self._queries += len(request.prompt_ids)
            self._hits += cached
        room = min(sampling.max_tokens, CONTEXT - len(request.prompt_ids)) - len(answer.tokens)
        count = min(int(self._options["run"]) if answer.started else 1, room)
        run: list[int] = []
        reason = stop = None
        for _ in range(count):
            self._maybe_fail(request, len(answer.tokens))
            last = answer.tokens[-1] if answer.tokens else request.prompt_ids[-1]
            token = self._next(request, len(answer.tokens), last)
            answer.tokens.append(token)
            run.append(token)
            if token == END or token in sampling.stop_token_ids:
                reason, stop = "stop", token
                break
        if reason is None and len(answer.tokens) >= min(sampling.max_tokens, CONTEXT - len(request.prompt_ids)):
            reason = "length"
        first, answer.started = not answer.started, True
        if reason is not None:
            del self._answers[request.id]
        sources = tuple(["toy"] * (len(run) - 1) + [""]) if run else ()
        logprobs = ()
        if sampling.logprobs is not None:
            logprobs = tuple(TokenLogprob(-0.5, tuple((t + k, -0.5 - k) for k in range(sampling.logprobs))) for t in run)
        drafted = 0 if first or request.speculation.mode == "off" else 4
        if not drafted:
            sources = ("",) * len(run)
        accepted = sum(1 for source in sources if source)
        judged = min(drafted, accepted + 1)
        return TokenEvent(
            request.id, tuple(run), sources, logprobs, StepCounts(drafted, accepted, {"toy": drafted} if drafted else {}, {"toy": accepted} if accepted else {}, judged),
            started=first, cached_tokens=cached, queue_seconds=0.001, finish_reason=reason, stop_token=stop,
        )  # fmt: skip

    def _next(self, request: Request, position: int, last: int) -> int:
        return next_token(request, position, last)

    def _maybe_fail(self, request: Request, position: int) -> None:
        if position < FAULT_AT:
            return
        for token, fault in FAULTS.items():
            if token not in request.prompt_ids:
                continue
            if fault == "raise":
                raise RuntimeError("a fault was asked for")
            os.kill(os.getpid(), signal.SIGSTOP if fault == "stop" else signal.SIGKILL)

    def close(self) -> None: ...

    def stats(self) -> dict[str, Any]:
        running = min(len(self._answers), int(self._options["batch"]))
        return {
            "num_requests_running": running,
            "num_requests_waiting": len(self._answers) - running,
            "kv_pages_live": sum(-(-(len(a.request.prompt_ids) + len(a.tokens)) // 16) for a in self._answers.values()),
            "kv_pages_cached": 0,
            "kv_pages_free": 1024,
            "prefix_cache_queries": self._queries,
            "prefix_cache_hits": self._hits,
            "preemptions": 0,
        }


def build(settings: Settings) -> tuple[ToyEngine, Ready]:
    words = dict(item.partition("=")[::2] for item in settings.tree_shape.split(",") if item)
    flag = words.pop("fail_file", "")
    options = {"step_ms": 1.0, "run": 4.0, "load_ms": 0.0, "batch": 64.0, "fail": 0.0} | {k: float(v) for k, v in words.items()}
    time.sleep(options["load_ms"] / 1e3)
    if options["fail"] or (flag and os.path.exists(flag)):
        raise ConfigError("the toy engine was told not to start")
    ready = Ready("toy", VOCABULARY, CONTEXT, 1024, 16, ("toy",), "toy", 0.0)
    return ToyEngine(options), ready


class EchoEngine(ToyEngine):
    """Says the last message of its ChatML prompt, token by token; for a byte 1 the control token 256."""

    def _next(self, request: Request, position: int, last: int) -> int:
        ids = list(request.prompt_ids)
        starts = [i for i, token in enumerate(ids) if token == START]
        message = ids[starts[-2] : starts[-1]]  # the last one opens the answer
        text = message[message.index(ord("\n")) + 1 : message.index(END)]
        token = text[position] if position < len(text) else END
        return 256 if token == 1 else token


def build_echo(settings: Settings) -> tuple[ToyEngine, Ready]:
    engine, ready = build(settings)
    return EchoEngine(engine._options), ready
