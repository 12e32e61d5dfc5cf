"""What the server needs of the text side, as protocols. The owner of an interface is its user; it names no tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from server.text import Vocabulary


class Tokenizer(Vocabulary, Protocol):
    """Token ids to text and back. Special tokens written out in the text of `encode` are plain characters."""

    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class Template(Protocol):
    """Messages to the prompt's token ids. Raises RequestError with the template's own message."""

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class TextTools:
    """The text side of one model."""

    tokenizer: Tokenizer
    template: Template
    longest_token_bytes: int

    @staticmethod
    def of(tokenizer: Tokenizer, template: Template) -> TextTools:
        longest = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))
        return TextTools(tokenizer, template, max(1, longest))
