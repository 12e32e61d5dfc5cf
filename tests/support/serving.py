"""Servers for tests, on real sockets: in this process on a thread (toy or real engine in its own process), or as a process.

with running(toy_settings()) as server: httpx.get(server.url + "/health")
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import websockets.sync.client as ws_client
from checkpoint_tokenizer import write_tokenizer
from prometheus_client.parser import text_string_to_metric_families
from websockets.exceptions import ConnectionClosed

from server.ports import TextTools
from server.serve import ServeOptions, Server, listen, load_text, make_gate
from server.settings import Settings
from server.template import ChatTemplate
from server.tokenizer import load_tokenizer

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parent.parent
START_SECONDS = 60.0


@dataclass
class Running:
    """A server that runs. `server` gives tests its insides only for stopping it."""

    url: str
    server: Server
    thread: threading.Thread
    loop: asyncio.AbstractEventLoop
    exit_code: int | None = None
    http: httpx.Client = field(init=False)  # one keep-alive client: making one costs more than many requests

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, timeout=30, trust_env=False, verify=False)

    @property
    def ws_url(self) -> str:
        return self.url.replace("http", "ws", 1) + "/v1/ws"

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def stop(self) -> None:
        """What the first signal does."""
        self.loop.call_soon_threadsafe(self.server.stop)

    def engine_pid(self) -> int:
        return self.server.engine_pid

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        def ready() -> bool:
            try:
                return self.http.get("/ready").status_code == 200
            except httpx.TimeoutException:  # on a busy machine the start can outlast one request
                return False

        wait_for(ready, seconds)

    def metric(self, name: str, **labels: str) -> float:
        """One sample of /metrics, 0 when it is not there yet."""
        text = self.http.get("/metrics").text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return float(sample.value)
        return 0.0


def wait_for(condition: Any, seconds: float = 10.0) -> None:
    """Poll until `condition()` is true; an assertion error after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true in time"
        time.sleep(0.01)


def until_closed(ws: Any, seconds: float = 20.0) -> tuple[list[Any], int]:
    """Every JSON frame up to the close, and its code (1006 when there was no close frame)."""
    frames: list[Any] = []
    try:
        while True:
            frames.append(json.loads(ws.recv(timeout=seconds)))
    except ConnectionClosed as closed:
        return frames, closed.rcvd.code if closed.rcvd is not None else 1006


def ws_answer(server: Running, **fields: Any) -> list[Any]:
    """The frames of one chat over a socket of its own, from `started` to `done` or `error`."""
    with ws_client.connect(server.ws_url) as ws:
        assert json.loads(ws.recv(timeout=20))["type"] == "hello"
        ws.send(json.dumps({"type": "chat", "id": "a"} | fields))
        frames: list[Any] = []
        while not frames or frames[-1]["type"] not in ("done", "error"):
            frames.append(json.loads(ws.recv(timeout=20)))
        return frames


def toy_settings(options: str = "", **fields: Any) -> Settings:
    """Settings for the toy engine; see toy_engine.py for `options`."""
    return Settings(model="toy", port=0, tree_shape=options, **({"drain_seconds": 5.0} | fields))


def toy_text(folder: Path) -> TextTools:
    """The 512-entry byte tokenizer of the test checkpoints with its ChatML template."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    tokenizer = load_tokenizer(folder, None)
    return TextTools.of(tokenizer, ChatTemplate(tokenizer))


@contextlib.contextmanager
def running(
    settings: Settings, text: TextTools | None = None, options: ServeOptions | None = None, ready: bool = True
) -> Iterator[Running]:
    """Run a server on a thread. With `text` its engine is the toy unless the options say otherwise, else the real one."""
    if options is None:
        options = ServeOptions()
    if text is not None and options.factory == ServeOptions().factory:
        options = replace(options, factory="toy_engine:build", factory_paths=(str(SUPPORT),))
    sock = listen(settings.host, settings.port)
    server = Server(settings, options, make_gate(settings), text or load_text(settings), sock)
    started = threading.Event()
    holder: list[Running] = []

    async def main() -> int:
        run = Running(
            f"http://127.0.0.1:{sock.getsockname()[1]}", server, threading.current_thread(), asyncio.get_running_loop()
        )
        holder.append(run)
        started.set()
        return await server.run()

    def body() -> None:
        code = asyncio.run(main())
        holder[0].exit_code = code

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    started.wait()
    run = holder[0]
    try:
        if ready:
            run.wait_ready()
        yield run
    finally:
        with contextlib.suppress(RuntimeError):
            run.stop()
        thread.join(30)
        run.http.close()
        sock.close()
        assert not thread.is_alive(), "the server did not stop"


@dataclass
class Process:
    """A server in a process of its own."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    @property
    def ws_url(self) -> str:
        return self.url.replace("http", "ws", 1) + "/v1/ws"

    def engine_pid(self) -> int:
        """The child that runs the engine."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        wait_for(lambda: path.read_text().split(), 10)
        return int(path.read_text().split()[0])

    def wait_ready(self) -> None:
        wait_for(lambda: httpx.get(self.url + "/ready").status_code == 200, START_SECONDS)

    def wait(self, seconds: float) -> int:
        return self.process.wait(seconds)


@contextlib.contextmanager
def server_process(
    folder: Path, options: str = "", ready: bool = True, limits: dict[str, Any] | None = None, **fields: Any
) -> Iterator[Process]:
    """Run the toy server as a process; stderr goes to a file."""
    log, port_file = folder / "server.log", folder / "port"
    port_file.unlink(missing_ok=True)
    arguments = {
        "options": options,
        "fields": fields,
        "folder": str(folder),
        "port_file": str(port_file),
        "limits": limits or {},
    }
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, str(SUPPORT / "serve_toy.py"), json.dumps(arguments)],
            cwd=ROOT, stderr=stderr, stdout=subprocess.DEVNULL, text=True, start_new_session=True,
        )  # fmt: skip
    try:
        wait_for(lambda: port_file.exists() or process.poll() is not None, START_SECONDS)
        assert process.poll() is None, log.read_text()
        run = Process(process, f"http://127.0.0.1:{port_file.read_text()}", log)
        if ready:
            run.wait_ready()
        yield run
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)
