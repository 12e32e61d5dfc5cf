"""Writing to and moving within the paged store, against one slot at a time."""

from __future__ import annotations

import pytest
import torch

from kernels.batch import KVTensors
from kernels.kv_slots.reference import move, write


def numbered(pages: int, page_size: int, layers: int = 2, dtype: torch.dtype = torch.float32) -> KVTensors:
    store = KVTensors.allocate(layers, pages, 3, 5, page_size, dtype)
    store.k.copy_(torch.arange(store.k.numel()).reshape(store.k.shape))
    store.v.copy_(-torch.arange(store.v.numel()).reshape(store.v.shape))
    return store


def row(store: KVTensors, layer: int, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    page, offset = divmod(slot, store.page_size)
    return store.k[layer, page, :, :, offset].clone(), store.v[layer, page, :, offset].clone()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_touches_its_slots_only(page_size: int, dtype: torch.dtype) -> None:
    store = numbered(40 // page_size + 1, page_size, dtype=dtype)
    before = KVTensors(store.k.clone(), store.v.clone())
    slots = [17, 3, 0, 39, 16]
    k, v = torch.randn(5, 3, 5), torch.randn(5, 3, 5)
    write(k, v, torch.tensor(slots, dtype=torch.int32), store.k[1], store.v[1])
    for slot in range(40):
        got = row(store, 1, slot)
        want = (k[slots.index(slot)].to(dtype), v[slots.index(slot)].to(dtype)) if slot in slots else row(before, 1, slot)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])
    assert torch.equal(store.k[0], before.k[0])


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(
    ("src", "dst"),
    [([5], [2]), ([2, 5, 9], [1, 2, 3]), ([1, 2, 3], [2, 3, 4]), ([7, 8], [8, 7]), ([], [])],
    ids=["one", "compaction", "overlap upwards", "exchange", "none"],
)
def test_move_reads_everything_first(page_size: int, src: list[int], dst: list[int]) -> None:
    store = numbered(16 // page_size, page_size)
    before = KVTensors(store.k.clone(), store.v.clone())
    move(torch.tensor(src, dtype=torch.int32), torch.tensor(dst, dtype=torch.int32), store)
    for layer in range(2):
        for slot in range(16):
            want = row(before, layer, src[dst.index(slot)] if slot in dst else slot)
            got = row(store, layer, slot)
            assert torch.equal(got[0], want[0])
            assert torch.equal(got[1], want[1])
