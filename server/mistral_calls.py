"""Reads tool calls as Mistral's models write them, while they arrive, whatever their chunks. Sans-I/O, character by character.

Two generations of one form, both behind the mark `[TOOL_CALLS]`: a JSON list of call objects, or `name[ARGS]{...}` with the mark before
every call. The marks are control tokens of those vocabularies; whoever feeds this shows them (`Format.marks`).
"""

from __future__ import annotations

import json
import re
import secrets
import string
from enum import Enum, auto

from server.call_scanner import CallScanner
from server.tool_events import CallArguments, CallEnd, CallStart, Text, ToolEvent, merged, overlap
from server.tools import ARGUMENTS_MARK, CALL_ID_MARK, CALLS_MARK

_HEAD = re.compile(
    rf"\s*([A-Za-z0-9_.-]{{1,64}})\s*(?:{re.escape(CALL_ID_MARK)}[A-Za-z0-9]*)?(?:{re.escape(ARGUMENTS_MARK)})?\s*\{{\Z"
)
_LONGEST_HEAD = 160  # characters between the mark and the arguments
_ID_LETTERS = string.ascii_letters + string.digits
ID_LENGTH = 9  # the templates of these models refuse ids of any other length


class _At(Enum):
    OUTSIDE = auto()
    HEAD = auto()  # after the mark: a list, or a name
    LIST = auto()  # between the calls of a list
    CALL = auto()


class MistralParser:
    """`feed` and `finish` return what became certain. `calls` counts the calls so far."""

    def __init__(self, parallel: bool = True) -> None:
        self.calls = 0
        self._parallel = parallel
        self._at = _At.OUTSIDE
        self._held = ""  # text that may be the beginning of a call, the mark included
        self._scanner = CallScanner()
        self._in_list = False
        self._announced = self._talking = False

    def feed(self, text: str) -> list[ToolEvent]:
        events: list[ToolEvent] = []
        for character in text:
            match self._at:
                case _At.OUTSIDE:
                    self._outside(character, events)
                case _At.HEAD:
                    self._head(character, events)
                case _At.LIST:
                    self._list(character, events)
                case _At.CALL:
                    self._call(character, events)
        return merged(events)

    def finish(self) -> list[ToolEvent]:
        """The answer has ended: what was held is text, unless it belongs to a call already announced."""
        events: list[ToolEvent] = []
        if self._at is _At.CALL:
            self._give_up(events)
        elif self._held and (not self.calls or not (self._held.isspace() or self._at is _At.LIST)):
            events.append(Text(self._held))
        self._at, self._held = _At.OUTSIDE, ""
        return merged(events)

    def _outside(self, character: str, events: list[ToolEvent]) -> None:
        self._held += character
        if self._held.endswith(CALLS_MARK):
            self._say(self._held[: -len(CALLS_MARK)], events)
            self._at, self._held = _At.HEAD, CALLS_MARK
            return
        keep = overlap(self._held, CALLS_MARK)
        ready, rest = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        if self._talking or not ready.isspace():
            self._say(ready, events)
            self._held = rest

    def _say(self, text: str, events: list[ToolEvent]) -> None:
        """Give out text; white space alone in front of or between calls is none."""
        if text and (self._talking or not text.isspace()):
            self._talking = True
            events.append(Text(text))

    def _head(self, character: str, events: list[ToolEvent]) -> None:
        self._held += character
        head = self._held[len(CALLS_MARK) :]
        if character == "[" and head.strip() == "[":
            self._at, self._in_list = _At.LIST, True
        elif character == "{":
            found = _HEAD.match(head)
            if found is None:
                self._back_to_text(events)
                return
            self._begin(in_list=False)
            # The scanner reads an object, so the name is put into one; the client's text is what stands in `_held`.
            for each in f'{{"name": {json.dumps(found[1])}, "arguments": ':
                self._scanner.feed(each)
            self._held = self._held[:-1]
            self._call(character, events)
        elif len(head) > _LONGEST_HEAD:
            self._back_to_text(events)

    def _list(self, character: str, events: list[ToolEvent]) -> None:
        if character == "{":
            self._begin(in_list=True)
            self._call(character, events)
        elif character == "]":
            self._at, self._talking = _At.OUTSIDE, False
            if not self.calls:  # an empty list calls nothing
                self._say(self._held + character, events)
            self._held = ""
        else:
            self._held += character
            if not (character.isspace() or (character == "," and self.calls)):
                self._back_to_text(events)

    def _begin(self, *, in_list: bool) -> None:
        self._scanner, self._announced = CallScanner(), False
        self._at, self._in_list = _At.CALL, in_list

    def _call(self, character: str, events: list[ToolEvent]) -> None:
        scanner = self._scanner
        self._held += character
        scanner.feed(character)
        if not self._in_list and scanner.after_value:
            scanner.feed("}")
        if scanner.broken:
            self._give_up(events)
            return
        if scanner.name is not None and not self._announced and (self._parallel or not self.calls):
            self._announced, self._talking, self._held = True, False, ""
            events.append(CallStart(self.calls, "".join(secrets.choice(_ID_LETTERS) for _ in range(ID_LENGTH)), scanner.name))
        if self._announced and (new := scanner.take_arguments()):
            events.append(CallArguments(self.calls, new))
        if scanner.done:
            if self._announced:
                events.append(CallEnd(self.calls))
                self.calls += 1
            self._held = ""
            self._at = _At.LIST if self._in_list else _At.OUTSIDE

    def _give_up(self, events: list[ToolEvent]) -> None:
        """No call, or one that breaks off: what a client has not seen as a call it gets as text."""
        if self._announced:
            events.append(CallEnd(self.calls))
            self.calls += 1
            self._at, self._held = _At.OUTSIDE, ""
        else:
            self._back_to_text(events)

    def _back_to_text(self, events: list[ToolEvent]) -> None:
        self._at, self._talking = _At.OUTSIDE, True
        text, self._held = self._held, ""
        events.append(Text(text))
