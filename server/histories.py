"""Conversations so far by response id, newest kept, for previous_response_id. Bounded; knows plain messages only."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

Messages = list[dict[str, Any]]


class Histories:
    """One per connection, and one per server for HTTP, where an id counts only together with the key that made it."""

    def __init__(self, count: int, total_bytes: int) -> None:
        self._count = count
        self._bytes = total_bytes
        self._kept: OrderedDict[tuple[str, str], tuple[Messages, int]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, tenant: str, response_id: str, messages: Messages) -> None:
        size = sum(_size(message) for message in messages)
        if size > self._bytes:
            return
        self._kept[tenant, response_id] = (messages, size)
        self._size += size
        while len(self._kept) > self._count or self._size > self._bytes:
            self._size -= self._kept.popitem(last=False)[1][1]

    def get(self, tenant: str, response_id: str) -> Messages | None:
        """A copy of the list, None for an unknown id."""
        found = self._kept.get((tenant, response_id))
        if found is None:
            return None
        self._kept.move_to_end((tenant, response_id))
        return list(found[0])


def _size(message: dict[str, Any]) -> int:
    """Bytes a message takes, about: its text, and the arguments of its calls."""
    calls = message.get("tool_calls")
    return len(message["content"].encode("utf-8", "surrogatepass")) + (len(str(calls)) if calls else 0) + 64
