"""Traffic at a server, over any wire (`Wire`). Knows users, arrivals and clocks; refuses to know messages.

All of a run's answers are asked for from one event loop. What it costs this process is part of what is measured, as with any client.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Protocol

import msgspec

from server.commands.bench.records import Answer, Run
from server.commands.bench.traffic import Source, Traffic, Turn
from server.prompts import Prompt
from spec.request import SamplingParams


class Wire(Protocol):
    """An open connection to a server."""

    async def ask(self, turn: Turn, sampling: SamplingParams, clock: Callable[[], float]) -> Answer:
        """Stream one answer. Refusals and errors are answers too; `category` is left to the caller."""
        ...


class Remote:
    """A lane over a server. `connect` opens a wire for one run and raises ConfigError when there is nobody to talk to."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], AbstractAsyncContextManager[Wire]],
        sampling: Callable[[int], SamplingParams],
        *,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = name
        self._connect = connect
        self._sampling = sampling
        self._seed = seed
        self._clock = clock

    def run(
        self, prompts: Mapping[int, Prompt], traffic: Traffic, repeat: str, tick: Callable[[], None], longest: int | None = None
    ) -> Run:
        """`repeat` means nothing here: what the server has cached and learnt, it uses."""
        return asyncio.run(self._run(prompts, traffic, tick, longest))

    async def _run(self, prompts: Mapping[int, Prompt], traffic: Traffic, tick: Callable[[], None], longest: int | None) -> Run:
        done: list[Answer] = []
        async with self._connect() as wire:
            start = self._clock()
            source = Source(prompts, traffic, start, self._seed)
            asked: set[asyncio.Task[None]] = set()

            async def ask(turn: Turn) -> None:
                sampling = self._sampling(turn.prompt + 1_000_003 * turn.number)
                if longest is not None:
                    sampling = msgspec.structs.replace(sampling, max_tokens=min(longest, sampling.max_tokens))
                answer = replace(await wire.ask(turn, sampling, self._clock), category=prompts[turn.prompt].category)
                done.append(answer)
                source.answered(turn, answer.text if answer.ok else None, self._clock())
                tick()

            while len(source) or asked:
                while (turn := source.take(self._clock())) is not None:
                    asked.add(asyncio.create_task(ask(turn)))
                due = source.next_due()
                pause = None if due is None else max(due - self._clock(), 0.0)
                if asked:
                    ended, asked = await asyncio.wait(asked, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                    for task in ended:
                        task.result()
                elif pause is not None:
                    await asyncio.sleep(pause)
            seconds = self._clock() - start
        return Run(tuple(sorted(done, key=lambda a: (a.prompt, a.turn))), seconds)
