"""Words one response of the Responses API: its events in order and its object. Knows shapes; refuses to know transports.

An answer is a list of output items: a reasoning item for what the model thinks, a message for its text, a function_call for each
call. One is open at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from server import shapes
from server.api_error import ApiError
from server.generation import Generation, Piece
from server.openai_shapes import new_id
from server.ports import Tokenizer
from server.responses_types import ResponsesRequest
from server.tool_events import CallArguments, CallEnd, CallStart, Text, ToolEvent
from server.tool_parser import reader_for
from server.tools import Tools

Event = dict[str, Any]


@dataclass(slots=True)
class _Item:
    """One output item. A message and reasoning have text, a call its name and the arguments' JSON text."""

    id: str
    index: int
    call: CallStart | None = None
    thinks: bool = False
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def part(self) -> str:
        """Type of its content part, and the name of that part's events."""
        return "reasoning_text" if self.thinks else "output_text"

    def content(self) -> dict[str, Any]:
        if self.thinks:
            return {"type": self.part, "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def object(self, status: str) -> dict[str, Any]:
        if self.thinks:
            content = [] if status == "in_progress" else [self.content()]
            return {"id": self.id, "type": "reasoning", "summary": [], "status": status, "content": content}
        if self.call is None:
            content = [] if status == "in_progress" else [self.content()]
            return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}
        return {
            "id": self.id, "type": "function_call", "call_id": self.call.id, "name": self.call.name,
            "arguments": self.text, "status": status,
        }  # fmt: skip


class ResponseBuilder:
    """Every event gets the next sequence number; `stream_id` is echoed when there is one."""

    def __init__(
        self, model: str, tokenizer: Tokenizer, body: ResponsesRequest, top_logprobs: int | None, tools: Tools | None
    ) -> None:
        self.id = new_id("resp_")
        self.stream_id: str | None = None
        self._created = time.time()
        self._model = model
        self._tokenizer = tokenizer
        self._body = body
        self._top = top_logprobs
        self._parser = reader_for(tools.format, tools.parallel) if tools is not None else None
        self._sequence = 0
        self._items: list[_Item] = []
        self._open: _Item | None = None

    # ---- events

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        if self.stream_id is not None:
            event["stream_id"] = self.stream_id
        return event

    def _of_item(self, kind: str, item: _Item, **fields: Any) -> Event:
        place = {"item_id": item.id, "output_index": item.index}
        return self._event(kind, **(place | ({"content_index": 0} if item.call is None else {})), **fields)

    def opening(self) -> list[Event]:
        return [self._event(f"response.{kind}", response=self.object("in_progress")) for kind in ("created", "in_progress")]

    def prepared_only(self) -> list[Event]:
        """Events of a request with generate false: it is remembered, and has no output."""
        return [*self.opening(), self._event("response.completed", response=self.object("completed"))]

    def piece(self, piece: Piece) -> Iterator[Event]:
        """Events of new tokens."""
        for part in piece.by_channel():
            logprobs = [] if self._top is None else self._token_logprobs(part)
            if reasoning := part.reasoning:
                yield from self._think(reasoning)
            elif self._parser is not None:
                for event in self._parser.feed(part.text):
                    yield from self._on_tool_event(event)
            elif any(each.channel == "content" for each in part.parts):
                yield from self._say(part.text, logprobs)

    def closing(self, generation: Generation) -> Iterator[Event]:
        """The last events: done for what is open, then completed, incomplete or failed."""
        if generation.error is not None:
            yield self._event("response.failed", response=self.object("failed", error=generation.error))
            return
        for event in self._parser.finish() if self._parser is not None else ():
            yield from self._on_tool_event(event)
        status = "completed" if generation.finish_reason == "stop" else "incomplete"
        if not self._items:
            yield from self._say("", [])
        yield from self._close(status)
        yield self._event(f"response.{status}", response=self.object(status, generation))

    def _on_tool_event(self, event: ToolEvent) -> Iterator[Event]:
        if isinstance(event, Text):
            yield from self._say(event.text, [])
        elif isinstance(event, CallStart):
            yield from self._close("completed")
            yield self._begin(_Item(new_id("fc_"), len(self._items), event))
        elif isinstance(event, CallArguments):
            assert self._open is not None
            self._open.text += event.text
            yield self._of_item("response.function_call_arguments.delta", self._open, delta=event.text)
        elif isinstance(event, CallEnd):
            yield from self._close("completed")

    def _begin(self, item: _Item) -> Event:
        self._items.append(item)
        self._open = item
        return self._event("response.output_item.added", output_index=item.index, item=item.object("in_progress"))

    def _say(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        if self._open is None or self._open.thinks:
            yield from self._close("completed")
            yield self._begin(_Item(new_id("msg_"), len(self._items)))
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield self._of_item("response.content_part.added", self._items[-1], part=part)
        item = self._items[-1]
        item.text += text
        item.logprobs += logprobs
        if text or logprobs:
            yield self._of_item("response.output_text.delta", item, delta=text, logprobs=logprobs)

    def _think(self, text: str) -> Iterator[Event]:
        if self._open is not None and self._open.call is not None:
            return  # nothing may come between a call's pieces
        if self._open is None or not self._open.thinks:
            yield from self._close("completed")
            yield self._begin(_Item(new_id("rs_"), len(self._items), thinks=True))
            yield self._of_item("response.content_part.added", self._items[-1], part=self._items[-1].content())
        item = self._items[-1]
        item.text += text
        yield self._of_item(f"response.{item.part}.delta", item, delta=text)

    def _close(self, status: str) -> Iterator[Event]:
        item, self._open = self._open, None
        if item is None:
            return
        if item.call is None:
            logprobs = {} if item.thinks else {"logprobs": item.logprobs}
            yield self._of_item(f"response.{item.part}.done", item, text=item.text, **logprobs)
            yield self._of_item("response.content_part.done", item, part=item.content())
        else:
            kind = "response.function_call_arguments.done"
            yield self._of_item(kind, item, name=item.call.name, arguments=item.text)
        yield self._event("response.output_item.done", output_index=item.index, item=item.object(status))

    def _token_logprobs(self, piece: Piece) -> list[dict[str, Any]]:
        """Entries of the message's own tokens; those of reasoning and of marks have no place in it."""
        said = [part.channel == "content" for part in piece.parts]
        ids = [token for token, own in zip(piece.token_ids, said, strict=False) if own]
        logprobs = [entry for entry, own in zip(piece.logprobs, said, strict=False) if own]
        return shapes.chat_logprobs(self._tokenizer, ids, logprobs, self._top or 0)

    # ---- objects

    def message(self) -> dict[str, Any]:
        """The answer as a plain message, for the next turn."""
        text = "".join(item.text for item in self._items if item.call is None and not item.thinks)
        calls = [(item.call, item.text) for item in self._items if item.call is not None]
        if not calls:
            return {"role": "assistant", "content": text}
        plain = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments(arguments)}}
            for call, arguments in calls
        ]
        return {"role": "assistant", "content": text, "tool_calls": plain}

    def object(self, status: str, generation: Generation | None = None, error: ApiError | None = None) -> dict[str, Any]:
        """The response object, complete when its generation has ended."""
        body = self._body
        reason = None
        if generation is not None and status == "incomplete":
            reason = "max_output_tokens" if generation.finish_reason == "length" else str(generation.finish_reason)
        result: dict[str, Any] = {
            "id": self.id, "object": "response", "created_at": self._created, "status": status,
            "completed_at": time.time() if status == "completed" else None, "background": False,
            "error": None, "incomplete_details": {"reason": reason} if reason else None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens, "metadata": body.metadata or {},
            "model": self._model, "output": [], "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id, "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": (body.text.format if body.text is not None else None) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto", "tools": body.tools or [], "top_logprobs": self._top or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p, "truncation": "disabled", "store": body.store is not False,
            "usage": None, "service_tier": "default",
        }  # fmt: skip
        if error is not None:
            code = "server_error" if error.status >= 500 else error.code
            result["error"] = {"code": code, "message": error.message, "param": error.param, "type": error.type}
        if generation is not None:
            figures = [generation.figures]
            last = len(self._items) - 1
            result["output"] = [item.object(status if item.index == last else "completed") for item in self._items]
            result["usage"] = _usage(shapes.usage(figures))
            result["speculation"] = shapes.speculation(figures)
            result["timings"] = shapes.timings(figures)
        return result


def _arguments(text: str) -> dict[str, Any]:
    """A call cut off by the token limit has no usable arguments."""
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _usage(counts: dict[str, Any]) -> dict[str, Any]:
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": counts["completion_tokens_details"],
        "total_tokens": counts["total_tokens"],
    }
