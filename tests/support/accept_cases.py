"""Hand-made acceptance walks, for every implementation of tree_accept."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Walk:
    ids: list[int]  # node 0 is the root
    targets: list[int]  # what the target says after each node
    parents: list[int]
    path: list[int]
    next_id: int


WALKS: dict[str, Walk] = {
    "root only": Walk([5], [9], [-1], [], 9),
    "nothing fits": Walk([5, 1, 2], [3, 0, 0], [-1, 0, 0], [], 3),
    "second sibling": Walk([5, 1, 2], [2, 7, 8], [-1, 0, 0], [2], 8),
    "first of two equal children": Walk([5, 1, 1], [1, 7, 8], [-1, 0, 0], [1], 7),
    "whole chain": Walk([5, 1, 2, 3], [1, 2, 3, 4], [-1, 0, 1, 2], [1, 2, 3], 4),
    "chain broken in the middle": Walk([5, 1, 2, 3], [1, 9, 3, 4], [-1, 0, 1, 2], [1], 9),
    "right token under the wrong parent": Walk([5, 1, 2, 9], [2, 0, 9, 0], [-1, 0, 0, 1], [2], 9),
    "branch after branch": Walk([5, 1, 2, 3, 4, 6], [2, 0, 4, 0, 8, 0], [-1, 0, 0, 2, 2, 4], [2, 4], 8),
    "a node equal to the root": Walk([5, 5, 5], [5, 5, 6], [-1, 0, 1], [1, 2], 6),
}


@dataclass(frozen=True)
class Batch:
    input_ids: torch.Tensor
    target_ids: torch.Tensor
    parents: torch.Tensor
    row_ptr: torch.Tensor
    path: list[list[int]]
    next_ids: list[int]


def batch(walks: list[Walk], max_depth: int, device: str = "cpu") -> Batch:
    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    ptr = [0]
    for walk in walks:
        ptr.append(ptr[-1] + len(walk.ids))
    return Batch(
        ints([i for w in walks for i in w.ids]),
        ints([t for w in walks for t in w.targets]),
        ints([p for w in walks for p in w.parents]),
        ints(ptr),
        [w.path + [-1] * (max_depth - len(w.path)) for w in walks],
        [w.next_id for w in walks],
    )


def random_walk(seed: int, nodes: int) -> Walk:
    """A tree over three tokens, so that walks go deep and siblings repeat; answer by a recursion over children lists."""
    rng = random.Random(seed)
    parents = [-1] + [rng.randrange(i) for i in range(1, nodes)]
    ids = [rng.randrange(3) for _ in range(nodes)]
    targets = [rng.randrange(3) for _ in range(nodes)]

    def follow(node: int) -> list[int]:
        for child in range(node + 1, nodes):
            if parents[child] == node and ids[child] == targets[node]:
                return [child, *follow(child)]
        return []

    path = follow(0)
    return Walk(ids, targets, parents, path, targets[path[-1] if path else 0])
