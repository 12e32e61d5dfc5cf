"""Frames nobody would send, through the decoder alone and over live sockets. The counts are printed at the end of the run."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import msgspec
import pytest
import websockets.sync.client as ws_client
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import Running

from server.api_error import ApiError
from server.protocol import CODECS, JSON_SUBPROTOCOL, MSGPACK_SUBPROTOCOL, Chat, Codec

JSON, MSGPACK = CODECS[JSON_SUBPROTOCOL], CODECS[MSGPACK_SUBPROTOCOL]
CHAT: dict[str, Any] = {"type": "chat", "id": "a", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
FIELDS = sorted({field.name for field in msgspec.structs.fields(Chat)} | {"type", "t", "key", "response_id", "after_seq"})
objects = st.dictionaries(st.sampled_from(FIELDS), values, max_size=6).flatmap(
    lambda fields: st.sampled_from(["chat", "cancel", "resume", "ping", "auth", "odd"]).map(
        lambda kind: {"type": kind} | fields
    )
)
# A good message with one or two fields gone wrong reaches further in than one that is wrong throughout.
nearly = st.dictionaries(st.sampled_from(FIELDS), values, min_size=1, max_size=2).map(lambda fields: CHAT | fields)
texts = st.text(max_size=200) | (objects | nearly).map(lambda o: json.dumps(o, default=repr))
binaries = st.binary(max_size=200) | (objects | nearly).map(
    lambda o: msgspec.msgpack.encode(o, enc_hook=str) if small(o) else b""
)


def small(value: Any) -> bool:
    """msgpack carries 64-bit integers only."""
    if isinstance(value, dict):
        return all(small(item) for item in value.values())
    if isinstance(value, list):
        return all(small(item) for item in value)
    return not isinstance(value, int) or -(2**63) <= value < 2**64


def decodes_or_refuses(codec: Codec, data: bytes | str) -> None:
    refusal = None
    try:
        codec.decode(data)
    except ApiError as caught:
        refusal = caught
    if refusal is not None:
        assert refusal.status == 400
        assert refusal.code
        json.loads(msgspec.json.encode(refusal.body()))
    codec.id_of(data)


def test_any_bytes_as_msgpack(fuzzed: Counter[str]) -> None:
    @settings(max_examples=300, deadline=None)
    @given(binaries)
    def run(data: bytes) -> None:
        fuzzed["msgpack frames decoded"] += 1
        decodes_or_refuses(MSGPACK, data)

    run()


def test_any_text_as_json(fuzzed: Counter[str]) -> None:
    @settings(max_examples=300, deadline=None)
    @given(texts)
    def run(data: str) -> None:
        fuzzed["JSON frames decoded"] += 1
        decodes_or_refuses(JSON, data)

    run()


@pytest.mark.parametrize("subprotocol", [JSON_SUBPROTOCOL, MSGPACK_SUBPROTOCOL])
def test_any_frame_on_a_live_socket(server: Running, fuzzed: Counter[str], subprotocol: str) -> None:
    """Every frame is answered or harmless: the socket stays open, errors are typed, and a ping behind it gets its pong."""
    binary = subprotocol == MSGPACK_SUBPROTOCOL
    encode: Any = msgspec.msgpack.encode if binary else (lambda message: json.dumps(message))
    decode: Any = msgspec.msgpack.decode if binary else json.loads
    with ws_client.connect(server.ws_url, subprotocols=[subprotocol]) as ws:  # type: ignore[list-item]
        ws.recv()

        @settings(max_examples=150, deadline=None)
        @given(st.lists(binaries if binary else texts, min_size=1, max_size=3))
        def run(frames: list[bytes | str]) -> None:
            fuzzed[f"{'msgpack' if binary else 'JSON'} frames sent"] += len(frames)
            for frame in frames:
                ws.send(frame)
            mark = fuzzed.total()
            ws.send(encode({"type": "ping", "t": mark}))
            while (message := decode(ws.recv(timeout=10))) != {"type": "pong", "t": mark}:
                assert message["type"] in ("error", "started", "delta", "done", "pong", "notice")
                if message["type"] == "error":
                    assert message["code"] not in ("", "internal_error"), message
                    assert "Traceback" not in message["message"]

        run()
