"""The server process: puts engine client, service and web application together, listens, and ends well.

It imports neither torch nor the engine: those live in the engine process. Knows processes, signals and exit codes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import uvicorn

from server.api_error import ApiError
from server.app import make_app
from server.auth import Gate, Keys, is_loopback
from server.connection import Sockets
from server.engine_client import EngineClient
from server.engine_link import EngineLaunch
from server.engine_watch import EngineState, Hooks, RestartPolicy
from server.limits import Limits
from server.logs import set_up
from server.metrics import Metrics
from server.models import resolve
from server.ports import TextTools
from server.protocol import VERSION, Hello
from server.resumables import Resumables
from server.service import Service
from server.session import SessionSettings
from server.settings import Settings
from server.template import ChatTemplate
from server.tokenizer import load_tokenizer
from server.tracing import Tracing, open_tracing
from server.ws_protocol import WebSocketProtocol
from spec.errors import ConfigError

log = logging.getLogger("forespeak.server")

SEND_BUFFER_BYTES = 256 * 1024  # of one socket in the kernel: what a slow reader can pile up there
BACKLOG = 2048  # connections that may wait to be accepted
TICK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What tests and embedders change; the command line uses the defaults."""

    factory: str = "server.compose:build_engine"
    factory_paths: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    on_listening: Callable[[int], None] = lambda port: None  # called with the port
    tracing: Tracing | None = None  # instead of what the settings say


def serve(settings: Settings, options: ServeOptions = ServeOptions()) -> int:
    """Serve until a signal or the engine's end. Returns the exit code: 0 drained, 2 bad settings, 3 the engine failed."""
    set_up(as_json=settings.log_json)
    gate = make_gate(settings)
    text = load_text(settings)
    sock = listen(settings.host, settings.port)
    try:
        return asyncio.run(Server(settings, options, gate, text, sock).run())
    finally:
        sock.close()


def make_gate(settings: Settings) -> Gate:
    """Keys and origins. Raises ConfigError when another address than loopback would be served without a key."""
    keys = Keys.read(Path(settings.api_key_file)) if settings.api_key_file else Keys()
    if not keys.required and not is_loopback(settings.host):
        raise ConfigError(f"host {settings.host} is not loopback, so an API key is needed: give --api-key-file")
    return Gate(keys, settings.host, frozenset(settings.allowed_origins))


def load_text(settings: Settings) -> TextTools:
    cache = Path(settings.cache_dir).expanduser() if settings.cache_dir else Path.home() / ".cache" / "forespeak"
    paths = resolve(settings.model, cache)
    tokenizer = load_tokenizer(paths.weights, cache / "tokenizers")
    _ = tokenizer.longest_token_bytes  # made now, while the engine loads, not by the first request
    return TextTools.of(tokenizer, ChatTemplate(tokenizer))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket: connections wait from now on. Raises ConfigError with what is wrong with the address."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}, port {port}: {error.strerror or error}") from error
    return sock


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handling: the drain is ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class Server:
    """One run of the server. Everything is made in `run`, on its event loop."""

    def __init__(self, settings: Settings, options: ServeOptions, gate: Gate, text: TextTools, sock: socket.socket) -> None:
        self._settings = settings
        self._options = options
        self._gate = gate
        self._text = text
        self._sock = sock
        self._stop = asyncio.Event()
        self._signals = 0
        self._metrics = Metrics(settings.metrics_prefix)
        self._tracing = options.tracing or open_tracing(settings.otlp_endpoint, version("forespeak"))

    @property
    def engine_pid(self) -> int:
        return self._engine.pid

    @property
    def num_running(self) -> int:
        return self._service.num_running

    @property
    def num_sockets(self) -> int:
        """Open native sockets."""
        return len(self._sockets.connections)

    async def run(self) -> int:
        hooks = Hooks(on_state=self._on_engine_state, on_stats=self._metrics.on_stats, on_step=self._metrics.on_step)
        self._engine = EngineClient(
            EngineLaunch(self._settings, self._options.factory, paths=self._options.factory_paths), self._options.policy, hooks
        )
        limits = self._options.limits
        self._service = Service(
            self._model_name(), self._engine, self._text, limits, self._metrics, self._settings.seed,
            self._settings.log_prompts, self._tracing,
        )  # fmt: skip
        self._sockets = Sockets(
            SessionSettings(limits, self._text.tokenizer, self._hello, self._gate.keys.tenant_of, Resumables(limits))
        )
        self.app = make_app(self._service, self._gate, self._sockets)
        config = uvicorn.Config(
            self.app, http="h11", ws=WebSocketProtocol, loop="asyncio", lifespan="off", log_config=None, access_log=False,
            server_header=False, proxy_headers=False, backlog=BACKLOG, ws_max_size=limits.body_bytes, ws_per_message_deflate=False,
            ws_ping_interval=limits.ping_seconds, ws_ping_timeout=limits.slow_seconds,
            timeout_graceful_shutdown=2, timeout_keep_alive=30, h11_max_incomplete_event_size=2**16,
        )  # fmt: skip
        self._uvicorn = _Uvicorn(config)
        self._handle_signals()
        await self._engine.start()
        serving = asyncio.create_task(self._uvicorn.serve([self._sock]))
        ticking = asyncio.create_task(self._tick())
        gc.collect()
        gc.freeze()  # the tokenizer and the modules live as long as the process
        self._options.on_listening(self._sock.getsockname()[1])
        log.info("listening on http://%s:%d, loading the model", self._settings.host, self._sock.getsockname()[1])
        try:
            await self._stop.wait()
            await self._drain()
        finally:
            ticking.cancel()
            self._uvicorn.should_exit = True
            await asyncio.gather(serving, ticking, return_exceptions=True)
            await self._engine.stop()
            self._service.close()
        return self._exit_code()

    def _model_name(self) -> str:
        return Path(self._settings.model).name.removesuffix(".gguf") or self._settings.model

    def _exit_code(self) -> int:
        if not self._engine.failure:
            return 0
        return 2 if self._engine.exit_code == 2 and self._engine.ready is None else 3

    def _hello(self) -> Hello:
        limits = self._options.limits
        ready = self._engine.ready
        values = {
            "message_bytes": limits.body_bytes, "requests": limits.requests_per_socket, "messages": limits.messages,
            "stops": limits.stops, "logit_bias": limits.logit_bias, "top_logprobs": limits.top_logprobs,
            "resume_seconds": limits.resume_seconds, "context": ready.context if ready is not None else None,
        }  # fmt: skip
        return Hello(version=VERSION, model=self._service.model, limits=values)

    # ---- while it runs

    def _on_engine_state(self, state: EngineState, message: str) -> None:
        if state is EngineState.RESTARTING:
            log.warning("the engine is being restarted: %s", message)
            self._metrics.restarts.inc()
            self._metrics.on_engine_gone(self._engine.num_running)
            self._sockets.notice("engine_restarting", "the engine is being restarted; answers go on where they stopped")
        elif state is EngineState.READY:
            log.info("%s", message)
            self._sockets.notice("engine_ready", "the engine is ready")
        elif state is EngineState.FAILED:
            log.error("the engine cannot be started: %s", message)
            self._stop.set()

    async def _tick(self) -> None:
        """Housekeeping once a second; in between, measure how late the event loop is."""
        next_tick = time.monotonic() + TICK_SECONDS
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK_SECONDS / 4)
            now = time.monotonic()
            self._metrics.loop_lag.observe(max(0.0, now - before - TICK_SECONDS / 4))
            if now >= next_tick:
                next_tick = now + TICK_SECONDS
                self._sockets.tick(now)

    # ---- the end

    def _handle_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop, number)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """First call: drain and end. Second call: end at once."""
        self._signals += 1
        if self._signals == 1:
            log.info("stopping: answers get up to %g seconds to finish", self._settings.drain_seconds)
            self._stop.set()
            return
        self._engine.kill()
        os._exit(128 + number)

    async def _drain(self) -> None:
        """No new work; running answers may finish; what is left is ended with an error; every socket is closed with 1012."""
        service = self._service
        service.draining = True
        self._sockets.notice("draining", "the server is shutting down; running answers may finish, new ones are refused")
        end = time.monotonic() + self._settings.drain_seconds
        idle = False
        while not idle and time.monotonic() < end and not self._engine.failure:
            self._sockets.end_idle()
            idle = await service.wait_idle(min(0.1, max(0.0, end - time.monotonic())))
        service.fail_all(ApiError(503, "the server was shut down before this answer was complete", code="server_draining"))
        self._sockets.end_all()
        await self._sockets.wait_closed(2.0)
