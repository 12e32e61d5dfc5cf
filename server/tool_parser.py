"""Reads tool calls out of an answer's text while it arrives, whatever its chunks. Sans-I/O, character by character.

Knows two ways of writing calls, between tags and as bare JSON; `reader_for` also knows who reads the others. Text that turns out to be no call is given back as text, and nothing is held
longer than it could still become one.
"""

from __future__ import annotations

import secrets

from server.call_scanner import CallScanner
from server.mistral_calls import MistralParser
from server.tool_events import CallArguments, CallEnd, CallStart, Text, ToolEvent, ToolReader, merged, overlap
from server.tools import CLOSE_TAG, OPEN_TAG, Format


def reader_for(format: Format, parallel: bool) -> ToolReader:
    """The reader of a model's way of writing calls."""
    return MistralParser(parallel) if format in ("mistral", "mistral_args") else ToolParser(format, parallel)


class ToolParser:
    """`feed` and `finish` return what became certain. `calls` counts the calls so far."""

    def __init__(self, format: Format, parallel: bool = True) -> None:
        self.calls = 0
        self._tags = format == "tags"
        self._parallel = parallel
        self._held = ""  # text that may be the beginning of a call
        self._scanner: CallScanner | None = None
        self._announced = False
        self._talking = False  # text has come since the beginning or the last call
        self._closing = ""  # after a complete call, up to its closing tag
        self._in_tail = False
        self._plain = False  # "json" only: the answer has turned out to be text

    def feed(self, text: str) -> list[ToolEvent]:
        events: list[ToolEvent] = []
        for character in text:
            if self._scanner is not None:
                self._in_call(character, events)
            elif self._in_tail:
                self._tail(character, events)
            else:
                self._outside(character, events)
        return merged(events)

    def finish(self) -> list[ToolEvent]:
        """The answer has ended: what was held is text, unless it is inside a call already announced."""
        events: list[ToolEvent] = []
        if self._scanner is not None:
            self._give_up(events)
        if not self._held.isspace() or not self.calls:
            events.append(Text(self._held))
        self._held = ""
        return merged(events)

    def _outside(self, character: str, events: list[ToolEvent]) -> None:
        self._held += character
        if self._tags:
            if self._held.endswith(OPEN_TAG):
                self._say(len(self._held) - len(OPEN_TAG), events)
                self._begin()
            else:
                self._say(len(self._held) - overlap(self._held, OPEN_TAG), events)
        elif self._plain:
            self._say(len(self._held), events)
        elif character == "{":
            self._held = self._held[:-1]
            self._begin()
            self._in_call(character, events)
        elif not (character.isspace() or (character == ";" and self.calls)):
            self._plain = True
            self._say(len(self._held), events)

    def _say(self, count: int, events: list[ToolEvent]) -> None:
        """Give out the first `count` held characters, but keep white space that may only stand in front of a call."""
        text = self._held[:count]
        if text and (self._talking or not text.isspace()):
            self._talking = True
            events.append(Text(text))
            self._held = self._held[count:]

    def _begin(self) -> None:
        self._scanner, self._announced = CallScanner(), False

    def _in_call(self, character: str, events: list[ToolEvent]) -> None:
        scanner = self._scanner
        assert scanner is not None
        scanner.feed(character)
        if scanner.broken:
            self._give_up(events)
            return
        drop = self.calls > 0 and not self._parallel
        if scanner.name is not None and not self._announced and not drop:
            self._announced, self._talking, self._held = True, False, ""
            events.append(CallStart(self.calls, "call_" + secrets.token_urlsafe(18), scanner.name))
        if self._announced and (new := scanner.take_arguments()):
            events.append(CallArguments(self.calls, new))
        if scanner.done:
            if self._announced:
                events.append(CallEnd(self.calls))
                self.calls += 1
            self._scanner, self._held = None, ""
            self._in_tail, self._closing = self._tags, ""

    def _give_up(self, events: list[ToolEvent]) -> None:
        """No call, or one that breaks off: what a client has not seen as a call it gets as text."""
        scanner, self._scanner = self._scanner, None
        assert scanner is not None
        if self._announced:
            events.append(CallEnd(self.calls))
            self.calls += 1
        else:
            self._plain = self._talking = True
            text = self._held + scanner.raw
            self._held = ""
            events.append(Text(text))

    def _tail(self, character: str, events: list[ToolEvent]) -> None:
        """White space and the closing tag after a call; anything else is text again."""
        self._closing += character
        rest = self._closing.lstrip()
        if rest == CLOSE_TAG:
            self._in_tail, self._closing = False, ""
        elif not CLOSE_TAG.startswith(rest):
            text, self._closing, self._in_tail = self._closing, "", False
            for again in text:
                self._outside(again, events)
