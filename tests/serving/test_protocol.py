"""The native protocol's frames, without sockets: every frame gives a message or a typed error, whatever its bytes."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from server.api_error import ApiError
from server.protocol import CODECS, JSON_SUBPROTOCOL, MSGPACK_SUBPROTOCOL, Cancel, Chat, Codec, Ping, choose_codec

JSON, MSGPACK = CODECS[JSON_SUBPROTOCOL], CODECS[MSGPACK_SUBPROTOCOL]
CHAT: dict[str, Any] = {"type": "chat", "id": "a", "messages": [{"role": "user", "content": "hi"}]}


def frame(codec: Codec, message: Any) -> bytes | str:
    return msgspec.msgpack.encode(message) if codec.binary else json.dumps(message)


def error(codec: Codec, data: bytes | str) -> ApiError:
    with pytest.raises(ApiError) as caught:
        codec.decode(data)
    return caught.value


@pytest.mark.parametrize("codec", [JSON, MSGPACK])
def test_messages_and_unknown_fields(codec: Codec) -> None:
    chat = codec.decode(frame(codec, CHAT | {"temperature": 0.5, "top_k": None, "surprise": {"deep": [1]}}))
    assert isinstance(chat, Chat)
    assert (chat.id, chat.temperature, chat.top_k) == ("a", 0.5, None)
    assert codec.decode(frame(codec, {"type": "cancel", "id": 7})) == Cancel(id=7)
    assert codec.decode(frame(codec, {"type": "ping", "t": 1.5})) == Ping(t=1.5)


@pytest.mark.parametrize("codec", [JSON, MSGPACK])
@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": True}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"logit_bias": {"5": "x"}}, "logit_bias"),
        ({"stop": [1]}, "stop[0]"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"speculation": {"mode": "sometimes"}}, "speculation.mode"),
        ({"id": None}, "id"),
        ({"seed": "7"}, "seed"),
    ],
)
def test_errors_name_the_field(codec: Codec, change: dict[str, Any], param: str) -> None:
    found = error(codec, frame(codec, CHAT | change))
    assert found.param == param
    assert param in found.message


@pytest.mark.parametrize("codec", [JSON, MSGPACK])
@pytest.mark.parametrize("message", [{"type": "dance"}, {"id": "a"}, {"type": 3}])
def test_unknown_types(codec: Codec, message: Any) -> None:
    assert error(codec, frame(codec, message)).code == "unknown_type"


@pytest.mark.parametrize("text", ["{bad", "", "[]", "3", "null", '"x"', '{"type":"chat","id":"\\ud800"}'])
def test_broken_json(text: str) -> None:
    """WS-03: text that is no message is refused with a typed error."""
    assert error(JSON, text).status == 400


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_json_without_finite_numbers(number: str) -> None:
    """LM-01: NaN and infinities, and an error that can itself be written as JSON."""
    found = error(JSON, json.dumps(CHAT)[:-1] + f', "temperature": {number}}}')
    assert found.param == "temperature"
    json.loads(msgspec.json.encode(found.body()))


def test_deep_nesting_is_an_error() -> None:
    deep = "[" * 5000 + "]" * 5000
    assert error(JSON, f'{{"type":"chat","id":"a","messages":[],"response_format":{{"x":{deep}}}}}').code == "invalid_json"


def test_wrong_frame_type_keeps_its_name() -> None:
    assert error(JSON, json.dumps(CHAT).encode()).code == "wrong_frame_type"
    assert error(MSGPACK, json.dumps(CHAT)).code == "wrong_frame_type"


def test_id_of_a_bad_message() -> None:
    assert JSON.id_of('{"type":"chat","id":"q","messages":3}') == "q"
    assert JSON.id_of('{"type":"chat","id":true}') is None
    assert JSON.id_of("{bad") is None
    assert MSGPACK.id_of(msgspec.msgpack.encode({"id": 5})) == 5


def test_subprotocols() -> None:
    assert choose_codec([]) == (JSON, None)
    assert choose_codec(["chat", MSGPACK_SUBPROTOCOL]) == (MSGPACK, MSGPACK_SUBPROTOCOL)
    assert choose_codec(["chat"]) == (JSON, None)
