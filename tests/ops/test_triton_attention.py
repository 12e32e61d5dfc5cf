"""Triton tree attention against torch's dense masked attention, on odd shapes."""

from __future__ import annotations

import pytest
import torch
from attention_cases import ODD_ROWS, AttentionCase, Shape, make_case
from device import to_device

from kernels.tree_attention.triton import tree_attention

# Online softmax and dense softmax add the same few hundred float32 products in different orders.
FLOAT32_ORDER = 5e-6
# Queries and softmax weights are rounded to bfloat16 (8 bits) for the tensor cores; values are of size about 1.
BFLOAT16_INPUTS = 3e-2


def check(case: AttentionCase, split_keys: int | None = None) -> None:
    case = to_device(case)
    got = tree_attention(
        case.q, case.store_k, case.store_v, case.inputs, case.scale, case.window, case.sinks, split_keys=split_keys
    )
    atol = FLOAT32_ORDER if case.store_k.dtype == torch.float32 else BFLOAT16_INPUTS
    torch.testing.assert_close(got, case.expected, atol=atol, rtol=atol)


@pytest.mark.parametrize("name", ODD_ROWS)
def test_odd_rows(name: str) -> None:
    check(make_case(ODD_ROWS[name]))


@pytest.mark.parametrize("page_size", [1, 4, 16, 32])
@pytest.mark.parametrize("groups", [1, 3, 4, 8])
def test_grouped_heads_and_page_sizes(groups: int, page_size: int) -> None:
    check(make_case((Shape(17, 6), Shape(33, 3, "chain")), q_heads=2 * groups, kv_heads=2, page_size=page_size, seed=groups))


@pytest.mark.parametrize("head_dim", [30, 64, 80])
def test_head_dims(head_dim: int) -> None:
    check(make_case((Shape(17, 6), Shape(0, 3, "chain")), head_dim=head_dim))


@pytest.mark.parametrize("window", [1, 2, 16, 65, 1000])
def test_window_counts_positions_on_the_path(window: int) -> None:
    check(make_case((Shape(70, 9), Shape(0, 40, "chain"), Shape(3, 12, "deep")), window=window))


@pytest.mark.parametrize("split_keys", [64, 128, 100_000])
def test_splits_are_merged(split_keys: int) -> None:
    rows = (Shape(200, 5), Shape(63, 1), Shape(0, 3, "chain"), Shape(127, 4, "star"))
    check(make_case(rows), split_keys)
    check(make_case(rows, window=70, with_sinks=True), split_keys)


def test_sinks() -> None:
    check(make_case((Shape(20, 9), Shape(0, 1)), with_sinks=True))


@pytest.mark.parametrize("page_size", [16, 32])
def test_bfloat16_store(page_size: int) -> None:
    check(make_case((Shape(40, 9), Shape(0, 20, "chain")), dtype=torch.bfloat16, page_size=page_size))


def test_no_nodes() -> None:
    case = make_case((Shape(3, 1),))
    assert tree_attention(case.q[:0], case.store_k, case.store_v, case.inputs, 1.0, None).shape == (0, 4, 32)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_sizes(page_size: int, dtype: torch.dtype) -> None:
    """An 8B-shaped layer: 32 nodes at 4096 keys beside a prefill chunk, 32 query heads on 8, head size 128."""
    rows = (Shape(4096, 32), Shape(1000, 256, "chain"), Shape(31, 1))
    check(make_case(rows, q_heads=32, kv_heads=8, head_dim=128, page_size=page_size, dtype=dtype))
