"""Token ids to visible text, one push at a time. Knows bytes, characters and stop strings; refuses to know sockets and models.

Text leaves only when its characters are complete, so no delta ever holds half a character. Bytes that are not UTF-8 and an
incomplete character at the very end are dropped, streamed or not, so the deltas of any chunking join to `Tokenizer.decode`.
What is counted of an answer is `server.generation`'s.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Literal, Protocol

# How a vocabulary treats the space in front of an answer: a sentencepiece word starts with one that is not text.
#   "keep"   nothing is removed (byte-level vocabularies)
#   "strip"  one leading space of the whole text is removed
#   "drop"   every space mark of the first token is removed (the `Metaspace` decoder)
Leading = Literal["keep", "strip", "drop"]


class Vocabulary(Protocol):
    """What a stream needs of a tokenizer. `hidden_ids` are control and end tokens: counted, never shown."""

    @property
    def hidden_ids(self) -> frozenset[int]: ...
    @property
    def leading(self) -> Leading: ...
    @property
    def chat_template(self) -> str | None: ...
    def token_to_id(self, token: str) -> int | None: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def first_token_bytes(self, token_id: int) -> bytes: ...


class TextStream:
    """Incremental decoder of one answer, O(1) per token.

    `continuation` is for text that goes on after a prompt the client already holds (raw completions): the leading space
    then belongs to the text. `hidden_ids` replaces the vocabulary's own set.
    """

    def __init__(self, vocabulary: Vocabulary, *, continuation: bool = False, hidden_ids: frozenset[int] | None = None) -> None:
        self.vocabulary = vocabulary
        self.continuation = continuation
        self._hidden = vocabulary.hidden_ids if hidden_ids is None else hidden_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        self._leading: Leading = "keep" if continuation else vocabulary.leading

    def another(self) -> TextStream:
        """A stream of the same kind for another text."""
        return TextStream(self.vocabulary, continuation=self.continuation, hidden_ids=self._hidden)

    def push(self, token_ids: Sequence[int]) -> str:
        """The characters these tokens complete."""
        return "".join([self.push_one(token_id) for token_id in token_ids])

    def push_one(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        if self._leading == "drop":
            self._leading = "keep"
            return self._decoder.decode(self.vocabulary.first_token_bytes(token_id))
        text = self._decoder.decode(self.vocabulary.token_bytes(token_id))
        if self._leading == "strip" and text:
            self._leading = "keep"
            text = text.removeprefix(" ")
        return text

    def finish(self) -> str:
        """The end of the answer: an incomplete character is dropped, so nothing is left to show."""
        self._decoder.reset()
        return ""


class _Prefix:
    """How much of one stop string the text ends with (Knuth, Morris and Pratt 1977)."""

    __slots__ = ("_fallback", "pattern", "state")

    def __init__(self, pattern: str) -> None:
        self.pattern, self.state = pattern, 0
        fallback, k = [0] * len(pattern), 0
        for i in range(1, len(pattern)):
            while k and pattern[i] != pattern[k]:
                k = fallback[k - 1]
            k += pattern[i] == pattern[k]
            fallback[i] = k
        self._fallback = fallback

    def step(self, character: str) -> bool:
        """Take one character; true when the stop string is complete."""
        k = self.state
        while k and self.pattern[k] != character:
            k = self._fallback[k - 1]
        self.state = k + (self.pattern[k] == character)
        return self.state == len(self.pattern)


class StopMatcher:
    """Cuts text in front of the first stop string to be completed, and holds back what may be the beginning of one.

    The character that completes a stop string decides, so the cut does not depend on how text was chunked; of stop strings
    completed by the same character the longest wins. Empty stop strings are ignored.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = [_Prefix(stop) for stop in dict.fromkeys(stops) if stop]
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is safe to show now, whether a stop string was completed). After a match nothing more is shown."""
        if self.matched is not None:
            return "", True
        if not self._stops:
            return text, False
        buffer = self._held + text
        for index, character in enumerate(text, len(self._held)):
            complete = [stop.pattern for stop in self._stops if stop.step(character)]
            if complete:
                self.matched, self._held = max(complete, key=len), ""
                return buffer[: index + 1 - len(self.matched)], True
        keep = len(buffer) - max(stop.state for stop in self._stops)
        self._held = buffer[keep:]
        return buffer[:keep], False

    def finish(self) -> str:
        """The end of the answer: held text was a near miss and is shown."""
        held, self._held = self._held, ""
        return held
