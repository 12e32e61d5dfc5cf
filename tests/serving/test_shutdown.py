"""Signals, as a process sees them: drain, second signal, idle sockets, during load; nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets.sync.client as ws_client
from serving import Process, server_process, until_closed, wait_for

USER = [{"role": "user", "content": "hi"}]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:
        return False


def check_end(server: Process, engine: int, code: int, seconds: float) -> None:
    assert server.wait(seconds) == code
    wait_for(lambda: not alive(engine), 5)
    log = server.log.read_text()
    assert "Traceback" not in log, log
    assert "CancelledError" not in log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_idle_sockets(tmp_path: Path, number: int) -> None:
    """SH-02: idle sockets are closed with 1012 and hold nothing up."""
    with server_process(tmp_path) as server:
        engine = server.engine_pid()
        sockets = [ws_client.connect(server.ws_url).__enter__() for _ in range(20)]
        for ws in sockets:
            ws.recv()
        began = time.monotonic()
        os.kill(server.process.pid, number)
        for ws in sockets:
            frames, code = until_closed(ws)
            assert {frame["code"] for frame in frames} <= {"draining"}
            assert code == 1012
        check_end(server, engine, 0, 5)
        assert time.monotonic() - began < 2.5


def test_answers_finish_during_the_drain(tmp_path: Path) -> None:
    """SH-02: during load, answers finish and new ones are refused."""
    with server_process(tmp_path, "step_ms=10,run=1", drain_seconds=10) as server, httpx.Client(base_url=server.url) as http:
        engine = server.engine_pid()
        answers: list[Any] = []

        def ask() -> None:
            body = {"messages": USER, "max_tokens": 300}
            answers.append(httpx.post(server.url + "/v1/chat/completions", json=body, timeout=30))

        thread = threading.Thread(target=ask)
        thread.start()
        with ws_client.connect(server.ws_url) as ws:
            ws.recv()
            ws.send(json.dumps({"type": "chat", "id": 1, "messages": USER, "max_tokens": 300}))
            wait_for(lambda: "forespeak:num_requests_running 2.0" in http.get("/metrics").text, 3)
            assert http.get("/ready").status_code == 200
            os.kill(server.process.pid, signal.SIGTERM)
            wait_for(lambda: http.get("/ready").json()["status"] == "draining", 3)
            refused = http.post("/v1/chat/completions", json={"messages": USER})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_draining")
            assert "retry-after" in refused.headers
            ws.send(json.dumps({"type": "chat", "id": 2, "messages": USER}))
            frames, code = until_closed(ws)
            ends = {f["id"]: f for f in frames if f["type"] in ("done", "error")}
            assert ends[1]["usage"]["completion_tokens"] == 300
            assert ends[2]["code"] == "server_draining"
            assert code == 1012
        thread.join(20)
        assert answers[0].json()["usage"]["completion_tokens"] == 300
        check_end(server, engine, 0, 10)


def test_drain_has_an_end(tmp_path: Path) -> None:
    """What does not finish in time is ended with an error, on every transport."""
    with server_process(tmp_path, "step_ms=50,run=1", drain_seconds=0.5) as server:
        engine = server.engine_pid()
        body = {"messages": USER, "max_tokens": 400}
        whole: list[Any] = []
        asking = threading.Thread(
            target=lambda: whole.append(httpx.post(server.url + "/v1/chat/completions", json=body, timeout=30))
        )
        asking.start()
        with (
            ws_client.connect(server.ws_url) as ws,
            httpx.stream("POST", server.url + "/v1/chat/completions", json=body | {"stream": True}, timeout=30) as stream,
        ):
            ws.recv()
            ws.send(json.dumps({"type": "chat", "id": 1} | body))
            while json.loads(ws.recv())["type"] != "delta":
                pass
            os.kill(server.process.pid, signal.SIGTERM)
            last = until_closed(ws)[0][-1]
            assert (last["type"], last["code"]) == ("error", "server_draining")
            lines = [line for line in stream.iter_lines() if line]
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "server_draining"
        asking.join(10)
        assert whole[0].status_code == 503
        check_end(server, engine, 0, 5)


def test_second_signal_ends_at_once(tmp_path: Path) -> None:
    with server_process(tmp_path, "step_ms=50,run=1", drain_seconds=60) as server:
        engine = server.engine_pid()
        with ws_client.connect(server.ws_url) as ws:
            ws.recv()
            ws.send(json.dumps({"type": "chat", "id": 1, "messages": USER, "max_tokens": 400}))
            while json.loads(ws.recv())["type"] != "delta":
                pass
            os.kill(server.process.pid, signal.SIGTERM)
            while json.loads(ws.recv())["type"] != "notice":
                pass
            os.kill(server.process.pid, signal.SIGTERM)
            check_end(server, engine, 128 + signal.SIGTERM, 1.5)


def test_signal_during_the_load(tmp_path: Path) -> None:
    """SH-02: a signal while the model loads."""
    with server_process(tmp_path, "load_ms=30000", ready=False) as server:
        engine = server.engine_pid()
        loading = httpx.post(server.url + "/v1/chat/completions", json={"messages": USER})
        assert (loading.status_code, loading.json()["error"]["code"]) == (503, "engine_not_ready")
        assert httpx.get(server.url + "/ready").json()["status"] == "loading"
        os.kill(server.process.pid, signal.SIGTERM)
        check_end(server, engine, 0, 3)


def test_signal_during_a_long_step(tmp_path: Path) -> None:
    """SH-02: a signal in the middle of a long prefill."""
    with server_process(tmp_path, "step_ms=1500,run=1", drain_seconds=0) as server:
        engine = server.engine_pid()
        thread = threading.Thread(
            target=lambda: httpx.post(server.url + "/v1/chat/completions", json={"messages": USER}, timeout=30)
        )
        thread.start()
        wait_for(lambda: "num_requests_running 1.0" in httpx.get(server.url + "/metrics").text)
        os.kill(server.process.pid, signal.SIGTERM)
        check_end(server, engine, 0, 5)
        thread.join(5)
