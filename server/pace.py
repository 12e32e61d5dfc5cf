"""Spreads an accepted run over the time one step takes, so that text flows instead of jumping. Sans-I/O: the caller has the clock.

The first token of every run leaves at once, and a new run pushes out what is left of the last: nothing waits longer than a step.
"""

from __future__ import annotations

from collections import deque

from server.generation import Piece

LONGEST_SPREAD = 0.5  # seconds


class Pacer:
    def __init__(self) -> None:
        self._due: deque[tuple[float, Piece]] = deque()

    def add(self, piece: Piece, gap: float, now: float) -> None:
        """`gap` is the measured time between the last two runs, 0 for the first."""
        self._due = deque((min(when, now), held) for when, held in self._due)
        spread = min(gap, LONGEST_SPREAD)
        count = len(piece.parts)
        for index, part in enumerate(piece.parts):
            single = Piece(piece.token_ids[index : index + 1], piece.logprobs[index : index + 1], [part])
            single.drafted = piece.drafted if index == 0 else 0
            self._due.append((now + spread * index / count, single))

    def take(self, now: float) -> Piece | None:
        """Everything due by now, as one piece."""
        result: Piece | None = None
        while self._due and self._due[0][0] <= now:
            single = self._due.popleft()[1]
            if result is None:
                result = single
            else:
                result.extend(single)
        return result

    def next_time(self) -> float | None:
        return self._due[0][0] if self._due else None
