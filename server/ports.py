"""What the server needs of the text side, as protocols. The owner of an interface is its user; it names no tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from server.text import Vocabulary
from server.tools import MARKS, Format, detect_format


class Tokenizer(Vocabulary, Protocol):
    """Token ids to text and back. Special tokens written out in the text of `encode` are plain characters."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def longest_token_bytes(self) -> int: ...
    @property
    def chat_template(self) -> str | None: ...
    def token_to_id(self, token: str) -> int | None: ...
    def encode(self, text: str, *, add_special: bool = False) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class Template(Protocol):
    """Messages to the prompt's token ids. Raises RequestError with the template's own message."""

    @property
    def supports_tools(self) -> bool: ...
    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class TextTools:
    """The text side of one model."""

    tokenizer: Tokenizer
    template: Template
    tool_format: Format | None  # None: the template knows no tools
    tool_marks: Mapping[str, int]  # control tokens that the reader of tool calls has to see

    @staticmethod
    def of(tokenizer: Tokenizer, template: Template) -> TextTools:
        if not template.supports_tools:
            return TextTools(tokenizer, template, None, {})
        found = {mark: index for mark in MARKS if (index := tokenizer.token_to_id(mark)) in tokenizer.hidden_ids}
        marks = {mark: index for mark, index in found.items() if index is not None}
        return TextTools(tokenizer, template, detect_format(tokenizer.chat_template), marks)
