"""Which part of an answer a token belongs to: what the model says, what it thinks, or the marks around them. Sans-I/O.

Knows two ways of writing parts, both by token ids: channels (gpt-oss: `<|start|>ROLE<|channel|>NAME<|message|>TEXT<|end|>`) and
thinking between `<think>` and `</think>`. It takes token after token, so how many of them a step brought cannot matter. Refuses
to know stop strings, drafts and JSON.

Of channels, `final` and the one without a name are content, every other one is reasoning. Headers are neither. A token that
begins thinking does so in front of the answer only; later it is text like any other, unless the vocabulary hides it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from server.text import TextStream, Vocabulary

Channel = Literal["content", "reasoning", "mark"]
Mark = Literal["start", "channel", "message", "end", "think", "answer"]

_HEADERS: Mapping[str, Mark] = MappingProxyType(
    {"<|start|>": "start", "<|channel|>": "channel", "<|message|>": "message", "<|end|>": "end"}
)
_MORE_ENDS = ("<|return|>", "<|call|>")
_THINKING: Mapping[str, Mark] = MappingProxyType({"<think>": "think", "</think>": "answer"})
_SAID = (b"", b"final")  # names of channels that are content
LONGEST_OPENING = 16  # tokens in front of the first mark; more of them are no header


def marks_of(vocabulary: Vocabulary) -> Mapping[int, Mark]:
    """What each marking token does, by its id; empty for a model whose chat template writes no such parts.

    Marks of channels have to be control tokens, so that no text can be taken for them. Those of thinking are plain entries of
    some vocabularies.
    """
    template = vocabulary.chat_template or ""
    if "<|channel|>" in template:
        found = _ids(vocabulary, _HEADERS)
        ends = _ids(vocabulary, dict.fromkeys(_MORE_ENDS, "end"))
        if len(found) == len(_HEADERS) and found.keys() <= vocabulary.hidden_ids:
            return ends | found
    elif any(mark in template for mark in _THINKING):
        found = _ids(vocabulary, _THINKING)
        if len(found) == len(_THINKING):
            return found
    return {}


def _ids(vocabulary: Vocabulary, names: Mapping[str, Mark]) -> dict[int, Mark]:
    return {index: mark for name, mark in names.items() if (index := vocabulary.token_to_id(name)) is not None}


class ChannelReader:
    """Tells the channel of each token of one answer. The end of the prompt, which may have begun a part, counts as read."""

    def __init__(self, marks: Mapping[int, Mark], vocabulary: Vocabulary, prompt_ids: Sequence[int]) -> None:
        self._marks = marks
        self._vocabulary = vocabulary
        self.where: Channel = "content"
        self._name: bytearray | None = None  # of the channel, while its header is read
        self._said = False  # content has begun
        for token_id in prompt_ids[self._opening_of(prompt_ids) :]:
            self.feed(token_id)
            self._said = False  # the prompt's words are none of the answer's

    def _opening_of(self, prompt_ids: Sequence[int]) -> int:
        """Where the template's opening of the answer begins: what stands before it is other people's text."""
        channels = "start" in self._marks.values()
        hidden = self._vocabulary.hidden_ids
        for index in range(len(prompt_ids) - 1, -1, -1):
            mark = self._marks.get(prompt_ids[index])
            if mark == "start":
                return index
            if not channels and mark is None and prompt_ids[index] in hidden:
                return index + 1
        return len(prompt_ids) if channels else 0

    @property
    def between(self) -> bool:
        """Whether the next token stands in a header that has not come to a channel's name."""
        return self.where == "mark" and self._name is None

    def mark(self, token_id: int) -> Mark | None:
        return self._marks.get(token_id)

    def feed(self, token_id: int) -> Channel:
        """The channel of the next token; "mark" for marks and headers."""
        match self._marks.get(token_id):
            case None:
                self._text(token_id)
                return self.where
            case "start" | "end":
                self.where, self._name = "mark", None
            case "channel":
                self.where, self._name = "mark", bytearray()
            case "message":
                name = bytes(self._name or b"").split()[:1]
                self.where, self._name = "content" if not name or name[0] in _SAID else "reasoning", None
            case "think" if not self._said:
                self.where = "reasoning"
            case "answer" if self.where == "reasoning":
                self.where, self._said = "content", True
            case "think" | "answer":
                return self.where
        return "mark"

    def speak(self) -> None:
        """What seemed to be a header is content."""
        self.where, self._name, self._said = "content", None, True

    def _text(self, token_id: int) -> None:
        hidden = token_id in self._vocabulary.hidden_ids
        if self._name is not None:
            self._name += b" " if hidden else self._vocabulary.token_bytes(token_id)
        elif self.where == "content" and not hidden and self._vocabulary.token_bytes(token_id).strip():
            self._said = True


class ChannelText:
    """Text of one answer with the channel of each token. Every channel has a decoder of its own: bytes of a character that one
    part leaves unfinished never join the next part's.

    `marks` empty means that all of it is content. Line breaks behind a mark of thinking are the template's layout and are left
    out. An answer that has no marks at all where the prompt ended in a header is content, shown after LONGEST_OPENING tokens or
    at its end.
    """

    def __init__(self, text: TextStream, marks: Mapping[int, Mark], prompt_ids: Sequence[int]) -> None:
        self._text = text
        self._reader = ChannelReader(marks, text.vocabulary, prompt_ids) if marks else None
        self._streams = {"content": text, "reasoning": text.another()}
        self._opening = self._reader is not None and self._reader.between
        self._held: list[int] = []  # of the opening
        self._layout = False  # nothing but line breaks has come behind a mark of thinking

    @classmethod
    def of(cls, text: TextStream, prompt_ids: Sequence[int], *, constrained: bool) -> ChannelText:
        """For an answer to this prompt. A raw completion has no parts, nor has an answer held to a grammar."""
        plain = text.continuation or constrained
        return cls(text, {} if plain else marks_of(text.vocabulary), prompt_ids)

    @property
    def channel(self) -> Channel:
        """Where the last token left the answer."""
        return "content" if self._reader is None else self._reader.where

    def push_one(self, token_id: int) -> tuple[str, Channel]:
        """The characters this token completes, and their channel."""
        if self._reader is None:
            return self._text.push_one(token_id), "content"
        channel = self._reader.feed(token_id)
        if channel == "mark":
            return self._between(self._reader, token_id)
        text = self._streams[channel].push_one(token_id)
        if self._layout and text:
            text = text.lstrip("\n")
            self._layout = not text
        return text, channel

    def _between(self, reader: ChannelReader, token_id: int) -> tuple[str, Channel]:
        mark = reader.mark(token_id)
        if mark is not None:
            for stream in self._streams.values():
                stream.finish()
            self._held.clear()
            self._opening, self._layout = False, mark in ("think", "answer")
        elif self._opening:
            self._held.append(token_id)
            if len(self._held) > LONGEST_OPENING:
                reader.speak()
                return self._release(), "content"
        return "", "mark"

    def _release(self) -> str:
        self._opening = False
        text = self._text.push(self._held)
        self._held.clear()
        return text

    def finish(self) -> str:
        """The end of the answer: content that was held. Incomplete characters are dropped."""
        rest = self._release()
        return rest + "".join(stream.finish() for stream in self._streams.values())
