"""What serving owes its speed to, technique by technique: how to run without each. Composition only: other settings, another
admission, or an engine wrapped; nothing inside the engine knows that it is being compared.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from server.commands.bench.traffic import Admission, AtOnce, Batches
from server.settings import Settings
from spec.errors import ConfigError
from spec.request import Request, TokenEvent

if TYPE_CHECKING:  # what runs engines loads torch; parsing a flag must not
    from server.commands.bench.in_process import Steps

WHOLE_PROMPTS = 2**17  # a chunk no prompt fills: every prompt is one step


@dataclass(frozen=True, slots=True)
class Setup:
    """How one lane runs."""

    settings: Settings
    admission: Admission
    wrap: Callable[[Steps], Steps] = lambda engine: engine


class Technique(Protocol):
    def __call__(self, setup: Setup, users: int) -> Setup:
        """The same setup without the technique; `users` ask at once."""
        ...


def _settings(**values: Any) -> Technique:
    def without(setup: Setup, users: int) -> Setup:
        return dataclasses.replace(setup, settings=msgspec.structs.replace(setup.settings, **values))

    return without


def _static_batches(setup: Setup, users: int) -> Setup:
    return dataclasses.replace(setup, admission=Batches(users))


def _one_at_a_time(setup: Setup, users: int) -> Setup:
    return dataclasses.replace(setup, admission=Batches(1))


def _recompute(setup: Setup, users: int) -> Setup:
    settings = msgspec.structs.replace(setup.settings, prefix_cache=False, drafters="none")
    return dataclasses.replace(setup, settings=settings, wrap=Recomputing)


# Name -> (what the lane does instead, how).
TECHNIQUES: Mapping[str, tuple[str, Technique]] = {
    "speculation": ("plain decoding, a token a pass", _settings(drafters="none")),
    "chunked-prefill": ("a prompt is one step, however long", _settings(chunk_tokens=WHOLE_PROMPTS)),
    "prefix-cache": ("every prompt is computed from its first token", _settings(prefix_cache=False)),
    "continuous-batching": ("static batches: nobody starts before the whole batch has ended", _static_batches),
    "batching": ("one answer at a time", _one_at_a_time),
    "quantised-weights": ("the same weights in bfloat16", _settings(weights="bfloat16")),
    "kv-cache": (
        "all tokens are computed again for every new one, without prefix cache and speculation, which need it",
        _recompute,
    ),
}


def parse_without(text: str) -> tuple[str, ...]:
    """A comma list of technique names. Raises ConfigError naming those there are."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in TECHNIQUES:
            raise ConfigError(f"--without {name!r}: techniques are {', '.join(TECHNIQUES)}")
    return names


def without(setup: Setup, names: Sequence[str], users: int) -> Setup:
    """The setup lacking those techniques, in whatever order they are named: the more basic one decides where two change the same."""
    for name in [name for name in TECHNIQUES if name in names]:
        setup = TECHNIQUES[name][1](setup, users)
    return setup


class Recomputing:
    """An engine without a KV cache: every token is a request of its own that begins with all tokens so far and ends after one.

    Inside is an ordinary engine, whose prefix cache must be off. Answers are those of the engine itself.
    """

    def __init__(self, engine: Steps) -> None:
        self._engine = engine
        self._ids = itertools.count()
        self._asked: dict[int, Request] = {}  # by the inner request's id: the request so far, under its own id

    def add(self, request: Request) -> None:
        inner = next(self._ids)
        done = len(request.generated_ids)
        sampling = msgspec.structs.replace(request.sampling, max_tokens=done + 1)
        self._engine.add(msgspec.structs.replace(request, id=inner, sampling=sampling))
        self._asked[inner] = request

    def step(self) -> list[TokenEvent]:
        return [event for inner in self._engine.step() for event in self._outer(inner)]

    def stats(self) -> Mapping[str, Any]:
        return self._engine.stats()

    def _outer(self, event: TokenEvent) -> list[TokenEvent]:
        request = self._asked[event.request_id]
        first = event.started and not request.generated_ids
        outer = msgspec.structs.replace(event, request_id=request.id, started=first)
        if event.finish_reason is None:
            return [outer]
        del self._asked[event.request_id]
        tokens = (*request.generated_ids, *event.token_ids)
        if event.finish_reason == "length" and len(tokens) < request.sampling.max_tokens and event.token_ids:
            self.add(msgspec.structs.replace(request, generated_ids=tokens))
            outer = msgspec.structs.replace(outer, finish_reason=None)
        return [outer]


def everything(settings: Settings) -> Setup:
    """With every technique that the settings ask for."""
    return Setup(settings, AtOnce())
