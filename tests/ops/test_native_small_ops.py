"""C++ norm, rotation, slots and accept walk against the reference ops, on every instruction set of this machine."""

from __future__ import annotations

import pytest
import torch
from accept_cases import WALKS, batch, random_walk
from toy import rope_tables

from kernels.batch import KVTensors
from kernels.kv_slots import reference as slots_reference
from kernels.native import load
from kernels.norm import reference as norm_reference
from kernels.rope import reference as rope_reference

LIBRARY = load()
if LIBRARY is None:
    pytest.skip("no native library: no C++ compiler here", allow_module_level=True)

from kernels.kv_slots import native as slots  # noqa: E402
from kernels.norm import native as norm  # noqa: E402
from kernels.rope.native import rope  # noqa: E402
from kernels.tree_accept.native import tree_accept  # noqa: E402

FEW_ULPS = 2e-6  # the same formula in float32 with another order of sums


def random(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("isa", LIBRARY.isas)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (5, 33), (123, 96), (3, 577), (2, 64)])
def test_norms(rows: int, size: int, isa: str) -> None:
    x, residual, weight = random(rows, size) * 3, random(rows, size, seed=1), random(size, seed=2)
    got = norm.rms_norm(x, weight, 1e-5, isa)
    torch.testing.assert_close(got, norm_reference.rms_norm(x, weight, 1e-5), atol=FEW_ULPS, rtol=FEW_ULPS)
    assert torch.equal(got, norm.rms_norm(x, weight, 1e-5, LIBRARY.isas[0]))
    assert torch.equal(got[rows - 1 :], norm.rms_norm(x[rows - 1 :], weight, 1e-5, isa))
    fused, total = norm.add_rms_norm(x, residual, weight, 1e-5, isa)
    assert torch.equal(total, x + residual)
    assert torch.equal(fused, norm.rms_norm(total, weight, 1e-5, isa))


@pytest.mark.parametrize("isa", LIBRARY.isas)
@pytest.mark.parametrize(("nodes", "heads", "dim"), [(1, 1, 2), (5, 3, 30), (23, 4, 64), (2, 2, 80)])
def test_rope_is_the_reference_bit_for_bit(nodes: int, heads: int, dim: int, isa: str) -> None:
    x, tables = random(nodes, heads, dim), rope_tables(64, dim)
    positions = (torch.arange(nodes, dtype=torch.int32) * 7) % 64
    assert torch.equal(rope(x, positions, *tables, isa=isa), rope_reference.rope(x, positions, *tables))


def test_rope_refuses_positions_past_the_tables() -> None:
    with pytest.raises(IndexError):
        rope(random(1, 1, 8), torch.tensor([64], dtype=torch.int32), *rope_tables(64, 8))


def store(page_size: int, dtype: torch.dtype) -> KVTensors:
    out = KVTensors.allocate(3, 6, 2, 40, page_size, dtype)
    out.k.copy_(random(*out.k.shape, seed=1))
    out.v.copy_(random(*out.v.shape, seed=2))
    return out


@pytest.mark.parametrize("isa", LIBRARY.isas)
@pytest.mark.parametrize("page_size", [1, 4, 16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots(page_size: int, dtype: torch.dtype, isa: str) -> None:
    ours, theirs = store(page_size, dtype), store(page_size, dtype)
    g = torch.Generator().manual_seed(4)
    free = torch.randperm(6 * page_size, generator=g).to(torch.int32)
    k, v = random(5, 2, 40, seed=5), random(5, 2, 40, seed=6)
    k[0, 0, :4] = torch.tensor([float("inf"), -0.0, 1e-40, 3.3e38])
    slots.write(k, v, free[:5].clone(), ours.k[1], ours.v[1], isa)
    slots_reference.write(k, v, free[:5], theirs.k[1], theirs.v[1])
    src = free[:5].clone()
    dst = torch.cat((free[1:5], free[5:6]))  # overlaps its sources: a move done one by one would smear the first row
    slots.move(src, dst, ours, threads=2, isa=isa)
    slots_reference.move(src, dst, theirs)
    assert torch.equal(ours.k, theirs.k)
    assert torch.equal(ours.v, theirs.v)


def test_slots_refuse_what_is_out_of_bounds() -> None:
    tensors = store(4, torch.float32)
    with pytest.raises(IndexError):
        slots.move(torch.tensor([24], dtype=torch.int32), torch.tensor([0], dtype=torch.int32), tensors)
    with pytest.raises(IndexError):
        slots.write(random(1, 2, 40), random(1, 2, 40), torch.tensor([-1], dtype=torch.int32), tensors.k[0], tensors.v[0])


@pytest.mark.parametrize("isa", LIBRARY.isas)
def test_accept_walks(isa: str) -> None:
    walks = [*WALKS.values(), *(random_walk(seed, nodes) for seed, nodes in enumerate((1, 2, 5, 33, 64, 64)))]
    case = batch(walks, 64)
    path, accepted, next_ids = tree_accept(case.input_ids, case.target_ids, case.parents, case.row_ptr, 64, isa)
    assert path.tolist() == case.path
    assert next_ids.tolist() == case.next_ids
    assert accepted.tolist() == [sum(n >= 0 for n in row) for row in case.path]


def test_accept_stops_at_max_depth() -> None:
    case = batch([WALKS["whole chain"]], 3)
    path, accepted, next_ids = tree_accept(case.input_ids, case.target_ids, case.parents, case.row_ptr, 2)
    assert (path.tolist(), accepted.tolist(), next_ids.tolist()) == ([[1, 2]], [2], [3])
