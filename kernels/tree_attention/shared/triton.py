"""Attention of many rows' nodes to keys that all of them share. Knows pages and tiles; refuses to know rows apart."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.tree_attention.stored import read_keys, read_steps, read_values


@triton.jit(do_not_specialize=["window", "first", "last", "row", "keys", "nodes", "table_width", "split_keys", "place"])
def _shared_kernel(
    q_ptr,  # [N, Hq, D] float32
    k_ptr,  # [pages, Hkv, D, PAGE] float32, bfloat16, or uint8 (FLOAT8); or bytes with steps
    v_ptr,  # [pages, Hkv, PAGE, D]
    k_steps_ptr,  # the same memory as float32 where it is bytes with steps, else None
    v_steps_ptr,
    out_ptr,  # [PARTS, N, Hq, D] float32, not yet divided by the sum
    top_ptr,  # [PARTS, N, Hq] float32 largest scaled score in base 2
    sum_ptr,  # [PARTS, N, Hq] float32
    positions_ptr,  # [N]
    table_ptr,  # [S, P]
    scale,  # of the scores, times log2(e)
    window,  # positions a node sees, read when WINDOWED
    first,  # nodes first .. last - 1 share the keys
    last,
    row,  # whose page table is read
    keys,
    nodes,  # N
    table_width,  # P
    kv_heads,
    split_keys,  # keys of one split, a multiple of BLOCK_N
    place,  # the part that split 0 writes
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOWED: tl.constexpr,
    FLOAT8: tl.constexpr,
    WIDEN: tl.constexpr,  # multiply in float32 (the interpreter)
):
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    lane = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # a node and one of its heads that read this key/value head
    node = first + lane // GROUPS
    head = kv_head * GROUPS + lane % GROUPS
    live = node < last
    channel = tl.arange(0, BLOCK_D)
    real = channel < DIM
    lane_at = node.to(tl.int64) * (kv_heads * GROUPS) + head
    q = tl.load(q_ptr + lane_at[:, None] * DIM + channel[None, :], mask=live[:, None] & real[None, :], other=0.0)
    if not WIDEN:
        q = q.to(tl.bfloat16 if k_ptr.dtype.element_ty == tl.uint8 else k_ptr.dtype.element_ty)
    position = tl.load(positions_ptr + node, mask=live, other=0)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    end = tl.minimum(keys, (split + 1) * split_keys)
    for start in range(split * split_keys, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        inside = key < end
        page = tl.load(table_ptr + row * table_width + key // PAGE, mask=inside, other=0).to(tl.int64)
        held, token = page * kv_heads + kv_head, key % PAGE
        tile_mask = real[:, None] & inside[None, :]  # [D, keys]
        k = read_keys(k_ptr, k_steps_ptr, held[None, :], token[None, :], channel[:, None], tile_mask, DIM, PAGE, FLOAT8, WIDEN)
        tile_mask = inside[:, None] & real[None, :]  # [keys, D]
        v = read_values(
            v_ptr, v_steps_ptr, held[:, None], token[:, None], channel[None, :], tile_mask, DIM, PAGE, FLOAT8, WIDEN
        )
        score = tl.dot(q, k, input_precision="ieee") * scale
        if k_steps_ptr is not None:
            score *= read_steps(k_steps_ptr, held, token, inside, DIM, PAGE)[None, :]
        seen = inside[None, :] & live[:, None]
        if WINDOWED:
            seen = seen & (position[:, None] - key[None, :] < window)
        score = tl.where(seen, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1))
        origin = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(score - origin[:, None])
        fade = tl.exp2(top - origin)
        share = weight
        if v_steps_ptr is not None:
            share = tl.where(weight == 0.0, 0.0, weight * read_steps(v_steps_ptr, held, token, inside, DIM, PAGE)[None, :])
        mixed = mixed * fade[:, None] + tl.dot(share.to(v.dtype), v, input_precision="ieee")
        total = total * fade + tl.sum(weight, axis=1)
        top = new_top
    lane_at += (place + split).to(tl.int64) * nodes * (kv_heads * GROUPS)
    tl.store(top_ptr + lane_at, top, mask=live)
    tl.store(sum_ptr + lane_at, total, mask=live)
    tl.store(out_ptr + lane_at[:, None] * DIM + channel[None, :], mixed, mask=live[:, None] & real[None, :])
