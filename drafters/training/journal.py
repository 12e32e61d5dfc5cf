"""The training log: one JSON object a line. A continued run drops the lines behind its checkpoint, so none is there twice.

{"step", "tokens", "minutes", "epoch", "rate", "loss"}                     means since the line before
{"step", "tokens", "minutes", "held_out": {"top_1": [...], "top_2", "top_4", "overlap", "loss"}, "by_kind": {...}}    by depth
{"facts": {...}}                                                           first, and again at the end
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from spec.errors import ConfigError


class Journal:
    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, step: int, facts: dict[str, Any]) -> None:
        """Keep what was written up to `step`, or start anew at step 0."""
        lines = [line for line in read_journal(self.path) if _stands(line, step)] if step else []
        draft = self.path.with_name(f"{self.path.name}.new")
        draft.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in [{"facts": facts}, *lines]))
        os.replace(draft, self.path)

    def write(self, **line: Any) -> None:
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")


def _stands(line: dict[str, Any], step: int) -> bool:
    """Whether a run that continues at `step` will not write this line again: it judges before a step and logs after it."""
    at = line.get("step")
    return at is not None and (at < step if "held_out" in line else at <= step)


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Every whole line. A last line without its end is a write that was cut. Raises ConfigError."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"cannot read the training log {path}: {error.strerror}") from error
    found: list[dict[str, Any]] = []
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            item = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}:{number}: not a line of a training log: {error}") from error
        found.append(item)
    return found
