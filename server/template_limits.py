"""What one rendering of a chat template may cost, and the operations that could cost more than they say.

Knows Python values and their sizes. Refuses to know Jinja and chats. A template comes with a model file, so it is treated as
hostile: every operation whose result can be larger than its operands is checked before it runs.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from spec.errors import RequestError

MAX_TEXT = 8 << 20  # characters of one string, and of everything that is printed
MAX_ITEMS = 200_000  # entries of one list or mapping, entries of entries included
MAX_STEPS = 2_000_000  # loop rounds, calls and operations of one rendering; 64 characters made count as one
MAX_SECONDS = 5.0  # of processor time
MAX_BITS = 4096  # of an integer
MAX_WIDTH = 1000  # of padding
_PER_STEP = 64
_PER_LOOK = 50
_WIDE = re.compile(r"\d{4,}|\*")


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


class TemplateError(RequestError):
    """Messages that a chat template refuses or cannot render: the client's fault, with the template's own message."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="invalid_messages", param="messages")


class TemplateStopped(TemplateError):
    """A template that reached for something it may not do, or for more than its limits allow: the model file's fault."""


class LimitError(Exception):
    """A rendering asked for more than its limits allow."""


class Budget:
    """The account of one rendering. Raises LimitError as soon as it is overdrawn.

    Time is the thread's own processor time, so a busy machine does not make a slow template of a good one. The clock is a
    system call: it is read after every `_PER_LOOK` steps.
    """

    def __init__(self, steps: int = MAX_STEPS, seconds: float = MAX_SECONDS) -> None:
        self._steps, self._printed = steps, 0
        self._deadline = time.thread_time() + seconds
        self._next_look = steps

    def charge(self, characters: int = 0) -> None:
        self._steps -= 1 + characters // _PER_STEP
        if self._steps <= self._next_look:
            self._look()

    def print(self, characters: int) -> None:
        self._printed += characters
        if self._printed > MAX_TEXT:
            raise LimitError(f"it prints more than {MAX_TEXT} characters")
        self.charge(characters)

    def _look(self) -> None:
        if self._steps < 0:
            raise LimitError("it takes too many steps")
        if time.thread_time() > self._deadline:
            raise LimitError("it takes too long")
        self._next_look = max(self._steps - _PER_LOOK, -1)


def require(size: int, limit: int = MAX_TEXT) -> None:
    if size > limit:
        raise LimitError(f"a value of size {size} is larger than {limit}")


def text_size(value: Any) -> int:
    """An upper bound of `len(str(value))`, a few characters per entry for brackets. Raises LimitError past the limits.

    Only plain values have one: the text of other objects could repeat a value any number of times.
    """
    total, items, stack = 0, 0, [value]
    while stack:
        item = stack.pop()
        items += 1
        require(items, MAX_ITEMS)
        if isinstance(item, str):
            total += len(item) + 4
        elif isinstance(item, Mapping):
            require(len(item), MAX_ITEMS)
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            require(len(item), MAX_ITEMS)
            stack.extend(item)
        elif isinstance(item, int):
            require(item.bit_length(), MAX_BITS)
            total += 8 + item.bit_length() // 3
        elif item is None or isinstance(item, float):
            total += 32
        else:
            raise LimitError(f"a {type(item).__name__} cannot be made text")
        require(total)
    return total + 4 * items


def measured(budget: Budget, value: Any) -> Any:
    """Pass a freshly made value on if it is not too large."""
    if isinstance(value, str | bytes):
        require(len(value))
        budget.charge(len(value))
    elif isinstance(value, list | tuple | Mapping):
        budget.charge(_size(value))
    elif isinstance(value, int):
        require(value.bit_length(), MAX_BITS)
    return value


def _size(value: Any) -> int:
    """Characters and entries of a container, with repeated entries counted each time."""
    total, items, stack = 0, 0, [value]
    while stack:
        item = stack.pop()
        items += 1
        require(items, MAX_ITEMS)
        if isinstance(item, str):
            total += len(item)
            require(total)
        elif isinstance(item, Mapping):
            require(len(item), MAX_ITEMS)
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            require(len(item), MAX_ITEMS)
            stack.extend(item)
    return total + items


# Operators


def check_binary(operator: str, left: Any, right: Any) -> None:
    """Raises LimitError for an operation whose result would be too large."""
    if operator == "*":
        for sequence, count in ((left, right), (right, left)):
            if isinstance(sequence, str | bytes | list | tuple) and isinstance(count, int):
                require(max(count, 0) * max(_size(sequence), 1))
        if isinstance(left, int) and isinstance(right, int):
            require(left.bit_length() + right.bit_length(), MAX_BITS)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        require(left.bit_length() * max(right, 0), MAX_BITS)
    elif operator == "%" and isinstance(left, str | bytes):
        if isinstance(left, bytes) or _WIDE.search(left):
            raise LimitError("a format with such a width is not available")
        require(len(left) + left.count("%") * text_size(right))
    elif operator == "+" and isinstance(left, str) and isinstance(right, str):
        require(len(left) + len(right))


def check_field(spec: str) -> None:
    if _WIDE.search(spec):
        raise LimitError("a format with such a width is not available")


# Methods and filters that make more than they are given


def joined(separator: str, parts: Iterable[Any]) -> str:
    texts, total = [], 0
    for part in parts:
        total += text_size(part) + len(separator)
        require(total)
        texts.append(part if isinstance(part, str) else str(part))
    return separator.join(texts)


def replaced(text: str, old: str, new: str, count: int = -1) -> str:
    found = text.count(old)
    times = found if count < 0 else min(found, count)
    require(len(text) + times * max(len(new) - len(old), 0))
    return text.replace(old, new, count)


def indented(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Spaces (or the given string) in front of every line; the first and blank lines only when asked for."""
    pad = width if isinstance(width, str) else " " * min(max(int(width), 0), MAX_WIDTH)
    lines = str(text).split("\n")
    require(len(text) + len(lines) * len(pad))
    return "\n".join(
        pad + line if (index or first) and (line or blank or not index) else line for index, line in enumerate(lines)
    )


def summed(values: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
    """Numbers only: adding lists one by one takes quadratic time."""
    total = start
    for value in values:
        number = value[attribute] if attribute is not None else value
        if not isinstance(number, int | float) or not isinstance(total, int | float):
            raise TypeError("sum takes numbers")
        total += number
    return total


def to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as Hugging Face templates expect it: not escaped for HTML, characters as they are."""
    size = text_size(value)
    if indent is not None:
        require(int(indent), MAX_WIDTH)
        require(size * (1 + int(indent)))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def as_text(value: Any) -> str:
    if not isinstance(value, str):
        text_size(value)
    return str(value)


def _padding(method: str) -> Callable[..., Any]:
    def run(text: str, width: int, *fill: str) -> Any:
        require(width, MAX_WIDTH)
        return getattr(text, method)(width, *fill)

    return run


def _plain(method: str) -> Callable[..., Any]:
    def run(owner: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(owner, method)(*args, **kwargs)

    return run


_TEXT_METHODS = words(
    """capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric isspace istitle
    isupper lower lstrip partition removeprefix removesuffix rfind rindex rpartition rsplit rstrip split splitlines startswith
    strip swapcase title upper"""
)

# Methods of built-in values that a template may call, by the type that owns them: they get the value first.
METHODS: Mapping[type, Mapping[str, Callable[..., Any]]] = {
    str: {
        **{name: _plain(name) for name in _TEXT_METHODS},
        **{name: _padding(name) for name in ("center", "ljust", "rjust", "zfill")},
        "join": joined,
        "replace": replaced,
    },
    dict: {name: _plain(name) for name in ("copy", "get", "items", "keys", "values")},
    list: {name: _plain(name) for name in ("copy", "count", "index")},
    tuple: {name: _plain(name) for name in ("count", "index")},
}
