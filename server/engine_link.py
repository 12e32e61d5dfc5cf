"""One life of one engine process: spawn it, exchange frames, end it. Knows processes and sockets; refuses to know requests.

The parent's end of a socket pair is driven by the event loop; the child gets the other end by descriptor number.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from server import framing
from server.settings import Settings
from server.wire import FromEngine, ToEngine

_BUFFER_BYTES = 2**20

log = logging.getLogger("forespeak.engine")


@dataclass(frozen=True, slots=True)
class EngineLaunch:
    """What to run: `factory` is `module:function` taking Settings and returning (Engine, Ready)."""

    settings: Settings
    factory: str = "server.compose:build_engine"
    python: str = sys.executable
    paths: tuple[str, ...] = ()  # more places to import the factory from

    def environment(self) -> dict[str, str]:
        """Ours, importing the very code that runs here whatever the working directory holds."""
        places = [str(Path(__file__).resolve().parent.parent), *self.paths, os.environ.get("PYTHONPATH", "")]
        return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(place for place in places if place)}


class EngineLink(asyncio.Protocol):
    """Calls `on_message` for everything the engine says and `on_lost` once, when its socket ends."""

    def __init__(self, on_message: Callable[[FromEngine], None], on_lost: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._frames = framing.FrameReader()
        self._transport: asyncio.WriteTransport | None = None
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def start(self, launch: EngineLaunch) -> None:
        """Spawn the process and hand it its settings. Raises OSError when it cannot be started."""
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        try:
            command = (launch.python, "-P", "-m", "server.engine_main", str(theirs.fileno()), launch.factory)
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=launch.environment(),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=ours)
        assert self._transport is not None
        self._transport.write(framing.pack(msgspec.json.encode(launch.settings)))

    def send(self, message: ToEngine) -> None:
        """Queue one message; silently dropped when the engine is gone (on_lost tells)."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(framing.encode(message))

    def kill(self) -> None:
        """SIGKILL: works on a stopped process too."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)

    async def close(self, grace: float) -> int:
        """Close the socket (the engine exits on that), wait up to `grace` seconds, then kill. Returns the exit code."""
        if self._transport is not None:
            self._transport.close()
        if self._process is None:
            return 0
        try:
            return await asyncio.wait_for(self._process.wait(), grace)
        except TimeoutError:
            self.kill()
            return await self._process.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._frames.feed(data):
                self._on_message(framing.decode_from_engine(payload))
        except (framing.FramingError, msgspec.DecodeError) as error:
            log.error("the engine process sent something unreadable: %s", error)
            self.kill()

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost()
