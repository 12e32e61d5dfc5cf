"""Keys and values in 8-bit floats: rounding, writing, moving and attention, reference and Triton."""

from __future__ import annotations

import itertools

import pytest
import torch
from attention_cases import AttentionCase, Shape, make_case
from device import DEVICE, to_device
from toy import rope_tables

from kernels.batch import KVTensors
from kernels.float8.reference import encode, stored
from kernels.kv_slots import reference as slots
from kernels.kv_slots import triton as slots_triton
from kernels.rope import reference as rope
from kernels.rope import triton as rope_triton
from kernels.tree_attention import reference as attention
from kernels.tree_attention import triton as attention_triton

FLOAT8 = torch.float8_e4m3fn
FLOAT32_ORDER = 5e-6
BFLOAT16_INPUTS = 3e-2  # on a device q and the softmax weights are rounded to bfloat16


def numbers() -> list[float]:
    """Every e4m3 number of one sign, by the definition, ascending."""
    return sorted(
        m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8 if e < 15 else 7)
    )


def nearest(x: float) -> float:
    """By searching the table; of two at the same distance the one whose code is even."""
    table = numbers()
    if x != x:
        return x
    size = min(abs(x), table[-1])
    best = min(range(len(table)), key=lambda code: (abs(table[code] - size), code % 2))
    return table[best] if x >= 0 else -table[best]


def test_rounding_is_to_the_nearest_with_halves_to_even() -> None:
    table = numbers()
    halves = [(a + b) / 2 for a, b in itertools.pairwise(table)]
    edges = [0.0, 2.0**-10, 2.0**-11, 448.0, 449.0, 463.9, 464.0, 1e30, float("inf"), 2.0**-149, 0.0156249, 0.0156251]
    g = torch.Generator().manual_seed(0)
    random = (torch.randn(200, generator=g).exp() * torch.randn(200, generator=g)).tolist()
    x = torch.tensor([*table, *halves, *edges, *random])
    x = torch.cat((x, -x))
    want = torch.tensor([nearest(v) for v in x.tolist()])
    assert torch.equal(encode(x).float(), want)
    assert torch.isnan(encode(torch.tensor([float("nan")])).float()).all()
    store = KVTensors.allocate(1, 1, 1, x.numel(), 1, FLOAT8, DEVICE)  # the Triton writer: one key of many channels
    row = to_device(x[None, None])
    slots_triton.write(row, row, to_device(torch.zeros(1, dtype=torch.int32)), store.k[0], store.v[0])
    assert torch.equal(store.k.float().cpu().flatten(), want)
    assert torch.equal(store.v.float().cpu().flatten(), want)


def test_writing_and_moving() -> None:
    g = torch.Generator().manual_seed(1)
    k, v = torch.randn(5, 2, 6, generator=g) * 100, torch.randn(5, 2, 6, generator=g)
    k[0, 0, 0], v[1, 1, 5] = float("nan"), 1e9
    stores = [KVTensors.allocate(1, 3, 2, 6, 4, FLOAT8, device) for device in ("cpu", DEVICE)]
    at = torch.tensor([3, 8, 0, 11, 5], dtype=torch.int32)
    src, dst = torch.tensor([8, 0, 5], dtype=torch.int32), torch.tensor([0, 1, 8], dtype=torch.int32)
    slots.write(k, v, at, stores[0].k[0], stores[0].v[0])
    slots_triton.write(*to_device((k, v, at)), stores[1].k[0], stores[1].v[0])
    for moves in range(2):
        for name in ("k", "v"):
            ours, theirs = (getattr(store, name).view(torch.uint8).cpu() for store in stores)
            assert torch.equal(ours, theirs)
        assert ours.any()
        if moves:
            break
        slots.move(src, dst, stores[0])
        slots_triton.move(*to_device((src, dst)), stores[1])
    assert torch.equal(stores[0].v.float()[0, 0, :, 0], encode(v[1]).float())  # slot 8 came to slot 0
    assert stores[0].v.float().max() == 448


def test_rotation_writes_what_the_reference_rounds() -> None:
    g = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(3, heads * 8, generator=g) * 5 for heads in (4, 2, 2))
    cos, sin = rope_tables(32, 8)
    positions, at = torch.tensor([0, 7, 31], dtype=torch.int32), torch.tensor([5, 2, 9], dtype=torch.int32)
    store = KVTensors.allocate(1, 3, 2, 8, 4, FLOAT8)
    slots.write(rope.rope(k.view(3, 2, 8), positions, cos, sin), v.view(3, 2, 8), at, store.k[0], store.v[0])
    other = KVTensors.allocate(1, 3, 2, 8, 4, FLOAT8, DEVICE)
    rope_triton.rope_write(*to_device((q, k, v, positions, at, cos, sin)), other.k[0], other.v[0])
    assert torch.equal(store.v.view(torch.uint8), other.v.view(torch.uint8).cpu())
    # the rotation may differ in its last bit on a device, and then a code beside a half
    torch.testing.assert_close(other.k.float().cpu(), store.k.float(), atol=0, rtol=0 if DEVICE == "cpu" else 0.13)


def float8_case(case: AttentionCase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(K and V of the case in 8 bits, the attention over the numbers they stand for)."""
    k, v = stored(case.store_k, FLOAT8), stored(case.store_v, FLOAT8)
    want = attention.tree_attention(case.q, k.float(), v.float(), case.inputs, case.scale, case.window, case.sinks)
    return k, v, want


CASES = {
    "tree and chunk": ((Shape(40, 9), Shape(0, 20, "chain")), {}),
    "pages of 32, grouped heads": ((Shape(33, 5), Shape(63, 3, "star")), {"page_size": 32, "q_heads": 8, "kv_heads": 1}),
    "window and sinks": ((Shape(70, 9), Shape(3, 12, "deep")), {"window": 20, "with_sinks": True}),
    "odd heads": ((Shape(17, 6),), {"head_dim": 30}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("split_keys", [None, 64])
def test_attention(name: str, split_keys: int | None) -> None:
    rows, options = CASES[name]
    case = make_case(rows, **options)  # type: ignore[arg-type]
    k, v, want = float8_case(case)
    assert torch.equal(attention.tree_attention(case.q, k, v, case.inputs, case.scale, case.window, case.sinks), want)
    got = attention_triton.tree_attention(
        *to_device((case.q, k, v, case.inputs)), case.scale, case.window, to_device(case.sinks), split_keys=split_keys
    )
    atol = FLOAT32_ORDER if DEVICE == "cpu" else BFLOAT16_INPUTS
    torch.testing.assert_close(got.cpu(), want, atol=atol, rtol=atol)
    assert (want - case.expected).abs().max() < 0.5  # 3 bits of mantissa: near what float32 keys give, and no more
