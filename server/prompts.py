"""Prompt files: JSON lines, or ShareGPT's JSON array. Knows the accepted shapes; refuses to know tokens."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from spec.errors import ConfigError

Turns = Literal["first", "all"]

# Who speaks in ShareGPT's files; other voices (tools, observations) are left out.
_USERS, _SYSTEMS = frozenset({"human", "user"}), frozenset({"system"})


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation to answer. `text` is set instead of `messages` for a raw completion prompt.

    `later` are the user's further turns: each is said once the answer to the one before is there, behind that answer.
    """

    id: str
    category: str
    messages: tuple[dict[str, str], ...] = ()
    text: str | None = None
    later: tuple[str, ...] = ()


def read_prompts(path: Path, limit: int | None = None, turns: Turns = "first") -> list[Prompt]:
    """Prompts of a file whose lines are `{"prompt"}`, `{"messages"}`, Spec-Bench's `{"question_id", "category", "turns"}` or
    ShareGPT's `{"id", "conversations": [{"from", "value"}]}`; the last may also stand in one JSON array, as it is published.

    With a limit and several categories the picks are spread evenly: the first of every category, then the second, ...
    `turns` "all" keeps the user's later turns of a conversation; recorded answers of other models are never used.
    Raises ConfigError naming the line, or the item of an array.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the prompt file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt file {path} is not UTF-8 text") from error
    prompts: list[Prompt] = []
    for name, where, item in _items(text, path):
        prompt = _parse(item, where, name)
        if prompt is not None:
            prompts.append(prompt if turns == "all" else replace(prompt, later=()))
    if not prompts:
        raise ConfigError(f"the prompt file {path} holds no prompts")
    return _spread(prompts, limit)


def _items(text: str, path: Path) -> list[tuple[str, str, Any]]:
    """(default name, where it stands, the JSON value) of every prompt."""
    if text.lstrip().startswith("["):
        return [(str(i), f"{path}, item {i}", item) for i, item in enumerate(_json(text, str(path)), 1)]
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    return [(str(number), f"{path}:{number}", _json(line, f"{path}:{number}")) for number, line in lines]


def _json(text: str, where: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from error


def _parse(item: Any, where: str, number: str) -> Prompt | None:
    """None for a recorded conversation in which no user speaks."""
    if not isinstance(item, dict):
        raise ConfigError(f"{where}: expected a JSON object, got {type(item).__name__}")
    name, category = str(item.get("question_id", item.get("id", number))), str(item.get("category", "all"))
    if isinstance(item.get("prompt"), str):
        return Prompt(name, category, (_user(item["prompt"]),))
    if isinstance(item.get("messages"), list) and item["messages"]:
        for message in item["messages"]:
            if (
                not isinstance(message, dict)
                or not isinstance(message.get("role"), str)
                or not isinstance(message.get("content"), str)
            ):
                raise ConfigError(f'{where}: every message needs a string "role" and a string "content"')
        return Prompt(name, category, tuple(item["messages"]))
    if isinstance(item.get("turns"), list) and item["turns"] and all(isinstance(turn, str) for turn in item["turns"]):
        first, *later = item["turns"]
        return Prompt(name, category, (_user(first),), later=tuple(later))
    if isinstance(item.get("conversations"), list):
        return _conversation(item["conversations"], where, name, category)
    raise ConfigError(
        f'{where}: expected "prompt", "messages", "turns" or "conversations", found {", ".join(sorted(item)) or "nothing"}'
    )


def _conversation(turns: list[Any], where: str, name: str, category: str) -> Prompt | None:
    """ShareGPT's: what the user said, and what the system message was."""
    for turn in turns:
        if not isinstance(turn, dict) or not isinstance(turn.get("from"), str) or not isinstance(turn.get("value"), str):
            raise ConfigError(f'{where}: every turn of a conversation needs a string "from" and a string "value"')
    system = [{"role": "system", "content": turn["value"]} for turn in turns[:1] if turn["from"] in _SYSTEMS]
    said = [turn["value"] for turn in turns if turn["from"] in _USERS and turn["value"].strip()]
    if not said:
        return None
    return Prompt(name, category, (*system, _user(said[0])), later=tuple(said[1:]))


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _spread(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    if limit is None or limit >= len(prompts):
        return prompts
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    rounds = itertools.zip_longest(*groups.values())
    return [prompt for column in rounds for prompt in column if prompt is not None][:limit]
