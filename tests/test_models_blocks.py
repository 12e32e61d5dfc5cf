"""Block types against the gguf library's own dequantiser, on random bytes: every bit of every field takes part."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf_twin import random_blocks

from kernels.linear import BLOCK, BlockWeight
from spec.models.blocks import BLOCK_TYPES, dequantise, quantise, to_block_weight
from spec.models.gguf_file import TENSOR_TYPES

EXACT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
# a float16 scale in place of a 17-bit product (Q4_K, Q5_K); a 16-wide group on the grid of its louder neighbour (Q6_K)
ROUNDED = {"Q4_K": 2**-10, "Q5_K": 2**-10, "Q6_K": 0.5 / 96 + 2**-10}


def values_of(weight: BlockWeight) -> torch.Tensor:
    """[out, in] float32, by the contract's words alone."""
    codes = weight.codes
    if weight.bits == 4:
        codes = torch.cat((codes & 15, codes >> 4), dim=-1)
    return (codes.float() * weight.scale.float()[..., None] + weight.minimum.float()[..., None]).flatten(1)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_dequantised_values_equal_the_librarys(kind: str) -> None:
    raw = random_blocks(kind, 7, 768)
    theirs = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))
    assert torch.equal(dequantise(kind, torch.from_numpy(raw)), theirs)
    assert theirs.count_nonzero() > theirs.numel() * 0.9


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_canonical_blocks_hold_the_same_values(kind: str) -> None:
    raw = random_blocks(kind, 7, 768)
    theirs = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))
    weight = to_block_weight(kind, torch.from_numpy(raw))
    assert weight.bits == (4 if kind in ("Q4_0", "Q4_1", "Q4_K") else 8)
    assert (weight.scale.dtype, weight.minimum.dtype) == (torch.float16, torch.float16 if weight.bits == 4 else torch.float32)
    assert tuple(weight.codes.shape) == (7, 768 // BLOCK, 4 * weight.bits)
    ours = values_of(weight)
    if kind in EXACT:
        assert torch.equal(ours, theirs)
    else:
        loudest = theirs.reshape(7, -1, BLOCK).abs().amax(-1, keepdim=True)
        assert ((ours - theirs).reshape(7, -1, BLOCK).abs() <= loudest * ROUNDED[kind]).all()


@pytest.mark.parametrize("kind", EXACT)
def test_real_weights_survive(kind: str) -> None:
    """What the library writes from weights of a normal size (it cannot write the K types; those are compared above)."""
    values = np.random.default_rng(3).standard_normal((5, 512)).astype(np.float32) * 0.02
    quant = gguf.GGMLQuantizationType[kind]
    raw = gguf.quants.quantize(values, quant)
    theirs = torch.from_numpy(gguf.quants.dequantize(raw, quant))
    assert torch.equal(dequantise(kind, torch.from_numpy(raw)), theirs)
    assert torch.equal(values_of(to_block_weight(kind, torch.from_numpy(raw))), theirs)


def test_a_zero_block_stays_zero() -> None:
    for kind in BLOCK_TYPES:
        values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        raw = torch.zeros(2, 512 // values * size, dtype=torch.uint8)
        assert values_of(to_block_weight(kind, raw)).abs().max() == 0
        assert dequantise(kind, raw).abs().max() == 0


def test_row_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = torch.from_numpy(random_blocks("Q6_K", 7, 768))
    whole, wide = to_block_weight("Q6_K", raw), dequantise("Q6_K", raw)
    monkeypatch.setattr("spec.models.blocks.CHUNK_VALUES", 768 * 3)
    parts = to_block_weight("Q6_K", raw)
    assert torch.equal(whole.codes, parts.codes)
    assert torch.equal(whole.scale, parts.scale)
    assert torch.equal(wide, dequantise("Q6_K", raw))


@pytest.mark.parametrize(("bits", "levels"), [(8, 127 * 2), (4, 15)])
@pytest.mark.parametrize("offset", [0.0, 0.05])
def test_quantising_dense_weights_rounds_to_nearest(bits: int, levels: int, offset: float) -> None:
    values = torch.randn(9, 96, generator=torch.Generator().manual_seed(1)) * 0.03 + offset
    values[3, :32] = 0
    values[4, 32:64] = -0.5
    weight = quantise(values, bits)
    blocks = values.reshape(9, -1, BLOCK)
    spread = 2 * blocks.abs().amax(-1) if bits == 8 else blocks.amax(-1) - blocks.amin(-1)
    # half a step, and the float16 rounding of scale and minimum
    allowed = spread / levels * 0.5 + blocks.abs().amax(-1) * 2**-10 + spread * 2**-10 + 1e-7
    assert ((values_of(weight).reshape(9, -1, BLOCK) - blocks).abs() <= allowed[..., None]).all()


def test_the_type_table_agrees_with_the_library() -> None:
    for kind, (name, values, size) in TENSOR_TYPES.items():
        quant = gguf.GGMLQuantizationType(kind)
        assert (quant.name, gguf.GGML_QUANT_SIZES[quant]) == (name, (values, size))
