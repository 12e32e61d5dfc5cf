"""Answers that survive their socket, by unguessable id: who holds them, how long they are kept. Sans-I/O.

An answer belongs to the key that asked for it; to every other key its id does not exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from server.api_error import ApiError
from server.limits import Limits
from server.protocol import ClientId
from server.stream import ChatStream


class Holder(Protocol):
    """The session an answer is attached to."""

    def lose(self, client_id: ClientId) -> None: ...


@dataclass(slots=True)
class _Kept:
    stream: ChatStream
    holder: Holder | None
    until: float | None = None  # set while nobody is attached


class Resumables:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._kept: dict[str, _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, stream: ChatStream, holder: Holder) -> None:
        """Raises ApiError 429 when the key, or the server, keeps too many. Finished answers nobody fetched make room first."""
        mine = [kept for kept in self._kept.values() if kept.stream.tenant == stream.tenant]
        if len(mine) >= self._limits.resumable_per_key:
            self._make_room(mine)
        elif len(self._kept) >= self._limits.resumable:
            self._make_room(list(self._kept.values()))
        self._kept[stream.response_id] = _Kept(stream, holder)

    def _make_room(self, candidates: list[_Kept]) -> None:
        for kept in candidates:
            if kept.stream.over and kept.holder is None:
                del self._kept[kept.stream.response_id]
                return
        raise ApiError(
            429,
            f"{len(candidates)} resumable answers are kept; no more are allowed",
            code="too_many_resumable",
            retry_after=5.0,
        )

    def find(self, response_id: str, tenant: str) -> tuple[ChatStream, Holder | None]:
        """Raises ApiError 404 for an id that never was, is over, or belongs to another key."""
        kept = self._kept.get(response_id)
        if kept is None or kept.stream.tenant != tenant:
            raise ApiError(
                404, "there is no answer with this response_id to resume", code="unknown_response", param="response_id"
            )
        return kept.stream, kept.holder

    def attach(self, stream: ChatStream, holder: Holder) -> None:
        kept = self._kept[stream.response_id]
        kept.holder, kept.until = holder, None

    def detach(self, stream: ChatStream, now: float) -> None:
        kept = self._kept[stream.response_id]
        kept.holder, kept.until = None, now + self._limits.resume_seconds

    def finished(self, stream: ChatStream, now: float) -> None:
        """Its last message was sent. It stays a while, as the message may have been lost with its socket."""
        if stream.response_id in self._kept:
            self.detach(stream, now)

    def remove(self, stream: ChatStream) -> None:
        self._kept.pop(stream.response_id, None)

    def expire(self, now: float) -> None:
        """Stop and forget what nobody came back for."""
        for response_id, kept in list(self._kept.items()):
            if kept.until is not None and now >= kept.until:
                kept.stream.cancel()
                del self._kept[response_id]
