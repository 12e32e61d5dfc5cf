"""What a drafter's own score is worth: P(node accepted | parent accepted), learnt online. Knows counts and cells; refuses
to know prices, tokens and what a score is made of.

A cell is (drafter, greedy or sampled, depth, rank, confidence bin). Its estimate is its own share of accepted nodes,
pulled towards coarser cells (depth forgotten, then rank) and at last towards the prior, the raw score, so that a rare
cell borrows and a busy one speaks for itself (shrinkage as in additive smoothing with a hierarchical prior). Counts fade
exponentially with a half-life in observations, so drift is followed and memory is bounded.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spec.drafter import Outcome

EDGES = (0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.27, 0.35, 0.45, 0.55, 0.65, 0.75, 0.83, 0.9, 0.95, 0.98)
BINS = len(EDGES) + 1
DEPTHS = 8  # 1, 2, 3, 4, 5-6, 7-9, 10-15, 16 and deeper
RANKS = 5  # 0, 1, 2, 3, 4 and later
_DEPTH_CELL = (0, 0, 1, 2, 3, 4, 4, 5, 5, 5, 6, 6, 6, 6, 6, 6)
FORMAT = 1


def confidence_bin(confidence: float) -> int:
    """Bin of a raw score, 0 .. BINS - 1; NaN counts as 0."""
    return bisect_right(EDGES, confidence) if confidence == confidence else 0


_CENTRES = tuple((low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True))
_UNKNOWN_PRIOR = (0.45, 0.15, 0.08, 0.05, 0.03)  # by rank, before anything was seen
_PRIOR_WEIGHT = 6.0  # observations the raw score is worth
_SHRINK = 10.0  # observations a coarser cell is worth to a finer one
_MODES = 2  # greedy, sampled


class _Level:
    """Faded counts of one granularity: `seen[i]` nodes whose parent was accepted, `hits[i]` of them accepted."""

    __slots__ = ("hits", "seen")

    def __init__(self, size: int) -> None:
        self.seen = [0.0] * size
        self.hits = [0.0] * size

    def add(self, cell: int, hit: bool, keep: float) -> None:
        self.seen[cell] = self.seen[cell] * keep + 1.0
        self.hits[cell] = self.hits[cell] * keep + (1.0 if hit else 0.0)

    def shrink(self, cell: int, prior: float, weight: float) -> float:
        return (self.hits[cell] + weight * prior) / (self.seen[cell] + weight)


class _Drafter:
    """All cells of one drafter, finest first."""

    __slots__ = ("levels",)

    def __init__(self) -> None:
        self.levels = {
            "depth_rank_bin": _Level(_MODES * DEPTHS * RANKS * BINS),
            "rank_bin": _Level(_MODES * RANKS * BINS),
            "bin": _Level(_MODES * BINS),
            "depth_rank": _Level(_MODES * DEPTHS * RANKS),  # for UNKNOWN confidence
            "rank": _Level(_MODES * RANKS),
        }

    @staticmethod
    def cells(mode: int, depth: int, rank: int, bin_: int) -> tuple[int, int, int, int, int]:
        """Cell numbers in the order of `levels`."""
        by_depth = (mode * DEPTHS + depth) * RANKS + rank
        by_rank = mode * RANKS + rank
        return by_depth * BINS + bin_, by_rank * BINS + bin_, mode * BINS + bin_, by_depth, by_rank

    def estimate(self, mode: int, depth: int, rank: int, bin_: int) -> float:
        fine, middle, coarse, _, _ = self.cells(mode, depth, rank, bin_)
        levels = self.levels
        p = levels["bin"].shrink(coarse, _CENTRES[bin_], _PRIOR_WEIGHT)
        p = levels["rank_bin"].shrink(middle, p, _SHRINK)
        return levels["depth_rank_bin"].shrink(fine, p, _SHRINK)

    def estimate_unknown(self, mode: int, depth: int, rank: int) -> float:
        _, _, _, by_depth, by_rank = self.cells(mode, depth, rank, 0)
        p = self.levels["rank"].shrink(by_rank, _UNKNOWN_PRIOR[rank], _PRIOR_WEIGHT)
        return self.levels["depth_rank"].shrink(by_depth, p, _SHRINK)


class Calibration:
    """Chances learnt from outcomes. Not thread-safe: one engine step at a time reads, then records."""

    def __init__(self, memory: float = 1500.0, max_drafters: int = 32) -> None:
        """`memory`: observations a cell remembers (its exponential window). Drafters past `max_drafters` stay at the prior."""
        self._keep = 1.0 - 1.0 / memory
        self._max_drafters = max_drafters
        self._drafters: dict[str, _Drafter] = {}
        self._cache: dict[tuple[str, int, int, int, bool], float] = {}

    def chance(self, drafter: str, depth: int, rank: int, confidence: float, *, greedy: bool) -> float:
        """P(accepted | parent accepted) of such a node; confidence below 0 (UNKNOWN): the mean over all confidences."""
        bin_ = -1 if confidence < 0.0 else confidence_bin(confidence)
        key = (drafter, depth, rank, bin_, greedy)
        found = self._cache.get(key)
        if found is None:
            found = self._cache[key] = self._compute(drafter, depth, rank, bin_, greedy)
        return found

    def _compute(self, drafter: str, depth: int, rank: int, bin_: int, greedy: bool) -> float:
        table = self._drafters.get(drafter)
        depth_cell, rank_cell, mode = _depth_cell(depth), min(max(rank, 0), RANKS - 1), 0 if greedy else 1
        if table is None:
            return _UNKNOWN_PRIOR[rank_cell] if bin_ < 0 else _CENTRES[bin_]
        if bin_ < 0:
            return table.estimate_unknown(mode, depth_cell, rank_cell)
        return table.estimate(mode, depth_cell, rank_cell, bin_)

    def observe(self, drafter: str, depth: int, rank: int, bin_: int, *, greedy: bool, accepted: bool) -> None:
        """Count one node whose parent was accepted."""
        table = self._drafters.get(drafter)
        if table is None:
            if len(self._drafters) >= self._max_drafters:
                return
            table = self._drafters[drafter] = _Drafter()
        cells = table.cells(0 if greedy else 1, _depth_cell(depth), min(max(rank, 0), RANKS - 1), min(max(bin_, 0), BINS - 1))
        for level, cell in zip(table.levels.values(), cells, strict=True):
            level.add(cell, accepted, self._keep)
        if self._cache:
            self._cache.clear()

    def record(self, outcomes: Sequence[Outcome]) -> None:
        """Count every node the target really judged: its parent was accepted and the answer went on after it."""
        for outcome in outcomes:
            tree = outcome.tree
            if not tree.token_ids or outcome.next_id is None:
                continue
            greedy = outcome.view.sampling.temperature == 0.0
            accepted = set(outcome.path)
            last = outcome.path[-1] if outcome.path else -1
            for i, parent in enumerate(tree.parents):
                if parent >= 0 and parent not in accepted:
                    continue
                if outcome.finished and parent == last:
                    continue  # the answer ended on the parent: an end token in a draft's place says nothing of the draft
                hit = i in accepted
                for name, (rank, bin_) in zip(tree.sources[i], tree.origins[i], strict=True):
                    self.observe(name, tree.depths[i], rank, bin_, greedy=greedy, accepted=hit)

    # --- persistence -------------------------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """Plain data: per drafter and level the non-empty cells as [cell, seen, hits]."""
        return {
            "format": FORMAT,
            "edges": list(EDGES),
            "drafters": {
                name: {
                    label: [[i, round(n, 3), round(h, 3)] for i, (n, h) in enumerate(zip(lv.seen, lv.hits, strict=True)) if n]
                    for label, lv in table.levels.items()
                }
                for name, table in sorted(self._drafters.items())
            },
        }

    def restore(self, data: Any) -> None:
        """Replace the counts by those of `dump`. Raises ValueError on anything else, leaving the counts as they were."""
        try:
            if data["format"] != FORMAT or tuple(data["edges"]) != EDGES:
                raise ValueError("another format or other confidence bins")
            loaded: dict[str, _Drafter] = {}
            for name, levels in data["drafters"].items():
                table = loaded[str(name)] = _Drafter()
                for label, level in table.levels.items():
                    for cell, seen, hits in levels[label]:
                        if not (isinstance(cell, int) and 0 <= cell < len(level.seen) and 0.0 <= hits <= seen):
                            raise ValueError(f"cell {cell!r} of {label} holds {seen!r}, {hits!r}")
                        if not math.isfinite(seen):
                            raise ValueError(f"cell {cell} of {label} is not finite")
                        level.seen[cell], level.hits[cell] = float(seen), float(hits)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a calibration: {error!r}") from error
        self._drafters = dict(list(loaded.items())[: self._max_drafters])
        self._cache.clear()

    def save(self, path: Path) -> None:
        """Write atomically: a reader sees the old file or the new one. OSError passes through."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            partial.write_text(json.dumps(self.dump(), separators=(",", ":")), encoding="utf-8")
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def load(self, path: Path, notice: Callable[[str], None]) -> bool:
        """Read what `save` wrote; False when there is nothing. A broken file is reported to `notice` and left unused."""
        try:
            self.restore(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return False
        except (OSError, ValueError, RecursionError) as error:
            notice(f"calibration file {path} is not used: {error}")
            return False
        return True


def _depth_cell(depth: int) -> int:
    return _DEPTH_CELL[depth] if 0 <= depth < len(_DEPTH_CELL) else DEPTHS - 1
