"""kv_slots in C++: the same calls as the reference."""

from __future__ import annotations

import torch

from kernels.batch import KVTensors, store_sizes
from kernels.native import require
from kernels.native.tensors import address, layered_store, store_data


def write(
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    store_k: torch.Tensor,
    store_v: torch.Tensor,
    isa: str | None = None,
) -> None:
    """Put rows k, v [N, Hkv, D] float32 into `slots` [N] int32 of one layer, rounded to the store's dtype. Raises IndexError."""
    pages, heads = store_k.shape[:2]
    dim, page_size = store_sizes(store_k)
    _check_slots(slots, pages * page_size)
    if k.shape != (slots.shape[0], heads, dim) or v.shape != k.shape:
        raise ValueError(f"k {list(k.shape)} and v {list(v.shape)} must be {[slots.shape[0], heads, dim]}")
    library = require()
    library.c.fs_kv_write(
        library.isa(isa),
        layered_store(store_k, store_v, 1),
        0,
        address(k, torch.float32, "k"),
        address(v, torch.float32, "v"),
        address(slots, torch.int32, "slots"),
        slots.shape[0],
    )


def move(src: torch.Tensor, dst: torch.Tensor, store: KVTensors, threads: int = 1, isa: str | None = None) -> None:
    """Copy slots `src` [M] int32 to `dst` [M] int32 in all layers, as if every source was read first. Raises IndexError."""
    if src.shape != dst.shape:
        raise ValueError(f"{src.shape[0]} sources for {dst.shape[0]} targets")
    for slots in (src, dst):
        _check_slots(slots, store.num_pages * store.page_size)
    library = require()
    library.c.fs_kv_move(
        library.isa(isa),
        library.team(threads).handle,
        store_data(store),
        address(src, torch.int32, "src"),
        address(dst, torch.int32, "dst"),
        src.shape[0],
    )


def _check_slots(slots: torch.Tensor, count: int) -> None:
    if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < count:
        raise IndexError(f"slots must lie in 0..{count - 1}")
