"""The last frames of one answer, for a client that lost its socket. Knows sequence numbers; refuses to know sockets."""

from __future__ import annotations

from collections import deque
from types import GenericAlias
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")
_PACK = msgspec.msgpack.Encoder()


class Ring(Generic[T]):
    """Keeps the newest `size` of consecutively numbered items, the first being number 0.

    `item_type` is what msgspec decodes an item as. A packed ring holds one block of bytes, about a tenth of the objects' memory:
    hundreds of finished answers wait at once for clients that may never come back.
    """

    def __init__(self, size: int, item_type: Any) -> None:
        self._items: deque[T] = deque(maxlen=size)
        self._type = item_type
        self._packed: bytes | None = None
        self.end = 0  # number of the next item

    def add(self, item: T) -> None:
        """Not after `pack`."""
        assert self._packed is None
        self._items.append(item)
        self.end += 1

    def pack(self) -> None:
        """Nothing more will be added: keep the items as bytes."""
        if self._packed is None:
            self._packed = _PACK.encode(list(self._items))
            self._items.clear()

    def after(self, number: int) -> list[T] | None:
        """Everything numbered above `number`; None when some of it is gone."""
        items: list[T] = list(self._items)
        if self._packed is not None:
            items = msgspec.msgpack.decode(self._packed, type=GenericAlias(list, (self._type,)))
        first = self.end - len(items)
        if number + 1 < first:
            return None
        return items[max(0, number + 1 - first) :]
