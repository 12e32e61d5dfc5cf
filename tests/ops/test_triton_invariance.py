"""The device's invariant kernels: attention in order against the dense answer, and a decoder whose bits see their own path only.

In the interpreter this shows that the algorithm keeps its promise; whether a device's instructions do, the `gpu` test shows.
"""

from __future__ import annotations

import pytest
import torch
import toy
from attention_cases import ODD_ROWS, AttentionCase, Shape, make_case
from device import DEVICE, to_device
from invariance import check_invariance

from kernels.decoder.triton import TritonDecoder
from kernels.kv_slots.triton import move
from kernels.tree_attention.ordered.triton import tree_attention

FLOAT32_ORDER = 5e-6  # the same few hundred float32 products in another order


def check(case: AttentionCase) -> None:
    case = to_device(case)
    got = tree_attention(case.q, case.store_k, case.store_v, case.inputs, case.scale, case.window, case.sinks)
    torch.testing.assert_close(got, case.expected, atol=FLOAT32_ORDER, rtol=FLOAT32_ORDER)


@pytest.mark.parametrize("name", ["one node, no past", "page boundary", "page boundary +1", "mixed"])
def test_odd_rows(name: str) -> None:
    check(make_case(ODD_ROWS[name], kv_heads=1))


@pytest.mark.parametrize("options", [{"q_heads": 3, "kv_heads": 1, "head_dim": 30}, {"page_size": 32, "dtype": torch.bfloat16}])
def test_heads_pages_and_types(options: dict[str, object]) -> None:
    check(make_case((Shape(17, 6), Shape(33, 3, "chain")), **options))  # type: ignore[arg-type]


def test_window_sinks_and_parts() -> None:
    check(make_case((Shape(253, 6), Shape(3, 4, "deep")), kv_heads=1, q_heads=2, window=30, with_sinks=True))
    check(make_case((Shape(254, 4), Shape(1, 1)), kv_heads=1, q_heads=2))  # the tree lies across the border of two parts


def test_no_nodes() -> None:
    case = make_case((Shape(3, 1),))
    assert tree_attention(case.q[:0], case.store_k, case.store_v, case.inputs, 1.0, None).shape == (0, 4, 32)


@pytest.mark.skipif(DEVICE == "cuda", reason="the device has a test of its own")
def test_scores_see_their_own_path_only() -> None:
    shape, weights = toy.rand_weights(
        3, layers=1, hidden=32, q_heads=2, kv_heads=1, head_dim=16, intermediate=32, vocab=40, sliding_window=5
    )
    check_invariance(TritonDecoder(shape, weights, invariant=True), length=8, page_sizes=(4,), move=move)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_device_gives_the_same_bits_alone_and_in_company(dtype: torch.dtype) -> None:
    """A chain of 40 tokens on an 8B-shaped layer: alone, then beside a prefill chunk, then as the first branch of a tree."""
    shape, weights = toy.rand_weights(
        3, layers=1, hidden=4096, q_heads=32, kv_heads=8, head_dim=128, intermediate=1024, vocab=512
    )
    weights = to_device(toy.map_weights(weights, lambda w: toy.replace(w, values=w.values.to(dtype))))
    decoder = TritonDecoder(shape, weights, invariant=True)
    tokens = list(range(3, 43))
    chain = toy.Row(tokens, [0, 1, 2])
    others = [toy.Row(list(range(200)), list(range(3, 16))), chain]
    tree = toy.Row([tokens[0], 9, *tokens[1:], 8, 8], [0, 1, 2], 0, [-1, 0, 0, *range(2, 41), 1, 5])
    found = []
    for rows, mine in (([chain], slice(0, 40)), (others, slice(200, 240)), ([tree], [0, *range(2, 41)])):
        store = toy.new_store(shape, 16, 16, torch.bfloat16, fill=float("nan"), device=DEVICE)
        found.append(decoder.forward(to_device(toy.step_inputs(rows, 16)), store, True).hidden[mine])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
