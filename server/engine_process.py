"""The loop of the engine process: take messages, step, send events. Knows wire messages; refuses to know text and sockets' peers.

A second thread reads the socket, so that pings are answered while a long step runs (a stopped process answers none) and the
death of the server is noticed at once.
"""

from __future__ import annotations

import gc
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from server import framing
from server.wire import Cancel, Events, Fatal, FromEngine, Ping, Pong, Ready, Shutdown, Stats, Submit, ToEngine
from spec.errors import RequestError
from spec.request import Request, TokenEvent

STATS_SECONDS = 1.0
ORPHAN_GRACE_SECONDS = 2.0  # a step under way when the server dies gets this long to end by itself
_RECEIVE_BYTES = 2**16

log = logging.getLogger("forespeak.engine")


class Engine(Protocol):
    """What the loop needs of an engine. `add` raises RequestError for a request that can never run."""

    def add(self, request: Request) -> None: ...
    def cancel(self, request_id: int) -> None: ...
    def step(self) -> Sequence[TokenEvent]: ...
    @property
    def step_phases(self) -> tuple[float, ...]: ...
    def has_work(self) -> bool: ...
    def stats(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


class Inbox:
    """Messages from the server, read by a thread of its own. `closed` is set when the server is gone or said Shutdown."""

    def __init__(self, sock: socket.socket, abandon: Callable[[], None]) -> None:
        self.closed = False
        self.steps = 0  # reported in pongs; written by the engine loop only
        self.finished = threading.Event()
        self.grace = 0.0  # seconds a dead server's engine may take to end by itself; nothing is worth waiting for in a load
        self._sock = sock
        self._abandon = abandon
        self._messages: deque[ToEngine] = deque()
        self._changed = threading.Condition()
        self._send_lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, name="inbox", daemon=True)

    def start(self) -> None:
        self._reader.start()

    def send(self, message: FromEngine) -> None:
        data = framing.encode(message)
        with self._send_lock:
            self._sock.sendall(data)

    def take(self, timeout: float | None) -> list[ToEngine]:
        """Everything that arrived. Waits up to `timeout` seconds (None: without end, 0: not at all) for the first message."""
        with self._changed:
            if timeout != 0:
                self._changed.wait_for(lambda: bool(self._messages) or self.closed, timeout)
            messages = list(self._messages)
            self._messages.clear()
        return messages

    def _read(self) -> None:
        frames = framing.FrameReader()
        try:
            while data := self._sock.recv(_RECEIVE_BYTES):
                for payload in frames.feed(data):
                    self._on_message(framing.decode_to_engine(payload))
        except (OSError, framing.FramingError, ValueError) as error:
            log.debug("the server's socket ended: %s", error)
        self._close()
        if not self.finished.wait(self.grace):
            self._abandon()

    def _on_message(self, message: ToEngine) -> None:
        if isinstance(message, Ping):
            self.send(Pong(message.nonce, self.steps))
        elif isinstance(message, Shutdown):
            self._close()
        else:
            with self._changed:
                self._messages.append(message)
                self._changed.notify()

    def _close(self) -> None:
        with self._changed:
            self.closed = True
            self._changed.notify()


def run_engine_process(
    sock: socket.socket, build: Callable[[], tuple[Engine, Ready]], abandon: Callable[[], None] = lambda: None
) -> int:
    """Build the engine, say Ready, serve until the server leaves. Returns the exit code: 0, or 3 after a fault.

    Errors of `build` propagate. `abandon` is called by the reader thread when the server has died and a step does not end.
    """
    inbox = Inbox(sock, abandon)
    inbox.start()  # before the load, which may take long: pings are answered during it
    try:
        engine, ready = build()
        gc.collect()
        gc.freeze()  # what was loaded lives as long as the process: keep the collector from walking it in the middle of a step
        inbox.grace = ORPHAN_GRACE_SECONDS
        inbox.send(Stats(engine.stats()))  # first, so that a server that is ready has its figures
        inbox.send(ready)
        try:
            _serve(engine, inbox)
        finally:
            engine.close()
    except OSError as error:
        log.debug("the server is gone: %s", error)
    except BaseException as error:
        if not inbox.closed:
            _say_fatal(inbox, error)
        raise
    finally:
        inbox.finished.set()
    return 0


def _say_fatal(inbox: Inbox, error: BaseException) -> None:
    try:
        inbox.send(Fatal(f"{type(error).__name__}: {error}"))
    except OSError:
        log.debug("the server left before the fault could be reported")


def _serve(engine: Engine, inbox: Inbox) -> None:
    next_stats = time.monotonic() + STATS_SECONDS
    fresh = True  # whether the last Stats still describe the engine
    while not inbox.closed:
        wait = 0.0 if engine.has_work() else (None if fresh else max(0.0, next_stats - time.monotonic()))
        refused: list[TokenEvent] = []
        for message in inbox.take(wait):
            fresh = False
            _apply(engine, message, refused)
        if refused:
            inbox.send(Events(tuple(refused)))
        if engine.has_work():
            fresh = False
            events = engine.step()
            inbox.steps += 1
            inbox.send(Events(tuple(events), engine.step_phases))
        idle_now = not fresh and not engine.has_work()
        if idle_now or (not fresh and time.monotonic() >= next_stats):
            inbox.send(Stats(engine.stats()))
            next_stats = time.monotonic() + STATS_SECONDS
            fresh = idle_now


def _apply(engine: Engine, message: ToEngine, refused: list[TokenEvent]) -> None:
    if isinstance(message, Cancel):
        engine.cancel(message.request_id)
    elif isinstance(message, Submit):
        try:
            engine.add(message.request)
        except RequestError as error:
            refused.append(
                TokenEvent(
                    message.request.id, finish_reason="error", error=str(error), error_code=error.code, error_param=error.param
                )
            )
