"""The native WebSocket's messages and their two encodings. Sans-I/O: frames in, messages or errors out.

Knows names and types of fields; refuses to know sessions, limits and what a message causes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from server.api_error import ApiError
from server.decoding import TypedDecoder
from server.messages import Message
from server.options import SamplingOptions

VERSION = "1"
JSON_SUBPROTOCOL = "forespeak.v1.json"
MSGPACK_SUBPROTOCOL = "forespeak.v1.msgpack"

ClientId = str | int


# ---- from clients


class Auth(msgspec.Struct, tag="auth", kw_only=True):
    """The first message of a browser, which cannot set headers."""

    key: str


class Chat(SamplingOptions, tag="chat", kw_only=True):
    id: ClientId
    messages: list[Message]
    model: str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    resumable: bool | None = None
    pace: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class Cancel(msgspec.Struct, tag="cancel", kw_only=True):
    id: ClientId


class Resume(msgspec.Struct, tag="resume", kw_only=True):
    id: ClientId
    response_id: str
    after_seq: int


class Ping(msgspec.Struct, tag="ping", kw_only=True):
    t: str | int | float | None = None


ClientMessage = Auth | Chat | Cancel | Resume | Ping
CLIENT_TYPES = ("auth", "chat", "cancel", "resume", "ping")


# ---- from the server


class Hello(msgspec.Struct, tag="hello", kw_only=True):
    version: str
    model: str
    limits: dict[str, Any]


class Started(msgspec.Struct, tag="started", kw_only=True):
    id: ClientId
    response_id: str
    seq: int
    prompt_tokens: int
    cached_tokens: int


class Delta(msgspec.Struct, tag="delta", kw_only=True, omit_defaults=True):
    """`tokens` counts the tokens of this delta, `accepted` those that were drafted. `pieces` are [text, drafter or ""] and
    join to `text`; they are left out when all of it has one origin, which `drafter` names."""

    id: ClientId
    seq: int
    text: str
    tokens: int
    drafted: int
    accepted: int
    drafter: str | None = None
    pieces: list[tuple[str, str]] | None = None
    tool_calls: list[dict[str, Any]] | None = None  # beginnings and pieces of calls, as chat completions streams them
    logprobs: list[dict[str, Any]] | None = None
    reasoning: str | None = None  # of a model that thinks aloud: text of its own, none of the answer's


class Done(msgspec.Struct, tag="done", kw_only=True, omit_defaults=True):
    id: ClientId
    seq: int
    finish_reason: str
    usage: dict[str, Any]
    speculation: dict[str, Any]
    timings: dict[str, Any]
    tool_calls: list[dict[str, Any]] | None = None


class Error(msgspec.Struct, tag="error", kw_only=True, omit_defaults=True):
    """With `seq` it ends an answer that had started."""

    code: str
    message: str
    id: ClientId | None = None
    seq: int | None = None
    param: str | None = None
    retry_after: float | None = None


class Snapshot(msgspec.Struct, tag="snapshot", kw_only=True, omit_defaults=True):
    """The whole answer so far, up to `seq`."""

    id: ClientId
    seq: int
    text: str
    reasoning: str | None = None


class Notice(msgspec.Struct, tag="notice", kw_only=True):
    code: str
    message: str


class Pong(msgspec.Struct, tag="pong", kw_only=True, omit_defaults=True):
    t: str | int | float | None = None


ServerMessage = Hello | Started | Delta | Done | Error | Snapshot | Notice | Pong
AnswerMessage = Started | Delta | Done | Error


class _AnyId(msgspec.Struct):
    id: Any = None


class Codec:
    """One encoding. `decode` takes a frame's payload as it came: str for text frames, bytes for binary ones."""

    def __init__(self, name: str, *, binary: bool) -> None:
        self.name = name
        self.binary = binary
        kind = "msgpack" if binary else "json"
        self._decoder = TypedDecoder[ClientMessage](ClientMessage, kind)
        self._ids = TypedDecoder[_AnyId](_AnyId, kind)
        self._encoder: Any = msgspec.msgpack.Encoder() if binary else msgspec.json.Encoder()

    def encode(self, message: ServerMessage) -> bytes | str:
        data: bytes = self._encoder.encode(message)
        return data if self.binary else data.decode()

    def decode(self, frame: bytes | str) -> ClientMessage:
        """Raises ApiError naming the field; code unknown_type for a type that does not exist."""
        if isinstance(frame, str) is self.binary:
            expected, came = ("binary", "text") if self.binary else ("text", "binary")
            raise ApiError(400, f"{self.name} takes {expected} frames; a {came} frame came", code="wrong_frame_type")
        try:
            return self._decoder.decode(frame)
        except ApiError as error:
            if error.param == "type":
                known = ", ".join(CLIENT_TYPES)
                raise ApiError(
                    400, f"the type is missing or unknown; known are {known}", code="unknown_type", param="type"
                ) from None
            raise

    def id_of(self, frame: bytes | str) -> ClientId | None:
        """The id of a message that could not be decoded, when there is a usable one."""
        if isinstance(frame, str) is self.binary:
            return None
        try:
            found = self._ids.decode(frame).id
        except ApiError:
            return None
        return found if isinstance(found, str | int) and not isinstance(found, bool) else None


CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        JSON_SUBPROTOCOL: Codec(JSON_SUBPROTOCOL, binary=False),
        MSGPACK_SUBPROTOCOL: Codec(MSGPACK_SUBPROTOCOL, binary=True),
    }
)


def choose_codec(offered: list[str]) -> tuple[Codec, str | None]:
    """The first subprotocol we know of those offered, and the name to confirm. None offered, or none known: JSON."""
    for name in offered:
        if name in CODECS:
            return CODECS[name], name
    return CODECS[JSON_SUBPROTOCOL], None
