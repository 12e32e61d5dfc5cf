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
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from spec.tree import DraftTree

EDGES = (0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.27, 0.35, 0.45, 0.55, 0.65, 0.75, 0.83, 0.9, 0.95, 0.98)
BINS = len(EDGES) + 1
DEPTHS = 8  # 1, 2, 3, 4, 5-6, 7-9, 10-15, 16 and deeper
RANKS = 5  # 0, 1, 2, 3, 4 and later
COLUMNS = BINS + 1  # of a table of chances: that of an unknown score, then one by bin
DEPTH_CELLS = (0, 0, 1, 2, 3, 4, 4, 5, 5, 5, 6, 6, 6, 6, 6, 6, 7)  # by depth; the last one holds on
FORMAT = 1


def confidence_bin(confidence: float) -> int:
    """Bin of a raw score, 0 .. BINS - 1; NaN counts as 0."""
    return bisect_right(EDGES, confidence) if confidence == confidence else 0


_CENTRES = tuple((low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True))
_UNKNOWN_PRIOR = (0.45, 0.15, 0.08, 0.05, 0.03)  # by rank, before anything was seen
_PRIOR_WEIGHT = 6.0  # observations the raw score is worth
_SHRINK = 10.0  # observations a coarser cell is worth to a finer one
_MODES = 2  # greedy, sampled
_STALE = 64  # observations after which every kept estimate is computed anew
_BLANK = array("d", [math.nan]) * (DEPTHS * RANKS * COLUMNS)


class _Level:
    """Faded counts of one granularity: `seen[i]` nodes whose parent was accepted, `hits[i]` of them accepted."""

    __slots__ = ("hits", "seen")

    def __init__(self, size: int) -> None:
        self.seen = array("d", bytes(8 * size))
        self.hits = array("d", bytes(8 * size))

    def add(self, cell: int, hit: bool, keep: float) -> None:
        self.seen[cell] = self.seen[cell] * keep + 1.0
        self.hits[cell] = self.hits[cell] * keep + (1.0 if hit else 0.0)

    def shrink(self, cell: int, prior: float, weight: float) -> float:
        return (self.hits[cell] + weight * prior) / (self.seen[cell] + weight)

    def counts(self, mode: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of one mode's (seen, hits)."""
        seen, hits = (
            torch.frombuffer(cells, dtype=torch.float64).view(_MODES, *shape)[mode] for cells in (self.seen, self.hits)
        )
        return seen, hits


class _Drafter:
    """All cells of one drafter, from fine to coarse; the last two serve scores not known yet."""

    __slots__ = ("by_bin", "by_depth", "by_rank", "by_rank_bin", "finest")

    def __init__(self) -> None:
        self.finest = _Level(_MODES * DEPTHS * RANKS * BINS)
        self.by_rank_bin = _Level(_MODES * RANKS * BINS)
        self.by_bin = _Level(_MODES * BINS)
        self.by_depth = _Level(_MODES * DEPTHS * RANKS)
        self.by_rank = _Level(_MODES * RANKS)

    def levels(self) -> dict[str, _Level]:
        return {name: getattr(self, name) for name in self.__slots__}

    def add(self, mode: int, depth: int, rank: int, bin_: int, hit: bool, keep: float) -> None:
        by_depth, by_rank = (mode * DEPTHS + depth) * RANKS + rank, mode * RANKS + rank
        self.finest.add(by_depth * BINS + bin_, hit, keep)
        self.by_rank_bin.add(by_rank * BINS + bin_, hit, keep)
        self.by_bin.add(mode * BINS + bin_, hit, keep)
        self.by_depth.add(by_depth, hit, keep)
        self.by_rank.add(by_rank, hit, keep)

    def estimate(self, mode: int, depth: int, rank: int, bin_: int) -> float:
        by_depth, by_rank = (mode * DEPTHS + depth) * RANKS + rank, mode * RANKS + rank
        p = _shrink(self.by_bin, mode * BINS + bin_, self.by_rank_bin, by_rank * BINS + bin_, _CENTRES[bin_], _PRIOR_WEIGHT)
        p = _shrink(self.by_rank_bin, by_rank * BINS + bin_, self.finest, by_depth * BINS + bin_, p, _SHRINK)
        return self.finest.shrink(by_depth * BINS + bin_, p, _SHRINK)

    def estimates(self, mode: int) -> torch.Tensor:
        """All of them at once, [DEPTHS, RANKS, COLUMNS] float64: the same operations in the same order."""
        by_bin, by_rank_bin = self.by_bin.counts(mode, BINS), self.by_rank_bin.counts(mode, RANKS, BINS)
        finest = self.finest.counts(mode, DEPTHS, RANKS, BINS)
        by_rank, by_depth = self.by_rank.counts(mode, RANKS), self.by_depth.counts(mode, DEPTHS, RANKS)
        p = _shrink_all(by_bin, by_rank_bin, torch.tensor(_CENTRES, dtype=torch.float64), _PRIOR_WEIGHT)
        p = _shrink_all(by_rank_bin, finest, p, _SHRINK)
        known = (finest[1] + _SHRINK * p) / (finest[0] + _SHRINK)
        p = _shrink_all(by_rank, by_depth, torch.tensor(_UNKNOWN_PRIOR, dtype=torch.float64), _PRIOR_WEIGHT)
        unknown = (by_depth[1] + _SHRINK * p) / (by_depth[0] + _SHRINK)
        return torch.cat((unknown.unsqueeze(2), known), dim=2)

    def estimate_unknown(self, mode: int, depth: int, rank: int) -> float:
        by_depth, by_rank = (mode * DEPTHS + depth) * RANKS + rank, mode * RANKS + rank
        p = _shrink(self.by_rank, by_rank, self.by_depth, by_depth, _UNKNOWN_PRIOR[rank], _PRIOR_WEIGHT)
        return self.by_depth.shrink(by_depth, p, _SHRINK)


class _Chances:
    """Estimates of one drafter in one mode, kept once computed: [DEPTHS][RANKS][COLUMNS], NaN = not computed."""

    __slots__ = ("empty", "values")

    def __init__(self) -> None:
        self.values = _BLANK[:]
        self.empty: list[int] | None = None  # cells that are NaN; None: any may be

    def clear(self) -> None:
        self.values[:] = _BLANK
        self.empty = None

    def fill(self, estimates: Callable[[], torch.Tensor], estimate: Callable[[int], float]) -> array[float]:
        """Without NaN: all at once, or the few that were observed since."""
        values = self.values
        if self.empty is None:
            kept = torch.frombuffer(values, dtype=torch.float64)
            torch.where(kept.isnan(), estimates().flatten(), kept, out=kept)
        else:
            for cell in self.empty:
                if values[cell] != values[cell]:
                    values[cell] = estimate(cell)
        self.empty = []
        return values


def _shrink(coarse: _Level, at: int, fine: _Level, own: int, prior: float, weight: float) -> float:
    """The share in the other cells of a coarse one: what a cell saw itself must not count again in what it borrows."""
    seen = max(0.0, coarse.seen[at] - fine.seen[own])
    hits = min(seen, max(0.0, coarse.hits[at] - fine.hits[own]))
    return (hits + weight * prior) / (seen + weight)


def _shrink_all(
    coarse: tuple[torch.Tensor, torch.Tensor], fine: tuple[torch.Tensor, torch.Tensor], prior: torch.Tensor, weight: float
) -> torch.Tensor:
    """`_shrink` of all cells, as (seen, hits): a coarse cell is spread along the first axis of the fine ones."""
    seen = (coarse[0] - fine[0]).clamp(min=0.0)
    hits = torch.minimum(seen, (coarse[1] - fine[1]).clamp(min=0.0))
    return (hits + weight * prior) / (seen + weight)


class Calibration:
    """Chances learnt from outcomes. Not thread-safe: one engine step at a time reads, then records."""

    def __init__(self, memory: float = 1500.0, max_drafters: int = 32) -> None:
        """`memory`: observations a cell remembers (its exponential window). Drafters past `max_drafters` stay at the prior."""
        self._keep = 1.0 - 1.0 / memory
        self._max_drafters = max_drafters
        self._drafters: dict[str, _Drafter] = {}
        self._chances: dict[tuple[str, bool], _Chances] = {}
        self._since_clear = 0
        self._weights: dict[str, str] = {}  # by drafter, what names the weights its counts were made with

    def chance(self, drafter: str, depth: int, rank: int, confidence: float, *, greedy: bool) -> float:
        """P(accepted | parent accepted) of such a node; confidence below 0 (UNKNOWN): the mean over all confidences."""
        # `cell_chance` and `confidence_bin` spelled out: asked for every node, most often right after a pass, when calls are dear.
        bin_ = -1 if confidence < 0.0 else bisect_right(EDGES, confidence) if confidence == confidence else 0
        kept = self._chances.get((drafter, greedy))
        if kept is not None and 0 <= depth < len(DEPTH_CELLS) and 0 <= rank < RANKS:
            found = kept.values[(DEPTH_CELLS[depth] * RANKS + rank) * COLUMNS + bin_ + 1]
            if found == found:
                return found
        return self.cell_chance(drafter, depth, rank, bin_, greedy)

    def cell_chance(self, drafter: str, depth: int, rank: int, bin_: int, greedy: bool) -> float:
        """The same by confidence bin; -1 = unknown."""
        kept = self._kept(drafter, greedy)
        cell = (_depth_cell(depth) * RANKS + _rank_cell(rank)) * COLUMNS + bin_ + 1
        found = kept.values[cell]
        if found != found:
            found = kept.values[cell] = self._compute(drafter, cell, greedy)
        return found

    def table(self, drafter: str, greedy: bool) -> array[float]:
        """`chance` of all cells of one drafter: [DEPTHS][RANKS][COLUMNS], column 0 of unknown scores, the others by bin. It changes with
        the next observation."""

        def estimates() -> torch.Tensor:
            counts = self._drafters.get(drafter) or _Drafter()
            return counts.estimates(0 if greedy else 1)

        return self._kept(drafter, greedy).fill(estimates, lambda cell: self._compute(drafter, cell, greedy))

    def _kept(self, drafter: str, greedy: bool) -> _Chances:
        found = self._chances.get((drafter, greedy))
        if found is None:
            if len(self._chances) >= 2 * self._max_drafters:  # names nobody counts for are not kept for long
                self._chances.clear()
            found = self._chances[drafter, greedy] = _Chances()
        return found

    def _compute(self, drafter: str, cell: int, greedy: bool) -> float:
        """`cell`: place in a table."""
        rest, column = divmod(cell, COLUMNS)
        depth, rank = divmod(rest, RANKS)
        mode = 0 if greedy else 1
        counts = self._drafters.get(drafter)
        if counts is None:
            return _CENTRES[column - 1] if column else _UNKNOWN_PRIOR[rank]
        return counts.estimate(mode, depth, rank, column - 1) if column else counts.estimate_unknown(mode, depth, rank)

    def observe(self, drafter: str, depth: int, rank: int, bin_: int, *, greedy: bool, accepted: bool) -> None:
        """Count one node whose parent was accepted."""
        table = self._drafters.get(drafter)
        if table is None:
            if len(self._drafters) >= self._max_drafters:
                return
            table = self._drafters[drafter] = _Drafter()
        bin_ = min(max(bin_, 0), BINS - 1)
        table.add(0 if greedy else 1, _depth_cell(depth), _rank_cell(rank), bin_, accepted, self._keep)
        # The cell itself is fresh at once; those that only borrow from it follow within _STALE observations.
        kept = self._chances.get((drafter, greedy))
        if kept is not None:
            cell = (_depth_cell(depth) * RANKS + _rank_cell(rank)) * COLUMNS + bin_ + 1
            kept.values[cell] = math.nan
            if kept.empty is not None:
                kept.empty.append(cell)
        self._since_clear += 1
        if self._since_clear >= _STALE:
            self._forget_estimates()

    def record(self, tree: DraftTree, nodes: Iterable[tuple[int, bool]], *, greedy: bool) -> None:
        """Count (node, accepted) of every node that was really judged, once for each of its drafters."""
        for node, accepted in nodes:
            for name, (rank, bin_) in zip(tree.sources[node], tree.origins[node], strict=True):
                self.observe(name, tree.depths[node], rank, bin_, greedy=greedy, accepted=accepted)

    def claim(self, weights: Mapping[str, str]) -> None:
        """These drafters have these weights now. What was learnt of one that had others is forgotten."""
        for name, identity in weights.items():
            if self._weights.get(name) != identity:
                self._drafters.pop(name, None)
                self._weights[name] = identity
        self._forget_estimates()

    def _forget_estimates(self) -> None:
        for kept in self._chances.values():
            kept.clear()
        self._since_clear = 0

    # --- persistence -------------------------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """Plain data: per drafter and level the non-empty cells as [cell, seen, hits]."""
        return {
            "format": FORMAT,
            "edges": list(EDGES),
            "weights": dict(sorted(self._weights.items())),
            "drafters": {
                name: {
                    label: [[i, round(n, 3), round(h, 3)] for i, (n, h) in enumerate(zip(lv.seen, lv.hits, strict=True)) if n]
                    for label, lv in table.levels().items()
                }
                for name, table in sorted(self._drafters.items())
            },
        }

    def restore(self, data: Any) -> None:
        """Replace the counts by those of `dump`. Raises ValueError on anything else, leaving the counts as they were."""
        try:
            if data["format"] != FORMAT or tuple(data["edges"]) != EDGES:
                raise ValueError("another format or other confidence bins")
            weights = {str(name): str(identity) for name, identity in data.get("weights", {}).items()}
            loaded: dict[str, _Drafter] = {}
            for name, levels in data["drafters"].items():
                table = loaded[str(name)] = _Drafter()
                for label, level in table.levels().items():
                    for cell, seen, hits in levels[label]:
                        if not (isinstance(cell, int) and 0 <= cell < len(level.seen) and 0.0 <= hits <= seen):
                            raise ValueError(f"cell {cell!r} of {label} holds {seen!r}, {hits!r}")
                        if not math.isfinite(seen):
                            raise ValueError(f"cell {cell} of {label} is not finite")
                        level.seen[cell], level.hits[cell] = float(seen), float(hits)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a calibration: {error!r}") from error
        self._weights = weights
        self._drafters = dict(list(loaded.items())[: self._max_drafters])
        self._forget_estimates()

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
    return DEPTH_CELLS[depth] if 0 <= depth < len(DEPTH_CELLS) else DEPTHS - 1


def _rank_cell(rank: int) -> int:
    return rank if 0 <= rank < RANKS else RANKS - 1
