"""Walks over the JSON object of one tool call as it arrives, without waiting for its end. Knows the two keys that matter only."""

from __future__ import annotations

from enum import Enum, auto

import msgspec


class _At(Enum):
    START = auto()  # before {
    KEY = auto()  # before a key, or }
    COLON = auto()
    VALUE = auto()  # before or inside a value
    COMMA = auto()
    DONE = auto()
    BROKEN = auto()


class CallScanner:
    """Walks over one call object `{"name": ..., "arguments": {...}}`, keys in any order, without waiting for its end.

    `raw` is all it took. `name` is set when known; `take_arguments` gives what of the arguments' text is new.
    """

    def __init__(self) -> None:
        self.raw = ""
        self.name: str | None = None
        self._at = _At.START
        self._key = ""
        self._token = ""  # the key or value being read
        self._depth = 0  # inside the value
        self._in_string = self._escaped = False
        self._arguments = ""
        self._given = 0
        self._arguments_are_text = False

    @property
    def done(self) -> bool:
        return self._at is _At.DONE

    @property
    def broken(self) -> bool:
        return self._at is _At.BROKEN

    @property
    def after_value(self) -> bool:
        """Whether a value has just ended, so that the object may."""
        return self._at is _At.COMMA

    def take_arguments(self) -> str:
        if self.name is None or (self._arguments_are_text and not self.done):
            return ""
        new = self._arguments[self._given :]
        self._given = len(self._arguments)
        return new

    def feed(self, character: str) -> None:
        """Take one character. After `done` or `broken` nothing more may come."""
        self.raw += character
        if self._at is _At.VALUE:
            self._value(character)
        elif self._at is _At.KEY and self._token:
            self._string(character, _At.COLON)
        elif character.isspace():
            return
        elif self._at is _At.START:
            self._at = _At.KEY if character == "{" else _At.BROKEN
        elif self._at is _At.KEY:
            self._token = character
            if character == "}":
                self._finish()
            elif character != '"':
                self._at = _At.BROKEN
        elif self._at is _At.COLON:
            self._at, self._token = (_At.VALUE, "") if character == ":" else (_At.BROKEN, "")
        elif character == ",":
            self._at, self._token = _At.KEY, ""
        elif character == "}":
            self._finish()
        else:
            self._at = _At.BROKEN

    def _string(self, character: str, then: _At) -> None:
        self._token += character
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            try:
                self._key = msgspec.json.decode(self._token, type=str)
                self._at = then
            except msgspec.DecodeError:
                self._at = _At.BROKEN
            self._token = ""

    def _value(self, character: str) -> None:
        if not self._token and character.isspace():
            return
        if not self._in_string and self._depth == 0 and self._token and character in ",}":
            self._end_value()  # a number or a word ends where the object goes on
            if not self.broken:
                self.raw = self.raw[:-1]
                self.feed(character)
            return
        self._token += character
        if self._is_arguments:
            self._arguments += character
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                if self._depth == 0:
                    self._end_value()
        elif character == '"':
            self._in_string = True
            self._arguments_are_text |= self._is_arguments and self._token == '"'
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_value()

    @property
    def _is_arguments(self) -> bool:
        return self._key in ("arguments", "parameters")

    def _end_value(self) -> None:
        self._at = _At.COMMA
        if self._key == "name":
            try:
                self.name = msgspec.json.decode(self._token, type=str)
            except msgspec.DecodeError:
                self._at = _At.BROKEN
        self._token = ""

    def _finish(self) -> None:
        """The object is complete: it is a call if it has a name and its arguments are an object (or a string holding one)."""
        self._at = _At.DONE if self.name else _At.BROKEN
        try:
            if self._arguments_are_text:
                self._arguments = msgspec.json.decode(self._arguments, type=str)
            if isinstance(msgspec.json.decode(self._arguments or "{}"), dict):
                self._arguments = self._arguments or "{}"
                return
        except msgspec.DecodeError:
            pass
        self._at = _At.BROKEN
