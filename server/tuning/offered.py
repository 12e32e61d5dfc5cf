"""What a drafter would offer under a budget, of all that it was recorded to offer. Pure: recorded offers and tables in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from server.tuning.traces import Machine, Trace, depths_of, kept
from spec.drafter import UNKNOWN, Budget
from spec.tree import NOTHING, Proposal

_HOPES = 3  # ranks whose mean chance stands for the children of a node


class At(Protocol):
    """A conversation, `said` tokens into its answer."""

    trace: Trace
    said: int


def offered(name: str, views: Sequence[At], budgets: Sequence[Budget], machine: Machine) -> tuple[list[Proposal], float | None]:
    """What a drafter would offer under these budgets, of all it can offer, and its milliseconds (None = it is not asked).

    Level by level: one more pass is made as long as the tokens it is expected to bring are worth its milliseconds, all
    sequences together. That is how drafters that run passes decide; for one that looks things up a level costs nothing.
    """
    asked = [i for i, budget in enumerate(budgets) if budget.wants(name)]
    if not asked:
        return [NOTHING] * len(views), None
    cost = machine.drafts[name]
    offers = {i: _priced(name, views[i].trace.offers[views[i].said - 1].get(name, NOTHING), budgets[i]) for i in asked}
    deepest = max((max(depths, default=0) for _, depths, _ in offers.values()), default=0)
    depth, spent = 0, cost.ms(0, len(asked))
    while depth < deepest:
        ms = cost.ms(depth + 1, len(asked))
        gain = sum(_hope(name, budgets[i], offers[i], depth) for i in asked)
        if gain <= budgets[asked[0]].pass_price(max(0.0, ms - spent)):
            break
        depth, spent = depth + 1, max(ms, spent)
    result = [NOTHING] * len(views)
    for i in asked:
        proposal, depths, paths = offers[i]
        best = sorted((d > depth, -path, n) for n, (d, path) in enumerate(zip(depths, paths, strict=True)))
        chosen = {n for deep, _, n in best[: budgets[i].max_nodes] if not deep}
        if chosen:
            result[i] = kept(proposal, [n in chosen for n in range(len(depths))])
    return result, spent


Priced = tuple[Proposal, list[int], list[float]]  # a proposal, its nodes' depths, their path chances


def _priced(name: str, proposal: Proposal, budget: Budget) -> Priced:
    """The nodes within the depth whose path chance is worth the price."""
    depths = depths_of(proposal)
    paths: list[float] = []
    keep: list[bool] = []
    for depth, parent, rank, confidence in zip(depths, proposal.parents, proposal.ranks, proposal.confidence, strict=True):
        above = 1.0 if parent < 0 else paths[parent]
        path = above * min(1.0, budget.chance(name, depth, rank, confidence)) if depth <= budget.max_depth else 0.0
        paths.append(path)
        keep.append(path > 0.0 and path >= budget.price and (parent < 0 or keep[parent]))
    if all(keep):
        return proposal, depths, paths
    marks = list(zip(depths, paths, keep, strict=True))
    return kept(proposal, keep), [d for d, _, k in marks if k], [p for _, p, k in marks if k]


def _hope(name: str, budget: Budget, offer: Priced, depth: int) -> float:
    """Tokens expected, net of price, of one more level below `depth`, before its scores are known."""
    if depth + 1 > budget.max_depth:
        return 0.0
    _, depths, paths = offer
    above = [1.0] if depth == 0 else [path for d, path in zip(depths, paths, strict=True) if d == depth]
    gain = 0.0
    for rank in range(_HOPES):
        hope = budget.chance(name, depth + 1, rank, UNKNOWN)
        gain += sum(max(0.0, path * hope - budget.price) for path in above)
    return gain
