"""The bench's flags to one `Order`. Knows spellings and ranges; raises ConfigError with one clear line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

from server.commands.bench.figures import parse_limits
from server.commands.bench.order import Order
from server.prompts import Turns
from spec.errors import ConfigError


def order(
    *,
    prompts: Path | None,
    concurrency: str | None,
    rate: str | None,
    seed: int | None,
    turns: str,
    limit: str,
    without: str,
    api: str,
    api_key_file: Path | None,
    **rest: Any,
) -> Order:
    """`rest` are fields of the Order as they are. Without --concurrency and --rate one user asks."""
    if prompts is None:
        raise ConfigError("give --prompts FILE")
    if turns not in ("first", "all"):
        raise ConfigError(f"--turns {turns!r}: write first or all")
    if api not in ("chat", "completions"):
        raise ConfigError(f"--api {api!r}: write chat or completions")
    users = tuple(int(u) for u in numbers("--concurrency", concurrency or ("" if rate else "1"), whole=True))
    rates = numbers("--rate", rate or "", whole=False)
    key = None
    if api_key_file is not None:
        from server.chat import read_key

        key = read_key(api_key_file)
    return Order(
        prompts=prompts, users=users, rates=rates, seed=seed or 0, turns=cast(Turns, turns), limits=parse_limits(limit),
        without=_without(without), api=api, key=key, **rest,
    )  # fmt: skip


def numbers(flag: str, text: str, whole: bool) -> tuple[float, ...]:
    """A comma list of numbers above 0, at least one where there is any text. Raises ConfigError naming the item."""
    found = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        try:
            value = float(int(item) if whole else float(item))
        except ValueError:
            value = 0.0
        if not (value > 0 and math.isfinite(value)):
            example = "1,4,16" if whole else "0.5,1,2"
            raise ConfigError(f"{flag} {item!r}: write a comma list of positive numbers, for example {example}")
        found.append(value)
    return tuple(found)


def _without(text: str) -> tuple[str, ...]:
    from server.commands.bench.techniques import parse_without

    return parse_without(text)
