"""The native socket's I/O: reads frames while it sends others, and closes with the right code. Knows starlette and asyncio only;
what frames mean is the session's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from starlette.websockets import WebSocket, WebSocketDisconnect

from server.api_error import ApiError, invalid
from server.messages import plain_messages
from server.openai_types import chat_logprobs_wanted
from server.protocol import Chat, choose_codec
from server.service import Caller, Service
from server.session import (
    CLOSE_FAILED,
    CLOSE_NO_KEY,
    CLOSE_RESTART,
    CLOSE_SLOW,
    CLOSE_TOO_MANY,
    Begin,
    Session,
    SessionSettings,
)
from server.stream import ChatStream
from server.tool_shapes import CallReader

log = logging.getLogger("forespeak.server")

FLUSH_SECONDS = 1.0  # for frames still queued when a socket is closed


class Sockets:
    """Every open native socket of a server, for notices, watching and the end."""

    def __init__(self, settings: SessionSettings) -> None:
        self.settings = settings
        self.connections: set[Connection] = set()

    def notice(self, code: str, message: str) -> None:
        for connection in list(self.connections):
            connection.session.notice(code, message)

    def tick(self, now: float) -> None:
        """Once a second: give up slow readers, forget answers nobody came back for."""
        for connection in list(self.connections):
            connection.session.check_slow(connection.blocked_since, now)
        self.settings.resumables.expire(now)

    def end_idle(self) -> None:
        """Close every socket on which nothing runs."""
        for connection in list(self.connections):
            if connection.session.num_running == 0:
                connection.session.end(CLOSE_RESTART, "the server is shutting down")

    def end_all(self) -> None:
        """Close every socket once what it has to say is out."""
        for connection in list(self.connections):
            connection.session.end(CLOSE_RESTART, "the server is shutting down")

    async def wait_closed(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while self.connections and time.monotonic() < end:
            await asyncio.sleep(0.02)


async def native_socket(websocket: WebSocket) -> None:
    """/v1/ws. The guard in front has checked Host, Origin and the key, if one came in a header."""
    service: Service = websocket.app.state.service
    sockets: Sockets = websocket.app.state.sockets
    tenant: str | None = websocket.state.tenant
    codec, subprotocol = choose_codec(websocket.scope["subprotocols"])
    await websocket.accept(subprotocol)
    connection = Connection(websocket, service, sockets.settings, lambda wake: Session(sockets.settings, codec, tenant, wake))
    sockets.connections.add(connection)
    try:
        await connection.run()
    finally:
        sockets.connections.discard(connection)


class Connection:
    """One socket. `blocked_since` is when the frame that is being sent began to wait."""

    def __init__(
        self,
        websocket: WebSocket,
        service: Service,
        settings: SessionSettings,
        session: Callable[[Callable[[], None]], Session],
    ) -> None:
        self.blocked_since: float | None = None
        self._websocket = websocket
        self._service = service
        self._limits = settings.limits
        self._wake = asyncio.Event()
        self._starts: set[asyncio.Task[None]] = set()
        self._counted: str | None = None  # the tenant this socket is counted for
        self._ending = asyncio.Event()
        self.session = session(self._on_change)

    async def run(self) -> None:
        reader = asyncio.create_task(self._read())
        writer = asyncio.create_task(self._write())
        writer.add_done_callback(self._writer_ended)
        closer = asyncio.create_task(self._close_when_told(writer))
        tasks: set[asyncio.Task[None]] = {reader, writer, closer}
        try:
            self._admit()
            await asyncio.wait({reader, closer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.session.detach(time.monotonic())
            tasks |= self._starts
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception) and not isinstance(result, WebSocketDisconnect):
                    log.error("a socket failed unexpectedly", exc_info=result)
            if self._counted is not None:
                self._service.admission.give_socket(self._counted)

    def _writer_ended(self, writer: asyncio.Task[None]) -> None:
        """A writer that failed leaves a client waiting for ever: close instead. `run` logs why."""
        if not writer.cancelled() and isinstance(writer.exception(), Exception):
            self.session.end(CLOSE_FAILED, "the server failed on this connection")

    def _on_change(self) -> None:
        self._wake.set()
        if self.session.close_code is not None:
            self._ending.set()

    async def _close_when_told(self, writer: asyncio.Task[None]) -> None:
        """Let what is queued out first, unless the reader is the problem; then the close frame."""
        await self._ending.wait()
        code = self.session.close_code or CLOSE_RESTART
        await asyncio.wait({writer}, timeout=0 if code == CLOSE_SLOW else FLUSH_SECONDS)
        writer.cancel()
        await self._websocket.close(code, self.session.close_reason)

    def _admit(self) -> None:
        """Count this socket for its key, once the key is known."""
        tenant = self.session.tenant
        if self._counted is None and tenant is not None:
            try:
                self._service.admission.take_socket(tenant)
                self._counted = tenant
            except ApiError as error:
                self.session.end(CLOSE_TOO_MANY, error.message)

    # ---- reading

    async def _read(self) -> None:
        limits = self._limits
        if self.session.tenant is None:
            try:
                async with asyncio.timeout(limits.auth_seconds):
                    while self.session.tenant is None:
                        await self._read_one()
            except TimeoutError:
                self.session.end(CLOSE_NO_KEY, f"no key came within {limits.auth_seconds:g} seconds")
        while True:
            await self._read_one()

    async def _read_one(self) -> None:
        message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1006))
        if self.session.close_code is not None:
            return
        frame = message.get("bytes")
        intent = self.session.receive(message["text"] if frame is None else frame)
        self._admit()
        if intent is not None:
            task = asyncio.create_task(self._start(intent))
            self._starts.add(task)
            task.add_done_callback(self._starts.discard)

    async def _start(self, intent: Begin) -> None:
        """From a chat message to a running generation. Every failure is an error frame of its id."""
        stream = intent.stream
        try:
            await self._begin(stream, intent.chat)
        except ApiError as error:
            self.session.refuse(stream, error)
        except Exception:
            log.exception("a chat request failed unexpectedly")
            self.session.refuse(stream, ApiError(500, "the server failed on this request", code="internal_error"))
        self._wake.set()

    async def _begin(self, stream: ChatStream, chat: Chat) -> None:
        # The key may have come in a message, after the handshake.
        service, caller = self._service, replace(Caller.of(self._websocket), tenant=stream.tenant)
        service.check_open()
        service.check_model(chat.model)
        if chat.n is not None and chat.n != 1:
            raise invalid("n", f"n is {chat.n}; on this socket every chat has one answer, send several chats instead")
        stream.top_logprobs = chat_logprobs_wanted(chat.logprobs, chat.top_logprobs, self._limits)
        tools = service.tools(chat.tools, chat.tool_choice, chat.parallel_tool_calls)
        stream.reader = CallReader(tools) if tools is not None else None
        prompt = await service.chat_prompt(plain_messages(chat.messages, self._limits), tools)
        prepared = service.prepare(prompt, chat, caller, logprobs=stream.top_logprobs, tools=tools)

        def notify() -> None:
            stream.on_progress(time.monotonic())
            stream.wake()

        [generation] = service.begin(prepared, notify)
        stream.begin(generation)
        if stream.cancelled:
            stream.cancel()

    # ---- writing

    async def _write(self) -> None:
        websocket, session = self._websocket, self.session
        while True:
            self._wake.clear()
            while (frame := session.next_frame(time.monotonic())) is not None:
                self.blocked_since = time.monotonic()
                if isinstance(frame, str):
                    await websocket.send_text(frame)
                else:
                    await websocket.send_bytes(frame)
                self.blocked_since = None
            if session.close_code is not None:
                return
            due = session.next_time()
            if due is None:
                await self._wake.wait()
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, due - time.monotonic())):
                        await self._wake.wait()
