"""The C++ decoder: the reference's numbers, and bits that no row count, chunking, tree, page layout or machine can move."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from invariance import alone, check_invariance
from toy import Row, greedy, new_store, quantize, quantized, rand_weights, step_inputs, swapped

from kernels.decoder import DecoderShape, DecoderWeights
from kernels.decoder.reference import ReferenceDecoder
from kernels.linear import BlockWeight, Weight
from kernels.native import NativeError, load
from spec.inputs import build_inputs, pack_inputs
from spec.plan import PlanRow
from spec.tree import EMPTY_TREE, DraftTree

LIBRARY = load()
if LIBRARY is None:
    pytest.skip("no native library: no C++ compiler here", allow_module_level=True)

from kernels.decoder.native import NativeDecoder  # noqa: E402
from kernels.kv_slots.native import move  # noqa: E402

# Three layers of float32 sums in another order, relative to the largest value.
FLOAT32_LAYERS = 1e-5
# The same where rows are quantised: another last bit of a value may round to the next code.
CODES_ROUNDED = 0.02

VARIANTS: dict[str, dict[str, object]] = {
    "plain": {},
    "bias, qk norm, window, odd heads": {
        "qk_norm": True,
        "qkv_bias": True,
        "sliding_window": 13,
        "head_dim": 24,
        "kv_heads": 1,
    },
    "groups of 3, head 64": {"hidden": 192, "q_heads": 3, "kv_heads": 1, "head_dim": 64, "intermediate": 160},
    "groups of 8": {"q_heads": 8, "kv_heads": 1, "head_dim": 16},
    "hidden 40": {"hidden": 40, "intermediate": 50, "vocab": 131},
}


def model(name: str) -> tuple[DecoderShape, DecoderWeights]:
    return rand_weights(1, **VARIANTS[name])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", VARIANTS)
def test_numbers_are_the_reference(name: str) -> None:
    shape, weights = model(name)
    text = [(i * 7919) % shape.vocab_size for i in range(40)]
    for ours, theirs in zip(
        alone(NativeDecoder(shape, weights, 2), text), alone(ReferenceDecoder(shape, weights), text), strict=True
    ):
        assert float((ours - theirs).abs().max() / theirs.abs().max()) < FLOAT32_LAYERS


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_greedy_text_is_the_reference(bits: int) -> None:
    shape, weights = rand_weights(2)
    coded = quantized(weights, bits)
    prompt = [5, 17, 300]
    want = greedy(ReferenceDecoder(shape, coded), prompt, 12)
    assert greedy(NativeDecoder(shape, coded, 2), prompt, 12) == want


@pytest.mark.parametrize("name", VARIANTS)
def test_dense_bits_never_move(name: str) -> None:
    check_invariance(NativeDecoder(*model(name), 2), length=30, page_sizes=(4, 16), move=move)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_bits_never_move(bits: int, dtype: torch.dtype) -> None:
    shape, weights = rand_weights(3)
    sizes = (16, 32) if dtype is torch.uint8 else (1, 4, 16, 32)
    check_invariance(NativeDecoder(shape, quantized(weights, bits), 2), page_sizes=sizes, move=move, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_bits_never_move_over_chunk_borders(dtype: torch.dtype) -> None:
    shape, weights = rand_weights(4, layers=2)
    decoder = NativeDecoder(shape, quantized(weights), 2)
    check_invariance(decoder, length=150, page_sizes=(16,), move=move, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_row_counts_1_to_64(dtype: torch.dtype) -> None:
    """The first tokens of a text give the same bits whatever number of rows follows in the same pass."""
    shape, weights = rand_weights(5)
    decoder = NativeDecoder(shape, quantized(weights), 2)
    text = [(i * 37) % 512 for i in range(64)]
    hidden, logits = alone(decoder, text, dtype=dtype)
    for rows in range(1, 65):
        inputs = step_inputs([Row(text[:rows], range(9), 0)], 16)
        out = decoder.forward(inputs, new_store(shape, 9, dtype=dtype, fill=float("nan")), need_logits=True)
        assert out.logits is not None
        assert torch.equal(out.logits, logits[:rows])
        assert torch.equal(out.hidden, hidden[:rows])


@pytest.mark.parametrize(
    ("bits", "dtype"), [(None, torch.float32), (4, torch.float32), (8, torch.float32), (4, torch.uint8), (None, torch.uint8)]
)
def test_threads_and_instruction_sets_agree_bit_for_bit(bits: int | None, dtype: torch.dtype) -> None:
    shape, weights = rand_weights(6, qk_norm=True)
    weights = weights if bits is None else quantized(weights, bits)
    text = [(i * 101) % 512 for i in range(20)]
    want = alone(NativeDecoder(shape, weights, 1), text, dtype=dtype)
    for threads, isa in [(2, None), (5, None), *((2, isa) for isa in LIBRARY.isas)]:
        got = alone(NativeDecoder(shape, weights, threads, isa=isa), text, dtype=dtype)
        assert torch.equal(got[0], want[0]), (threads, isa)
        assert torch.equal(got[1], want[1]), (threads, isa)


def mixed_forms() -> tuple[DecoderShape, DecoderWeights]:
    """Every form of matrix beside every other that may read the same rows: 4 and 8 bits, with minimums and without, dense ones; an odd
    number of blocks; a vocabulary of 4 bits."""
    shape, weights = rand_weights(3, hidden=96, intermediate=160, layers=3, vocab=67, q_heads=3, kv_heads=1, head_dim=32)

    def coded(weight: Weight, bits: int, offset: bool = False) -> BlockWeight:
        found = quantize(weight, bits)
        if bits == 4:
            return replace(found, minimum=(found.scale.float() * -8).half()) if offset else found
        return found if offset else replace(found, minimum=found.minimum + 0.01)

    a, b, c = weights.layers
    a = replace(
        a, q=coded(a.q, 4), k=coded(a.k, 4, True), v=coded(a.v, 4), o=coded(a.o, 4, True),
        gate=coded(a.gate, 4), up=coded(a.up, 8, True), down=coded(a.down, 4),
    )  # fmt: skip
    b = replace(
        b, q=coded(b.q, 4), k=coded(b.k, 8, True), v=coded(b.v, 8), o=coded(b.o, 8),
        gate=coded(b.gate, 8), up=coded(b.up, 4, True), down=coded(b.down, 8, True),
    )  # fmt: skip
    c = replace(c, q=coded(c.q, 4), v=coded(c.v, 4, True), gate=coded(c.gate, 4), down=coded(c.down, 4))
    head = coded(weights.lm_head, 4)
    return shape, replace(weights, layers=(a, b, c), lm_head=head, embedding=head)


def test_mixed_forms_are_the_reference_and_their_bits_never_move() -> None:
    shape, weights = mixed_forms()
    text = [(i * 37) % shape.vocab_size for i in range(64)]
    hidden, logits = alone(NativeDecoder(shape, weights, 1), text)
    for ours, theirs in zip((hidden, logits), alone(ReferenceDecoder(shape, weights), text), strict=True):
        assert float((ours - theirs).abs().max() / theirs.abs().max()) < CODES_ROUNDED
    for threads, isa in [(3, None), *((2, isa) for isa in LIBRARY.isas)]:
        decoder = NativeDecoder(shape, weights, threads, isa=isa)
        for rows in (1, 2, 4, 5, 8, 9, 12, 13, 16, 17, 33, 64):
            inputs = step_inputs([Row(text[:rows], range(9), 0)], 16)
            out = decoder.forward(inputs, new_store(shape, 9, fill=float("nan")), need_logits=True)
            assert out.logits is not None
            assert torch.equal(out.logits, logits[:rows]), (threads, isa, rows)
            assert torch.equal(out.hidden, hidden[:rows]), (threads, isa, rows)


def test_scores_only_where_asked() -> None:
    shape, weights = rand_weights(7)
    decoder = NativeDecoder(shape, weights, 2)
    inputs = step_inputs([Row([3, 1, 4, 1, 5], [0], 0, score=[1, 4]), Row([9], [1], 0, score=[])], 16)
    out = decoder.forward(inputs, new_store(shape, 2), need_logits=False)
    assert out.logits is None
    assert out.hidden.shape == (6, shape.hidden)
    full = decoder.forward(inputs, new_store(shape, 2), need_logits=True)
    assert full.logits is not None
    assert out.argmax.tolist() == full.logits.argmax(-1).tolist()
    none = decoder.forward(step_inputs([Row([9], [1], 0, score=[])], 16), new_store(shape, 2), need_logits=True)
    assert none.logits is not None
    assert none.logits.shape == (0, shape.vocab_size)


def test_tied_embedding_is_packed_once_and_weights_may_go() -> None:
    shape, weights = rand_weights(8)
    coded = quantized(weights)
    tied = replace(coded, embedding=coded.lm_head)
    text = [5, 6, 7, 8]
    want = alone(ReferenceDecoder(shape, tied), text)[1].argmax(-1)
    decoder = NativeDecoder(shape, tied, 2)
    del tied, coded, weights
    gc.collect()
    assert torch.equal(alone(decoder, text)[1].argmax(-1), want)


def test_input_out_of_bounds_is_refused() -> None:
    shape, weights = rand_weights(9)
    decoder = NativeDecoder(shape, weights, 2)
    store = new_store(shape, 2)
    with pytest.raises(NativeError, match="token id"):
        decoder.forward(step_inputs([Row([512], [0])], 16), store, False)
    with pytest.raises(NativeError, match="position"):
        decoder.forward(step_inputs([Row([1], range(70), 1030)], 16), new_store(shape, 70), False)
    with pytest.raises(NativeError, match="slot or page"):
        decoder.forward(step_inputs([Row([1], [5])], 16), store, False)
    with pytest.raises(NativeError, match="shape"):
        decoder.forward(step_inputs([Row([1], [0])], 16), new_store(rand_weights(layers=2)[0], 2), False)
    assert swapped(decoder).shape is shape


def test_two_callers_share_one_team() -> None:
    """Two Python threads, each with a decoder of its own, on the same threads: passes take turns, bits stay."""
    decoders = [NativeDecoder(*rand_weights(seed), 3) for seed in (11, 12)]
    want = [greedy(d, [1, 2, 3], 20) for d in decoders]
    with ThreadPoolExecutor(2) as pool:
        got = [pool.submit(greedy, d, [1, 2, 3], 20) for d in decoders]
    assert [g.result() for g in got] == want


def test_a_forked_child_computes_with_threads_of_its_own() -> None:
    shape, weights = rand_weights(10)
    decoder = NativeDecoder(shape, weights, 2)
    want = greedy(decoder, [1, 2, 3], 4)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, bytes(str(greedy(decoder, [1, 2, 3], 4) == want), "ascii"))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        assert answer.read() == "True"
    os.waitpid(pid, 0)
    assert greedy(decoder, [1, 2, 3], 4) == want


def test_a_pass_from_plain_buffers_is_the_forward() -> None:
    """Over passes of many sizes, which share their buffers; and NaN among the values is noticed."""
    shape, weights = model("plain")
    decoder = NativeDecoder(shape, weights, 2)
    mine, theirs = new_store(shape, 8, 4), new_store(shape, 8, 4)
    run = decoder.over(mine)
    pages, text = list(range(8)), [(i * 7919) % shape.vocab_size for i in range(24)]
    tree = DraftTree((5, 6, 7), (-1, -1, 0))
    for start, count, drafted, need_logits in ((0, 9, EMPTY_TREE, False), (9, 1, tree, True), (10, 1, EMPTY_TREE, False)):
        row = PlanRow(1, start, text[start : start + count], pages, scored=True, decoding=count == 1)
        wanted = decoder.forward(build_inputs([row], [drafted], 4, torch.device("cpu")), theirs, need_logits)
        argmax, logits, hidden, finite = run(pack_inputs([row], [drafted], 4), need_logits)
        assert argmax == wanted.argmax.tolist()
        assert torch.equal(hidden, wanted.hidden)
        assert (logits is None) == (wanted.logits is None)
        assert logits is None or torch.equal(logits, wanted.logits)  # type: ignore[arg-type]
        assert finite
    mine.v[0, 0] = float("nan")
    row = PlanRow(1, 11, [text[11]], pages, scored=True, decoding=True)
    assert run(pack_inputs([row], [EMPTY_TREE], 4), False)[3] is False
