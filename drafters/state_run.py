"""The target's hidden states of one sequence, as rows of one buffer. Knows positions and memory; refuses to know who wants them.

A resting drafter keeps one state a step, right after a pass, when every tensor made costs some ten microseconds: on the CPU a row is
copied by its address.
"""

from __future__ import annotations

from ctypes import memmove

import torch

_LEAST = 64  # rows


def row_address(states: torch.Tensor) -> int:
    """Of rows that can be copied by address; 0 where they cannot."""
    plain = states.device.type == "cpu" and states.dtype is torch.float32 and states.is_contiguous()
    return states.data_ptr() if plain else 0


class StateRun:
    """States of consecutive positions; those nobody told in between are zeros."""

    __slots__ = ("_address", "_bytes", "_first", "_rows", "_start", "_stop")

    def __init__(self, width: int, device: torch.device) -> None:
        self._bytes = 4 * width
        self._allocate(torch.empty(_LEAST, width, device=device))
        self._first = 0  # position of the buffer's first row
        self._start = self._stop = 0  # rows that are held

    def __len__(self) -> int:
        return self._stop - self._start

    def _allocate(self, rows: torch.Tensor) -> None:
        self._rows = rows
        self._address = row_address(rows)

    def add(self, position: int, states: torch.Tensor, first: int, count: int, address: int) -> None:
        """States of positions position .. position + count - 1: rows `first` and on of `states`, which lie at `address` (0 = copied as tensors)."""
        at = self._room(position, count)
        if address and self._address:
            memmove(self._address + at * self._bytes, address + first * self._bytes, count * self._bytes)
        else:
            self._rows[at : at + count] = states[first : first + count]

    def _room(self, position: int, count: int) -> int:
        """Where rows of these positions go, and from now on end."""
        at = position - self._first
        if self._start == self._stop or at < self._start:  # nothing of what is held comes before
            self._first, self._start, self._stop, at = position, 0, 0, 0
        if at + count > self._rows.shape[0]:
            at -= self._start
            held = self._rows[self._start : self._stop]
            rows = self._rows.new_empty(max(_LEAST, 2 * (at + count)), self._rows.shape[1])
            rows[: len(self)] = held
            self._allocate(rows)
            self._first += self._start
            self._start, self._stop = 0, len(self)
        if at > self._stop:
            self._rows[self._stop : at] = 0.0
        self._stop = at + count
        return at

    def forget_before(self, position: int) -> None:
        self._start = min(self._stop, max(self._start, position - self._first))

    def rows(self, position: int, count: int) -> torch.Tensor:
        """[count, width]; valid until the next `add`. Zeros where nothing is held."""
        at = position - self._first
        if self._start <= at and at + count <= self._stop:
            return self._rows[at : at + count]
        found = self._rows.new_zeros(count, self._rows.shape[1])
        low, high = max(at, self._start), min(at + count, self._stop)
        if low < high:
            found[low - at : high - at] = self._rows[low:high]
        return found
