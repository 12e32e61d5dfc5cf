"""What clients see of an engine fault: kind of fault x sampling x transport, on a server of its own with the real engine.

    ./dev bench fault_table [MODEL] [--max-tokens 160]

The engine process is killed (SIGKILL), stopped (SIGSTOP) or raises inside a step, in the middle of an answer. A row says whether the
answer came to its end, how long the longest pause between two pieces of text was, how long the server took to replace the process,
and whether the text is that of an undisturbed run. The last line is one JSON object; exit code 1 when a row is not all yes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import websockets.sync.client as ws_client
from rich.table import Table

from server.commands.common import table_console
from server.compose import build_engine
from server.serve import ServeOptions, serve
from server.settings import DEFAULT_MODEL, Settings
from server.wire import Ready
from spec.engine import Engine

PROMPT = "Write a short story about a lighthouse keeper who finds a message in a bottle."
FAULT_AFTER_CHARS = 60  # of answer text
NOTICE_SECONDS = 5.0  # a fault must be noticed, and the process replaced, within this
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "seeded": {"temperature": 0.8, "seed": 7}}
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "raise in a step": signal.SIGUSR1}


# ---- the server: the usual one, whose engine raises inside its next step after SIGUSR1


class Raising:
    """An engine that can be told to fail."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._told = False
        signal.signal(signal.SIGUSR1, lambda *_: setattr(self, "_told", True))

    def step(self) -> Any:
        events = self._engine.step()
        if self._told:
            raise RuntimeError("a fault was asked for")  # after the work, before anything of it is delivered
        return events

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def build(settings: Settings) -> tuple[Raising, Ready]:
    """The engine process's factory."""
    engine, ready = build_engine(settings)
    return Raising(engine), ready


@contextlib.contextmanager
def server(model: str) -> Iterator[tuple[str, int]]:
    """(base URL, process id) of a server that is ready."""
    with tempfile.TemporaryDirectory() as folder:
        port_file = Path(folder) / "port"
        log = (Path(folder) / "log").open("wb")
        process = subprocess.Popen([sys.executable, "-m", "bench.fault_table", "--serve", str(port_file), model], stderr=log)
        try:
            while not port_file.exists():
                if process.poll() is not None:
                    raise SystemExit("the server did not start")
                time.sleep(0.05)
            url = f"http://127.0.0.1:{port_file.read_text()}"
            wait_ready(url)
            yield url, process.pid
        finally:
            process.terminate()
            process.wait(30)
            log.close()


def run_server(port_file: Path, model: str) -> int:
    def tell(port: int) -> None:
        port_file.with_suffix(".new").write_text(str(port))
        port_file.with_suffix(".new").rename(port_file)

    options = ServeOptions(factory="bench.fault_table:build", on_listening=tell)
    return serve(Settings(model=model, port=0, drain_seconds=1), options)


def wait_ready(url: str) -> None:
    end = time.monotonic() + 300
    while time.monotonic() < end:
        if httpx.get(url + "/ready").status_code == 200:
            return
        time.sleep(0.1)
    raise SystemExit("the server did not become ready")


def engine_pid(server_pid: int) -> int:
    """The server's only child, 0 while there is none."""
    children = Path(f"/proc/{server_pid}/task/{server_pid}/children").read_text().split()
    return int(children[0]) if children else 0


# ---- the transports: each yields pieces of text and raises when the answer does not end well


def over_http(url: str, sampling: dict[str, Any], max_tokens: int) -> Iterator[str]:
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": max_tokens, "stream": True} | sampling
    with httpx.stream("POST", url + "/v1/chat/completions", json=body, timeout=120) as response:
        last = ""
        for line in response.iter_lines():
            last = line or last
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise RuntimeError(chunk["error"]["message"])
                for choice in chunk["choices"]:
                    yield choice["delta"].get("content") or ""
        if last != "data: [DONE]":
            raise RuntimeError("the stream ended early")


def over_native(url: str, sampling: dict[str, Any], max_tokens: int) -> Iterator[str]:
    chat = {"type": "chat", "id": 1, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": max_tokens}
    with ws_client.connect(url.replace("http", "ws", 1) + "/v1/ws") as socket:
        socket.send(json.dumps(chat | sampling))
        expected = 0
        while True:
            message = json.loads(socket.recv(timeout=120))
            if "seq" in message:
                if message["seq"] != expected:
                    raise RuntimeError(f"message {message['seq']} came instead of {expected}")
                expected += 1
            if message["type"] == "delta":
                yield message["text"]
            elif message["type"] == "error":
                raise RuntimeError(message["message"])
            elif message["type"] == "done":
                return


def over_responses(url: str, sampling: dict[str, Any], max_tokens: int) -> Iterator[str]:
    create = {"type": "response.create", "input": PROMPT, "max_output_tokens": max_tokens} | sampling
    with openai.OpenAI(base_url=url + "/v1", api_key="none") as client, client.responses.connect() as connection:
        connection.send_raw(json.dumps(create))
        for event in connection:
            if event.type == "response.output_text.delta":
                yield event.delta
            elif event.type in ("response.completed", "response.incomplete"):
                return
            elif event.type in ("response.failed", "error"):
                raise RuntimeError(str(event))
    raise RuntimeError("the socket ended early")


TRANSPORTS: dict[str, Callable[[str, dict[str, Any], int], Iterator[str]]] = {
    "HTTP": over_http,
    "native socket": over_native,
    "Responses socket": over_responses,
}


# ---- the table


@dataclass(frozen=True)
class Row:
    fault: str
    sampling: str
    transport: str
    recovered: bool
    replaced_seconds: float  # from the fault to the new process
    pause_seconds: float  # longest wait between two pieces of text
    text_equal: bool
    note: str = ""

    @property
    def good(self) -> bool:
        return self.recovered and self.text_equal and self.replaced_seconds < NOTICE_SECONDS


def disturbed(pieces: Iterator[str], pid: int, number: int) -> tuple[str, float, float, str]:
    """(text, longest pause, seconds until the process was replaced, what went wrong or "")."""
    text, pause, last, struck, replaced = "", 0.0, time.monotonic(), 0.0, 0.0
    old = engine_pid(pid)
    try:
        for piece in pieces:
            now = time.monotonic()
            if struck and not replaced and engine_pid(pid) not in (0, old):
                replaced = now - struck
            pause, last, text = max(pause, now - last if struck else 0.0), now, text + piece
            if not struck and len(text) >= FAULT_AFTER_CHARS:
                os.kill(old, number)
                struck = last = time.monotonic()
                replaced = wait_replaced(pid, old, struck)
    except (RuntimeError, OSError, httpx.HTTPError, openai.APIError) as error:
        return text, pause, replaced, str(error)[:120]
    return text, pause, replaced, "" if struck else "the answer was too short to be disturbed"


def wait_replaced(pid: int, old: int, struck: float) -> float:
    """Seconds until another process is there. What arrives meanwhile waits in the socket."""
    while engine_pid(pid) in (0, old) and time.monotonic() - struck < 4 * NOTICE_SECONDS:
        time.sleep(0.02)
    return time.monotonic() - struck


def measure(url: str, pid: int, max_tokens: int) -> Iterator[Row]:
    for sampling, options in SAMPLINGS.items():
        for transport, read in TRANSPORTS.items():
            expected = "".join(read(url, options, max_tokens))
            for fault, number in SIGNALS.items():
                text, pause, replaced, wrong = disturbed(read(url, options, max_tokens), pid, number)
                yield Row(fault, sampling, transport, not wrong, round(replaced, 2), round(pause, 2), text == expected, wrong)
                wait_ready(url)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--serve", type=Path, metavar="PORT_FILE", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        return run_server(given.serve, given.model)
    with server(given.model) as (url, pid):
        rows = list(measure(url, pid, given.max_tokens))
        restarts = httpx.get(url + "/ready").json()["restarts"]
    table = Table("fault", "sampling", "transport", "recovered", "replaced after s", "longest pause s", "text equal", "")
    for row in sorted(rows, key=lambda row: list(SIGNALS).index(row.fault)):
        yes = ("no", "yes")
        table.add_row(
            row.fault, row.sampling, row.transport, yes[row.recovered], f"{row.replaced_seconds:.2f}",
            f"{row.pause_seconds:.2f}", yes[row.text_equal], row.note,
        )  # fmt: skip
    table_console().print(table)
    print(json.dumps({"model": given.model, "restarts": restarts, "rows": [asdict(row) for row in rows], "argv": sys.argv[1:]}))
    return 0 if all(row.good for row in rows) and restarts == len(rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
