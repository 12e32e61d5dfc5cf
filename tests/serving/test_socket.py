"""The native WebSocket over real connections: frames, limits, closes, reading while sending, slow readers."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

import msgspec
import pytest
import websockets.sync.client as ws_client
from serving import Running, running, toy_settings, wait_for
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode

from server.limits import Limits
from server.ports import TextTools
from server.protocol import JSON_SUBPROTOCOL, MSGPACK_SUBPROTOCOL
from server.serve import ServeOptions

USER = [{"role": "user", "content": "hi"}]


class Client:
    """A native client that decodes frames."""

    def __init__(self, server: Running, subprotocol: str | None = None, hello: bool = True, **options: Any) -> None:
        names: Any = [subprotocol] if subprotocol else None
        self._context = ws_client.connect(server.ws_url, subprotocols=names, **options)
        self.ws = self._context.__enter__()
        self.binary = subprotocol == MSGPACK_SUBPROTOCOL
        if hello:
            self.hello = self.recv()
            assert self.hello["type"] == "hello"

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *args: Any) -> None:
        self._context.__exit__(*args)

    def send(self, **message: Any) -> None:
        self.ws.send(msgspec.msgpack.encode(message) if self.binary else json.dumps(message))

    def chat(self, client_id: Any, **fields: Any) -> None:
        self.send(**{"type": "chat", "id": client_id, "messages": USER, "max_tokens": 20} | fields)

    def recv(self, timeout: float = 20) -> dict[str, Any]:
        frame = self.ws.recv(timeout=timeout)
        assert isinstance(frame, bytes) is self.binary
        message: dict[str, Any] = msgspec.msgpack.decode(frame) if isinstance(frame, bytes) else json.loads(frame)
        return message

    def until_end(self, client_id: Any) -> list[dict[str, Any]]:
        """Frames of one id up to its done or error, others left out."""
        frames = []
        while True:
            frame = self.recv()
            if frame.get("id") == client_id:
                frames.append(frame)
                if frame["type"] in ("done", "error"):
                    return frames

    def close_code(self) -> int:
        try:
            while True:
                self.ws.recv(timeout=20)
        except ConnectionClosed as closed:
            return closed.rcvd.code if closed.rcvd is not None else 1006


def text_of(frames: list[dict[str, Any]]) -> str:
    return "".join(frame["text"] for frame in frames if frame["type"] == "delta")


@pytest.mark.parametrize("subprotocol", [None, JSON_SUBPROTOCOL, MSGPACK_SUBPROTOCOL])
def test_chat_in_both_encodings(server: Running, subprotocol: str | None) -> None:
    with Client(server, subprotocol) as client:
        assert client.ws.subprotocol == subprotocol
        assert client.hello["limits"]["message_bytes"] == 2**20
        assert client.hello["model"] == "toy"
        client.chat("a", temperature=0, logprobs=True, top_logprobs=1)
        frames = client.until_end("a")
        assert [f["seq"] for f in frames] == list(range(len(frames)))
        assert frames[0]["type"] == "started"
        done = frames[-1]
        assert (done["type"], done["finish_reason"]) == ("done", "length")
        assert done["usage"]["completion_tokens"] == 20 == sum(f["tokens"] for f in frames if f["type"] == "delta")
        assert sum(len(f["logprobs"]) for f in frames if f["type"] == "delta") == 20
        answer = server.http.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 20, "temperature": 0}).json()
        assert text_of(frames) == answer["choices"][0]["message"]["content"]
        client.send(type="ping", t=5)
        assert client.recv() == {"type": "pong", "t": 5}


def test_bad_frames_on_one_connection(server: Running) -> None:
    """WS-03: every bad frame is answered with a typed error, and the connection goes on."""
    with Client(server) as client:
        bad: list[Any] = [json.dumps({"type": "ping"}).encode(), b"\xff\x00", "{bad", "[]", "3", "null", "", '{"type":"dance"}']
        for frame in bad:
            client.ws.send(frame)
            error = client.recv()
            assert error["type"] == "error", frame
            assert error["code"]
        client.ws.send(iter(['{"type":"chat","id":"f",', '"max_tokens":3,"messages":[', '{"role":"user","content":"x"}]}']))
        assert client.until_end("f")[-1]["type"] == "done"  # a fragmented message is one message
        client.chat("a")
        assert client.until_end("a")[-1]["type"] == "done"


def test_bad_msgpack_frames(server: Running) -> None:
    """WS-03, the other encoding."""
    with Client(server, MSGPACK_SUBPROTOCOL) as client:
        for frame in (b"", b"\xc1", b"\x93", msgspec.msgpack.encode([1]), "text"):
            client.ws.send(frame)
            assert client.recv()["type"] == "error"
        client.chat("a", temperature=float("nan"))
        assert client.recv()["param"] == "temperature"
        client.chat("a")
        assert client.until_end("a")[-1]["type"] == "done"


def test_text_that_is_not_utf8_closes_with_1007(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    """WS-03: text that is not UTF-8 closes with 1007, without a traceback."""
    with Client(server) as client:
        client.ws.socket.sendall(Frame(Opcode.TEXT, b'{"type":"\xff"}').serialize(mask=True))
        assert client.close_code() == 1007
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(("size", "fits"), [(2**20 - 1, True), (2**20, True), (2**20 + 1, False), (20 * 2**20, False)])
def test_message_size(server: Running, size: int, fits: bool) -> None:
    """WS-04: up to the limit a message is taken, above it the socket is closed with 1009."""
    with Client(server, compression=None) as client:
        frame = json.dumps({"type": "ping", "x": ""})
        frame = frame[:-2] + "x" * (size - len(frame)) + '"}'
        try:
            client.ws.send(frame)
        except ConnectionClosed:
            assert not fits
        if fits:
            assert client.recv() == {"type": "pong"}
        else:
            assert client.close_code() == 1009


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 9}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "x", "content": "x"}]}, "messages[0].role"),
        ({"n": 2}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"model": "gpt-6"}, "model"),
        ({"messages": [{"role": "user", "content": "a" * 10000}]}, "messages"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"response_format": {"type": "grammar", "grammar": "refuse"}}, "response_format"),
    ],
)
def test_refused_chats(server: Running, fields: dict[str, Any], param: str) -> None:
    """LM-01, LM-02, LM-04, LM-05 on the socket: an error frame names the field, and the connection goes on."""
    with Client(server) as client:
        client.chat("a", **fields)
        error = client.recv()
        assert (error["type"], error["id"], error["param"]) == ("error", "a", param)
        client.chat("a")
        assert client.until_end("a")[-1]["type"] == "done"


def test_cancel_while_tokens_are_sent(text: TextTools) -> None:
    """WS-06: messages are read while tokens are sent; a cancel ends its answer within a few steps."""
    with running(toy_settings("step_ms=20,run=1"), text) as slow, Client(slow) as client:
        client.chat("r1", max_tokens=400)
        arrivals = []
        while len(arrivals) < 10:
            if client.recv()["type"] == "delta":
                arrivals.append(time.perf_counter())
        assert arrivals[-1] - arrivals[0] > 0.1  # spread out, not one burst
        client.send(type="cancel", id="r1")
        client.chat("r2", max_tokens=5)
        rest = client.until_end("r1")
        assert rest[-1]["finish_reason"] == "cancelled"
        assert len(rest) <= 4
        frames = client.until_end("r2")
        assert (frames[-1]["finish_reason"], {f["id"] for f in frames}) == ("length", {"r2"})
        client.send(type="cancel", id="r1")
        assert client.recv()["code"] == "unknown_id"


def test_cancel_of_a_queued_request(text: TextTools) -> None:
    """SC-03: requests cancelled before their turn never run, and the others are not disturbed."""
    with running(toy_settings("step_ms=5,run=1,batch=1"), text) as slow, Client(slow) as client:
        client.chat("a", max_tokens=100, temperature=0)
        while client.recv()["type"] != "delta":
            pass
        for name in "bcd":
            client.chat(name, max_tokens=7)
        wait_for(lambda: slow.server.num_running == 4)
        client.send(type="cancel", id="c")
        client.send(type="cancel", id="b")
        ends: dict[str, Any] = {}
        while len(ends) < 4:
            frame = client.recv()
            if frame["type"] in ("done", "error"):
                ends[frame["id"]] = frame
        assert [ends[name]["finish_reason"] for name in "abcd"] == ["length", "cancelled", "cancelled", "length"]
        assert ends["a"]["usage"]["completion_tokens"] == 100
        assert ends["b"]["usage"]["completion_tokens"] == ends["c"]["usage"]["completion_tokens"] == 0
        assert slow.metric("forespeak:generation_tokens_total") == 107


def test_many_requests_interleave(text: TextTools) -> None:
    with running(toy_settings("step_ms=3,run=1"), text) as slow, Client(slow) as client:
        for name in range(8):
            client.chat(name, max_tokens=40)
        seen: list[Any] = []
        while len({f["id"] for f in seen if f["type"] == "done"}) < 8:
            seen.append(client.recv())
        for name in range(8):
            mine = [f for f in seen if f["id"] == name]
            assert [f["seq"] for f in mine] == list(range(len(mine)))
        order = [f["id"] for f in seen if f["type"] == "delta"]
        assert len(set(order[40:60])) == 8


def test_resume_after_a_lost_socket(text: TextTools) -> None:
    with running(toy_settings("step_ms=10,run=1"), text) as slow:
        with Client(slow) as client:
            client.chat("whole", max_tokens=60, temperature=0)
            expected = text_of(client.until_end("whole"))
            client.chat("a", max_tokens=60, temperature=0, resumable=True)
            first = []
            while len(first) < 8:
                first.append(client.recv())
            client.ws.socket.shutdown(socket.SHUT_RDWR)
        with Client(slow) as other:
            other.send(type="resume", id="b", response_id=first[0]["response_id"], after_seq=first[-1]["seq"])
            rest = other.until_end("b")
        assert [f["seq"] for f in first + rest] == list(range(len(first) + len(rest)))
        assert text_of(first + rest) == expected
        assert rest[-1]["usage"]["completion_tokens"] == 60
        with Client(slow) as client:
            client.chat("plain", max_tokens=400)
            while client.recv()["type"] != "delta":
                pass
        wait_for(lambda: slow.server.num_running == 0, 1)  # not resumable: gone with its socket


@pytest.mark.parametrize("leave", ["close", "reset", "half"])
@pytest.mark.parametrize("batch", [64, 1], ids=["running", "queued"])
def test_client_gone(text: TextTools, caplog: pytest.LogCaptureFixture, leave: str, batch: int) -> None:
    """WS-01: a client that leaves in any way stops its work, running or queued, and nothing is said about it in the log."""
    with running(toy_settings(f"step_ms=20,run=1,batch={batch}"), text) as slow:
        clients = [Client(slow, close_timeout=0.2) for _ in range(10)]
        for client in clients:
            client.chat("a", max_tokens=400)
            client.chat("b", max_tokens=400)
            while (batch > 1 or client is clients[0]) and client.recv()["type"] != "delta":
                pass
        wait_for(lambda: slow.server.num_running == 20, 5)
        for client in clients:
            raw = client.ws.socket
            if leave == "close":
                client.ws.close()
            elif leave == "reset":
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
                raw.shutdown(socket.SHUT_RD)
                raw.close()
            else:
                raw.shutdown(socket.SHUT_WR)
        wait_for(lambda: slow.server.num_running == 0, 2)
        wait_for(lambda: slow.metric("forespeak:kv_pages", state="live") == 0, 3)
        told = slow.metric("forespeak:generation_tokens_total")
        assert slow.metric("forespeak:num_requests_waiting") == slow.metric("forespeak:num_requests_running") == 0
        assert told < 20 * 100
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR") or record.exc_info]


def test_slow_reader_is_detached_and_others_go_on(text: TextTools) -> None:
    """A client that reads nothing is closed with 4503, its resumable answer waits, and its neighbour sees no gap."""
    options = ServeOptions(limits=Limits(pending_bytes=2_000, slow_seconds=2.0))
    with running(toy_settings("step_ms=1,run=4"), text, options) as fast:
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", fast.port))
        with ws_client.connect(fast.ws_url, sock=raw, max_queue=1, compression=None) as lazy:
            hello = json.loads(lazy.recv())
            assert hello["type"] == "hello"
            flood = json.dumps(
                {"type": "chat", "id": "x" * 100, "messages": USER, "logprobs": True, "top_logprobs": 20, "max_tokens": 480}
            )
            closed = threading.Event()

            def keep_asking() -> None:
                """New chats as the old ones end, with nobody reading."""
                number = 0
                while not closed.is_set():
                    number += 1
                    try:
                        lazy.send(flood.replace("xxxx", f"{number:04}", 1))
                    except ConnectionClosed:
                        return
                    time.sleep(0.005)

            asking = threading.Thread(target=keep_asking)
            asking.start()
            try:
                with Client(fast) as neighbour:
                    gaps = []
                    end = time.monotonic() + 25
                    while fast.server.num_sockets > 1 and time.monotonic() < end:
                        began = time.monotonic()
                        neighbour.chat("n", max_tokens=3)
                        neighbour.until_end("n")
                        gaps.append(time.monotonic() - began)
                    assert fast.server.num_sockets == 1
                    assert max(gaps) < 1.5
            finally:
                closed.set()
            code = 0
            try:
                while True:
                    lazy.recv(timeout=20)
            except ConnectionClosed as end_of_it:
                code = end_of_it.rcvd.code if end_of_it.rcvd else 0
            asking.join()
            assert code == 4503


def test_unanswered_pings_make_a_slow_reader(text: TextTools) -> None:
    """A peer that is too far behind to see the pings is closed with 4503 and not with a reset, and its resumable answer waits."""
    options = ServeOptions(limits=Limits(ping_seconds=0.1, slow_seconds=0.5))
    with (
        running(toy_settings("step_ms=20,run=1"), text, options) as slow,
        socket.create_connection(("127.0.0.1", slow.port)) as raw,
    ):
        raw.sendall(
            b"GET /v1/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        received = b""
        while b"hello" not in received:
            received += raw.recv(65536)
        chat = {"type": "chat", "id": "a", "messages": USER, "max_tokens": 150, "resumable": True, "temperature": 0}
        raw.sendall(Frame(Opcode.TEXT, json.dumps(chat).encode()).serialize(mask=True))
        wait_for(lambda: slow.server.num_running == 1, 5)
        wait_for(lambda: slow.server.num_sockets == 0, 5)
        raw.sendall(Frame(Opcode.TEXT, b'{"type":"ping"}').serialize(mask=True))  # unread data must not become a reset
        while part := raw.recv(65536):
            received += part
        assert received[-80:].count((4503).to_bytes(2, "big")) == 1
        response_id = received.split(b'"response_id":"')[1].split(b'"')[0].decode()
        assert slow.server.num_running == 1
        with Client(slow) as other:
            other.send(type="resume", id="b", response_id=response_id, after_seq=0)
            assert other.until_end("b")[-1]["usage"]["completion_tokens"] == 150


def test_event_loop_stays_alive(text: TextTools) -> None:
    """WS-05: keepalive answers come at once while others decode."""
    with running(toy_settings("step_ms=0,run=4"), text) as busy, Client(busy) as idle, Client(busy) as worker:
        worst = []
        for number in range(20):
            worker.chat(number, max_tokens=300)
        for _ in range(20):
            began = time.perf_counter()
            idle.ws.ping().wait(5)
            worst.append(time.perf_counter() - began)
        assert sorted(worst)[-2] < 0.5
        ended = 0
        while ended < 20:
            ended += worker.recv()["type"] == "done"


def test_limits_on_requests_and_sockets(text: TextTools) -> None:
    options = ServeOptions(limits=Limits(requests_per_key=3, sockets_per_key=2))
    with running(toy_settings("step_ms=20,run=1"), text, options) as small:
        with Client(small) as client, Client(small):
            with Client(small, hello=False) as third:
                assert third.close_code() == 4429
            for name in range(4):
                client.chat(name, max_tokens=50)
            errors = []
            while not errors:
                frame = client.recv()
                errors += [frame] if frame["type"] == "error" else []
            assert (errors[0]["code"], errors[0]["id"]) == ("rate_limit_exceeded", 3)
            refused = small.http.post("/v1/chat/completions", json={"messages": USER})
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
        wait_for(lambda: small.server.num_running == 0)
        assert small.http.post("/v1/chat/completions", json={"messages": USER, "n": 3, "max_tokens": 2}).status_code == 200
        assert small.http.post("/v1/chat/completions", json={"messages": USER, "n": 4, "max_tokens": 2}).status_code == 429
