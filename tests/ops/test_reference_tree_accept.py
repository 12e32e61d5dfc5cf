"""The acceptance walk on hand-made trees."""

from __future__ import annotations

import pytest
import torch
from accept_cases import WALKS, Batch, batch, random_walk

from kernels.tree_accept.reference import tree_accept


def check(case: Batch, max_depth: int) -> None:
    path, accepted, next_ids = tree_accept(case.input_ids, case.target_ids, case.parents, case.row_ptr, max_depth)
    assert path.dtype == accepted.dtype == next_ids.dtype == torch.int32
    assert path.tolist() == case.path
    assert accepted.tolist() == [sum(node >= 0 for node in p) for p in case.path]
    assert next_ids.tolist() == case.next_ids


@pytest.mark.parametrize("name", WALKS)
def test_hand_made(name: str) -> None:
    check(batch([WALKS[name]], 5), 5)


def test_rows_do_not_mix() -> None:
    check(batch(list(WALKS.values()), 4), 4)


@pytest.mark.parametrize("nodes", [1, 5, 64])
def test_random(nodes: int) -> None:
    check(batch([random_walk(seed, nodes) for seed in range(20)], nodes), nodes)


def test_depth_limit_stops_the_walk() -> None:
    chain = WALKS["whole chain"]
    case = batch([chain], 3)
    path, accepted, next_ids = tree_accept(case.input_ids, case.target_ids, case.parents, case.row_ptr, 2)
    assert (path.tolist(), accepted.tolist(), next_ids.tolist()) == ([[1, 2]], [2], [3])
