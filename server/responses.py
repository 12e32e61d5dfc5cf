"""POST /v1/responses, JSON and server-sent events, and the builder of response objects and events that its socket shares.

Knows the Responses API's shapes and conversations by id; refuses to know sockets and engines.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from server import shapes
from server.api_error import ApiError
from server.decoding import TypedDecoder
from server.generation import Generation, Piece
from server.histories import Histories, Messages
from server.httpio import EventStream, Gone, json_response, read_body, sse_event, unless_gone
from server.openai import Answer, Route, begin, new_id
from server.responses_types import (
    ResponsesRequest,
    check_supported,
    input_messages,
    previous_not_found,
    sampling_options,
    wanted_logprobs,
)
from server.service import Prepared, Service

_decoder = TypedDecoder[ResponsesRequest](ResponsesRequest)

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked request: what to run (None: only remember the input), and how to word it."""

    prepared: Prepared | None
    builder: ResponseBuilder
    conversation: Messages  # without instructions, which are not carried over


async def plan(service: Service, body: ResponsesRequest, tenant: str, arrival: float, *histories: Histories) -> Plan:
    """Check everything about a request. Raises ApiError naming the field; previous_response_not_found for an unknown id."""
    service.check_open()
    service.check_model(body.model)
    check_supported(body)
    earlier: Messages = []
    if body.previous_response_id is not None:
        found = next((h for each in histories if (h := each.get(tenant, body.previous_response_id)) is not None), None)
        if found is None:
            raise previous_not_found(body.previous_response_id)
        earlier = found
    generate = body.generate is not False
    conversation = [*earlier, *input_messages(body.input, service.limits, may_be_empty=not generate or bool(earlier))]
    top = wanted_logprobs(body, service.limits)
    builder = ResponseBuilder(service, body, top)
    if not generate:
        return Plan(None, builder, conversation)
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    prompt = await service.chat_prompt([*instructions, *conversation])
    options = sampling_options(body)
    prepared = service.prepare(prompt, options, tenant=tenant, arrival=arrival, logprobs=top, param="input")
    return Plan(prepared, builder, conversation)


class ResponseBuilder:
    """Words one response. Every event gets the next sequence number; `stream_id` is echoed when there is one."""

    def __init__(
        self, service: Service, body: ResponsesRequest, top_logprobs: int | None, stream_id: str | None = None
    ) -> None:
        self.id = new_id("resp_")
        self.stream_id = stream_id
        self.text = ""
        self._item_id = new_id("msg_")
        self._created = time.time()
        self._model = service.model
        self._tokenizer = service.text.tokenizer
        self._body = body
        self._top = top_logprobs
        self._logprobs: list[dict[str, Any]] = []
        self._sequence = 0
        self._open = False  # the message item has been announced

    # ---- events

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        if self.stream_id is not None:
            event["stream_id"] = self.stream_id
        return event

    def _part_event(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **fields)

    def opening(self) -> list[Event]:
        return [self._event(f"response.{kind}", response=self.object("in_progress")) for kind in ("created", "in_progress")]

    def piece(self, piece: Piece) -> Iterator[Event]:
        """Events of new text; the first also announces the message it belongs to."""
        if not self._open:
            yield from self._announce()
        text, logprobs = piece.text, self._token_logprobs(piece)
        self.text += text
        self._logprobs += logprobs
        if text or logprobs:
            yield self._part_event("response.output_text.delta", delta=text, logprobs=logprobs)

    def _announce(self) -> Iterator[Event]:
        self._open = True
        item = {"id": self._item_id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        yield self._event("response.output_item.added", output_index=0, item=item)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield self._part_event("response.content_part.added", part=part)

    def closing(self, generation: Generation) -> Iterator[Event]:
        """The last events: done for all that is open, then completed, incomplete or failed."""
        if generation.error is not None:
            yield self.failure(generation.error)
            return
        if not self._open:
            yield from self._announce()
        status = self._status(generation)
        yield self._part_event("response.output_text.done", text=self.text, logprobs=self._logprobs)
        yield self._part_event("response.content_part.done", part=self._content())
        yield self._event("response.output_item.done", output_index=0, item=self._item(status))
        yield self._event(f"response.{status}", response=self.object(status, generation))

    def failure(self, error: ApiError) -> Event:
        return self._event("response.failed", response=self.object("failed", error=error))

    def prepared_only(self) -> list[Event]:
        """Events of a request with generate false: it is remembered, and has no output."""
        return [*self.opening(), self._event("response.completed", response=self.object("completed"))]

    # ---- objects

    @staticmethod
    def _status(generation: Generation) -> str:
        return "completed" if generation.finish_reason == "stop" else "incomplete"

    def _token_logprobs(self, piece: Piece) -> list[dict[str, Any]]:
        if self._top is None:
            return []
        return shapes.chat_logprobs(self._tokenizer, piece.token_ids, piece.logprobs, self._top)

    def _content(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self._logprobs}

    def _item(self, status: str) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": [self._content()]}

    def object(self, status: str, generation: Generation | None = None, error: ApiError | None = None) -> dict[str, Any]:
        """The response object, complete when its generation has ended."""
        body = self._body
        incomplete = "max_output_tokens" if status == "incomplete" else None
        if generation is not None and generation.finish_reason == "cancelled":
            incomplete = "cancelled"
        result: dict[str, Any] = {
            "id": self.id, "object": "response", "created_at": self._created, "status": status,
            "completed_at": time.time() if status == "completed" else None, "background": False,
            "error": None, "incomplete_details": {"reason": incomplete} if incomplete else None,
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
            result["output"] = [self._item(status)]
            result["usage"] = _usage(shapes.usage(figures))
            result["speculation"] = shapes.speculation(figures)
            result["timings"] = shapes.timings(figures)
        return result


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


async def run(plan: Plan, answer: Answer, remember: Callable[[str, Messages], None]) -> AsyncIterator[Event]:
    """All events of a started response. A finished answer is remembered under its id before its last event is out."""
    builder, [generation] = plan.builder, answer.generations
    for event in builder.opening():
        yield event
    while True:
        ended = generation.ended
        piece = generation.take()
        if piece is not None:
            for event in builder.piece(piece):
                yield event
        if ended:
            break
        await answer.wait()
    if generation.error is None:
        remember(builder.id, [*plan.conversation, {"role": "assistant", "content": builder.text}])
    for event in builder.closing(generation):
        yield event


async def responses(request: Request) -> Response:
    arrival = time.perf_counter()
    service: Service = request.app.state.service
    histories: Histories = request.app.state.histories
    tenant: str = request.state.tenant
    body = _decoder.decode(await read_body(request, service.limits.body_bytes))
    made = await plan(service, body, tenant, arrival, histories)

    def remember(response_id: str, messages: Messages) -> None:
        if body.store is not False:
            histories.put(tenant, response_id, messages)

    if made.prepared is None:
        remember(made.builder.id, made.conversation)
        return json_response(made.builder.object("completed"))
    answer = begin(service, [made.prepared])

    async def first() -> Response:
        await answer.started()
        if body.stream:
            return EventStream(_as_sse(run(made, answer, remember)), answer.cancel)
        last: Event = {}
        async for event in run(made, answer, remember):
            last = event
        answer.raise_error()
        return json_response(last["response"])

    try:
        return await unless_gone(request, first, answer.cancel) or Gone()
    except BaseException:
        answer.cancel()
        raise


async def _as_sse(events: AsyncIterator[Event]) -> AsyncIterator[bytes]:
    async for event in events:
        yield sse_event(event, event["type"])


ROUTES: tuple[Route, ...] = (("POST", "/v1/responses", responses),)
