"""HTTP glue: bounded bodies, JSON answers, error answers, event streams that notice a client's leaving. Knows ASGI only."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api_error import ApiError

log = logging.getLogger("forespeak.server")

_encoder = msgspec.json.Encoder()
# Line and paragraph separator and next line, as UTF-8: legal in JSON, but readers that split lines the Unicode way break on them.
_SEPARATORS = re.compile(rb"\xe2\x80[\xa8\xa9]|\xc2\x85")
_ESCAPES = {b"\xe2\x80\xa8": b"\\u2028", b"\xe2\x80\xa9": b"\\u2029", b"\xc2\x85": b"\\u0085"}
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE_EVENT = b"data: [DONE]\n\n"


def encode_json(value: Any) -> bytes:
    return _encoder.encode(value)


def sse_event(value: Any, name: str | None = None) -> bytes:
    """One server-sent event on one line whatever splits it."""
    data = _SEPARATORS.sub(lambda match: _ESCAPES[match[0]], _encoder.encode(value))
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data) if name else b"data: %s\n\n" % data


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode_json(value), status, headers, "application/json")


def error_response(error: ApiError) -> Response:
    headers = dict(error.headers)
    if error.retry_after is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after))
    return json_response(error.body(), error.status, headers)


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body, at most `limit` bytes. Raises ApiError 413, before reading when Content-Length already tells."""
    too_large = ApiError(
        413, f"the body is larger than {limit} bytes", code="request_too_large", headers=(("connection", "close"),)
    )
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise too_large
    return bytes(body)


Handler = Callable[[Request], Awaitable[Response]]


def guarded(handler: Handler) -> Handler:
    """Turn ApiError into its answer and anything unexpected into a plain 500 without details."""

    async def call(request: Request) -> Response:
        try:
            return await handler(request)
        except ApiError as error:
            return error_response(error)
        except Exception:
            log.exception("a request failed unexpectedly")
            return error_response(ApiError(500, "the server failed on this request", code="internal_error"))

    return call


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(
    request: Request, work: Callable[[], Awaitable[Response]], on_gone: Callable[[], None]
) -> Response | None:
    """Run `work`; when the client leaves first, call `on_gone`, stop the work and return None."""
    gone = asyncio.ensure_future(_wait_disconnect(request.receive))
    task = asyncio.ensure_future(work())
    try:
        await asyncio.wait((gone, task), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        if not task.done():
            on_gone()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        gone.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await gone


class EventStream(Response):
    """A stream of ready-made events. Never compressed, never buffered. `on_gone` is called when the client left early."""

    def __init__(self, events: AsyncIterator[bytes], on_gone: Callable[[], None]) -> None:
        super().__init__()
        self._events = events
        self._on_gone = on_gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_wait_disconnect(receive))
        task = asyncio.ensure_future(self._send_all(send))
        try:
            await asyncio.wait((gone, task), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            if not task.done():
                self._on_gone()
                task.cancel()
            gone.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Gone(Response):
    """What a handler returns when nobody is there to read: nothing is sent."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        return None
