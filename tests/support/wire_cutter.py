"""A TCP proxy in front of a server, for tests of what happens when the line goes bad: cut it, refuse new ones, let it go silent.

with wire_cutter(server.port) as wire: connect to wire.url, then wire.cut()
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator


class WireCutter:
    """`connections` counts how many were ever made."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._writers: set[asyncio.StreamWriter] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._refusing = False
        self.connections = 0
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def ws_url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/v1/ws"

    def cut(self, refuse: bool = False) -> None:
        """Break every connection without a goodbye. `refuse`: and every new one, until `mend`."""
        self._do(lambda: self._cut(refuse))

    def mend(self) -> None:
        self._do(lambda: self._cut(False))

    def point_to(self, port: int) -> None:
        """Where new connections go."""
        self._target = port

    def silence(self) -> None:
        """What is connected now stays connected, but nothing comes through any more."""

        def stop() -> None:
            self._flowing, old = asyncio.Event(), self._flowing
            self._flowing.set()  # for connections to come
            old.clear()

        self._do(stop)

    def _do(self, action: Callable[[], None]) -> None:
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (action(), done.set()))
        assert done.wait(10)

    def _cut(self, refuse: bool) -> None:
        self._refusing = refuse
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def serve(self, started: threading.Event) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        async with await asyncio.start_server(self._connect, "127.0.0.1", 0) as listening:
            self.port = listening.sockets[0].getsockname()[1]
            started.set()
            await self._stopped.wait()
            self._cut(True)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self._refusing:
            writer.transport.abort()
            return
        flowing = self._flowing
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, up_writer}
        pumps = asyncio.gather(self._pump(reader, up_writer, flowing), self._pump(up_reader, writer, flowing))
        with contextlib.suppress(asyncio.CancelledError):  # the end of the test
            await pumps

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flowing: asyncio.Event) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2**16):
                await flowing.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
        self._writers.discard(writer)


@contextlib.contextmanager
def wire_cutter(port: int) -> Iterator[WireCutter]:
    cutter, started = WireCutter(port), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(cutter.serve(started)), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield cutter
    finally:
        cutter.stop()
        thread.join(10)
