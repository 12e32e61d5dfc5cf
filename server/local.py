"""Runs prompts through an engine in this process: what generate, verify and bench stand on. Knows no sockets.

The engine is stepped here exactly as the engine process steps it; text is made with the server's own incremental decoder.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from server.generation import count_up_to
from spec.engine import Engine
from spec.errors import RequestError
from spec.request import Request, StepCounts, TokenEvent

T = TypeVar("T")


@dataclass(slots=True)
class Completion:
    """One finished answer with its figures. Times are seconds on one monotonic clock."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    step_sizes: list[int] = field(default_factory=list)  # delivered tokens of each target pass, the first from prefill
    token_times: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    error: str | None = None
    cached_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_by: dict[str, int] = field(default_factory=dict)
    accepted_by: dict[str, int] = field(default_factory=dict)
    drafts: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    judged_per_position: list[int] = field(default_factory=list)
    submitted: float = 0.0
    queue_seconds: float = 0.0

    @property
    def ttft(self) -> float:
        """Seconds from submission to the first token."""
        return self.token_times[0] - self.submitted if self.token_times else float("nan")

    @property
    def decode_seconds(self) -> float:
        """Seconds from the first token to the last."""
        return self.token_times[-1] - self.token_times[0] if len(self.token_times) > 1 else 0.0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens a target pass delivered after the first token."""
        steps = self.step_sizes[1:]
        return sum(steps) / len(steps) if steps else 0.0

    def speculation(self) -> dict[str, object]:
        return {
            "drafted": self.drafted,
            "accepted": self.accepted,
            "steps": len(self.step_sizes),
            "acceptance_length": round(self.acceptance_length, 4),
            "drafts": self.drafts,
            "accepted_per_position": self.accepted_per_position,
            "judged_per_position": self.judged_per_position,
            "by_drafter": {
                name: {"drafted": count, "accepted": self.accepted_by.get(name, 0)}
                for name, count in sorted(self.drafted_by.items())
            },
        }

    def timings(self) -> dict[str, float]:
        tokens = len(self.token_times) - 1
        return {
            "queue_ms": round(self.queue_seconds * 1e3, 3),
            "ttft_ms": round(self.ttft * 1e3, 3),
            "decode_ms": round(self.decode_seconds * 1e3, 3),
            "tokens_per_second": round(tokens / self.decode_seconds, 2) if self.decode_seconds > 0 else 0.0,
        }

    def usage(self) -> dict[str, object]:
        prompt, answer = len(self.request.prompt_ids), len(self.token_ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def take(self, event: TokenEvent, now: float) -> None:
        """Add one event's tokens and figures."""
        if event.started:
            self.cached_tokens, self.queue_seconds = event.cached_tokens, event.queue_seconds
        if event.token_ids:
            self.step_sizes.append(len(event.token_ids))
            self.token_times.extend([now] * len(event.token_ids))
            self._count_drafts(event.counts)
        self.token_ids.extend(event.token_ids)
        self.sources.extend(event.sources)
        if event.finish_reason is not None:
            self.finish_reason, self.error = event.finish_reason, event.error

    def _count_drafts(self, counts: StepCounts) -> None:
        self.drafts += counts.drafted > 0
        self.drafted += counts.drafted
        self.accepted += counts.accepted
        count_up_to(counts.accepted, self.accepted_per_position)
        count_up_to(counts.judged, self.judged_per_position)
        for mine, theirs in ((self.drafted_by, counts.drafted_by), (self.accepted_by, counts.accepted_by)):
            for name, count in theirs.items():
                mine[name] = mine.get(name, 0) + count


def settle() -> None:
    """Call once all is loaded and warm: what is there lives as long as the process, and the garbage collector need not walk
    it in the middle of a step (the engine process does the same)."""
    gc.collect()
    gc.freeze()


def run_requests(
    engine: Engine,
    requests: Sequence[Request],
    concurrency: int = 1,
    on_finish: Callable[[Completion], None] | None = None,
    before_step: Callable[[int], None] | None = None,
) -> list[Completion]:
    """Answer all requests, at most `concurrency` at a time, and return their completions in the order given.

    A request the engine refuses becomes a completion with finish_reason "error". `before_step(n)` is called ahead of step n.
    """
    return in_turn([stepping(engine, requests, concurrency, on_finish, before_step)])[0]


def stepping(
    engine: Engine,
    requests: Sequence[Request],
    concurrency: int = 1,
    on_finish: Callable[[Completion], None] | None = None,
    before_step: Callable[[int], None] | None = None,
    after_step: Callable[[], None] | None = None,
) -> Generator[None, None, list[Completion]]:
    """`run_requests`, stopping ahead of every step. `after_step` is called as soon as a step is over."""
    waiting = deque(requests)
    done: dict[int, Completion] = {}
    running: dict[int, Completion] = {}
    step = 0
    while waiting or running:
        while waiting and len(running) < concurrency:
            request = waiting.popleft()
            completion = Completion(request, submitted=time.perf_counter())
            try:
                engine.add(request)
            except RequestError as error:
                completion.finish_reason, completion.error = "error", str(error)
                done[request.id] = completion
                continue
            running[request.id] = completion
        if not running:
            break
        yield
        if before_step is not None:
            before_step(step)
        step += 1
        events = engine.step()
        now = time.perf_counter()
        if after_step is not None:
            after_step()
        for event in events:
            completion = running[event.request_id]
            completion.take(event, now)
            if event.finish_reason is not None:
                done[event.request_id] = running.pop(event.request_id)
                if on_finish is not None:
                    on_finish(completion)
    return [done[request.id] for request in requests]


def in_turn(runs: Sequence[Generator[None, None, T]]) -> list[T]:
    """All runs, a step of each at a time until every one is over: what the machine does meanwhile it does to all of them."""
    results: dict[int, T] = {}
    while len(results) < len(runs):
        for number, run in enumerate(runs):
            if number in results:
                continue
            try:
                next(run)
            except StopIteration as end:
                results[number] = end.value
    return [results[number] for number in range(len(runs))]
