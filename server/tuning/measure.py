"""Milliseconds of passes, chunks, drafters and everything else, measured on the loaded model -> a Machine.

Sizes to compare are tried in turn, and what is kept of repeated tries is their middle, so that a stall of the machine moves
nothing and a slow minute moves all alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from kernels.batch import KVTensors
from server.compose import Parts
from server.speculation import pass_ms
from server.tuning.record import DraftSample, StepCost
from server.tuning.traces import Curve, DraftCost
from spec.config import EngineConfig
from spec.cost_table import CostTable
from spec.inputs import build_inputs
from spec.plan import PlanRow
from spec.target import TargetModel
from spec.tree import EMPTY_TREE

K = TypeVar("K", bound=Hashable)

CONTEXT = 1024  # keys of the passes that tell the cost of keys
STORE_TOKENS = 4096
LOOK_MS = 0.01  # of a drafter that is asked and finds nothing, before it was seen to


def target_of(parts: Parts, page_size: int) -> tuple[TargetModel, EngineConfig]:
    """The model with an empty store of this page size."""
    shape, pages = parts.model.shape, -(-STORE_TOKENS // page_size)
    store = KVTensors.allocate(
        shape.layers, pages, shape.kv_heads, shape.head_dim, page_size, parts.kv_dtype, parts.settings.device
    )
    return TargetModel(parts.decoder, store), EngineConfig(num_pages=pages, page_size=page_size)


def decode_table(parts: Parts, page_size: int, seconds: float) -> CostTable:
    """T(rows, context, sequences)."""
    target, config = target_of(parts, page_size)
    table = CostTable()
    table.measure(lambda *sizes: pass_ms(target, config, *sizes), max_rows=64, seconds=seconds)
    return table


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
    wanted = [(tokens, 0) for tokens in sizes] + [(64, CONTEXT)]
    taken = _in_turn({key: partial(chunk_ms, target, config, *key) for key in wanted}, repeats)
    curve = Curve(tuple((float(tokens), taken[tokens, 0]) for tokens in sizes))
    return curve, max(0.0, taken[64, CONTEXT] - curve.at(64)) / (64 * CONTEXT)


def page_factors(parts: Parts, sizes: Sequence[int], context: int, repeats: int) -> dict[int, float]:
    """A decoding pass over two rows behind `context` keys, by page size, as a share of the settings' own page size."""
    here = parts.settings.page_size
    stores = {size: target_of(parts, size) for size in {*sizes, here}}
    context = min(context, STORE_TOKENS // 2)
    taken = _in_turn({size: partial(pass_ms, *at, 2, context, 1) for size, at in stores.items()}, repeats)
    return {size: taken[size] / taken[here] for size in sizes}


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


def overhead_curve(costs: Sequence[StepCost]) -> Curve:
    """Milliseconds of a step that are neither pass nor drafting, by sequences."""
    by_count: dict[int, list[float]] = {}
    for cost in costs:
        by_count.setdefault(cost.sequences, []).append(cost.other * 1e3)
    enough = {count: values for count, values in by_count.items() if len(values) >= 5} or by_count
    return (
        Curve(tuple((float(count), middle(values)) for count, values in sorted(enough.items())))
        if enough
        else Curve(((1, 0.0),))
    )


def draft_costs(samples: Sequence[DraftSample]) -> dict[str, DraftCost]:
    """By drafter, from steps whose depth was limited in turn."""
    return {name: _draft_cost(name, samples) for name in sorted({name for sample in samples for name in sample.ms})}


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
