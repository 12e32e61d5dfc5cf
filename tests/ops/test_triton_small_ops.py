"""Triton norm, rotation, SwiGLU, slots, accept walk and argmax against the reference ops."""

from __future__ import annotations

import pytest
import torch
from accept_cases import WALKS, batch, random_walk
from device import BFLOAT16_STEP, DEVICE, to_device
from toy import rope_tables

from kernels.batch import KVTensors
from kernels.kv_slots import reference as slots_reference
from kernels.kv_slots import triton as slots_triton
from kernels.norm import reference as norm_reference
from kernels.norm import triton as norm_triton
from kernels.rope import reference as rope_reference
from kernels.rope import triton as rope_triton
from kernels.sample.triton import argmax
from kernels.silu_mul import reference as silu_reference
from kernels.silu_mul import triton as silu_triton
from kernels.tree_accept.triton import tree_accept

# The same formula in float32 with another order of sums or another exp: a few roundings.
FEW_ULPS = 2e-6


def random(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.cpu(), want, atol=FEW_ULPS, rtol=FEW_ULPS)


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (5, 33), (123, 96), (3, 577)])
def test_norms(rows: int, size: int) -> None:
    x, residual, weight = random(rows, size) * 3, random(rows, size, seed=1), random(size, seed=2)
    near(norm_triton.rms_norm(to_device(x), to_device(weight), 1e-5), norm_reference.rms_norm(x, weight, 1e-5))
    got = norm_triton.add_rms_norm(*to_device((x, residual, weight)), 1e-5)
    want = norm_reference.add_rms_norm(x, residual, weight, 1e-5)
    near(got[0], want[0])
    assert torch.equal(got[1].cpu(), want[1])


def test_norm_writes_the_type_it_is_asked_for() -> None:
    x, weight = random(3, 40), random(40, seed=1)
    got = norm_triton.rms_norm(to_device(x), to_device(weight), 1e-5, out_dtype=torch.bfloat16)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.cpu().float(), norm_reference.rms_norm(x, weight, 1e-5), atol=0, rtol=BFLOAT16_STEP)


def test_norm_of_no_rows() -> None:
    assert norm_triton.rms_norm(torch.zeros(0, 8), torch.ones(8), 1e-5).shape == (0, 8)


def test_silu_mul_of_halves() -> None:
    both = random(5, 154) * 4
    both[0, :2] = torch.tensor([-200.0, 200.0])
    got = silu_triton.silu_mul(*to_device(both).split(77, dim=1))
    near(got, silu_reference.silu_mul(both[:, :77], both[:, 77:]))


@pytest.mark.parametrize(("nodes", "heads", "dim"), [(1, 1, 2), (5, 3, 30), (23, 4, 64)])
def test_rope(nodes: int, heads: int, dim: int) -> None:
    x, tables = random(nodes, heads, dim), rope_tables(64, dim)
    positions = (torch.arange(nodes, dtype=torch.int32) * 7) % 64
    near(rope_triton.rope(*to_device((x, positions, *tables))), rope_reference.rope(x, positions, *tables))


@pytest.mark.parametrize("page_size", [1, 16, 32])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_write_is_norm_rope_and_write(page_size: int, norms: bool, dtype: torch.dtype) -> None:
    nodes, q_heads, kv_heads, dim = 5, 6, 2, 30
    qkv = random(nodes, (q_heads + 2 * kv_heads) * dim)
    q, k, v = qkv.split((q_heads * dim, kv_heads * dim, kv_heads * dim), dim=1)
    q_norm, k_norm = (random(dim, seed=3), random(dim, seed=4)) if norms else (None, None)
    positions = torch.tensor([3, 4, 4, 5, 60], dtype=torch.int32)
    slots = torch.tensor([33, 2, 17, 40, 16], dtype=torch.int32)
    tables = rope_tables(64, dim)
    store = KVTensors.allocate(1, 64 // page_size, kv_heads, dim, page_size, dtype)
    store.k.fill_(7)
    store.v.fill_(7)
    on_device = to_device(KVTensors(store.k.clone(), store.v.clone()))
    got = rope_triton.rope_write(
        *to_device((q, k, v, positions, slots, *tables)), on_device.k[0], on_device.v[0],
        *to_device((q_norm, k_norm)), 1e-6,
    )  # fmt: skip

    def prepared(x: torch.Tensor, heads: int, norm: torch.Tensor | None) -> torch.Tensor:
        x = x.reshape(nodes, heads, dim)
        x = x if norm is None else norm_reference.rms_norm(x, norm, 1e-6)
        return rope_reference.rope(x, positions, *tables)

    near(got, prepared(q, q_heads, q_norm))
    rows_k, rows_v = prepared(k, kv_heads, k_norm), v.reshape(nodes, kv_heads, dim)
    slots_reference.write(rows_k, rows_v, slots, store.k[0], store.v[0])
    step = BFLOAT16_STEP if dtype == torch.bfloat16 else FEW_ULPS
    torch.testing.assert_close(on_device.k.cpu(), store.k, atol=FEW_ULPS, rtol=step)
    torch.testing.assert_close(on_device.v.cpu(), store.v, atol=0, rtol=step)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots(page_size: int, dtype: torch.dtype) -> None:
    stores = []
    for op, device in ((slots_reference, "cpu"), (slots_triton, DEVICE)):
        store = KVTensors.allocate(2, 16 // page_size, 3, 5, page_size, dtype)
        store.k.copy_(random(*store.k.shape))
        store.v.copy_(random(*store.v.shape, seed=1))
        store = to_device(store, device)
        slots = torch.tensor([9, 0, 15], dtype=torch.int32, device=device)
        op.write(*to_device((random(3, 3, 5), random(3, 3, 5, seed=2)), device), slots, store.k[1], store.v[1])
        for src, dst in (([2, 5, 9], [1, 2, 3]), ([1, 2, 3], [2, 3, 4]), ([7, 8], [8, 7]), ([], [])):
            op.move(*(torch.tensor(t, dtype=torch.int32, device=device) for t in (src, dst)), store)
        stores.append(to_device(store, "cpu"))
    step = BFLOAT16_STEP if dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(stores[0].k, stores[1].k, atol=0, rtol=step)
    torch.testing.assert_close(stores[0].v, stores[1].v, atol=0, rtol=step)


@pytest.mark.parametrize("nodes", [0, 1, 5, 64])
def test_tree_accept(nodes: int) -> None:
    walks = [random_walk(seed, nodes) for seed in range(12)] if nodes else list(WALKS.values())
    depth = max(nodes, 4)
    case = batch(walks, depth, DEVICE)
    path, accepted, next_ids = tree_accept(case.input_ids, case.target_ids, case.parents, case.row_ptr, depth)
    assert path.dtype == accepted.dtype == next_ids.dtype == torch.int32
    assert path.tolist() == case.path
    assert accepted.tolist() == [sum(node >= 0 for node in p) for p in case.path]
    assert next_ids.tolist() == case.next_ids


def test_tree_accept_stops_at_the_depth_limit() -> None:
    case = batch([WALKS["whole chain"]], 3, DEVICE)
    path, accepted, next_ids = tree_accept(case.input_ids, case.target_ids, case.parents, case.row_ptr, 2)
    assert (path.tolist(), accepted.tolist(), next_ids.tolist()) == ([[1, 2]], [2], [3])


@pytest.mark.parametrize(("rows", "vocab", "chunk"), [(1, 1, 64), (5, 131, 64), (3, 512, 100), (2, 515, 8192)])
def test_argmax(rows: int, vocab: int, chunk: int) -> None:
    logits = random(rows, vocab)
    logits[0, vocab // 2] = logits[0, vocab - 1] = 9.0  # a tie across chunks goes to the lower id
    logits[-1, : vocab // 2] = float("-inf")
    got = argmax(to_device(logits), chunk)
    assert got.dtype == torch.int32
    assert got.tolist() == logits.argmax(-1).tolist()
