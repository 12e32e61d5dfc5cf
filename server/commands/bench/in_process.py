"""Traffic through an engine in this process, stepped here as the engine process steps it. Knows no sockets."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from server.commands.bench.records import Answer, Run
from server.commands.bench.traffic import Admission, AtOnce, Message, Source, Traffic, Turn
from server.local import Completion
from server.prompts import Prompt
from spec.errors import RequestError
from spec.request import Request, SamplingParams, TokenEvent


class Steps(Protocol):
    """What is needed of an engine."""

    def add(self, request: Request) -> None: ...
    def step(self) -> Sequence[TokenEvent]: ...
    def stats(self) -> Mapping[str, Any]: ...


class InProcess:
    """A lane over an engine. `encode` makes a conversation's token ids, `decode` an answer's text; `sampling` is given a
    number that is the same for the same turn in every lane. `clock` and `wait` are seconds; tests bring their own."""

    def __init__(
        self,
        name: str,
        engine: Steps,
        encode: Callable[[Sequence[Message]], Sequence[int]],
        decode: Callable[[Sequence[int]], str],
        sampling: Callable[[int], SamplingParams],
        *,
        admission: Admission | None = None,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self.name = name
        self._engine = engine
        self._encode = encode
        self._decode = decode
        self._sampling = sampling
        self._admission = admission or AtOnce()
        self._seed = seed
        self._clock = clock
        self._wait = wait
        self._ids = itertools.count(1)

    def run(
        self, prompts: Mapping[int, Prompt], traffic: Traffic, repeat: str, tick: Callable[[], None], longest: int | None = None
    ) -> Run:
        """`repeat` is the requests' tenant, so that prefix cache and copying drafter learn nothing from other repeats."""
        before = dict(self._engine.stats().get("phase_seconds", {}))
        start = self._clock()
        source = Source(prompts, traffic, start, self._seed)
        waiting: list[Turn] = []
        running: dict[int, tuple[Turn, Completion]] = {}
        done: list[Answer] = []

        def finish(turn: Turn, completion: Completion, now: float) -> None:
            answer = self._record(turn, completion, prompts[turn.prompt].category)
            done.append(answer)
            source.answered(turn, answer.text if answer.ok else None, now)
            tick()

        while len(source) or waiting or running:
            now = self._clock()
            while (turn := source.take(now)) is not None:
                waiting.append(turn)
            for turn in waiting[: self._admission.room(len(running), len(waiting))]:
                waiting.remove(turn)
                completion = self._ask(turn, repeat, longest)
                if completion.error is None:
                    running[completion.request.id] = (turn, completion)
                else:
                    finish(turn, completion, self._clock())
            if running:
                self._step(running, finish)
            elif not waiting and (due := source.next_due()) is not None and (pause := due - self._clock()) > 0:
                self._wait(pause)
        after = self._engine.stats().get("phase_seconds", {})
        phases = {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}
        return Run(tuple(sorted(done, key=lambda a: (a.prompt, a.turn))), self._clock() - start, phases)

    def _ask(self, turn: Turn, repeat: str, longest: int | None) -> Completion:
        sampling = self._sampling(turn.prompt + 1_000_003 * turn.number)
        if longest is not None:
            sampling = msgspec.structs.replace(sampling, max_tokens=min(longest, sampling.max_tokens))
        request = Request(next(self._ids), tuple(self._encode(turn.messages)), sampling, tenant=repeat)
        completion = Completion(request, submitted=self._clock())
        try:
            self._engine.add(request)
        except RequestError as error:
            completion.finish_reason, completion.error = "rejected", str(error)
        return completion

    def _step(self, running: dict[int, tuple[Turn, Completion]], finish: Callable[[Turn, Completion, float], None]) -> None:
        events = self._engine.step()
        now = self._clock()
        for event in events:
            turn, completion = running[event.request_id]
            completion.take(event, now)
            if event.finish_reason is not None:
                del running[event.request_id]
                finish(turn, completion, now)

    def _record(self, turn: Turn, completion: Completion, category: str) -> Answer:
        ends = list(itertools.accumulate(completion.step_sizes))
        return Answer(
            prompt=turn.prompt,
            turn=turn.number,
            category=category,
            due=turn.due,
            chunk_times=tuple(completion.token_times[end - 1] for end in ends),
            chunk_tokens=tuple(completion.step_sizes),
            tokens=len(completion.token_ids),
            prompt_tokens=len(completion.request.prompt_ids),
            cached_tokens=completion.cached_tokens,
            finish_reason=completion.finish_reason,
            error=completion.error or "",
            token_ids=tuple(completion.token_ids),
            text=self._decode(completion.token_ids),
            queue_seconds=completion.queue_seconds + completion.submitted - turn.due,
            passes=max(len(completion.step_sizes) - 1, 0),
            passed_tokens=sum(completion.step_sizes[1:]),
            drafted_by=completion.drafted_by,
            accepted_by=completion.accepted_by,
            accepted_per_position=tuple(completion.accepted_per_position),
        )
