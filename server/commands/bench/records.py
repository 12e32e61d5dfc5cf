"""What a run leaves behind: one record an answer, whichever way it was asked for. Plain data; knows no figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from server.commands.bench.traffic import Traffic
from server.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. Times are seconds on the run's clock; `due` is when the user asked, not when the engine took it.

    A chunk is what arrived at once: the tokens of one engine step, one message, one event of a stream. `chunk_tokens` is None
    where the server does not say how many tokens a chunk holds.
    """

    prompt: int  # its conversation's number
    turn: int
    category: str
    due: float
    chunk_times: tuple[float, ...] = ()
    chunk_tokens: tuple[int, ...] | None = ()
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str = ""  # stop, length, rejected, error
    error: str = ""
    token_ids: tuple[int, ...] | None = None  # None: only the text is known
    text: str = ""
    queue_seconds: float = 0.0
    passes: int = 0  # target passes after the prompt's own
    passed_tokens: int = 0  # delivered by those passes
    drafted_by: dict[str, int] = field(default_factory=dict)
    accepted_by: dict[str, int] = field(default_factory=dict)
    accepted_per_position: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        """Answered, be it with nothing."""
        return self.finish_reason not in ("rejected", "error")

    @property
    def said(self) -> tuple[int, ...] | str:
        """What two answers must share to be called identical."""
        return self.text if self.token_ids is None else self.token_ids


@dataclass(frozen=True, slots=True)
class Run:
    """The answers of one stretch of traffic, by (prompt, turn), its wall time, and where the engine's time went (seconds)."""

    answers: tuple[Answer, ...]
    seconds: float
    phases: dict[str, float] = field(default_factory=dict)


def joined(runs: Sequence[Run]) -> Run:
    """Stretches of one run, one after another, as one."""
    phases: dict[str, float] = {}
    for run in runs:
        for name, seconds in run.phases.items():
            phases[name] = phases.get(name, 0.0) + seconds
    return Run(tuple(answer for run in runs for answer in run.answers), sum(run.seconds for run in runs), phases)


class Lane(Protocol):
    """One thing to measure: an engine in this process, or a server somewhere. Lanes run in turn, never together."""

    name: str

    def run(
        self, prompts: Mapping[int, Prompt], traffic: Traffic, repeat: str, tick: Callable[[], None], longest: int | None = None
    ) -> Run:
        """Answer all conversations, given by their numbers, which seed them; `tick` is called once a turn. `repeat` keeps runs apart that must not share caches, where the
        lane can. `longest` caps the answers' tokens (warm-up). Raises ConfigError when nothing can be measured at all."""
        ...
