"""Who asks when. A closed loop has a number of users, each of whom asks again once the answer is there; an open loop has
conversations that arrive whether or not the last one is done (a Poisson process). Knows seconds; refuses to know engines.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from server.prompts import Prompt

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Exactly one of the two is set: `users` of a closed loop, or `rate`, conversations a second of an open one."""

    users: int | None = None
    rate: float | None = None

    @property
    def label(self) -> str:
        return f"{self.users} at once" if self.rate is None else f"{self.rate:g} a second"


def poisson_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds from the start at which `count` conversations arrive: gaps are exponential with mean 1 / `rate`.

    The same seed gives the same pattern at every rate, faster or slower, so that rates differ in nothing else.
    """
    draw = random.Random(seed)
    return list(itertools.accumulate(draw.expovariate(1.0) / rate for _ in range(count)))


@dataclass(frozen=True, slots=True)
class Turn:
    """One thing said to the model. `due`: when the user said it, seconds on the run's clock; `number` counts from 0."""

    prompt: int  # its conversation's number
    number: int
    due: float
    messages: tuple[Message, ...]


@dataclass(slots=True)
class Source:
    """The turns of one run, as they fall due: `ready` gives the earliest, `answered` is told of every end.

    In a closed loop a user's next conversation begins when the last one ended, so users hold their place through all turns.
    """

    prompts: Mapping[int, Prompt]  # by number, in order of arrival
    traffic: Traffic
    start: float
    seed: int
    _due: list[tuple[float, int, Turn]] = field(default_factory=list)
    _not_begun: list[int] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        indices = list(self.prompts)
        if self.traffic.rate is not None:
            arrivals = poisson_arrivals(self.traffic.rate, len(indices), self.seed)
            for index, after in zip(indices, arrivals, strict=True):
                self._begin(index, self.start + after)
        else:
            users = self.traffic.users or 1
            for index in indices[:users]:
                self._begin(index, self.start)
            self._not_begun = indices[users:][::-1]

    def __len__(self) -> int:
        """Turns that nobody has taken yet, those of conversations not begun left out."""
        return len(self._due)

    def next_due(self) -> float | None:
        """When the earliest turn falls due; None when nothing will happen before another answer ends."""
        return self._due[0][0] if self._due else None

    def take(self, now: float) -> Turn | None:
        """The earliest turn that is due."""
        return heapq.heappop(self._due)[2] if self._due and self._due[0][0] <= now else None

    def answered(self, turn: Turn, text: str | None, now: float) -> None:
        """An answer ended; `text` None ends the conversation with it (a refusal, an error)."""
        prompt = self.prompts[turn.prompt]
        if text is not None and turn.number < len(prompt.later):
            messages = (*turn.messages, {"role": "assistant", "content": text})
            said = {"role": "user", "content": prompt.later[turn.number]}
            self._put(Turn(turn.prompt, turn.number + 1, now, (*messages, said)))
        elif self._not_begun:
            self._begin(self._not_begun.pop(), now)

    def _begin(self, index: int, due: float) -> None:
        self._put(Turn(index, 0, due, opening(self.prompts[index])))

    def _put(self, turn: Turn) -> None:
        heapq.heappush(self._due, (turn.due, next(self._order), turn))


def opening(prompt: Prompt) -> tuple[Message, ...]:
    return prompt.messages if prompt.text is None else ({"role": "user", "content": prompt.text},)


class Admission(Protocol):
    """How many of the waiting turns may be handed to the engine now."""

    def room(self, running: int, waiting: int) -> int: ...


@dataclass(frozen=True, slots=True)
class AtOnce:
    """Continuous batching: the engine gets everything as it comes and decides itself."""

    def room(self, running: int, waiting: int) -> int:
        return waiting


@dataclass(frozen=True, slots=True)
class Batches:
    """Static batching: a batch of up to `size`, and nothing more before all of it has ended."""

    size: int

    def room(self, running: int, waiting: int) -> int:
        return 0 if running else min(self.size, waiting)
