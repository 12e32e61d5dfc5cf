"""Engine faults under running answers: killed, stopped, raising. Answers go on as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import websockets.sync.client as ws_client
from serving import Running, running, server_process, toy_settings, wait_for

from server.engine_watch import RestartPolicy
from server.ports import TextTools
from server.serve import ServeOptions

NOTICE_SECONDS = 5.0
# The openai client opens its socket in a way that websockets has deprecated; that is between those two.
LEGACY = pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")
POLICY = RestartPolicy(ping_seconds=0.1, silence_seconds=1.0, backoff_seconds=0.05)


@pytest.fixture(scope="module")
def slow_server(text: TextTools) -> Iterator[Running]:
    """Slow enough that faults hit running answers."""
    with running(toy_settings("step_ms=5,run=2"), text, ServeOptions(policy=POLICY)) as run:
        yield run


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "tell me"}], "max_tokens": 120} | fields


def http_text(server: Running, request: dict[str, Any], after: threading.Event | None = None) -> str:
    """The answer's text over SSE; `after` is set when the first text has come."""
    parts = []
    with server.http.stream("POST", "/v1/chat/completions", json=request | {"stream": True}, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    parts.append(choice["delta"].get("content") or "")
            if after is not None and len(parts) > 3:
                after.set()
    return "".join(parts)


def socket_text(server: Running, request: dict[str, Any], after: threading.Event | None = None) -> str:
    parts, seq, notices = [], -1, []
    with ws_client.connect(server.ws_url) as ws:
        ws.recv()
        ws.send(json.dumps({"type": "chat", "id": 1} | request))
        while True:
            message = json.loads(ws.recv(timeout=30))
            if message["type"] == "notice":
                notices.append(message["code"])
                continue
            assert message["seq"] == seq + 1
            seq = message["seq"]
            if message["type"] == "done":
                if after is not None:
                    assert "engine_restarting" in notices
                return "".join(parts)
            if message["type"] == "delta":
                parts.append(message["text"])
                if after is not None and len(parts) > 3:
                    after.set()


def responses_socket_text(server: Running, request: dict[str, Any], after: threading.Event | None = None) -> str:
    parts = []
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x") as client, client.responses.connect() as connection:
        extra = {"seed": request["seed"]} if "seed" in request else {}
        create = {
            "type": "response.create",
            "input": "tell me",
            "max_output_tokens": 120,
            "temperature": request["temperature"],
        }
        connection.send_raw(json.dumps(create | extra))
        for event in connection:
            if event.type == "response.output_text.delta":
                parts.append(event.delta)
                if after is not None and len(parts) > 3:
                    after.set()
            if event.type in ("response.completed", "response.incomplete", "response.failed", "error"):
                assert event.type == "response.incomplete", event
                break
    return "".join(parts)


def break_engine(server: Running, kind: str) -> None:
    pid = server.engine_pid()
    os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 7}


@LEGACY
@pytest.mark.parametrize(
    ("kind", "sampling", "read"),
    [
        ("kill", GREEDY, http_text),
        ("kill", SEEDED, http_text),
        ("stop", SEEDED, http_text),
        ("kill", GREEDY, socket_text),
        ("kill", SEEDED, socket_text),
        ("stop", GREEDY, socket_text),
        ("kill", GREEDY, responses_socket_text),
        ("kill", SEEDED, responses_socket_text),
    ],
)
def test_answer_continues_after_a_fault(slow_server: Running, kind: str, sampling: dict[str, Any], read: Any) -> None:
    expected = read(slow_server, body(**sampling))
    restarts = slow_server.metric("forespeak:engine_restarts_total")
    after = threading.Event()
    result: list[str] = []
    thread = threading.Thread(target=lambda: result.append(read(slow_server, body(**sampling), after)))
    thread.start()
    assert after.wait(20)
    old = slow_server.engine_pid()
    began = time.monotonic()
    break_engine(slow_server, kind)
    wait_for(lambda: slow_server.engine_pid() != old, NOTICE_SECONDS)
    assert time.monotonic() - began < NOTICE_SECONDS
    thread.join(30)
    assert result == [expected]
    assert slow_server.metric("forespeak:engine_restarts_total") == restarts + 1
    slow_server.wait_ready()


@pytest.mark.parametrize("letter", ["!", "$"], ids=["raise", "kill"])
def test_third_crash_ends_the_request_and_only_it(slow_server: Running, letter: str) -> None:
    """A request that crashes every engine is given up after three; its neighbours finish with their own text."""
    expected = http_text(slow_server, body(temperature=0))
    neighbours: list[str] = []
    threads = [
        threading.Thread(target=lambda: neighbours.append(http_text(slow_server, body(temperature=0)))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    restarts = slow_server.metric("forespeak:engine_restarts_total")
    poison = body(temperature=0) | {"messages": [{"role": "user", "content": letter}]}
    answer = slow_server.http.post("/v1/chat/completions", json=poison, timeout=60)
    for thread in threads:
        thread.join(60)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "engine_crashed"
    assert "3 times" in answer.json()["error"]["message"]
    assert neighbours == [expected] * 3
    slow_server.wait_ready()
    assert slow_server.metric("forespeak:engine_restarts_total") == restarts + 3


def test_ready_tells_the_truth_during_a_restart(text: TextTools) -> None:
    options = ServeOptions(policy=POLICY)
    with running(toy_settings("load_ms=600"), text, options) as server:
        os.kill(server.engine_pid(), signal.SIGKILL)
        wait_for(lambda: server.http.get("/ready").status_code == 503, 2)
        assert server.http.get("/ready").json()["status"] == "restarting"
        assert server.http.get("/health").status_code == 200
        # New work during the restart waits for it.
        answer = server.http.post("/v1/chat/completions", json=body(max_tokens=3))
        assert answer.status_code == 200
        assert server.http.get("/ready").status_code == 200


def test_stopped_engine_is_not_ready_before_it_is_replaced(text: TextTools) -> None:
    policy = RestartPolicy(ping_seconds=0.1, doubt_seconds=0.5, silence_seconds=2.5)
    with running(toy_settings(), text, ServeOptions(policy=policy)) as server:
        old = server.engine_pid()
        os.kill(old, signal.SIGSTOP)
        wait_for(lambda: server.http.get("/ready").json()["status"] == "unresponsive", 2)
        assert server.engine_pid() == old
        wait_for(lambda: server.engine_pid() != old, 5)
        server.wait_ready()


def test_engine_that_never_comes_back_ends_the_server(text: TextTools, tmp_path: Any) -> None:
    flag = tmp_path / "broken"
    options = ServeOptions(policy=POLICY)
    with running(toy_settings(f"fail_file={flag.as_posix()}"), text, options) as server:
        flag.touch()
        os.kill(server.engine_pid(), signal.SIGKILL)
        server.thread.join(20)
        assert server.exit_code == 3


def test_engine_that_cannot_start_ends_the_server(text: TextTools) -> None:
    with running(toy_settings("fail=1"), text, ready=False) as server:
        server.thread.join(20)
        assert server.exit_code == 2


def test_engine_leaves_with_a_dead_server(tmp_path: Any) -> None:
    """No process is left behind by a server that was killed."""
    with server_process(tmp_path, "") as server:
        engine = server.engine_pid()
        os.kill(server.process.pid, signal.SIGKILL)
        wait_for(lambda: not _alive(engine), 10)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split(")")[1].split()[0] != "Z"
    except OSError:
        return False
