"""Sequences on which a draft pass promises less than its time is worth. Knows lengths; refuses to know chances and prices.

What a pass promises moves slowly (chances and prices are means over many steps), so a sequence on which it was too little is not asked about for
some tokens, more each time: a question costs a fifth of a millisecond even where no pass is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spec.drafter import SequenceView

_LEAST, _MOST = 2, 16  # tokens of a pause


class Dull:
    def __init__(self) -> None:
        self._pauses: dict[int, tuple[int, int]] = {}  # by sequence: how long the last pause was, and the length that ends it

    def note(self, views: Iterable[SequenceView]) -> None:
        for view in views:
            last, _ = self._pauses.get(view.seq_id, (0, 0))
            pause = min(_MOST, max(_LEAST, 2 * last))
            self._pauses[view.seq_id] = (pause, len(view.token_ids) + pause)

    def clear(self, views: Iterable[SequenceView]) -> None:
        if self._pauses:
            for view in views:
                self._pauses.pop(view.seq_id, None)

    def forget(self, seq_id: int) -> None:
        self._pauses.pop(seq_id, None)

    def left(self, views: Sequence[SequenceView]) -> list[int]:
        """Those, by place, that are not in a pause."""
        pauses = self._pauses
        return [i for i, view in enumerate(views) if view.seq_id not in pauses or len(view.token_ids) >= pauses[view.seq_id][1]]
