"""uvicorn's WebSocket protocol with its goodbyes changed. Knows uvicorn's insides; nothing else in the server does.

A close frame never waits behind a reader that reads nothing, a peer that does not answer it is dropped, a peer that is still
sending gets to read why (closing under unread data would reset the connection and lose the frame), text that is not UTF-8 is
closed with 1007 without a traceback in the log, and a peer that leaves a ping unanswered is a slow reader like any other.
"""

from __future__ import annotations

import asyncio

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from server.session import CLOSE_SLOW

LINGER_SECONDS = 3.0


class WebSocketProtocol(WebSocketsSansIOProtocol):
    _failed = False

    async def send(self, message: ASGISendEvent) -> None:
        if message["type"] == "websocket.close" and self.handshake_complete:
            self.writable.set()
            self._drop_later()
        elif message["type"] == "websocket.send" and self.transport.is_closing():
            raise ClientDisconnected  # before asyncio warns of writes into nothing
        await super().send(message)

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text" and not self.close_sent:
            self.frames = [b"".join(self.frames)]
            try:
                self.frames[0].decode()
            except UnicodeDecodeError:
                self.frames = []
                self.conn.fail(1007, "a text frame is not UTF-8")
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    def handle_parser_exception(self) -> None:
        """The peer broke the protocol or a limit: say so, then read on without looking, until it has gone or time is up."""
        if self._failed:
            return
        self._failed = True
        sent = self.conn.close_sent
        code, reason = (sent.code, sent.reason) if sent is not None else (1002, "")
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.close_sent = True
        self.transport.write(b"".join(self.conn.data_to_send()))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.transport.resume_reading()
        self.close_timer = self._drop_later()  # it keeps run_asgi from closing under the peer's data

    def keepalive_timeout(self) -> None:
        """A ping waits behind everything the peer has not read yet: it is too far behind, or gone."""
        self.pong_timer = self.pending_ping_payload = None
        if not self.close_sent and not self.transport.is_closing():
            self.conn.fail(CLOSE_SLOW, "no ping was answered in time; resumable answers wait")
            self.handle_parser_exception()

    def data_received(self, data: bytes) -> None:
        if not self._failed:
            super().data_received(data)

    def _drop_later(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(LINGER_SECONDS, self._drop)

    def _drop(self) -> None:
        if not self.disconnected:
            self.transport.abort()
