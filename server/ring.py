"""The last frames of one answer, for a client that lost its socket. Knows sequence numbers; refuses to know sockets."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Ring(Generic[T]):
    """Keeps the newest `size` of consecutively numbered items, the first being number 0."""

    def __init__(self, size: int) -> None:
        self._items: deque[T] = deque(maxlen=size)
        self.end = 0  # number of the next item

    def add(self, item: T) -> None:
        self._items.append(item)
        self.end += 1

    def after(self, number: int) -> list[T] | None:
        """Everything numbered above `number`; None when some of it is gone."""
        first = self.end - len(self._items)
        if number + 1 < first:
            return None
        skip = max(0, number + 1 - first)
        return [item for index, item in enumerate(self._items) if index >= skip]
