"""Messages between the server process and the engine process: msgpack over a local socket, 4-byte big-endian length first.

Server to engine: Submit, Cancel, Ping, Shutdown. Engine to server: Ready, Events, Stats, Pong, Fatal.
"""

from __future__ import annotations

from typing import Any

import msgspec

from spec.request import Request, TokenEvent


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    request: Request


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    request_id: int


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    nonce: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    pass


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded and warm."""

    model: str
    vocab_size: int
    context: int
    num_pages: int
    page_size: int
    drafters: tuple[str, ...]
    backend: str
    load_seconds: float


class Events(msgspec.Struct, frozen=True, tag="events"):
    """Everything one step produced, and its seconds by phase (spec.request.PHASES). No phases: nothing was run."""

    events: tuple[TokenEvent, ...]
    phases: tuple[float, ...] = ()


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """Gauges and counters for /metrics and /ready, sent before Ready, about once a second and when idle begins. See Engine.stats()."""

    values: dict[str, Any]


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    nonce: int
    steps: int


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The engine cannot go on; it exits after this."""

    message: str


ToEngine = Submit | Cancel | Ping | Shutdown
FromEngine = Ready | Events | Stats | Pong | Fatal
