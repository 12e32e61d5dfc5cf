"""The WebSocket of the Responses API at /v1/responses: response.create in, response events out.

Turns of one lane (`stream_id`, or none) run one after the other, lanes side by side. Conversations are held by this connection.
Knows starlette and asyncio; the events themselves are made in responses.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from server.api_error import ApiError
from server.decoding import TypedDecoder
from server.guard import refuse_socket
from server.histories import Histories
from server.httpio import encode_json
from server.openai import begin
from server.responses import plan, run
from server.responses_types import ResponseCreate, ResponseSteer, SocketMessage
from server.service import Caller, Service
from server.session import CLOSE_RESTART, CLOSE_SLOW

log = logging.getLogger("forespeak.server")

_decoder = TypedDecoder[SocketMessage](SocketMessage)
HISTORY_COUNT = 64  # conversations one connection holds
HISTORY_BYTES = 4 * 2**20
QUEUED_TURNS = 32
POLL_SECONDS = 0.1


async def responses_socket(websocket: WebSocket) -> None:
    """The guard has checked Host, Origin and key before."""
    service: Service = websocket.app.state.service
    tenant: str = websocket.state.tenant
    try:
        service.admission.take_socket(tenant)
    except ApiError as error:
        await refuse_socket(websocket.scope, websocket.send, error)
        return
    try:
        await websocket.accept()
        await _Connection(websocket, service, tenant, websocket.app.state.histories).run()
    finally:
        service.admission.give_socket(tenant)


class _Connection:
    def __init__(self, websocket: WebSocket, service: Service, tenant: str, shared: Histories) -> None:
        self._websocket = websocket
        self._service = service
        self._tenant = tenant
        self._shared = shared  # of HTTP answers under the same key
        self._histories = Histories(HISTORY_COUNT, HISTORY_BYTES)
        self._lanes: dict[str | None, asyncio.Queue[ResponseCreate]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._busy = 0
        self._sending = asyncio.Lock()
        self._closed = False
        self._cancels: set[Callable[[], None]] = set()

    async def run(self) -> None:
        reader = self._spawn(self._read())
        drain = self._spawn(self._close_on_drain())
        try:
            await asyncio.wait({reader, drain}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for cancel in list(self._cancels):
                cancel()
            for task in self._tasks:
                task.cancel()
            for result in await asyncio.gather(*self._tasks, return_exceptions=True):
                if isinstance(result, Exception) and not isinstance(result, WebSocketDisconnect):
                    log.error("a Responses socket failed unexpectedly", exc_info=result)

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        return task

    async def _close_on_drain(self) -> None:
        while not (self._service.draining and self._busy == 0):
            await asyncio.sleep(POLL_SECONDS)
        await self._close(CLOSE_RESTART, "the server is shutting down")

    async def _close(self, code: int, reason: str) -> None:
        if not self._closed:
            self._closed = True
            await self._websocket.close(code, reason)

    async def _send(self, event: dict[str, Any]) -> None:
        """One event as a text frame. A reader that takes nothing for too long is closed with 4503."""
        async with self._sending:
            if self._closed:
                return
            try:
                async with asyncio.timeout(self._service.limits.slow_seconds):
                    await self._websocket.send_text(encode_json(event).decode())
            except TimeoutError:
                await self._close(CLOSE_SLOW, "this connection reads too slowly")

    async def _say_error(self, error: ApiError, stream_id: str | None = None) -> None:
        event: dict[str, Any] = {"type": "error", "status": error.status, **error.body()}
        if stream_id is not None:
            event["stream_id"] = stream_id
        await self._send(event)

    async def _read(self) -> None:
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                return
            try:
                data = message.get("bytes")
                received = _decoder.decode(message["text"] if data is None else data)
                if isinstance(received, ResponseSteer):
                    raise ApiError(400, "steering is not supported by this server", code="steering_not_supported", param="type")
                await self._enqueue(received)
            except ApiError as error:
                if error.param == "type":
                    error = ApiError(
                        400, "the type is missing or unknown; known is response.create", code=error.code, param="type"
                    )
                await self._say_error(error)

    async def _enqueue(self, body: ResponseCreate) -> None:
        limits = self._service.limits
        if body.stream_id is not None and not 1 <= len(body.stream_id) <= limits.id_chars:
            raise ApiError(400, f"stream_id needs 1 to {limits.id_chars} characters", code="invalid_value", param="stream_id")
        lane = self._lanes.get(body.stream_id)
        if lane is None:
            if len(self._lanes) >= limits.requests_per_socket:
                raise ApiError(
                    429, f"at most {limits.requests_per_socket} lanes may be used on one socket", code="rate_limit_exceeded"
                )
            lane = self._lanes[body.stream_id] = asyncio.Queue(QUEUED_TURNS)
            self._spawn(self._run_lane(body.stream_id, lane)).add_done_callback(self._tasks.discard)
        try:
            lane.put_nowait(body)
        except asyncio.QueueFull:
            raise ApiError(429, f"at most {QUEUED_TURNS} turns may wait in one lane", code="rate_limit_exceeded") from None
        self._busy += 1

    async def _run_lane(self, name: str | None, lane: asyncio.Queue[ResponseCreate]) -> None:
        """Take the lane's turns one after the other. It ends with the last one that waits; the next turn opens it anew."""
        while not lane.empty():
            body = lane.get_nowait()
            try:
                await self._turn(body)
            except ApiError as error:
                await self._say_error(error, body.stream_id)
            except WebSocketDisconnect:
                return
            except Exception:
                log.exception("a response failed unexpectedly")
                await self._say_error(ApiError(500, "the server failed on this request", code="internal_error"), body.stream_id)
            finally:
                self._busy -= 1
        if self._lanes.get(name) is lane:
            del self._lanes[name]

    async def _turn(self, body: ResponseCreate) -> None:
        made = await plan(self._service, body, Caller.of(self._websocket), self._histories, self._shared)
        made.builder.stream_id = body.stream_id

        def remember(response_id: str, messages: list[dict[str, Any]]) -> None:
            self._histories.put(self._tenant, response_id, messages)

        if made.prepared is None:
            remember(made.builder.id, made.conversation)
            for event in made.builder.prepared_only():
                await self._send(event)
            return
        answer = begin(self._service, [made.prepared])
        self._cancels.add(answer.cancel)
        try:
            await answer.started()
            async for event in run(made, answer, remember):
                await self._send(event)
        finally:
            answer.cancel()
            self._cancels.discard(answer.cancel)
