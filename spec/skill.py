"""How much worse than usual a drafter does on one sequence. Knows judged nodes; refuses to know why.

A drafter that copies shines on a summary and fails on a poem; calibration holds the mean over everybody. The factor here is
accepted over expected nodes of the sequence so far, pulled towards 1 and faded, and it multiplies the calibrated chance. It fades with
steps too: a drafter that had bad luck is not asked, so nothing it does could ever clear it.
"""

from __future__ import annotations

from spec.calibration import Calibration
from spec.drafter import Outcome
from spec.tree import DraftTree

_PULL = 4.0  # expected acceptances that "as usual" is worth
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


class Skill:
    """Factors by sequence and drafter. Bounded: the oldest sequence is forgotten first."""

    def __init__(self) -> None:
        self._counts: dict[int, dict[str, list[float]]] = {}  # [accepted, expected]
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
        return {
            name: min(_HIGH, max(_LOW, (hits * kept + _PULL) / (expected * kept + _PULL)))
            for name, (hits, expected) in counts.items()
        }

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
            for pair in counts.values():
                pair[0] *= kept
                pair[1] *= kept
        self._seen[seq_id] = self._now
        for node, accepted in nodes:
            depth = tree.depths[node]
            for name, (rank, bin_) in zip(tree.sources[node], tree.origins[node], strict=True):
                pair = counts.setdefault(name, [0.0, 0.0])
                pair[0] = pair[0] * _KEEP + accepted
                pair[1] = pair[1] * _KEEP + calibration.cell_chance(name, depth, rank, bin_, greedy)

    def forget(self, seq_id: int) -> None:
        self._counts.pop(seq_id, None)
        self._seen.pop(seq_id, None)
