"""Milliseconds of passes, chunks, drafters and everything else, measured on the loaded model -> a Machine.

Sizes to compare are tried in turn, and what is kept of repeated tries is their middle, so that a stall of the machine moves
nothing and a slow minute moves all alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kernels.batch import KVTensors, fitting
from server.compose import Parts
from server.speculation import measure_costs, pass_ms
from server.tuning.record import DraftSample, StepCost
from server.tuning.traces import Curve, DraftCost, StepCurves
from spec.config import EngineConfig
from spec.cost_table import CostTable
from spec.inputs import build_inputs
from spec.plan import PlanRow
from spec.target import TargetModel
from spec.tree import EMPTY_TREE

K = TypeVar("K", bound=Hashable)

CONTEXT = 1024  # keys of the passes that tell the cost of keys
KEYED = 64  # prompt tokens of the pass that tells the cost of keys
STORE_TOKENS = 4096
FEW = 10  # steps that a figure is not made of unless there are no more
LOOK_MS = 0.01  # of a drafter that is asked and finds nothing, before it was seen to


def target_of(parts: Parts, page_size: int) -> tuple[TargetModel, EngineConfig]:
    """The model with an empty store of this page size."""
    shape, pages = parts.model.shape, -(-STORE_TOKENS // page_size)
    dtype = fitting(parts.kv_dtype, shape.head_dim, page_size)
    store = KVTensors.allocate(shape.layers, pages, shape.kv_heads, shape.head_dim, page_size, dtype, parts.settings.device)
    return TargetModel(parts.decoder, store), EngineConfig(num_pages=pages, page_size=page_size)


def decode_table(parts: Parts, page_size: int, seconds: float) -> CostTable:
    """T(rows, context, sequences)."""
    target, config = target_of(parts, page_size)
    table = CostTable()
    measure_costs(table, target, config, seconds)
    return table


def probe_ms(target: TargetModel, config: EngineConfig) -> float:
    """How fast the machine is just now: a pass over one row, the middle of a few."""
    return statistics.median(pass_ms(target, config, 1, 0, 1) for _ in range(5))


def chunk_ms(target: TargetModel, config: EngineConfig, tokens: int, context: int) -> float:
    """Milliseconds of a pass over `tokens` prompt tokens behind `context` keys, the last one scored."""
    size = config.page_size
    pages = list(range(-(-(context + tokens) // size)))
    ids = [i % target.vocab_size for i in range(tokens)]
    row = PlanRow(seq_id=0, num_kv=context, token_ids=ids, page_ids=pages, scored=True, decoding=False)
    inputs = build_inputs([row], [EMPTY_TREE], size, target.store.k.device)
    start = time.perf_counter()
    target.run(inputs, need_logits=False)
    return (time.perf_counter() - start) * 1e3


def chunk_curve(parts: Parts, sizes: Sequence[int], repeats: int) -> tuple[Curve, float]:
    """(milliseconds by prompt tokens of a pass, what a committed key adds to one prompt token)."""
    target, config = target_of(parts, parts.settings.page_size)
    longest = min(parts.model.context, STORE_TOKENS)
    sizes = [tokens for tokens in sizes if tokens <= longest] or [1]
    keys = max(0, min(CONTEXT, longest - KEYED))
    wanted = [(tokens, 0) for tokens in {*sizes, min(KEYED, longest)}] + [(min(KEYED, longest), keys)]
    taken = _in_turn({key: partial(chunk_ms, target, config, *key) for key in wanted}, repeats)
    curve = Curve(tuple((float(tokens), taken[tokens, 0]) for tokens in sizes))
    tokens = min(KEYED, longest)
    return curve, max(0.0, taken[tokens, keys] - taken[tokens, 0]) / max(1, tokens * keys)


def _in_turn(tries: Mapping[K, Callable[[], float]], repeats: int) -> dict[K, float]:
    for attempt in tries.values():
        attempt()  # warms up
    taken: dict[K, list[float]] = {key: [] for key in tries}
    for _ in range(repeats):
        for key, attempt in tries.items():
            taken[key].append(attempt())
    return {key: statistics.median(values) for key, values in taken.items()}


def middle(values: Iterable[float]) -> float:
    """The mean without the lowest and the highest tenth; 0 of nothing."""
    ordered = sorted(values)
    cut = len(ordered) // 10
    inner = ordered[cut : len(ordered) - cut] if cut else ordered
    return sum(inner) / len(inner) if inner else 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """Steps of one run, and how fast the machine was then: milliseconds of a pass over one row, by the table over as probed."""

    costs: Sequence[StepCost]
    speed: float


def step_curves(samples: Sequence[Sample], decode: CostTable, context: float) -> StepCurves:
    """`context`: keys a sequence holds on average. What counts is the middle of the runs' own middles."""
    other: dict[int, list[Seen]] = {}
    cold: dict[int, list[Seen]] = {}
    for sample in samples:
        by_count: dict[int, list[StepCost]] = {}
        for cost in sample.costs:
            by_count.setdefault(cost.sequences, []).append(cost)
        for count, costs in by_count.items():
            expected = [decode.pass_ms(count + c.nodes, int(context * count), count) for c in costs]
            passes = middle(c.verify * 1e3 / ms for c, ms in zip(costs, expected, strict=True))
            other.setdefault(count, []).append((middle(c.other for c in costs) * 1e3 * sample.speed, len(costs)))
            cold.setdefault(count, []).append((passes * sample.speed, len(costs)))
    return StepCurves(_line(other), _by_count(cold))


Seen = tuple[float, int]  # a figure of one run, and the steps it was made of


def _together(seen: Sequence[Seen]) -> Seen:
    """The middle of the runs that saw enough, of all where none did; and all steps."""
    return statistics.median([x for x, n in seen if n >= FEW] or [x for x, _ in seen]), sum(n for _, n in seen)


def _by_count(values: Mapping[int, list[Seen]]) -> Curve:
    """Through every count that was seen often enough, and no further; 1 where nothing was seen."""
    found = {count: _together(seen) for count, seen in sorted(values.items())}
    enough = {count: x for count, (x, n) in found.items() if n >= FEW} or {count: x for count, (x, _) in found.items()}
    return Curve(tuple((float(count), x) for count, x in enough.items()) or ((1.0, 1.0),), goes_on=False)


def _line(values: Mapping[int, list[Seen]]) -> Curve:
    """The rising line closest to the middles (least squares, each weighed by how often it was seen); 0 where nothing was seen."""
    seen = [(float(count), *_together(each)) for count, each in sorted(values.items())]
    if not seen:
        return Curve(((1.0, 0.0),))
    weight = sum(n for _, _, n in seen)
    x0, y0 = sum(x * n for x, _, n in seen) / weight, sum(y * n for _, y, n in seen) / weight
    spread = sum((x - x0) ** 2 * n for x, _, n in seen)
    slope = max(0.0, sum((x - x0) * (y - y0) * n for x, y, n in seen) / spread) if spread else 0.0
    first = max(0.0, y0 + slope * (1.0 - x0))
    return Curve(((1.0, first), (2.0, first + slope)))


def page_factors(turns: Iterable[tuple[Sequence[StepCost], Mapping[int, Sequence[StepCost]]]]) -> dict[int, float]:
    """Passes of an engine with another page size over those of the usual one in the same turn, by page size: the middle over turns, or 1
    where that is within twice its standard error.

    Passes between other work, not the same one again and again: keys that are in no cache are what a page size decides.
    """
    ratios: dict[int, list[float]] = {}
    for usual, others in turns:
        own = middle(c.verify for c in usual)
        for size, costs in others.items():
            if costs and own > 0.0:
                ratios.setdefault(size, []).append(middle(c.verify for c in costs) / own)
    return {size: _beyond_noise(values) for size, values in sorted(ratios.items())}


def _beyond_noise(ratios: Sequence[float]) -> float:
    """The median, or 1. The standard error of a median of n normal values is 1.25 s / sqrt(n), s told by the median deviation (1.48)."""
    found = statistics.median(ratios)
    error = 1.25 * 1.48 * statistics.median(abs(r - found) for r in ratios) / len(ratios) ** 0.5
    return found if abs(found - 1.0) > 2.0 * error else 1.0


def draft_costs(samples: Sequence[DraftSample]) -> dict[str, DraftCost]:
    """By drafter, from steps whose depth was limited in turn."""
    return {name: _draft_cost(name, samples) for name in sorted({name for sample in samples for name in sample.ms})}


def cut_factors(
    whole: Sequence[DraftSample], cut: Mapping[int, Sequence[DraftSample]], names: Collection[str]
) -> dict[tuple[str, int], float]:
    """What drafting takes with a shorter list of tokens over what it takes with the whole one, by drafter and size: the middle over
    the depths that both were seen at, one sequence at a time; never more than 1."""

    def by_depth(name: str, samples: Sequence[DraftSample]) -> dict[int, float]:
        taken: dict[int, list[float]] = {}
        for sample in samples:
            if name in sample.ms and sample.sequences == 1 and sample.depths[name]:
                taken.setdefault(sample.depths[name], []).append(sample.ms[name])
        return {depth: middle(values) for depth, values in taken.items() if len(values) >= 3}

    found: dict[tuple[str, int], float] = {}
    for name in names:
        usual = by_depth(name, whole)
        for size, samples in cut.items():
            ratios = [ms / usual[depth] for depth, ms in by_depth(name, samples).items() if usual.get(depth)]
            found[name, size] = min(1.0, statistics.median(ratios)) if ratios else 1.0
    return found


def _draft_cost(name: str, samples: Sequence[DraftSample]) -> DraftCost:
    taken: dict[tuple[int, int], list[float]] = {}  # by sequences and depth
    for sample in samples:
        if name in sample.ms:
            taken.setdefault((sample.sequences, sample.depths[name]), []).append(sample.ms[name])
    means = {key: middle(values) for key, values in taken.items() if len(values) >= 3} or {
        key: middle(values) for key, values in taken.items()
    }
    fewest = min(sequences for sequences, _ in means)
    points: list[tuple[float, float]] = []
    for depth, ms in sorted((depth, ms) for (sequences, depth), ms in means.items() if sequences == fewest):
        points.append((float(depth), max([ms, *(y for _, y in points)])))  # deeper never costs less
    if points[0][0] > 0:
        points.insert(0, (0.0, min(LOOK_MS, points[0][1])))
    single = Curve(tuple(points))
    shares = [
        (ms / single.at(depth) - 1.0) / (sequences - fewest)
        for (sequences, depth), ms in means.items()
        if sequences > fewest and single.at(depth) > 0.0
    ]
    share = max(0.0, statistics.median(shares)) if shares else 1.0
    return DraftCost(single, share)
