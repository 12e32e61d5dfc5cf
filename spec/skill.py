"""How much worse than usual a drafter does on one sequence. Knows judged nodes; refuses to know why.

A drafter that copies shines on a summary and fails on a poem; calibration holds the mean over everybody. The factor here is
accepted over expected nodes of the sequence so far, pulled towards 1 and faded, and it multiplies the calibrated chance. It fades with
steps too: a drafter that had bad luck is not asked, so nothing it does could ever clear it.

How hard it is pulled is learnt, by drafter: were sequences all alike, accepted nodes would miss what is expected by chance alone,
v = sum p (1 - p) in the square. What they miss beyond that is how much sequences differ: the factor's variance t, and the mean of a
Gamma(1/t, 1/t) prior's posterior is (accepted + 1/t) / (expected + 1/t) (empirical Bayes; Efron and Morris 1973).
"""

from __future__ import annotations

from spec.calibration import Calibration
from spec.drafter import Outcome
from spec.tree import DraftTree

_LEAST_PULL, _MOST_PULL = 4.0, 400.0  # expected acceptances that "as usual" is worth
_PRIOR = 400.0  # squared expected acceptances that the first belief about differences, the least pull, is worth
_KEEP_JUDGED = 1.0 - 1.0 / 128.0  # of what is known of differences, per judged tree
_KEEP = 0.995  # per judged node
_KEEP_STEP = 1.0 - 1.0 / 256.0  # per step
_LOW, _HIGH = 0.2, 1.0  # a lucky start is no skill: chances raised above the mean were not met (171 expected, 90 accepted)
_SEQUENCES = 4096

Judged = list[tuple[int, bool]]


def judged(outcome: Outcome) -> Judged:
    """(node, accepted) of every node the target really judged: its parent was accepted and the answer went on after it."""
    tree, path = outcome.tree, outcome.path
    if not tree.token_ids or outcome.next_id is None:
        return []
    last = path[-1] if path else -1
    found: Judged = []
    for i, parent in enumerate(tree.parents):
        if parent >= 0 and parent not in path:
            continue
        if outcome.finished and parent == last:
            continue  # the answer ended on the parent: an end token in a draft's place says nothing of the draft
        found.append((i, i in path))
    return found


class _Differences:
    """How much sequences differ in a drafter's success: faded sums over judged trees."""

    __slots__ = ("_missed", "_size")

    def __init__(self) -> None:
        self._size = _PRIOR
        self._missed = _PRIOR / _LEAST_PULL

    def add(self, hits: float, expected: float, variance: float) -> None:
        self._size = self._size * _KEEP_JUDGED + expected * expected
        self._missed = self._missed * _KEEP_JUDGED + (hits - expected) ** 2 - variance

    @property
    def pull(self) -> float:
        """1 / t."""
        if self._missed * _MOST_PULL <= self._size:
            return _MOST_PULL
        return max(_LEAST_PULL, self._size / self._missed)


class Skill:
    """Factors by sequence and drafter. Bounded: the oldest sequence is forgotten first."""

    def __init__(self) -> None:
        self._counts: dict[int, dict[str, list[float]]] = {}  # [accepted, expected, its variance were all sequences alike]
        self._differences: dict[str, _Differences] = {}
        self._seen: dict[int, int] = {}  # the step of the last judgement
        self._now = 0

    def step(self) -> None:
        """A step is over."""
        self._now += 1

    def factors(self, seq_id: int) -> dict[str, float]:
        """By drafter; a drafter that is not listed has 1."""
        counts = self._counts.get(seq_id)
        if not counts:
            return {}
        kept = self._kept(seq_id)
        found: dict[str, float] = {}
        for name, (hits, expected, _) in counts.items():
            pull = self._differences[name].pull
            found[name] = min(_HIGH, max(_LOW, (hits * kept + pull) / (expected * kept + pull)))
        return found

    def _kept(self, seq_id: int) -> float:
        return float(_KEEP_STEP ** (self._now - self._seen[seq_id]))

    def record(self, seq_id: int, tree: DraftTree, nodes: Judged, calibration: Calibration, greedy: bool) -> None:
        counts = self._counts.get(seq_id)
        if counts is None:
            if len(self._counts) >= _SEQUENCES:
                self.forget(next(iter(self._counts)))
            counts = self._counts[seq_id] = {}
        else:
            kept = self._kept(seq_id)
            for earlier in counts.values():
                _fade(earlier, kept)
        self._seen[seq_id] = self._now
        judged_now: set[str] = set()
        for node, accepted in nodes:
            depth = tree.depths[node]
            for name, (rank, bin_) in zip(tree.sources[node], tree.origins[node], strict=True):
                sums = counts.setdefault(name, [0.0, 0.0, 0.0])
                chance = calibration.cell_chance(name, depth, rank, bin_, greedy)
                _fade(sums, _KEEP)
                sums[0] += accepted
                sums[1] += chance
                sums[2] += chance * (1.0 - chance)
                judged_now.add(name)
        for name in judged_now:
            self._differences.setdefault(name, _Differences()).add(*counts[name])

    def forget(self, seq_id: int) -> None:
        self._counts.pop(seq_id, None)
        self._seen.pop(seq_id, None)


def _fade(sums: list[float], keep: float) -> None:
    sums[0] *= keep
    sums[1] *= keep
    sums[2] *= keep * keep
