"""A decoder whose input is a token and features fused: the formula, the same numbers from every version, bits that never move."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from toy import Row, decoder, new_store, quantize, quantized, rand_weights, step_inputs

from kernels.decoder import DecoderOutput, DecoderShape, DecoderWeights, FusedDecoder, Fusion
from kernels.decoder.reference import ReferenceDecoder
from kernels.linear import DenseWeight
from kernels.native import NativeError, load

LIBRARY = load()
native = pytest.mark.skipif(LIBRARY is None, reason="no native library: no C++ compiler here")
WIDTH = 64
FLOAT32_LAYERS = 1e-5  # sums of one layer in another order, relative to the largest value


def fused(seed: int = 0, vocab: int = 200, scored: int = 70) -> tuple[DecoderShape, DecoderWeights]:
    """One layer over a vocabulary of `vocab` tokens that scores only `scored` of them."""
    shape, weights = rand_weights(seed, layers=1, vocab=vocab)
    g = torch.Generator().manual_seed(seed + 1)
    weight = DenseWeight(torch.randn(shape.hidden, WIDTH + shape.hidden, generator=g) * 0.1)
    fusion = Fusion(torch.rand(WIDTH, generator=g) + 0.5, torch.rand(shape.hidden, generator=g) + 0.5, weight)
    assert isinstance(weights.lm_head, DenseWeight)
    head = DenseWeight(weights.lm_head.values[:scored])
    return replace(shape, vocab_size=scored), replace(weights, lm_head=head, fusion=fusion)


def in_blocks(weights: DecoderWeights, bits: int) -> DecoderWeights:
    assert weights.fusion is not None
    return replace(quantized(weights, bits), fusion=replace(weights.fusion, weight=quantize(weights.fusion.weight, bits)))


def features(rows: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)) * 3


def text(count: int, vocab: int = 200) -> list[int]:
    return [(i * 7919 + 3) % vocab for i in range(count)]


def chain(model: FusedDecoder, count: int, rows: torch.Tensor) -> DecoderOutput:
    store = new_store(model.shape, 16, fill=float("nan"))
    return model.forward(step_inputs([Row(text(count), range(16), 0)], 16), store, True, rows)


def test_the_first_layer_sees_what_the_formula_says() -> None:
    shape, weights = fused()
    rows, ids = features(9), text(9)
    fusion = weights.fusion
    assert fusion is not None

    def rms(v: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return v / torch.sqrt((v * v).mean() + 1e-5) * weight

    assert isinstance(weights.embedding, DenseWeight)
    assert isinstance(fusion.weight, DenseWeight)
    inputs = torch.stack(
        [
            fusion.weight.values
            @ torch.cat([rms(rows[i], fusion.feature_norm), rms(weights.embedding.values[token], fusion.token_norm)])
            for i, token in enumerate(ids)
        ]
    )
    # The same decoder without a fusion, whose embedding is the fused input itself.
    plain = ReferenceDecoder(shape, replace(weights, fusion=None, embedding=DenseWeight(inputs)))
    want = plain.forward(step_inputs([Row(list(range(9)), range(16), 0)], 16), new_store(shape, 16), True)
    got = chain(ReferenceDecoder(shape, weights), 9, rows)
    torch.testing.assert_close(got.hidden, want.hidden)
    assert got.logits is not None
    assert got.logits.shape == (9, 70)
    moved = chain(ReferenceDecoder(shape, weights), 9, rows + torch.eye(9, WIDTH))
    assert float((moved.hidden - got.hidden).abs().max()) > 0.01


@native
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_native_numbers_are_the_reference(bits: int | None) -> None:
    from kernels.decoder.native import NativeDecoder

    shape, weights = fused(1)
    weights = weights if bits is None else in_blocks(weights, bits)
    ours, theirs = (chain(m, 40, features(40)) for m in (NativeDecoder(shape, weights, 2), ReferenceDecoder(shape, weights)))
    if bits is None:
        assert float((ours.hidden - theirs.hidden).abs().max() / theirs.hidden.abs().max()) < FLOAT32_LAYERS
    else:  # a code of an activation may fall to the other side of a tie
        torch.testing.assert_close(ours.hidden, theirs.hidden, rtol=0.02, atol=0.02)
    assert ours.argmax.tolist() == theirs.argmax.tolist()


@native
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_bits_of_a_row_never_move(bits: int | None) -> None:
    """Whatever number of rows runs beside it, on any instruction set and number of threads, in a chain or a tree."""
    from kernels.decoder.native import NativeDecoder

    assert LIBRARY is not None
    shape, weights = fused(2)
    weights = weights if bits is None else in_blocks(weights, bits)
    rows = features(80)
    want = chain(NativeDecoder(shape, weights, 1), 80, rows)
    for threads, isa in [(2, None), (3, None), *((2, isa) for isa in LIBRARY.isas)]:
        got = chain(NativeDecoder(shape, weights, threads, isa=isa), 80, rows)
        assert torch.equal(got.hidden, want.hidden), (threads, isa)
        assert got.logits is not None
        assert want.logits is not None
        assert torch.equal(got.logits, want.logits), (threads, isa)
    model = NativeDecoder(shape, weights, 2)
    for count in (1, 3, 4, 5, 17, 64):
        assert torch.equal(chain(model, count, rows[:count].contiguous()).hidden, want.hidden[:count]), count
    # A fork: the chain's last token, and beside it another one with its features.
    ids = [*text(3), 9]
    tree = Row(ids, range(16), 0, parents=[-1, 0, 1, 1])
    out = model.forward(step_inputs([tree], 16), new_store(shape, 16), True, rows[[0, 1, 2, 7]].contiguous())
    assert torch.equal(out.hidden[:3], want.hidden[:3])


@native
def test_a_decoder_beside_another_reads_its_embedding() -> None:
    from kernels.decoder.native import NativeDecoder

    shape, weights = fused(3)
    target_shape, target_weights = rand_weights(3, layers=1, vocab=200)
    alone = chain(NativeDecoder(shape, replace(weights, embedding=target_weights.embedding), 2), 12, features(12))
    misled = replace(weights, embedding=DenseWeight(torch.zeros(200, shape.hidden)))
    beside = NativeDecoder(target_shape, target_weights, 2).beside(shape, misled)  # the target itself may go
    assert torch.equal(chain(beside, 12, features(12)).hidden, alone.hidden)
    assert torch.equal(
        chain(ReferenceDecoder(target_shape, target_weights).beside(shape, misled), 12, features(12)).hidden,
        chain(ReferenceDecoder(shape, replace(weights, embedding=target_weights.embedding)), 12, features(12)).hidden,
    )
    narrow = rand_weights(3, layers=1, hidden=64, q_heads=2, kv_heads=1, vocab=200)
    with pytest.raises(NativeError, match="shape"):
        NativeDecoder(*narrow, 1).beside(shape, weights)


@native
def test_features_that_do_not_fit_are_refused() -> None:
    from kernels.decoder.native import NativeDecoder

    shape, weights = fused(4)
    inputs = step_inputs([Row([1, 2], [0], 0)], 16)
    for model in (NativeDecoder(shape, weights, 1), ReferenceDecoder(shape, weights)):
        with pytest.raises(ValueError, match="features"):
            model.forward(inputs, new_store(shape, 1), True)
    with pytest.raises(NativeError, match=r"features are \[1, 64\]"):
        NativeDecoder(shape, weights, 1).forward(inputs, new_store(shape, 1), True, features(1))
    for plain in (decoder(*rand_weights(layers=1)), NativeDecoder(*rand_weights(layers=1), 1)):
        with pytest.raises(ValueError, match="features"):
            plain.forward(inputs, new_store(plain.shape, 1), True, features(2))  # type: ignore[call-arg]
    assert weights.fusion is not None
    narrow = replace(weights, fusion=replace(weights.fusion, feature_norm=torch.ones(32)))
    with pytest.raises(NativeError, match="fusion is 96 x 160"):
        NativeDecoder(shape, narrow, 1)
