"""Writing and moving rows of the paged store. Knows slots; refuses to know which sequence owns them."""

from __future__ import annotations

import torch

from kernels.batch import KVTensors, store_sizes
from kernels.float8.reference import codes, stored
from kernels.whole_store import reference as whole_store


def write(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, store_k: torch.Tensor, store_v: torch.Tensor) -> None:
    """Put rows k, v [N, Hkv, D] float32 into `slots` [N] of one layer, rounded to the store's dtype."""
    page, offset = _split(slots, store_sizes(store_k)[1])
    if store_k.dtype == torch.uint8:
        whole_store.write(k, v, page, offset, store_k, store_v)
        return
    codes(store_k)[page, :, :, offset] = codes(stored(k, store_k.dtype))  # indexed view [N, Hkv, D]
    codes(store_v)[page, :, offset, :] = codes(stored(v, store_v.dtype))


def move(src: torch.Tensor, dst: torch.Tensor, store: KVTensors) -> None:
    """Copy slots `src` [M] to `dst` [M] in all layers; every source is read before any destination is written."""
    if store.k.dtype == torch.uint8:
        whole_store.move(src.long(), dst.long(), store.page_size, store.k, store.v)
        return
    src_page, src_offset = _split(src, store.page_size)
    dst_page, dst_offset = _split(dst, store.page_size)
    keys, values = codes(store.k), codes(store.v)
    k = keys[:, src_page, :, :, src_offset]  # a copy, [M, L, Hkv, D]
    v = values[:, src_page, :, src_offset, :]
    keys[:, dst_page, :, :, dst_offset] = k
    values[:, dst_page, :, dst_offset, :] = v


def _split(slots: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    slots = slots.long()
    return slots // page_size, slots % page_size
