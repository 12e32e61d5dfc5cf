"""What a reader of tool calls says, and what its kinds share. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments' JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    index: int


ToolEvent = Text | CallStart | CallArguments | CallEnd


class ToolReader(Protocol):
    """`feed` and `finish` return what became certain; `calls` counts the calls so far."""

    calls: int

    def feed(self, text: str) -> list[ToolEvent]: ...
    def finish(self) -> list[ToolEvent]: ...


def overlap(text: str, tag: str) -> int:
    """How many of the last characters of `text` could begin `tag`."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-size:])), 0)


def merged(events: list[ToolEvent]) -> list[ToolEvent]:
    """Neighbouring pieces of the same kind joined, empty ones left out."""
    joined: list[ToolEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Text) and isinstance(last, Text):
            joined[-1] = Text(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and last.index == event.index:
            joined[-1] = CallArguments(event.index, last.text + event.text)
        elif not (isinstance(event, Text) and not event.text):
            joined.append(event)
    return joined
