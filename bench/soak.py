"""Load on a server for minutes, with clients that behave badly: cancels, disconnects, slow readers, broken frames.

    ./dev bench soak                    200 sockets with 2 requests each for 3 minutes on a server of its own
    ./dev bench soak --url ws://127.0.0.1:8000/v1/ws --pid PID --seconds 600

Prints a table and, last, one JSON line. Exit code 1 when an error was not typed, a request did not end, pages stay live, the
server's memory grew by 5 % or more after the first quarter, or its event loop was late by more than 50 ms at the 99th percentile.
Clients run at a lower priority than the server, as most clients run on other machines.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

LAG_SECONDS = 0.05
CLIENT_NICENESS = 5
OWN_KEYS = 4  # of a server started here: the sockets share them, so that fair sharing is at work too
GOOD_END = "exit code 0, 0 tracebacks in its log"
PATIENCE = 300.0  # seconds a client waits for any message: a slow machine may have a long queue
GROWTH = 0.05
BROKEN_FRAMES: tuple[str | bytes, ...] = (
    "{bad",
    "[]",
    "",
    b"\x00\xff",
    '{"type":"dance"}',
    '{"type":"chat","id":1,"messages":7}',
)
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "and", "again", "so", "on"]


@dataclass
class Tally:
    """What all clients saw together."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    tokens: int = 0
    first_token: list[float] = field(default_factory=list)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default=None, help="ws://.../v1/ws of a running server; without it one is started")
    parser.add_argument("--serve", default="", help="arguments of the server that is started, for example '--drafters none'")
    parser.add_argument("--key", dest="keys", action="append", default=[], help="API key; several are shared out")
    parser.add_argument("--sockets", type=int, default=200)
    parser.add_argument("--requests", type=int, default=2, help="at once on each socket")
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--pid", type=int, default=None, help="the server process, to watch its memory")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments, argparse.Namespace(server_end=""))


class _Silent(Exception):
    """The server said nothing for too long."""


def authorization(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


class Client:
    """One socket after another until the time is up."""

    def __init__(self, options: argparse.Namespace, number: int, tally: Tally) -> None:
        self._options = options
        self._random = random.Random(options.seed * 100_003 + number)
        self._headers = authorization(options.keys[number % len(options.keys)] if options.keys else None)
        self._not_before = 0.0  # what a 429 asked for
        self._tally = tally
        self._next = 0

    async def run(self, end: float) -> None:
        while time.monotonic() < end:
            try:
                async with connect(
                    self._options.url, additional_headers=self._headers, compression=None, close_timeout=1, ping_interval=None
                ) as socket:
                    self._tally.counts["sockets"] += 1
                    await self._talk(socket, end)
            except ConnectionClosed as closed:
                code = closed.rcvd.code if closed.rcvd is not None else 1006
                self._tally.counts[f"closed {code}"] += 1
                if code not in (1000, 1012, 4429, 4503):
                    self._tally.problems.append(f"a socket was closed with {code}")
            except _Silent:
                self._tally.problems.append(f"no message for {PATIENCE:g} seconds")
            except (OSError, InvalidHandshake, TimeoutError) as error:
                self._tally.problems.append(f"cannot connect: {error!r}"[:200])
                await asyncio.sleep(1)

    async def _talk(self, socket: ClientConnection, end: float) -> None:
        """Keep `requests` answers running; leave at random."""
        open_: dict[int, float] = {}
        leave = min(end, time.monotonic() + self._random.uniform(2, 60))
        pause = (
            self._random.choice([0.1, 1.0]) if self._random.random() < 0.05 else 0.0
        )  # a slow reader until it wants to leave
        self._tally.counts["slow readers"] += pause > 0
        json.loads(await socket.recv())
        while time.monotonic() < leave or open_:
            while len(open_) < self._options.requests and self._not_before < time.monotonic() < leave:
                await self._ask(socket, open_)
            if not open_:
                await asyncio.sleep(0.1)
                continue
            await asyncio.sleep(pause if time.monotonic() < leave else 0)
            chance = self._random.random()
            if chance < 0.01 and open_:
                await socket.send(json.dumps({"type": "cancel", "id": self._random.choice(list(open_))}))
                self._tally.counts["cancels"] += 1
            elif chance < 0.015:
                await socket.send(self._random.choice(BROKEN_FRAMES))
                self._tally.counts["broken frames"] += 1
            elif chance < 0.018:
                await asyncio.sleep(self._random.uniform(0.2, 3))
                self._tally.counts["pauses"] += 1
            elif chance < 0.021:
                self._tally.counts["disconnects"] += 1
                socket.transport.abort()
                return
            try:
                frame = await asyncio.wait_for(socket.recv(), PATIENCE)
            except TimeoutError as error:
                raise _Silent from error
            self._take(json.loads(frame), open_)

    async def _ask(self, socket: ClientConnection, open_: dict[int, float]) -> None:
        self._next += 1
        words = " ".join(self._random.choices(WORDS, k=self._random.randint(1, 60)))
        chat: dict[str, Any] = {
            "type": "chat", "id": self._next, "messages": [{"role": "user", "content": words}],
            "max_tokens": self._random.randint(1, self._options.max_tokens), "temperature": self._random.choice([0, 0.8]),
            "pace": self._random.random() < 0.1, "resumable": self._random.random() < 0.05,
        }  # fmt: skip
        await socket.send(json.dumps(chat))
        open_[self._next] = time.monotonic()
        self._tally.counts["requests"] += 1

    def _take(self, message: dict[str, Any], open_: dict[int, float]) -> None:
        kind = message["type"]
        if kind == "delta":
            self._tally.tokens += message["tokens"]
        elif kind == "started":
            self._tally.first_token.append(time.monotonic() - open_.get(message["id"], time.monotonic()))
        elif kind == "done":
            self._tally.counts[f"done {message['finish_reason']}"] += 1
            open_.pop(message["id"], None)
        elif kind == "error":
            self._tally.counts[f"error {message.get('code')}"] += 1
            if not message.get("code") or message["code"] == "internal_error":
                self._tally.problems.append(f"an error without a type: {message}"[:200])
            open_.pop(message.get("id", -1), None)
            self._not_before = time.monotonic() + (message.get("retry_after") or 0)


def scrape(options: argparse.Namespace) -> dict[str, float]:
    """/metrics as name{labels} -> value."""
    url = options.url.replace("ws", "http", 1).rsplit("/v1/", 1)[0] + "/metrics"
    headers = authorization(options.keys[0] if options.keys else None)
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as response:
        text = response.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {s.name.split(":", 1)[-1] + "".join(f"{{{v}}}" for v in s.labels.values()): s.value for s in samples}


def resident(pid: int | None) -> int:
    """Bytes of memory the process holds, 0 when unknown."""
    if pid is None:
        return 0
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    return 0


def lag(before: dict[str, float], after: dict[str, float], share: float) -> float:
    """Upper edge of the bucket that holds this quantile of the event loop's lateness, seconds."""
    name = "event_loop_lag_seconds_bucket"
    buckets = sorted(
        (float(key[len(name) + 1 : -1]), value - before.get(key, 0)) for key, value in after.items() if key.startswith(name)
    )
    total = buckets[-1][1] if buckets else 0
    return next((edge for edge, count in buckets if count >= share * total), float("inf")) if total else 0.0


async def soak(options: argparse.Namespace) -> dict[str, Any]:
    tally = Tally()
    before, began = scrape(options), time.monotonic()
    end = began + options.seconds
    clients = [asyncio.create_task(Client(options, number, tally).run(end)) for number in range(options.sockets)]
    memory = [resident(options.pid)]
    for _ in range(4):
        await asyncio.sleep(options.seconds / 4)
        memory.append(resident(options.pid))
    results = await asyncio.gather(*clients, return_exceptions=True)
    tally.problems += [f"a client failed: {result!r}"[:200] for result in results if isinstance(result, BaseException)]
    early, late, seconds = memory[1], resident(options.pid), time.monotonic() - began
    after = await _settle(options)
    growth = late / early - 1 if early else 0.0
    late_p50, late_p99 = lag(before, after, 0.5), lag(before, after, 0.99)
    live = after.get("kv_pages{live}", 0.0)
    if live:
        tally.problems.append(f"{live:.0f} pages are still live")
    if growth >= GROWTH:
        tally.problems.append(f"the server's memory grew by {growth:.1%}")
    if late_p99 > LAG_SECONDS:
        tally.problems.append(f"the event loop was late by up to {late_p99 * 1e3:.0f} ms at the 99th percentile")
    first = sorted(tally.first_token)
    return {
        "sockets": options.sockets, "requests_each": options.requests, "seconds": round(seconds, 1),
        "counts": dict(sorted(tally.counts.items())), "tokens_per_second": round(tally.tokens / seconds, 1),
        "ttft_ms_p50": round(first[len(first) // 2] * 1e3, 1) if first else None,
        "ttft_ms_p99": round(first[int(len(first) * 0.99)] * 1e3, 1) if first else None,
        "loop_lag_ms_p50_at_most": round(late_p50 * 1e3, 1), "loop_lag_ms_p99_at_most": round(late_p99 * 1e3, 1),
        "resident_mib": [round(size / 2**20, 1) for size in (*memory, late)], "memory_growth": round(growth, 4),
        "live_pages_after": live,
        "restarts": after.get("engine_restarts_total", 0) - before.get("engine_restarts_total", 0),
        "problems": tally.problems[:20], "argv": sys.argv[1:],
    }  # fmt: skip


async def _settle(options: argparse.Namespace) -> dict[str, float]:
    """Metrics once nothing runs any more, or after half a minute."""
    for _ in range(30):
        values = scrape(options)
        if values.get("num_requests_running", 0) + values.get("num_requests_waiting", 0) + values.get("kv_pages{live}", 0) == 0:
            break
        await asyncio.sleep(1)
    return values


@contextlib.contextmanager
def own_server(options: argparse.Namespace) -> Iterator[None]:
    """Start `forespeak serve` on a free port, wait until it is ready, end it with SIGTERM. Raises when it cannot be reached."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options.keys = [secrets.token_urlsafe(16) for _ in range(OWN_KEYS)]
    with tempfile.TemporaryFile() as log, tempfile.NamedTemporaryFile("w", suffix=".keys") as keys:
        keys.write("\n".join(options.keys))
        keys.flush()
        command = [sys.executable, "-m", "server.cli", "serve", "--port", str(port), "--api-key-file", keys.name]
        process = subprocess.Popen([*command, *options.serve.split()], stdin=subprocess.DEVNULL, stderr=log)
        options.url, options.pid = f"ws://127.0.0.1:{port}/v1/ws", process.pid
        try:
            _wait_ready(f"http://127.0.0.1:{port}/ready", process)
            yield
        finally:
            process.terminate()
            code = process.wait(60)
            log.seek(0)
            tracebacks = log.read().count(b"Traceback")
            options.server_end = f"exit code {code}, {tracebacks} tracebacks in its log"


def _wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 300
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.1)
    raise SystemExit("the server did not become ready")


def main() -> int:
    options = parse(sys.argv[1:])
    with own_server(options) if options.url is None else contextlib.nullcontext():
        os.nice(CLIENT_NICENESS)
        figures = asyncio.run(soak(options))
    if options.server_end:
        figures["server"] = options.server_end
        if options.server_end != GOOD_END:
            figures["problems"].append(f"the server ended badly: {options.server_end}")
    for name, value in figures.items():
        print(f"{name:20} {value}")
    print(json.dumps(figures))
    return 1 if figures["problems"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
