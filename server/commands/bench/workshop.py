"""Lanes over engines in this process. The one module of the bench that makes engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from server.commands.bench.in_process import InProcess
from server.commands.bench.techniques import Setup
from server.commands.bench.traffic import Message
from server.compose import Parts, load_parts, make_engine
from server.settings import Settings
from server.template import ChatTemplate
from spec.request import SamplingParams


class Workshop:
    """Weights are loaded once for all lanes that read them alike."""

    def __init__(self, sampling: Callable[[int], SamplingParams], seed: int) -> None:
        self._sampling = sampling
        self._seed = seed
        self._parts: dict[str, Parts] = {}

    def parts(self, settings: Settings) -> Parts:
        if settings.weights not in self._parts:
            self._parts[settings.weights] = load_parts(settings)
        return dataclasses.replace(self._parts[settings.weights], settings=settings)

    def lane(self, name: str, setup: Setup) -> InProcess:
        parts = self.parts(setup.settings)
        template = ChatTemplate(parts.tokenizer)

        def encode(messages: Sequence[Message]) -> list[int]:
            return template.encode_chat(list(messages))

        engine = setup.wrap(make_engine(parts))
        return InProcess(
            name, engine, encode, parts.tokenizer.decode, self._sampling, admission=setup.admission, seed=self._seed
        )
