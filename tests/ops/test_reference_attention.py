"""The reference tree attention against torch's dense masked attention, on odd shapes."""

from __future__ import annotations

import pytest
import torch
from attention_cases import ODD_ROWS, AttentionCase, Shape, make_case
from toy import Row, step_inputs

from kernels.tree_attention.reference import key_slots, tree_attention

# Both sides sum a few hundred float32 products of size about 1, in different orders.
FLOAT32_ORDER = 3e-6


def run(case: AttentionCase) -> torch.Tensor:
    return tree_attention(case.q, case.store_k, case.store_v, case.inputs, case.scale, case.window, case.sinks)


def check(case: AttentionCase) -> None:
    torch.testing.assert_close(run(case), case.expected, atol=FLOAT32_ORDER, rtol=FLOAT32_ORDER)


@pytest.mark.parametrize("name", ODD_ROWS)
def test_odd_rows(name: str) -> None:
    check(make_case(ODD_ROWS[name]))


@pytest.mark.parametrize("page_size", [1, 4, 16, 32])
@pytest.mark.parametrize("groups", [1, 3, 4, 8])
def test_grouped_heads_and_page_sizes(groups: int, page_size: int) -> None:
    check(make_case((Shape(17, 6), Shape(33, 3, "chain")), q_heads=2 * groups, kv_heads=2, page_size=page_size, seed=groups))


@pytest.mark.parametrize("window", [1, 2, 16, 17, 1000])
def test_window_counts_positions_on_the_path(window: int) -> None:
    check(make_case((Shape(20, 9), Shape(0, 40, "chain"), Shape(3, 12, "deep")), window=window))


def test_sinks() -> None:
    check(make_case((Shape(20, 9), Shape(0, 1)), with_sinks=True))
    check(make_case((Shape(20, 9), Shape(0, 1)), with_sinks=True, window=4))


def test_bfloat16_store_is_read_as_is() -> None:
    check(make_case((Shape(20, 9),), dtype=torch.bfloat16))


def test_key_slots_follow_the_path() -> None:
    #            root 0; 1 and 2 under it; 3 under 1; 4 under 2
    row = Row([0] * 5, [7, 2, 5], kv_len=3, parents=[-1, 0, 0, 1, 2])
    paths = [p.tolist() for p in key_slots(step_inputs([row], 4), 4, None)]
    # logical 0..7 lie in slots 28 29 30 31 | 8 9 10 11
    assert paths == [
        [28, 29, 30, 31],
        [28, 29, 30, 31, 8],
        [28, 29, 30, 31, 9],
        [28, 29, 30, 31, 8, 10],
        [28, 29, 30, 31, 9, 11],
    ]


def test_node_63_uses_the_sign_bit() -> None:
    row = Row([0] * 64, [0, 1, 2, 3], parents=[-1, *range(63)])
    inputs = step_inputs([row], 16)
    assert int(inputs.words[63]) == -1
    assert key_slots(inputs, 16, None)[63].tolist() == list(range(64))
