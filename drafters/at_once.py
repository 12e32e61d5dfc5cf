"""A model drafter's whole step in one call of its decoder, where there is one. Knows rows, budgets and their tables; refuses to know stores,
states and what becomes of a tree.

It chooses the nodes that growing pass by pass in Python would choose (drafters/growth.py); between its passes there is no Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from drafters.draws import is_drawn, temperature_of
from drafters.growth import PassClock
from kernels.draft_tree import Grown, GrownTree, GrowthRow, GrowthRules, TreeGrower
from spec.calibration import DEPTH_CELLS, EDGES, RANKS
from spec.drafter import Budget, ChanceTable, SequenceView
from spec.tree import NOTHING, Proposal

WIDTH = 4  # nodes of one sequence expanded per pass


def growth_rules(fan: int, width: int, names: Sequence[int] | None) -> GrowthRules:
    """`names`: the target's token of each score column; None = its own number."""
    return GrowthRules(fan, width, EDGES, DEPTH_CELLS, RANKS, None if names is None else tuple(names))


def tables_of(name: str, views: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[ChanceTable] | None:
    """What drafter `name` needs to grow at once; None where somebody's drafts are drawn or his chances are no table."""
    found: list[ChanceTable] = []
    for view, budget in zip(views, budgets, strict=True):
        table = None if budget.table is None or is_drawn(view) else budget.table(name)
        if table is None:
            return None
        found.append(table)
    return found


def growing_row(
    tokens: Sequence[int], kv_len: int, view: SequenceView, budget: Budget, room: int, table: ChanceTable
) -> GrowthRow:
    return GrowthRow(
        tokens, kv_len, view.page_ids, True, room, budget.max_nodes, budget.max_depth,
        temperature_of(view), table.factor, budget.price, budget.prices, table.values,
    )  # fmt: skip


def grow_at_once(
    grower: TreeGrower,
    rows: Sequence[GrowthRow],
    features: torch.Tensor | None,
    price: Callable[[float], float],
    passes: PassClock,
) -> tuple[Grown, float]:
    """The trees, and the milliseconds of all passes but the first."""
    most = (WIDTH * len(rows) - 1).bit_length()  # power of two of nodes in a pass
    grown = grower.grow(rows, features, [price(passes.estimate(1 << size)) for size in range(most + 1)])
    later = 0.0
    for nodes, ms in grown.passes[1:]:
        passes.record(nodes, ms)
        later += ms
    return grown, later


def proposal_of(tree: GrownTree) -> Proposal:
    return Proposal(tree.token_ids, tree.parents, tree.confidence, tree.ranks) if tree.token_ids else NOTHING
