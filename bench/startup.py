"""How long `serve` takes from its start until it is ready, and how much memory its processes hold then and after answers.

    ./dev bench startup [MODEL] [--runs N] [--seconds 5] [--factor 1.6]

Ready is a 200 from `/ready`; the first run is a warm-up that fetches, builds and calibrates what is kept on disk. Memory is the
proportional set size (a page that two processes share is counted once) of the server and its engine, at ready and after an answer to a
prompt of about 1,000 tokens. Its limit is FACTOR x the weight file plus the keys and values in use at that moment: none at ready, those
of the prompt and its answer after it. What Python and its libraries take alone, which no weight file changes, counts against the limit
and is shown apart too. Prints a table and, last, one JSON line; exit code 1 on a miss.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.compose import cache_root
from server.models import resolve
from server.settings import Settings

MIB = 2**20
PATIENCE = 300.0
WORDS = 900
BARE = "import sys, {}; print('imported', flush=True); sys.stdin.read()"
LIBRARIES = ("server.serve", "server.compose, llguidance")  # what the server and the engine import


@dataclass(frozen=True, slots=True)
class Life:
    """One server from start to end. Bytes by process name; `tokens` of the long prompt and its answer."""

    ready_seconds: float
    at_ready: dict[str, int]
    after_answer: dict[str, int]
    tokens: int


def proportional_bytes(text: str) -> int:
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) * 1024


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return [int(child) for child in listed]


def memory(pid: int) -> dict[str, int]:
    """Bytes of the server and of its engine."""
    found = {"server": proportional_bytes(Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii"))}
    engines = [proportional_bytes(Path(f"/proc/{c}/smaps_rollup").read_text(encoding="ascii")) for c in children(pid)]
    return found | {"engine": sum(engines)}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def answer(port: int, model: str) -> int:
    """Ask for a few tokens after a long prompt; the tokens of both."""
    body = {"model": model, "max_tokens": 16, "temperature": 0}
    body["messages"] = [{"role": "user", "content": " ".join(f"word{i % 97}" for i in range(WORDS // 3))}]
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
        return int(json.load(reply)["usage"]["total_tokens"])


def live(model: str) -> Life:
    """Start a server, wait until it is ready, ask it once, end it. Raises RuntimeError when it does not come up or end well."""
    port = free_port()
    command = [sys.executable, "-m", "server.cli", "serve", model, "--port", str(port)]
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not ready(port):
            if process.poll() is not None or time.perf_counter() - begun > PATIENCE:
                raise RuntimeError(f"the server did not become ready (exit code {process.poll()})")
            time.sleep(0.01)
        seconds = time.perf_counter() - begun
        at_ready = memory(process.pid)
        tokens = answer(port, model)
        life = Life(seconds, at_ready, memory(process.pid), tokens)
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(PATIENCE)
    if code != 0:
        raise RuntimeError(f"the server ended with exit code {code}")
    return life


def ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as reply:
            return int(reply.status) == 200
    except (urllib.error.URLError, OSError):
        return False


def report(lives: list[Life], weights: int, per_token: int, bare: int, options: argparse.Namespace) -> dict[str, Any]:
    """Figures and whether both goals are met."""
    last = lives[-1]
    seconds = statistics.median(one.ready_seconds for one in lives)
    used = {"ready": 0, "after_answer": last.tokens * per_token}
    held = {"ready": sum(last.at_ready.values()), "after_answer": sum(last.after_answer.values())}
    limit = {when: options.factor * weights + kv for when, kv in used.items()}
    print(f"{'weight file':<14}{weights / MIB:8.0f} MiB; keys and values after the answer {used['after_answer'] / MIB:.0f} MiB")
    for when, parts in (("ready", last.at_ready), ("after_answer", last.after_answer)):
        listed = ", ".join(f"{name} {size / MIB:.0f}" for name, size in parts.items())
        print(f"{when:<14}{held[when] / MIB:8.0f} MiB ({listed})   limit {limit[when] / MIB:.0f} MiB")
    without_kv = held["after_answer"] - used["after_answer"]
    print(f"{'libraries':<14}{bare / MIB:8.0f} MiB: the same two processes with nothing but their imports")
    print(
        f"{'over the file':<14}{without_kv / weights:8.2f} x with keys and values left out, "
        f"{(without_kv - bare) / weights:.2f} x with the libraries left out too"
    )
    print(f"{'ready after':<14}{seconds:8.2f} s   limit {options.seconds:.1f} s")
    return {
        "bench": "startup",
        "ready_seconds": round(seconds, 3),
        "ready_seconds_all": [round(one.ready_seconds, 3) for one in lives],
        "weights_bytes": weights,
        "kv_bytes": used,
        "memory_bytes": held,
        "limit_bytes": {when: round(most) for when, most in limit.items()},
        "libraries_bytes": bare,
        "by_process": {"ready": last.at_ready, "after_answer": last.after_answer},
        "over_weights_without_kv": round(without_kv / weights, 3),
        "over_weights_without_kv_and_libraries": round((without_kv - bare) / weights, 3),
        "memory_over_limit": round(max(held[when] / limit[when] for when in held), 3),
        "memory_over_limit_without_libraries": round(max((held[when] - bare) / limit[when] for when in held), 3),
        "ready_in_time": seconds <= options.seconds,
        "memory_in_limit": all(held[when] <= limit[when] for when in held),
    }


def library_bytes() -> int:
    """Memory of two processes that import what the server and the engine import, side by side as these are: both are read while both
    are there. Raises RuntimeError when one cannot import."""
    pipe = subprocess.PIPE
    with contextlib.ExitStack() as stack:
        both = [
            stack.enter_context(subprocess.Popen([sys.executable, "-c", BARE.format(names)], stdin=pipe, stdout=pipe))
            for names in LIBRARIES
        ]
        for process in both:
            assert process.stdout is not None
            if process.stdout.readline() != b"imported\n":
                raise RuntimeError(f"cannot import what they import: {process.args!r}")
        return sum(memory(process.pid)["server"] for process in both)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.startup", description="start-up time and memory of a server")
    parser.add_argument("model", nargs="?", default=Settings().model)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--factor", type=float, default=1.6)
    options = parser.parse_args()
    file = resolve(options.model, cache_root(Settings())).weights
    files = [file] if file.is_file() else list(file.glob("*.safetensors"))
    bare = library_bytes()
    live(options.model)
    lives = [live(options.model) for _ in range(options.runs)]
    weights = sum(one.stat().st_size for one in files)
    found = report(lives, weights, kv_per_token(options.model), bare, options)
    print(json.dumps(found))
    return 0 if found["ready_in_time"] and found["memory_in_limit"] else 1


def kv_per_token(model: str) -> int:
    """Bytes of keys and values a token takes in the target's store, from the model's config."""
    from server.compose import kv_bytes_per_token, load_parts

    parts = load_parts(Settings(model=model))
    return kv_bytes_per_token(parts.model.shape, parts.kv_dtype)


if __name__ == "__main__":
    raise SystemExit(main())
