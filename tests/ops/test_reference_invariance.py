"""The reference decoder's promise: a token's scores depend on its own path only, bit for bit."""

from __future__ import annotations

import pytest
import torch
import toy
from invariance import check_invariance

from kernels.decoder.reference import ReferenceDecoder

CONFIGS = {
    "rand": {},
    "odd sizes": {"hidden": 91, "head_dim": 30, "intermediate": 77, "vocab": 131},  # no multiple of any vector width
    "one kv head, qk norm": {"q_heads": 8, "kv_heads": 1, "qk_norm": True, "layers": 2},
    "bias, window": {"q_heads": 3, "kv_heads": 3, "qkv_bias": True, "sliding_window": 9, "layers": 2},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_dense(name: str) -> None:
    check_invariance(ReferenceDecoder(*toy.rand_weights(3, **CONFIGS[name])), page_sizes=(1, 16))


@pytest.mark.parametrize("page_size", [4, 32])
def test_page_sizes(page_size: int) -> None:
    check_invariance(ReferenceDecoder(*toy.rand_weights(3, layers=2)), page_sizes=(page_size,))


@pytest.mark.parametrize("name", ["rand", "one kv head, qk norm", "bias, window"])
def test_a_store_of_bytes(name: str) -> None:
    shape, weights = toy.rand_weights(3, **(CONFIGS[name] | {"layers": 2}))
    check_invariance(ReferenceDecoder(shape, weights), length=30, page_sizes=(16, 32), dtype=torch.uint8)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_with_bfloat16_store(bits: int) -> None:
    shape, weights = toy.rand_weights(4, layers=2)
    check_invariance(ReferenceDecoder(shape, toy.quantized(weights, bits)), length=30, page_sizes=(16,), dtype=torch.bfloat16)


def test_sink_of_faults_is_caught() -> None:
    """The check itself sees a decoder whose bits depend on the number of rows."""

    class Careless(ReferenceDecoder):
        def forward(self, inputs, store, need_logits):  # type: ignore[no-untyped-def]
            out = super().forward(inputs, store, need_logits)
            nudged = out.logits * (1 + 2.0**-20 * (inputs.num_nodes == 7))
            return type(out)(hidden=out.hidden, argmax=nudged.argmax(-1).int(), logits=nudged)

    with pytest.raises(AssertionError, match="moved"):
        check_invariance(Careless(*toy.rand_weights(3, layers=1)), page_sizes=(16,))


def test_tree_logits_are_those_of_the_path_not_of_the_node_order() -> None:
    """Two branches of one tree score as the two texts they spell."""
    decoder = ReferenceDecoder(*toy.rand_weights(5))
    prompt = [3, 1, 4, 1, 5]
    pages = [2, 0, 1]
    store = toy.new_store(decoder.shape, 3, 4, fill=float("nan"))
    decoder.forward(toy.step_inputs([toy.Row(prompt, pages)], 4), store, False)
    tree = toy.Row([9, 20, 30, 21, 31], pages, 5, parents=[-1, 0, 0, 1, 2])
    got = decoder.forward(toy.step_inputs([tree], 4), store, True).logits
    for branch, nodes in (([9, 20, 21], [0, 1, 3]), ([9, 30, 31], [0, 2, 4])):
        fresh = toy.new_store(decoder.shape, 3, 4, fill=float("nan"))
        want = decoder.forward(toy.step_inputs([toy.Row(prompt + branch, [0, 1, 2])], 4), fresh, True).logits
        assert got is not None
        assert want is not None
        assert torch.equal(got[nodes], want[5:])
