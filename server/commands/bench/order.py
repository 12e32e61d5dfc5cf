"""One bench as it was asked for. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from server.commands.bench.traffic import Traffic
from server.prompts import Turns
from spec.request import SamplingParams

PLAIN = ("speculation",)  # what the usual baseline lacks


@dataclass(frozen=True, slots=True)
class Order:
    """One bench as it was asked for."""

    prompts: Path
    n: int | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    users: tuple[int, ...] = (1,)
    rates: tuple[float, ...] = ()
    repeats: int = 1
    turns: Turns = "first"
    warm_up: int = 2  # conversations
    limits: dict[str, float] = field(default_factory=dict)
    without: tuple[str, ...] = PLAIN
    html: Path | None = None
    url: str | None = None
    api: str = "chat"
    key: str | None = None

    def sampling(self, number: int) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, seed=(self.seed + number) % 2**63)

    def traffics(self) -> list[Traffic]:
        return [*(Traffic(users=users) for users in self.users), *(Traffic(rate=rate) for rate in self.rates)]
