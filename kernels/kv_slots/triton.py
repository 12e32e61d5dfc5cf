"""Writing and moving rows of the paged store on the device. Knows slots; refuses to know which sequence owns them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.batch import KVTensors, store_sizes
from kernels.float8.reference import codes
from kernels.float8.triton import rounded
from kernels.whole_store.triton import block_at, keep_key, keep_value, key_at, step_at, steps, value_at


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


@triton.jit
def _write_whole_kernel(
    rows_k_ptr,  # [M, Hkv, D] numbers
    rows_v_ptr,
    slots_ptr,  # [M]
    store_k_ptr,  # one layer, bytes with steps
    store_v_ptr,
    k_steps_ptr,  # the same memory as float32
    v_steps_ptr,
    heads,  # Hkv
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,  # at least DIM / 2
):
    index, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    HALF: tl.constexpr = DIM // 2
    channel = tl.arange(0, BLOCK)
    inside = channel < HALF
    slot = tl.load(slots_ptr + index).to(tl.int64)
    token = slot % PAGE
    block = block_at(slot // PAGE * heads + head, token, DIM, PAGE)
    row = (index * heads + head) * DIM + channel
    first = tl.load(rows_k_ptr + row, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(rows_k_ptr + row + HALF, mask=inside, other=0.0).to(tl.float32)
    keep_key(store_k_ptr, k_steps_ptr, block, token, channel, inside, first, second, DIM)
    first = tl.load(rows_v_ptr + row, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(rows_v_ptr + row + HALF, mask=inside, other=0.0).to(tl.float32)
    keep_value(store_v_ptr, v_steps_ptr, block, token, channel, inside, first, second, DIM)


@triton.jit(do_not_specialize=["moved"])
def _copy_whole_kernel(
    rows_ptr,  # [L, M, Hkv, 2, D] bytes of keys and of values, outside the store
    row_steps_ptr,  # [L, M, Hkv, 2] float32
    slots_ptr,  # [M]
    store_k_ptr,  # all layers, bytes with steps
    store_v_ptr,
    k_steps_ptr,  # the same memory as float32
    v_steps_ptr,
    moved,  # M
    heads,  # Hkv
    layer_heads,  # pages * Hkv
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    TO_STORE: tl.constexpr,
):
    index, head, layer = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < DIM
    slot = tl.load(slots_ptr + index).to(tl.int64)
    token = slot % PAGE
    block = block_at(layer * layer_heads + slot // PAGE * heads + head, token, DIM, PAGE)
    k_at = store_k_ptr + key_at(block, channel, token)
    v_at = store_v_ptr + value_at(block, channel, token, DIM)
    step = step_at(block, token, DIM)
    outside = ((layer * moved + index) * heads + head) * 2
    row = rows_ptr + outside * DIM + channel
    row_step = row_steps_ptr + outside
    if TO_STORE:
        tl.store(k_at, tl.load(row, mask=inside), mask=inside)
        tl.store(v_at, tl.load(row + DIM, mask=inside), mask=inside)
        tl.store(k_steps_ptr + step, tl.load(row_step))
        tl.store(v_steps_ptr + step, tl.load(row_step + 1))
    else:
        tl.store(row, tl.load(k_at, mask=inside), mask=inside)
        tl.store(row + DIM, tl.load(v_at, mask=inside), mask=inside)
        tl.store(row_step, tl.load(k_steps_ptr + step))
        tl.store(row_step + 1, tl.load(v_steps_ptr + step))


def write(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, store_k: torch.Tensor, store_v: torch.Tensor) -> None:
    """Put rows k, v [N, Hkv, D] into `slots` [N] of one layer, rounded to the store's dtype."""
    if store_k.dtype == torch.uint8:
        _write_whole(k.contiguous(), v.contiguous(), slots, store_k, store_v)
        return
    _copy(k.contiguous().unsqueeze(0), v.contiguous().unsqueeze(0), slots, store_k.unsqueeze(0), store_v.unsqueeze(0), True)


def move(src: torch.Tensor, dst: torch.Tensor, store: KVTensors) -> None:
    """Copy slots `src` [M] to `dst` [M] in all layers. All rows are gathered before any is written: programs run in any
    order, and a destination may be another row's source.
    """
    if store.k.dtype == torch.uint8:
        _move_whole(src, dst, store)
        return
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


def _write_whole(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, store_k: torch.Tensor, store_v: torch.Tensor) -> None:
    count, heads, dim = k.shape
    if count:
        _write_whole_kernel[(count, heads)](
            k, v, slots, store_k, store_v, steps(store_k), steps(store_v), heads, DIM=dim, PAGE=store_sizes(store_k)[1],
            BLOCK=triton.next_power_of_2(dim // 2), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip


def _move_whole(src: torch.Tensor, dst: torch.Tensor, store: KVTensors) -> None:
    layers, pages, heads = store.k.shape[:3]
    dim, page_size = store_sizes(store.k)
    count = src.shape[0]
    if not count:
        return
    rows = store.k.new_empty(layers, count, heads, 2, dim)
    row_steps = torch.empty(layers, count, heads, 2, dtype=torch.float32, device=store.k.device)
    for slots, to_store in ((src, False), (dst, True)):
        _copy_whole_kernel[(count, heads, layers)](
            rows, row_steps, slots, store.k, store.v, steps(store.k), steps(store.v), count, heads, pages * heads, DIM=dim,
            PAGE=page_size, BLOCK=triton.next_power_of_2(dim), TO_STORE=to_store, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
