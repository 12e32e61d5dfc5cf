"""The whole stack in Triton against the reference decoder."""

from __future__ import annotations

import pytest
import torch
import toy
from device import DEVICE, to_device

from kernels.decoder.reference import ReferenceDecoder
from kernels.decoder.triton import TritonDecoder
from kernels.kv_slots.triton import move
from kernels.linear import DenseWeight

# Logits have a standard deviation of 8; a few layers of float32 rounding in another order.
FLOAT32_STACK = 5e-4

CONFIGS = {
    "rand": {"vocab": 100},
    "odd sizes, bias": {"hidden": 91, "head_dim": 30, "intermediate": 77, "vocab": 131, "qkv_bias": True},
    "qk norm, window": {"q_heads": 8, "kv_heads": 1, "qk_norm": True, "sliding_window": 5, "vocab": 100},
}


def compare(shape: toy.DecoderShape, weights: toy.DecoderWeights, invariant: bool, tolerance: float = FLOAT32_STACK) -> None:
    """A prefill chunk, then a tree whose second branch is kept and moved to the front, then one more token."""
    reference, device_decoder = ReferenceDecoder(shape, weights), TritonDecoder(shape, to_device(weights), invariant)
    stores = [toy.new_store(shape, 6, 16, fill=float("nan"), device=d) for d in ("cpu", DEVICE)]
    src, dst = torch.tensor([16, 18], dtype=torch.int32), torch.tensor([15, 16], dtype=torch.int32)  # across pages 0 and 1
    steps = (
        [toy.Row([7, 3, 9, 11, 2, 4, 30, 30, 12, 5, 1, 0, 77, 6], [0, 1], score=[13])],
        [toy.Row([5, 40, 41, 42, 43], [0, 1], 14, [-1, 0, 0, 1, 2]), toy.Row([4, 4, 9], [3])],
        [toy.Row([50], [0, 1], 17)],
    )
    for index, rows in enumerate(steps):
        inputs = toy.step_inputs(rows, 16)
        want = reference.forward(inputs, stores[0], need_logits=True)
        got = device_decoder.forward(to_device(inputs), stores[1], need_logits=True)
        assert got.logits is not None
        torch.testing.assert_close(got.logits.cpu(), want.logits, atol=tolerance, rtol=0)
        torch.testing.assert_close(got.hidden.cpu(), want.hidden, atol=tolerance, rtol=0)
        assert got.argmax.tolist() == want.argmax.tolist()
        assert got.argmax.dtype == torch.int32
        if index == 1:
            for store in stores:
                move(*to_device((src, dst), store.k.device.type), store)
    assert device_decoder.forward(to_device(inputs), stores[1], need_logits=False).logits is None


@pytest.mark.parametrize("name", CONFIGS)
def test_dense(name: str) -> None:
    layers = 2 if name == "rand" else 1
    compare(*toy.rand_weights(2, layers=layers, **CONFIGS[name]), invariant=False)


def test_invariant_products() -> None:
    compare(*toy.rand_weights(2, layers=1, vocab=100), invariant=True)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised(bits: int) -> None:
    shape, weights = toy.rand_weights(2, layers=1, vocab=100, qkv_bias=True)
    # Activations are rounded to int8: a last-bit difference may tip a code, worth 1/127 of a block's largest value.
    compare(shape, toy.quantized(weights, bits), False, tolerance=0.3)


def test_mixed_weight_forms_are_not_stacked() -> None:
    shape, weights = toy.rand_weights(2, layers=1, vocab=100)
    layer = weights.layers[0]
    assert isinstance(layer.q, DenseWeight)
    mixed = toy.replace(layer, q=toy.quantize(layer.q, 8), up=DenseWeight(layer.up.values.to(torch.float64).float()))
    compare(shape, toy.replace(weights, layers=(mixed,)), False, tolerance=0.3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_sizes(dtype: torch.dtype) -> None:
    """One 135M-shaped layer stack on the device agrees with the reference on the argmax of clear positions."""
    shape, weights = toy.rand_weights(
        0, layers=4, hidden=576, q_heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocab=49152
    )
    weights = toy.map_weights(weights, lambda w: toy.replace(w, values=w.values.to(dtype)))
    row = toy.Row(list(range(40)), [0, 1, 2])
    inputs = toy.step_inputs([row], 16)
    want = ReferenceDecoder(shape, weights).forward(inputs, toy.new_store(shape, 3), True)
    got = TritonDecoder(shape, to_device(weights)).forward(to_device(inputs), toy.new_store(shape, 3, device=DEVICE), True)
    best = want.logits.topk(2).values
    clear = (best[:, 0] - best[:, 1]) > (1e-2 if dtype == torch.float32 else 1.0)
    assert clear.sum() > 10
    assert torch.equal(got.argmax.cpu()[clear], want.argmax[clear])
