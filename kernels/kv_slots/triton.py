"""Writing and moving rows of the paged store on the device. Knows slots; refuses to know which sequence owns them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.batch import KVTensors
from kernels.float8.reference import codes
from kernels.float8.triton import rounded


@triton.jit
def _kept(x, pointer):
    """x as the store keeps it; rows that came from the store are already so."""
    if x.dtype == pointer.dtype.element_ty:
        return x
    return rounded(x.to(tl.float32), pointer)


@triton.jit(do_not_specialize=["moved"])
def _copy_kernel(
    rows_k_ptr,  # [L, M, Hkv, D] rows outside the store
    rows_v_ptr,
    slots_ptr,  # [M]
    store_k_ptr,  # [L, pages, Hkv, D, PAGE]
    store_v_ptr,  # [L, pages, Hkv, PAGE, D]
    moved,  # M
    heads,  # Hkv
    layer_stride,  # elements of one layer of the store
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    TO_STORE: tl.constexpr,
):
    index, head, layer = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < DIM
    slot = tl.load(slots_ptr + index).to(tl.int64)
    base = layer * layer_stride + (slot // PAGE * heads + head) * (DIM * PAGE)
    k_at = store_k_ptr + base + channel * PAGE + slot % PAGE
    v_at = store_v_ptr + base + slot % PAGE * DIM + channel
    row = ((layer * moved + index) * heads + head) * DIM + channel
    if TO_STORE:
        tl.store(k_at, _kept(tl.load(rows_k_ptr + row, mask=inside), store_k_ptr), mask=inside)
        tl.store(v_at, _kept(tl.load(rows_v_ptr + row, mask=inside), store_v_ptr), mask=inside)
    else:
        tl.store(rows_k_ptr + row, tl.load(k_at, mask=inside), mask=inside)
        tl.store(rows_v_ptr + row, tl.load(v_at, mask=inside), mask=inside)


def write(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, store_k: torch.Tensor, store_v: torch.Tensor) -> None:
    """Put rows k, v [N, Hkv, D] into `slots` [N] of one layer, rounded to the store's dtype."""
    _copy(k.contiguous().unsqueeze(0), v.contiguous().unsqueeze(0), slots, store_k.unsqueeze(0), store_v.unsqueeze(0), True)


def move(src: torch.Tensor, dst: torch.Tensor, store: KVTensors) -> None:
    """Copy slots `src` [M] to `dst` [M] in all layers. All rows are gathered before any is written: programs run in any
    order, and a destination may be another row's source.
    """
    layers, _, heads, dim, _ = store.k.shape
    rows_k = store.k.new_empty(layers, src.shape[0], heads, dim)
    rows_v = torch.empty_like(rows_k)
    _copy(rows_k, rows_v, src, store.k, store.v, False)
    _copy(rows_k, rows_v, dst, store.k, store.v, True)


def _copy(
    rows_k: torch.Tensor,
    rows_v: torch.Tensor,
    slots: torch.Tensor,
    store_k: torch.Tensor,
    store_v: torch.Tensor,
    to_store: bool,
) -> None:
    layers, count, heads, dim = rows_k.shape
    store_k, store_v = codes(store_k), codes(store_v)
    rows_k, rows_v = codes(rows_k), codes(rows_v)
    if count:
        _copy_kernel[(count, heads, layers)](
            rows_k, rows_v, slots, store_k, store_v, count, heads, store_k.stride(0), DIM=dim, PAGE=store_k.shape[-1],
            BLOCK=triton.next_power_of_2(dim), TO_STORE=to_store, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
