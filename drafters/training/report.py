"""Curves and card from a training log, and from benches run since. Knows files; refuses to know drawing and wording."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from drafters.training.card import card
from drafters.training.journal import read_journal
from drafters.training.plot import curves
from spec.errors import ConfigError


def report(log: Path, benches: Sequence[Path] = ()) -> tuple[str, str]:
    """(SVG, Markdown). Raises ConfigError for files that are not a log or a bench's output."""
    lines = read_journal(log)
    facts: dict[str, Any] = next((line["facts"] for line in reversed(lines) if "facts" in line), {})
    if not facts:
        raise ConfigError(f"{log}: not a training log")
    judged: dict[str, Any] = next(
        (line.get("by_kind", {"all": line["held_out"]}) for line in reversed(lines) if "held_out" in line), {}
    )
    svg = curves(lines, f"{facts['what']} for {facts['target']}")
    return svg, card(facts, judged, [_bench(path) for path in benches])


def _bench(path: Path) -> dict[str, Any]:
    """The last line of what `forespeak bench` printed."""
    try:
        lines = path.read_text(encoding="utf-8").strip().splitlines()
        return msgspec.json.decode(lines[-1], type=dict[str, Any])
    except (OSError, UnicodeDecodeError, IndexError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: the last line is not a bench's JSON object: {error}") from error
