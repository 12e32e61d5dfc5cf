"""POST /v1/chat/completions, /v1/completions, /tokenize, /detokenize and GET /v1/models, /tokenizer_info in OpenAI's shapes. Knows JSON bodies and chunks;
refuses to know engines and how text is made.

Streamed and unstreamed answers come from the same generations and the same builders, so their text, usage and finish_reason
are equal.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from server import openai_types, shapes
from server.api_error import ApiError, invalid
from server.decoding import TypedDecoder
from server.generation import Generation, Piece
from server.httpio import DONE_EVENT, EventStream, Gone, json_response, read_body, sse_event, unless_gone
from server.messages import plain_messages
from server.openai_shapes import ChatShape, CompletionShape, Shape
from server.openai_types import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from server.service import Caller, Prepared, Service

P = ParamSpec("P")
T = TypeVar("T")

_chat = TypedDecoder[ChatRequest](ChatRequest)
_completion = TypedDecoder[CompletionRequest](CompletionRequest)
_tokenize = TypedDecoder[TokenizeRequest](TokenizeRequest)
_detokenize = TypedDecoder[DetokenizeRequest](DetokenizeRequest)


@dataclass(slots=True)
class Answer:
    """The choices of one HTTP request, running."""

    generations: list[Generation]
    wake: asyncio.Event
    n: int  # choices per prompt

    async def started(self) -> None:
        """Wait for the engine's first word on every choice, so that a refusal still gets its own status code."""
        while any(not (g.started or g.ended) for g in self.generations):
            await self.wait()
        self.raise_error()

    async def wait(self) -> None:
        await self.wake.wait()
        self.wake.clear()

    def raise_error(self) -> None:
        for generation in self.generations:
            if generation.error is not None:
                self.cancel()
                raise generation.error

    def cancel(self) -> None:
        for generation in self.generations:
            generation.cancel()

    def totals(self) -> dict[str, Any]:
        figures = [g.figures for g in self.generations]
        return {
            "usage": shapes.usage(figures, self.n),
            "speculation": shapes.speculation(figures),
            "timings": shapes.timings(figures),
        }


def begin(service: Service, prepared: Sequence[Prepared]) -> Answer:
    """Start every choice of every prompt, or none."""
    wake = asyncio.Event()
    answer = Answer([], wake, prepared[0].n)
    try:
        for each in prepared:
            answer.generations.extend(service.begin(each, wake.set))
    except ApiError:
        answer.cancel()
        raise
    return answer


async def _aside(generations: Sequence[Generation], build: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`build(...)`, beside the event loop where there are log probabilities of whole prompts to word: other streams go on."""
    if any(generation.prompt_logprobs for generation in generations):
        return await asyncio.to_thread(build, *args, **kwargs)
    return build(*args, **kwargs)


async def stream_events(answer: Answer, shape: Shape, with_usage: bool) -> AsyncIterator[bytes]:
    """Server-sent events of an answer. A failure on the way is one error event, and then the stream ends without [DONE]."""
    usage: dict[str, Any] = {"usage": None} if with_usage else {}
    open_choices = list(enumerate(answer.generations))
    for index, generation in open_choices:
        opening = await _aside([generation], shape.opening, index, generation)
        if opening is not None:
            yield sse_event(opening | usage)
    while open_choices:
        still_open = []
        for index, generation in open_choices:
            ended = generation.ended  # read before taking, so that nothing can come after the closing chunk
            piece = generation.take()
            if piece is not None:
                for chunk in shape.chunks(index, piece):
                    yield sse_event(chunk | usage)
            if generation.error is not None:
                answer.cancel()
                yield sse_event(generation.error.body())
                return
            if ended:
                for chunk in shape.closing(index, generation):
                    yield sse_event(chunk | usage)
            else:
                still_open.append((index, generation))
        open_choices = still_open
        if open_choices:
            await answer.wait()
    if with_usage:
        yield sse_event(shape.summary() | answer.totals())
    yield DONE_EVENT


async def collect(answer: Answer, shape: Shape) -> Response:
    """The unstreamed answer, after every choice ended."""
    while any(not g.ended for g in answer.generations):
        await answer.wait()
        answer.raise_error()
    answer.raise_error()
    pieces = [g.take() or Piece() for g in answer.generations]
    whole = await _aside(answer.generations, shape.whole, pieces, answer.generations)
    return json_response(whole | answer.totals())


async def respond(request: Request, answer: Answer, shape: Shape, stream: bool, with_usage: bool) -> Response:
    """Stream or collect; when the client leaves, every choice is cancelled at once."""

    async def first() -> Response:
        await answer.started()
        if stream:
            return EventStream(stream_events(answer, shape, with_usage), answer.cancel)
        return await collect(answer, shape)

    try:
        return await unless_gone(request, first, answer.cancel) or Gone()
    except BaseException:
        answer.cancel()
        raise


async def chat_completions(request: Request) -> Response:
    service: Service = request.app.state.service
    caller = Caller.of(request)
    service.check_open()
    body = _chat.decode(await read_body(request, service.limits.body_bytes))
    service.check_model(body.model)
    with_usage = openai_types.wants_usage(body.stream, body.stream_options)
    top = openai_types.chat_logprobs_wanted(body.logprobs, body.top_logprobs, service.limits)
    tools = service.tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    prompt = await service.chat_prompt(plain_messages(body.messages, service.limits), tools)
    prepared = service.prepare(prompt, body, caller, logprobs=top, tools=tools)
    answer = begin(service, [prepared])
    return await respond(request, answer, ChatShape(service, top, tools, prepared.n), bool(body.stream), with_usage)


async def completions(request: Request) -> Response:
    service: Service = request.app.state.service
    caller = Caller.of(request)
    service.check_open()
    body = _completion.decode(await read_body(request, service.limits.body_bytes))
    service.check_model(body.model)
    openai_types.check_completion(body)
    with_usage = openai_types.wants_usage(body.stream, body.stream_options)
    top = openai_types.completion_logprobs_wanted(body.logprobs, service.limits)
    prompts = openai_types.prompts_of(body.prompt, service.limits)
    prepared = []
    for prompt in prompts:
        if isinstance(prompt, str):
            ids = await service.text_prompt(prompt)
        else:
            service.check_prompt_ids(prompt)
            ids = prompt
        wanted = top if body.echo else None
        prepared.append(
            service.prepare(ids, body, caller, logprobs=top, prompt_logprobs=wanted, param="prompt", continuation=True)
        )
    echoes: list[str] = []
    if body.echo:
        if top is not None:
            openai_types.check_prompt_scores(sum(len(p.prompt_ids) * p.n for p in prepared), top, service.limits)
        texts = [p if isinstance(p, str) else await service.text_of(p) for p in prompts]
        echoes = [text for text in texts for _ in range(prepared[0].n)]
    answer = begin(service, prepared)
    return await respond(request, answer, CompletionShape(service, top, echoes), bool(body.stream), with_usage)


def _model_object(service: Service) -> dict[str, Any]:
    ready = service.engine.ready
    extra = {"context_length": ready.context, "drafters": list(ready.drafters)} if ready is not None else {}
    return {"id": service.model, "object": "model", "created": service.created, "owned_by": "forespeak"} | extra


async def models(request: Request) -> Response:
    return json_response({"object": "list", "data": [_model_object(request.app.state.service)]})


async def model(request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_model(request.path_params["model"])
    return json_response(_model_object(service))


async def tokenize(request: Request) -> Response:
    """Token ids of a text, or of messages through the chat template."""
    service: Service = request.app.state.service
    body = _tokenize.decode(await read_body(request, service.limits.body_bytes))
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "give either prompt or messages")
    if body.messages is not None:
        ids = await service.chat_prompt(plain_messages(body.messages, service.limits))
    else:
        ids = await service.text_prompt(body.prompt or "", special=body.add_special_tokens is not False)
    ready = service.check_open()
    return json_response({"tokens": ids, "count": len(ids), "max_model_len": ready.context})


async def detokenize(request: Request) -> Response:
    """The text of token ids, control tokens left out."""
    service: Service = request.app.state.service
    body = _detokenize.decode(await read_body(request, service.limits.body_bytes))
    service.check_model(body.model)
    service.check_prompt_ids(body.tokens, "tokens")
    return json_response({"prompt": await service.text_of(body.tokens)})


async def tokenizer_info(request: Request) -> Response:
    """What a client that has no tokenizer of its own asks before it uses ours."""
    tokenizer = request.app.state.service.text.tokenizer
    return json_response({"vocab_size": tokenizer.vocab_size, "chat_template": tokenizer.chat_template})


Route = tuple[str, str, Callable[[Request], Any]]
ROUTES: tuple[Route, ...] = (
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/completions", completions),
    ("GET", "/v1/models", models),
    ("GET", "/v1/models/{model:path}", model),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
    ("GET", "/tokenizer_info", tokenizer_info),
)
