"""Never slower than plain decoding: compares measured speed with and without drafting. Knows tokens and milliseconds of
finished steps; refuses to know why either is what it is.

The price rule already drafts only what should pay. This is the backstop for everything its model of the costs leaves out: some
steps run plain on purpose, and where drafting measures slower than they do it rests, longer each time it fails again.
Speeds are relative to the cost table's plain step, so that growing contexts and changing batches do not tilt the comparison.
"""

from __future__ import annotations

_PLAIN_FIRST = 8  # plain steps wanted before the comparison means anything
_PLAIN_FIRST_EVERY = 8
_PLAIN_EVERY = 256  # later, to keep the comparison current
_DRAFTED_FIRST = 96  # drafting steps before a verdict
_DOUBT = 1.5  # standard errors
_DRAFTED_SOON = 24  # before one on a glaring difference
_GLARING = 3.0  # standard errors
_STALL = 2.0  # times the usual time of a step; more is counted as so much
_CLEAR = 0.999  # slower by less is no difference
_MEMORY = 1200.0  # steps a speed remembers
_WORTH_FIRST = 48  # steps before a drafter's worth is judged
_REST = 256  # steps of rest after the first failure
_LONGEST_REST = 16_384
_LOOK = 8  # of resting steps, so many to one that is measured
_PROVEN = 256  # drafting steps that clear earlier failures


class Speed:
    """Faded sums over steps: tokens per unit of time, with its uncertainty."""

    __slots__ = ("_keep", "_tc", "_tt", "count", "time", "time_squared", "tokens")

    def __init__(self, memory: float = _MEMORY) -> None:
        self._keep = 1.0 - 1.0 / memory
        self.clear()

    def clear(self) -> None:
        self.count = self.tokens = self.time = 0.0
        self.time_squared = self._tt = self._tc = 0.0

    def add(self, tokens: float, time: float) -> None:
        if self.count > 4.0:
            time = min(time, _STALL * self.time / self.count)  # a stall of the machine says nothing of either way to decode
        keep = self._keep
        self.count = self.count * keep + 1.0
        self.tokens = self.tokens * keep + tokens
        self.time = self.time * keep + time
        self._tt = self._tt * keep + tokens * tokens
        self._tc = self._tc * keep + tokens * time
        self.time_squared = self.time_squared * keep + time * time

    def add_plain(self, steps: int) -> None:
        """So many steps of one token in one unit of time, at once."""
        if steps:
            keep = self._keep**steps
            added = (1.0 - keep) / (1.0 - self._keep)
            self.count = self.count * keep + added
            self.tokens = self.tokens * keep + added
            self.time = self.time * keep + added
            self._tt = self._tt * keep + added
            self._tc = self._tc * keep + added
            self.time_squared = self.time_squared * keep + added

    @property
    def value(self) -> float:
        return self.tokens / self.time if self.time > 0.0 else 0.0

    @property
    def error(self) -> float:
        """Standard error of `value`, relative (ratio estimator)."""
        if self.count < 2.0 or self.tokens <= 0.0:
            return 1.0
        r = self.value
        scatter = max(0.0, self._tt - 2.0 * r * self._tc + r * r * self.time_squared)
        return float(scatter**0.5 / self.tokens)


class Guard:
    """One load's verdict. `allow` is asked once per decoding step, `record` told what came of it."""

    __slots__ = ("_rest", "_rest_next", "_since_plain", "drafted", "plain")

    def __init__(self) -> None:
        self.plain = Speed(_MEMORY / 4)
        self.drafted = Speed()
        self._rest = 0
        self._rest_next = _REST
        self._since_plain = 0

    @property
    def resting(self) -> bool:
        return self._rest > 0

    def rests(self) -> bool:
        """Whether this step passes without being looked at. Every eighth step of a rest is looked at, as a plain one."""
        if self._rest <= 1 or self._rest % _LOOK == 0:
            return False
        self._rest -= 1
        return True

    def allow(self) -> bool:
        """Whether this step may draft."""
        if self._rest > 0:
            self._rest -= 1
            if self._rest == 0:
                self.drafted.clear()
            return False
        self._since_plain += 1
        return self._since_plain < (_PLAIN_EVERY if self.plain.count >= _PLAIN_FIRST else _PLAIN_FIRST_EVERY)

    def record(self, *, drafted: bool, tokens: float, time: float) -> None:
        """`tokens` per sequence of one step, `time` in plain steps of the same load (1 = what the cost table expects)."""
        if not drafted:
            self.plain.add(tokens, time)
            self._since_plain = 0
            return
        self.drafted.add(tokens, time)
        if self.drafted.count < _DRAFTED_SOON or self.plain.count < 0.75 * _PLAIN_FIRST:
            return
        doubt = _DOUBT if self.drafted.count >= _DRAFTED_FIRST else _GLARING
        if self.drafted.value * (1.0 + doubt * self.drafted.error) < _CLEAR * self.plain.value * (1.0 - self.plain.error):
            self._rest = self._rest_next
            self._rest_next = min(2 * self._rest_next, _LONGEST_REST)
        elif self.drafted.count >= _PROVEN:
            self._rest_next = _REST


class Worth:
    """Whether one drafter earns its own time under one load: expected tokens gained against tokens its time would bring."""

    __slots__ = ("_count", "_rest", "_rest_next", "cost", "gain")

    def __init__(self) -> None:
        self.gain = 0.0
        self.cost = 0.0
        self._count = 0
        self._rest = 0
        self._rest_next = _REST

    @property
    def resting(self) -> bool:
        return self._rest > 0

    def allow(self) -> bool:
        if self._rest == 0:
            return True
        self.passed(1)
        return False

    def passed(self, steps: int) -> None:
        """So many steps went by in which nobody was asked."""
        if self._rest:
            self._rest = max(0, self._rest - steps)
            if self._rest == 0:
                self._count = 0

    def record(self, gain: float, cost: float) -> None:
        """One step it was asked in, in tokens."""
        self._count += 1
        rate = max(1.0 / 128.0, 1.0 / self._count)
        self.gain += (gain - self.gain) * rate
        self.cost += (cost - self.cost) * rate
        if self._count >= _WORTH_FIRST and self.gain < self.cost:
            self._rest = self._rest_next
            self._rest_next = min(2 * self._rest_next, _LONGEST_REST)
        elif self._count >= _PROVEN:
            self._rest_next = _REST
