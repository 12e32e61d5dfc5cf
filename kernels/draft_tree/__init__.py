"""draft_tree: a draft decoder's guesses as a whole tree, grown best first, pass by pass, in one call.

Rows are sequences. One pass runs every row's committed tokens and, where the row `grows`, scores the root (its last token); then passes over the most
promising nodes of all rows follow, as long as one more pays. The rule, with everything in float64:

- A scored node gets its `fan` best tokens as children. Child of rank r, depth d and share s has the chance
  ``min(1, factor * chances[cell of d][min(r, ranks - 1)][1 + number of edges <= s])`` and the path chance f = f(parent) * chance, f(root) = 1; it is kept
  iff f > 0, f >= price and d <= max_depth. Offered are the `max_nodes` best by f, the earlier made first among equals.
- The promise of an unscored node is what its children may add: the sum over ranks of ``f(node) * hope - p`` for as long as that is positive, with the hope
  from column 0 of the table and p the larger of `price` and ``prices[k]``, k = nodes of the row whose f is at least the child's + its rank (the last
  price holds on). Nodes from depth `min(room, max_depth - 1)` on have none.
- A pass takes the offered, unscored nodes of positive promise, `width` of a row at most, the most promising first, and of those the first n for which
  the sum of promises less ``costs[bit length of n - 1]`` is largest; where that is not positive the trees are done.
- The store holds one chain after the root: a pass keeps its head as far as it lies above every wanted node of the row, and runs the other ancestors
  again. Where that takes more than `room` slots the row's nodes get no children.
- A row whose shares are not numbers is `broken`: it has no tree, and its keys are not to be trusted.

There is no reference beside this file: the same rule pass by pass, for decoders of any kind, is `drafters.growth` and `drafters.model`, against which
this one is tested.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

MOST_NODES = 63  # of one row's tree


@dataclass(frozen=True, slots=True)
class GrowthRules:
    """What holds for all calls of one drafter."""

    fan: int
    width: int
    edges: tuple[float, ...]  # ascending, of the columns behind column 0
    depth_cells: tuple[int, ...]  # by depth, the last one holds on
    ranks: int
    names: tuple[int, ...] | None  # the token of each score column; None = its own number


@dataclass(frozen=True, slots=True)
class GrowthRow:
    """One sequence. The fields behind `grows` are read where it does."""

    token_ids: Sequence[int]  # committed tokens without keys, the root last
    kv_len: int  # keys before them
    page_ids: Sequence[int]
    grows: bool
    room: int = 0  # slots after the root
    max_nodes: int = 0
    max_depth: int = 0
    temperature: float = 1.0
    factor: float = 1.0
    price: float = 0.0
    prices: tuple[float, ...] = ()
    chances: array[float] | None = None  # "d" [cells of depth][ranks][1 + edges + 1], column 0 = before the share is known


@dataclass(frozen=True, slots=True)
class GrownTree:
    """Nodes best first. `chain`: tokens whose keys lie right behind the root's, each the child of the one before."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]  # -1 = the root
    ranks: tuple[int, ...]
    confidence: tuple[float, ...]
    chain: list[int]
    broken: bool


@dataclass(frozen=True, slots=True)
class Grown:
    trees: list[GrownTree | None]  # one a row, None where it did not grow
    passes: list[tuple[int, float]]  # nodes run and milliseconds taken, the pass over committed tokens first


class TreeGrower(Protocol):
    """A decoder over one store."""

    def grow(self, rows: Sequence[GrowthRow], features: torch.Tensor | None, costs: Sequence[float]) -> Grown:
        """`features` [N, width] float32 of all committed tokens, None where the decoder takes none. `costs`: tokens that a pass of 1, 2, 3-4, 5-8,
        ... nodes has to bring, the last one holding on."""
