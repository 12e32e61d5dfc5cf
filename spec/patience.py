"""Asking costs time even where nothing is drafted. Knows, per sequence, what asking brought lately; refuses to know drafters.

A text that copies nothing makes drafters look in vain at every step. `gain` is a fast-fading mean of the tokens a step's drafts
brought on the sequence, less what verifying them cost. Where it falls below the price of asking, the sequence is asked less and
less often, until the questions cost next to nothing; a step that pays ends that at once. A wrong rest costs a few tokens at the onset of a copy, a
wrong question costs every step. A new sequence is believed to be like the others.

Whether a low mean foretells anything is learnt too: `after` is what questions brought that were asked although (or when a rest
after) the mean was low, less their price. Where that is above zero, bad luck was all it was, and nothing rests.
"""

from __future__ import annotations

_RATE = 0.125  # of the newest step
_START = 0.3  # tokens a question is believed to bring before any was asked
_USUAL_RATE = 1.0 / 256.0
_AFTER_RATE = 1.0 / 128.0
_DOUBT = 1.5  # times its price must a question bring: what it brings is known badly
_WASTE = 0.005  # tokens a step that questions in vain may cost on such a sequence: how long a rest grows
_LEAST, _MOST = 4, 64  # steps, of the longest rest
_SEQUENCES = 4096


class _Interest:
    __slots__ = ("after", "gain", "low", "pause", "until")

    def __init__(self, gain: float, after: float) -> None:
        self.gain = gain
        self.low = False  # what `gain` was when it was last looked at
        self.after = after
        self.pause = 0  # steps of the last rest, a power of two; 0 = it paid
        self.until = 0  # the step that ends it


class Patience:
    """Bounded: the oldest sequence is forgotten first. Rests end at multiples of their length, so that sequences that rest are
    asked in the same steps: the first question of a step costs more than the next ones."""

    def __init__(self) -> None:
        self._interest: dict[int, _Interest] = {}
        self._usual, self._usual_after = _START, 0.0  # over all sequences
        self._now = 0

    def step(self) -> None:
        """A step is over."""
        self._now += 1

    def allow(self, seq_id: int) -> bool:
        """Whether this sequence may draft in this step."""
        found = self._interest.get(seq_id)
        return found is None or self._now >= found.until

    def record(self, seq_id: int, gain: float, cost: float) -> None:
        """A step in which the sequence was asked: tokens its drafts brought less their verification, and the price of asking."""
        found = self._interest.get(seq_id)
        if found is None:
            if len(self._interest) >= _SEQUENCES:
                del self._interest[next(iter(self._interest))]
            found = self._interest[seq_id] = _Interest(self._usual, self._usual_after)
        if found.low:
            found.after += (gain - cost - found.after) * _AFTER_RATE
            self._usual_after += (gain - cost - self._usual_after) * _USUAL_RATE
        self._usual += (gain - self._usual) * _USUAL_RATE
        found.gain += (gain - found.gain) * _RATE
        found.low = found.gain < _DOUBT * cost
        if gain > cost or not found.low or found.after > 0.0:
            found.pause = found.until = 0
            return
        longest = min(_MOST, max(_LEAST, int(cost / _WASTE)))
        if found.pause < longest:
            found.pause = max(2, 2 * found.pause)
        found.until = (self._now // found.pause + 1) * found.pause

    def forget(self, seq_id: int) -> None:
        self._interest.pop(seq_id, None)
