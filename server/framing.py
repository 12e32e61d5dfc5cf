"""Frames of the local socket between server and engine process: 4-byte big-endian length, then one msgpack message.

Knows bytes and the two message unions; refuses to know sockets, processes and what any message means.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from server.wire import FromEngine, ToEngine

HEADER_BYTES = 4
MAX_FRAME_BYTES = 64 * 2**20  # far above any real message: a bigger length means the stream is out of step

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


class FramingError(Exception):
    """The peer sent bytes that cannot be a frame."""


def pack(payload: bytes) -> bytes:
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


def encode(message: ToEngine | FromEngine) -> bytes:
    """One message as one frame."""
    return pack(_encoder.encode(message))


def decode_to_engine(payload: bytes) -> ToEngine:
    return _to_engine.decode(payload)


def decode_from_engine(payload: bytes) -> FromEngine:
    return _from_engine.decode(payload)


class FrameReader:
    """Cuts a byte stream into frame payloads, however it was chunked."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Every payload completed by `data`. Raises FramingError on an impossible length."""
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= HEADER_BYTES:
                length = int.from_bytes(buffer[start : start + HEADER_BYTES], "big")
                if length > MAX_FRAME_BYTES:
                    raise FramingError(f"a frame of {length} bytes was announced; at most {MAX_FRAME_BYTES} are allowed")
                end = start + HEADER_BYTES + length
                if len(buffer) < end:
                    break
                payload = bytes(buffer[start + HEADER_BYTES : end])
                start = end
                yield payload
        finally:
            del buffer[:start]
