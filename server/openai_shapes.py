"""The wording of chat and text completions: chunks of a stream and whole answers from the same builders.

Knows OpenAI's JSON shapes; refuses to know transports and how text is made.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Protocol

from server import shapes
from server.generation import Generation, Piece
from server.service import Service
from server.tool_shapes import CallReader
from server.tools import Tools


def new_id(prefix: str) -> str:
    return prefix + secrets.token_urlsafe(18)


class Shape(Protocol):
    """How one endpoint words an answer. `index` is the choice's number."""

    id: str

    def opening(self, index: int, generation: Generation) -> dict[str, Any] | None: ...
    def chunks(self, index: int, piece: Piece) -> list[dict[str, Any]]: ...
    def closing(self, index: int, generation: Generation) -> list[dict[str, Any]]: ...
    def summary(self) -> dict[str, Any]: ...
    def whole(self, pieces: Sequence[Piece], generations: Sequence[Generation]) -> dict[str, Any]: ...


class ChatShape:
    """chat.completion and chat.completion.chunk."""

    def __init__(self, service: Service, top_logprobs: int | None, tools: Tools | None, choices: int) -> None:
        self.id = new_id("chatcmpl-")
        self._created = int(time.time())
        self._model = service.model
        self._tokenizer = service.text.tokenizer
        self._top = top_logprobs
        self._readers = [CallReader(tools) for _ in range(choices)] if tools is not None else []

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if self._top is None:
            return None
        content = shapes.chat_logprobs(self._tokenizer, piece.token_ids, piece.logprobs, self._top)
        return {"content": content, "refusal": None}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._head("chat.completion.chunk") | {"choices": [choice]}

    def opening(self, index: int, generation: Generation) -> dict[str, Any]:
        return self._chunk(index, {"role": "assistant", "content": ""}, None, None)

    def chunks(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        return [chunk for part in piece.by_channel() for chunk in self._part(index, part)]

    def _part(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """Chunks of one channel's text."""
        logprobs = self._logprobs(piece)
        if reasoning := piece.reasoning:
            return [self._chunk(index, {"reasoning_content": reasoning}, logprobs, None)]
        if not self._readers:
            return [self._chunk(index, {"content": piece.text}, logprobs, None)]
        deltas = self._readers[index].feed(piece.text) or ([{}] if logprobs is not None else [])
        return [self._chunk(index, delta, None if position else logprobs, None) for position, delta in enumerate(deltas)]

    def closing(self, index: int, generation: Generation) -> list[dict[str, Any]]:
        reason = str(generation.finish_reason)
        if not self._readers:
            return [self._chunk(index, {}, None, reason)]
        reader = self._readers[index]
        rest = [self._chunk(index, delta, None, None) for delta in reader.finish()]
        return [*rest, self._chunk(index, {}, None, reader.reason(reason))]

    def summary(self) -> dict[str, Any]:
        return self._head("chat.completion.chunk") | {"choices": []}

    def whole(self, pieces: Sequence[Piece], generations: Sequence[Generation]) -> dict[str, Any]:
        choices = [self._choice(index, *each) for index, each in enumerate(zip(pieces, generations, strict=True))]
        return self._head("chat.completion") | {"choices": choices}

    def _choice(self, index: int, piece: Piece, generation: Generation) -> dict[str, Any]:
        message: dict[str, Any] = {"content": piece.text}
        reason = str(generation.finish_reason)
        if self._readers:
            reader = self._readers[index]
            reader.feed(piece.text)
            reader.finish()
            message, reason = reader.message(), reader.reason(reason)
        if reasoning := piece.reasoning:
            message["reasoning_content"] = reasoning
        return {
            "index": index,
            "message": {"role": "assistant", "refusal": None} | message,
            "logprobs": self._logprobs(piece),
            "finish_reason": reason,
        }


class CompletionShape:
    """text_completion. With `echo` the prompts' text comes first, and its log probabilities when there are any."""

    def __init__(self, service: Service, top_logprobs: int | None, echoes: Sequence[str]) -> None:
        self.id = new_id("cmpl-")
        self._created = int(time.time())
        self._model = service.model
        self._tokenizer = service.text.tokenizer
        self._top = top_logprobs
        self._echoes = echoes
        self._offsets: dict[int, int] = {}

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self._created, "model": self._model}

    def _choice(self, index: int, text: str, logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, index: int, piece: Piece) -> dict[str, Any] | None:
        if self._top is None:
            return None
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + len(piece.text)
        return shapes.completion_logprobs(self._tokenizer, piece.token_ids, piece.logprobs, self._top, offset)

    def _prompt_logprobs(self, index: int, generation: Generation) -> dict[str, Any] | None:
        if self._top is None:
            return None
        self._offsets[index] = len(self._echoes[index])
        entries = (None, *generation.prompt_logprobs)
        return shapes.completion_logprobs(self._tokenizer, generation.request.prompt_ids, entries, self._top, 0)

    def opening(self, index: int, generation: Generation) -> dict[str, Any] | None:
        if not self._echoes:
            return None
        logprobs = self._prompt_logprobs(index, generation)
        return self._head() | {"choices": [self._choice(index, self._echoes[index], logprobs, None)]}

    def chunks(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        return [self._head() | {"choices": [self._choice(index, piece.text, self._logprobs(index, piece), None)]}]

    def closing(self, index: int, generation: Generation) -> list[dict[str, Any]]:
        return [self._head() | {"choices": [self._choice(index, "", None, generation.finish_reason)]}]

    def summary(self) -> dict[str, Any]:
        return self._head() | {"choices": []}

    def whole(self, pieces: Sequence[Piece], generations: Sequence[Generation]) -> dict[str, Any]:
        choices = []
        for index, (piece, generation) in enumerate(zip(pieces, generations, strict=True)):
            text, prompt = piece.text, None
            if self._echoes:
                text, prompt = self._echoes[index] + text, self._prompt_logprobs(index, generation)
            logprobs = self._logprobs(index, piece)
            if prompt is not None and logprobs is not None:
                logprobs = {name: values and values + logprobs[name] for name, values in prompt.items()}
            choices.append(self._choice(index, text, logprobs, generation.finish_reason))
        return self._head() | {"choices": choices}
