"""uvicorn's WebSocket protocol with three habits changed. Knows uvicorn's insides; nothing else in the server does.

A close frame never waits behind a reader that reads nothing, a peer that does not answer it is dropped, and frames that are not
UTF-8 are closed with 1007 without a traceback in the log.
"""

from __future__ import annotations

import asyncio

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

LINGER_SECONDS = 5.0


class WebSocketProtocol(WebSocketsSansIOProtocol):
    async def send(self, message: ASGISendEvent) -> None:
        if message["type"] == "websocket.close" and self.handshake_complete:
            self.writable.set()
            asyncio.get_running_loop().call_later(LINGER_SECONDS, self._drop)
        await super().send(message)

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text" and not self.close_sent:
            try:
                for frame in (self.frames[0],) if len(self.frames) == 1 else (b"".join(self.frames),):
                    frame.decode()
            except UnicodeDecodeError:
                self.frames = []
                self.conn.send_close(1007, "a text frame is not UTF-8")
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    def _drop(self) -> None:
        if not self.disconnected:
            self.transport.abort()
