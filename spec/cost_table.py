"""What a step costs: T(rows, context, sequences) in milliseconds, measured and kept current. Knows milliseconds; refuses
to know tokens, chances and drafters' insides.

    T = base(rows) + context * (per_key + per_pair * rows / sequences) + (sequences - 1) * per_sequence      one pass of the target
    step = T + overhead(sequences)                                                  what else a step costs, drafting apart

`base` is a monotone piecewise-linear curve over GRID. A key costs what reading it costs, and what each row of its sequence takes
to attend to it: `per_pair`, by the mean rows of a sequence. Start-up measures all terms; every real step then moves them a
little, the curve most at the step's own size. What a step took beyond expectation is shared out by the squares of what the terms
are expected to hold (normalised least mean squares); a slope that is zero counts as a small one there, so it can grow. Errors are
relative and clipped at a few times their usual spread, so that a stall of the machine counts like an ordinary slow step, and a
machine that did become slower is followed within some tens of steps.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from itertools import pairwise
from statistics import median

# One past a power of two stands in the grid too: kernels work in tiles, and the first row of a new tile costs more than the next ones.
GRID = (1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 16, 17, 20, 24, 32, 33, 40, 48, 64, 65, 96, 128, 192, 256, 384, 512, 1024)
_MEASURED = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 20, 24, 32, 33, 48, 64, 128, 256)  # sizes tried at start-up, while time lasts
_CONTEXT = 1024  # keys of one sequence in the passes that tell the cost of context, where so many fit
_CONTEXT_EACH = 256  # and of each of many
_TREE = 8  # rows of the one that tells what a row adds to it
# What the slopes count as at least when an error is shared out: so many keys as much as one row's pass, so many keys times rows of
# their sequence, and a sequence this share of a row.
_KEYS, _PAIRS, _SEQUENCE = 16_384, 8_192, 0.25
_RATE = 0.04  # share of a (clipped) error that the terms take over together, the curve at the step's own size
_FAR = 0.25  # of which far sizes take this share: a slower clock slows every size
_NEAR = 0.6  # and near ones this, or two sizes beside each other could not grow apart
_REACH = 0.6  # the rest fades until sizes differ by 1 + this factor
_ROWS_PRIOR = 0.1  # cost of one more row over that of the first, before anything is measured

PassMs = Callable[[int, int, int], float]  # (rows, context, sequences) -> milliseconds of one such pass


class Mean:
    """A running mean in which an outlier counts as three times the mean."""

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def add(self, x: float, rate: float) -> None:
        self.count += 1
        if self.count > 3:
            x = min(x, 3.0 * self.value + 1e-3)
        self.value += (x - self.value) * max(rate, 1.0 / self.count)


class CostTable:
    def __init__(self) -> None:
        self._base = [1.0 + _ROWS_PRIOR * (rows - 1) for rows in GRID]
        self._scale = 1.0  # of the whole curve: drift that every size shares costs one multiplication
        self._per_key = 0.0
        self._per_pair = 0.0  # of a key and one of its sequence's rows
        self._per_sequence = 0.0
        self._known = False
        self._spread = 0.1  # usual relative error
        self._overhead: dict[int, Mean] = {}  # by power of two of sequences
        self._draft: dict[tuple[str, int], Mean] = {}

    # --- asking -------------------------------------------------------------------------------------------------------

    def pass_ms(self, rows: int, context: int, sequences: int) -> float:
        """One target pass over `rows` nodes of `sequences` rows with `context` committed keys in all."""
        keys = context * (self._per_key + self._per_pair * rows / sequences)
        return self._curve(rows) + keys + (sequences - 1) * self._per_sequence

    def step_ms(self, rows: int, context: int, sequences: int) -> float:
        """The same and everything else a step does, drafting apart."""
        return self.pass_ms(rows, context, sequences) + self.overhead_ms(sequences)

    def row_ms(self, rows: int, count: int, keys: float = 0.0) -> list[float]:
        """Milliseconds that each of the next `count` rows adds to a pass over `rows`, where a sequence holds so many keys."""
        base, scale, attending = self._base, self._scale, keys * self._per_pair
        at = min(max(bisect_right(GRID, rows), 1), len(GRID) - 1)
        each: list[float] = []
        while True:
            step = scale * (base[at] - base[at - 1]) / (GRID[at] - GRID[at - 1]) + attending
            last = at + 1 >= len(GRID)
            room = count - len(each) if last else min(count - len(each), GRID[at] - rows - len(each))
            each += [step] * room
            if len(each) >= count:
                return each
            at += 1

    def _curve(self, rows: int) -> float:
        base = self._base
        at = min(max(bisect_right(GRID, rows), 1), len(GRID) - 1)
        low, high = GRID[at - 1], GRID[at]
        return self._scale * (base[at - 1] + (base[at] - base[at - 1]) * (rows - low) / (high - low))

    def overhead_ms(self, sequences: int) -> float:
        """Of the nearest number of sequences seen; 0 before any."""
        return _nearest(self._overhead, _octave(sequences))

    def draft_ms(self, drafter: str, sequences: int) -> float:
        """What this drafter takes in a step it is asked in; 0 while unknown."""
        known = self._draft.get((drafter, _octave(sequences)))
        if known is not None:
            return known.value
        return _nearest({size: mean for (name, size), mean in self._draft.items() if name == drafter}, _octave(sequences))

    # --- learning -----------------------------------------------------------------------------------------------------

    def measure(
        self,
        pass_ms: PassMs,
        *,
        max_rows: int = 64,
        max_context: int = _CONTEXT,
        seconds: float = 3.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Fill the table by running passes. Small sizes, which matter most, come first.

        No pass begins that would end after `seconds` if it took twice the longest one so far; one of a size that was run before is
        expected to take what it took. So only a surprise ends later, and nothing is run after it. The first pass of all is always run.
        """
        deadline = clock() + seconds
        sizes = [rows for rows in _MEASURED if rows <= max_rows] or [1]
        taken: dict[tuple[int, int, int], list[float]] = {}
        each, keys = max(sizes[-1] // 4, 1), min(_CONTEXT, max_context)
        wanted = [(rows, 0, 1) for rows in sizes] + [(1, keys, 1), (each, 0, each)]
        wanted += [
            (min(_TREE, sizes[-1]), min(_CONTEXT, max_context + 1 - min(_TREE, sizes[-1])), 1),
            (each, each * min(keys, _CONTEXT_EACH), each),
        ]
        for repeat in range(6):
            for key in wanted:
                slow = max(taken[key]) if key in taken else 2.0 * max((max(v) for v in taken.values()), default=0.0)
                if clock() + slow * 1e-3 > deadline and taken:
                    continue
                ms = pass_ms(*key)
                if repeat == 0 and clock() + 6 * ms * 1e-3 < deadline:
                    ms = pass_ms(*key)  # the first pass of a size warms up
                taken.setdefault(key, []).append(ms)
        # The first pass over many keys is also the first to touch the store, which can take ten times as long.
        steady = {key: values[1:] if key[1] and key[2] > 1 else values for key, values in taken.items()}
        self._fit({key: median(values) for key, values in steady.items() if values})

    def _fit(self, taken: dict[tuple[int, int, int], float]) -> None:
        known = [(rows, ms) for (rows, context, sequences), ms in sorted(taken.items()) if context == 0 and sequences == 1]
        if not known:
            return
        sizes, values = [rows for rows, _ in known], _monotone([ms for _, ms in known])
        self._base = _monotone([_interpolate(sizes, values, rows) for rows in GRID])
        self._scale = 1.0
        self._known = True
        extra = {key: max(0.0, ms - self._curve(key[0])) for key, ms in taken.items()}
        self._per_sequence = next((ms / (key[2] - 1) for key, ms in extra.items() if key[2] > 1 and not key[1]), 0.0)
        single = {
            key: max(0.0, ms - (key[2] - 1) * self._per_sequence) for key, ms in extra.items() if key[1] and key[0] == key[2]
        }
        if not single:
            return
        # One row a sequence: most keys tell most. More rows: what they add to that.
        self._per_key = sum(single.values()) / sum(context for _, context, _ in single)
        for (rows, context, sequences), ms in extra.items():
            if context and rows > sequences:
                self._per_pair = min(self._per_key, max(0.0, ms / context - self._per_key) / (rows / sequences - 1))
        self._per_key -= self._per_pair

    def record(self, rows: int, context: int, sequences: int, pass_ms: float, overhead_ms: float | None) -> None:
        """One real step without prompt tokens (those are not scored, so they cost less than other rows).

        `overhead_ms`: what else it took, None where drafts were part of that."""
        if overhead_ms is not None:
            self._overhead.setdefault(_octave(sequences), Mean()).add(max(0.0, overhead_ms), 0.05)
        if not pass_ms > 0.0:
            return
        expected = self.pass_ms(rows, context, sequences)
        if not self._known:  # nothing was measured: the first step sets the scale
            self._scale *= pass_ms / expected
            self._known = True
            return
        error = pass_ms / expected - 1.0
        bound = max(0.05, 3.0 * self._spread)
        error = min(max(error, -bound), bound)
        self._spread = min(0.3, self._spread + 0.05 * (abs(error) - self._spread))
        self._share_out(rows, context, sequences, error * expected)

    def _share_out(self, rows: int, context: int, sequences: int, missing: float) -> None:
        """Let the terms take over their parts of `missing` milliseconds."""
        base, others = self._curve(rows), sequences - 1
        pairs, one = context * rows / sequences, self._curve(1)
        in_keys = context * max(self._per_key, one / _KEYS)
        in_pairs = pairs * max(self._per_pair, one / _PAIRS)
        in_others = others * max(self._per_sequence, _SEQUENCE * base / rows)
        share = missing / (base * base + in_keys * in_keys + in_pairs * in_pairs + in_others * in_others)
        self._shift(rows, share * base)
        if context:
            self._per_key = max(0.0, self._per_key + _RATE * share * in_keys * in_keys / context)
            self._per_pair = max(0.0, self._per_pair + _RATE * share * in_pairs * in_pairs / pairs)
        if others:
            self._per_sequence = max(0.0, self._per_sequence + _RATE * share * in_others * in_others / others)

    def _shift(self, rows: int, error: float) -> None:
        """Move the curve at `rows`, and the rest of it less the farther it is."""
        base = self._base
        self._scale *= 1.0 + _RATE * _FAR * error
        strength = _RATE * (1.0 - _FAR) * error
        first = bisect_left(GRID, rows / (1.0 + _REACH))
        last = bisect_right(GRID, rows * (1.0 + _REACH))
        if last <= first:  # past the grid's end
            first, last = len(GRID) - 1, len(GRID)
        for at in range(first, last):
            size = GRID[at]
            apart = (size / rows if size > rows else rows / size) - 1.0
            base[at] *= 1.0 + strength * (1.0 if size == rows else _NEAR * max(0.0, 1.0 - apart / _REACH))
        if any(a > b for a, b in pairwise(base[max(0, first - 1) : last + 1])):
            self._base = _monotone(base)

    def record_draft(self, drafter: str, sequences: int, ms: float) -> None:
        """What a drafter that was asked took in a step."""
        self._draft.setdefault((drafter, _octave(sequences)), Mean()).add(max(0.0, ms), 0.05)


def _octave(sequences: int) -> int:
    return max(0, sequences - 1).bit_length()


def _nearest(means: dict[int, Mean], octave: int) -> float:
    if not means:
        return 0.0
    return means[min(means, key=lambda known: (abs(known - octave), known))].value


def _monotone(values: list[float]) -> list[float]:
    """The closest non-decreasing values in least squares: neighbours out of order are pooled (Ayer et al. 1955)."""
    if all(a <= b for a, b in pairwise(values)):
        return values
    pools: list[list[float]] = []  # [sum, count]
    for value in values:
        pools.append([value, 1.0])
        while len(pools) > 1 and pools[-2][0] * pools[-1][1] > pools[-1][0] * pools[-2][1]:
            total, count = pools.pop()
            pools[-1][0] += total
            pools[-1][1] += count
    return [total / count for total, count in pools for _ in range(int(count))]


def _interpolate(sizes: list[int], values: list[float], rows: int) -> float:
    """Linear between measured sizes, and on past the last with the last slope (or the prior's, after one size)."""
    if len(sizes) == 1:
        return values[0] * (1.0 + _ROWS_PRIOR * (rows - sizes[0]))
    at = min(max(bisect_right(sizes, rows), 1), len(sizes) - 1)
    low, high = sizes[at - 1], sizes[at]
    value = values[at - 1] + (values[at] - values[at - 1]) * (rows - low) / (high - low)
    return max(value, 1e-6)
