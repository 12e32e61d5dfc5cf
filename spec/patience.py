"""Asking costs time even where nothing is drafted. Knows, per sequence, what asking brought lately; refuses to know drafters.

A text that copies nothing makes drafters look in vain at every step. `gain` is a fast-fading mean of the tokens a step's drafts
brought on the sequence, less what verifying them cost. Where it falls below the price of asking, the sequence is asked less and
less often, until the questions cost next to nothing; a step that pays ends that at once. A wrong rest costs a few tokens at the onset of a copy, a
wrong question costs every step. A new sequence is believed to be like the others.
"""

from __future__ import annotations

from collections.abc import Sequence

_RATE = 0.125  # of the newest step
_START = 0.3  # tokens a question is believed to bring before any was asked
_USUAL_RATE = 1.0 / 256.0
_WASTE = 0.005  # tokens a step that questions in vain may cost on such a sequence: how long a rest grows
_LEAST, _MOST = 4, 64  # steps, of the longest rest
_SEQUENCES = 4096


class _Interest:
    __slots__ = ("gain", "pause", "wait")

    def __init__(self, gain: float) -> None:
        self.gain = gain
        self.pause = 0  # steps of the last rest, 0 = it paid
        self.wait = 0  # steps left of this one


class Patience:
    """Bounded: the oldest sequence is forgotten first."""

    def __init__(self) -> None:
        self._interest: dict[int, _Interest] = {}
        self._usual = _START  # over all sequences

    def allow(self, seq_id: int) -> bool:
        """Whether this sequence may draft in this step. Asked once a step."""
        found = self._interest.get(seq_id)
        if found is None or found.wait == 0:
            return True
        found.wait -= 1
        return False

    def rests(self, seq_ids: Sequence[int]) -> bool:
        """True, and a step less for everybody to wait, where all of them wait for more than this step."""
        waiting = []
        for seq_id in seq_ids:
            found = self._interest.get(seq_id)
            if found is None or found.wait <= 1:
                return False
            waiting.append(found)
        for found in waiting:
            found.wait -= 1
        return True

    def record(self, seq_id: int, gain: float, cost: float) -> None:
        """A step in which the sequence was asked: tokens its drafts brought less their verification, and the price of asking."""
        found = self._interest.get(seq_id)
        if found is None:
            if len(self._interest) >= _SEQUENCES:
                del self._interest[next(iter(self._interest))]
            found = self._interest[seq_id] = _Interest(self._usual)
        self._usual += (gain - self._usual) * _USUAL_RATE
        found.gain += (gain - found.gain) * _RATE
        if gain > cost or found.gain >= cost:
            found.pause = 0
        else:
            longest = min(_MOST, max(_LEAST, int(cost / _WASTE)))
            found.pause = min(longest, max(1, 2 * found.pause))
        found.wait = found.pause

    def forget(self, seq_id: int) -> None:
        self._interest.pop(seq_id, None)
