"""POST /v1/responses, JSON and server-sent events, and what its socket shares: from a request to a plan to its events.

Knows conversations by id; refuses to know the wording of events (response_builder), sockets and engines.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from server.decoding import TypedDecoder
from server.histories import Histories, Messages
from server.httpio import EventStream, Gone, json_response, read_body, sse_event, unless_gone
from server.openai import Answer, Route, begin
from server.response_builder import Event, ResponseBuilder
from server.responses_types import (
    ResponsesRequest,
    check_supported,
    input_messages,
    previous_not_found,
    sampling_options,
    wanted_logprobs,
)
from server.service import Caller, Prepared, Service

_decoder = TypedDecoder[ResponsesRequest](ResponsesRequest)


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked request: what to run (None: only remember the input), and how to word it."""

    prepared: Prepared | None
    builder: ResponseBuilder
    conversation: Messages  # without instructions, which are not carried over


async def plan(service: Service, body: ResponsesRequest, caller: Caller, *histories: Histories) -> Plan:
    """Check everything about a request. Raises ApiError naming the field; previous_response_not_found for an unknown id."""
    service.check_open()
    service.check_model(body.model)
    check_supported(body)
    earlier: Messages = []
    if body.previous_response_id is not None:
        found = next((h for each in histories if (h := each.get(caller.tenant, body.previous_response_id)) is not None), None)
        if found is None:
            raise previous_not_found(body.previous_response_id)
        earlier = found
    generate = body.generate is not False
    conversation = [*earlier, *input_messages(body.input, service.limits, may_be_empty=not generate or bool(earlier))]
    top = wanted_logprobs(body, service.limits)
    tools = service.tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    builder = ResponseBuilder(service.model, service.text.tokenizer, body, top, tools)
    if not generate:
        return Plan(None, builder, conversation)
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    prompt = await service.chat_prompt([*instructions, *conversation], tools)
    options = sampling_options(body)
    prepared = service.prepare(prompt, options, caller, logprobs=top, param="input", tools=tools)
    return Plan(prepared, builder, conversation)


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
    last = list(builder.closing(generation))
    if generation.error is None:
        remember(builder.id, [*plan.conversation, builder.message()])
    for event in last:
        yield event


async def responses(request: Request) -> Response:
    service: Service = request.app.state.service
    histories: Histories = request.app.state.histories
    caller = Caller.of(request)
    body = _decoder.decode(await read_body(request, service.limits.body_bytes))
    made = await plan(service, body, caller, histories)

    def remember(response_id: str, messages: Messages) -> None:
        if body.store is not False:
            histories.put(caller.tenant, response_id, messages)

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
