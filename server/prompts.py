"""Prompt files: one JSON object a line. Knows the three accepted shapes; refuses to know tokens."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from spec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation to answer. `text` is set instead of `messages` for a raw completion prompt."""

    id: str
    category: str
    messages: tuple[dict[str, str], ...] = ()
    text: str | None = None


def read_prompts(path: Path, limit: int | None = None, turns: Literal["first", "all"] = "first") -> list[Prompt]:
    """Prompts of a file in `{"prompt"}`, `{"messages"}` or Spec-Bench's `{"question_id", "category", "turns"}` form.

    With a limit and several categories the picks are spread evenly: the first of every category, then the second, ...
    `turns` "all" makes one prompt per turn of a question, each holding the user turns before it as well.
    Raises ConfigError naming the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the prompt file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt file {path} is not UTF-8 text") from error
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            prompts.extend(_parse(line, f"{path}:{number}", str(number), turns))
    if not prompts:
        raise ConfigError(f"the prompt file {path} holds no prompts")
    return _spread(prompts, limit)


def _parse(line: str, where: str, number: str, turns: str) -> list[Prompt]:
    try:
        item: Any = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(item, dict):
        raise ConfigError(f"{where}: expected a JSON object, got {type(item).__name__}")
    name, category = str(item.get("question_id", item.get("id", number))), str(item.get("category", "all"))
    if isinstance(item.get("prompt"), str):
        return [Prompt(name, category, ({"role": "user", "content": item["prompt"]},))]
    if isinstance(item.get("messages"), list) and item["messages"]:
        for message in item["messages"]:
            if (
                not isinstance(message, dict)
                or not isinstance(message.get("role"), str)
                or not isinstance(message.get("content"), str)
            ):
                raise ConfigError(f'{where}: every message needs a string "role" and a string "content"')
        return [Prompt(name, category, tuple(item["messages"]))]
    if isinstance(item.get("turns"), list) and item["turns"] and all(isinstance(turn, str) for turn in item["turns"]):
        users = [{"role": "user", "content": turn} for turn in item["turns"]]
        if turns == "first":
            return [Prompt(name, category, (users[0],))]
        return [Prompt(f"{name}.{i}", category, tuple(users[: i + 1])) for i in range(len(users))]
    raise ConfigError(f'{where}: expected "prompt", "messages" or "turns", found {", ".join(sorted(item)) or "nothing"}')


def _spread(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    if limit is None or limit >= len(prompts):
        return prompts
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    rounds = itertools.zip_longest(*groups.values())
    return [prompt for column in rounds for prompt in column if prompt is not None][:limit]
