"""Attention one key at a time on the device. Knows pages, ancestor words and positions; refuses to know tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.batch import StepInputs, store_sizes
from kernels.tree_attention.ordered import SPLIT, parts_of
from kernels.tree_attention.stored import Stored, read_keys, read_values
from kernels.tree_attention.triton import LOG2_E, _merge_kernel, _row_of_tile
from kernels.whole_store.triton import block_at, step_at

TILE = 16  # nodes times grouped heads of one program: one height for every batch, and with it one order of every sum


@triton.jit(do_not_specialize=["window", "rows", "nodes", "table_width"])
def _ordered_kernel(
    q_ptr,  # [N, Hq, D] float32
    k_ptr,  # [pages, Hkv, D, PAGE] float32, bfloat16, or uint8 (FLOAT8); or bytes with steps
    v_ptr,  # [pages, Hkv, PAGE, D]
    k_steps_ptr,  # the same memory as float32 where it is bytes with steps, else None
    v_steps_ptr,
    out_ptr,  # [PARTS, N, Hq, D] float32, not yet divided by the sum
    top_ptr,  # [PARTS, N, Hq] float32 largest scaled score in base 2
    sum_ptr,  # [PARTS, N, Hq] float32
    sinks_ptr,  # [Hq] float32 or None
    positions_ptr,  # [N]
    words_ptr,  # [N] int64
    causal_ptr,  # [S] uint8
    row_ptr,  # [S+1]
    table_ptr,  # [S, P]
    lens_ptr,  # [S]
    scale,  # of the scores, times log2(e)
    window,  # positions a node sees, read when WINDOWED
    rows,  # S
    nodes,  # N
    table_width,  # P
    kv_heads,
    GROUPS: tl.constexpr,  # Hq / Hkv
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr,  # nodes of a tile
    BLOCK_M: tl.constexpr,  # at least BLOCK_Q * GROUPS
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOWED: tl.constexpr,
    FLOAT8: tl.constexpr,
):
    tile, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = _row_of_tile(row_ptr, rows, tile, BLOCK_Q)
    first = tl.load(row_ptr + row)
    size = tl.load(row_ptr + row + 1) - first
    start_node = (tile - (first // BLOCK_Q + row)) * BLOCK_Q
    if start_node >= size:
        return
    kv_len = tl.load(lens_ptr + row)
    causal = tl.load(causal_ptr + row) != 0

    # lane m of the tile is node start_node + m // GROUPS under query head kv_head * GROUPS + m % GROUPS
    lane = tl.arange(0, BLOCK_M)
    node = start_node + lane // GROUPS
    head = kv_head * GROUPS + lane % GROUPS
    live = (lane < BLOCK_Q * GROUPS) & (node < size)
    channel = tl.arange(0, BLOCK_D)
    real = channel < DIM
    lane_at = (first + node).to(tl.int64) * (kv_heads * GROUPS) + head  # index into [N, Hq]
    q = tl.load(q_ptr + lane_at[:, None] * DIM + channel[None, :], mask=live[:, None] & real[None, :], other=0.0)
    word = tl.load(words_ptr + first + node, mask=live, other=0)
    position = tl.load(positions_ptr + first + node, mask=live, other=0)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:  # noqa: SIM102 - known when compiling, which `part` is not
        if part == 0:
            top = tl.load(sinks_ptr + head, mask=live, other=0.0) * 1.4426950408889634
            total = tl.full([BLOCK_M], 1.0, tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    # Committed keys of this part, then all of the row's own whose positions fall into it.
    begin = tl.minimum(part * SPLIT, kv_len)
    committed = tl.minimum((part + 1) * SPLIT, kv_len) - begin
    own_keys = tl.where((part + 1) * SPLIT > kv_len, tl.where(causal, tl.minimum(start_node + BLOCK_Q, size), size), 0)
    for step in range(committed + own_keys):
        own = step - committed  # index among the row's nodes of this step; negative for committed keys
        key = tl.where(own < 0, begin + step, kv_len + own)
        key_position = key
        if own >= 0:
            key_position = tl.load(positions_ptr + first + own)
        bit = (word >> tl.minimum(tl.maximum(own, 0), 63).to(tl.int64)) & 1
        seen = (own < 0) | tl.where(causal, own <= node, bit != 0)
        seen = seen & (key_position // SPLIT == part)
        if WINDOWED:
            seen = seen & (position - key_position < window)
        page = tl.load(table_ptr + row * table_width + key // PAGE).to(tl.int64)
        held, token = page * kv_heads + kv_head, key % PAGE
        k = read_keys(k_ptr, k_steps_ptr, held, token, channel, real, DIM, PAGE, FLOAT8, True)
        v = read_values(v_ptr, v_steps_ptr, held, token, channel, real, DIM, PAGE, FLOAT8, True)
        score = tl.sum(q * k[None, :], axis=1) * scale
        if k_steps_ptr is not None:
            score *= tl.load(k_steps_ptr + step_at(block_at(held, token, DIM, PAGE), token, DIM))
            v *= tl.load(v_steps_ptr + step_at(block_at(held, token, DIM, PAGE), token, DIM))
        score = tl.where(seen, score, float("-inf"))
        new_top = tl.maximum(top, score)
        origin = tl.where(new_top == float("-inf"), 0.0, new_top)  # a lane that has seen nothing: keeps -inf - -inf away
        weight = tl.exp2(score - origin)
        fade = tl.exp2(top - origin)
        mixed = tl.where(seen[:, None], mixed * fade[:, None] + weight[:, None] * v[None, :], mixed)
        total = tl.where(seen, total * fade + weight, total)
        top = new_top

    lane_at += part.to(tl.int64) * nodes * (kv_heads * GROUPS)
    tl.store(top_ptr + lane_at, top, mask=live)
    tl.store(sum_ptr + lane_at, total, mask=live)
    tl.store(out_ptr + lane_at[:, None] * DIM + channel[None, :], mixed, mask=live[:, None] & real[None, :])


def tree_attention(
    q: torch.Tensor,
    store_k: torch.Tensor,
    store_v: torch.Tensor,
    inputs: StepInputs,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """out [N, Hq, D] float32; the contract is the package's, `sinks` [Hq] float32. Nothing is read back from the device."""
    nodes, q_heads, dim = q.shape
    kv_heads, page_size = store_k.shape[1], store_sizes(store_k)[1]
    out = torch.empty_like(q)
    if nodes == 0:
        return out
    groups, rows = q_heads // kv_heads, inputs.num_rows
    block_m = max(TILE, triton.next_power_of_2(groups))
    block_q = block_m // groups
    tiles = nodes // block_q + rows
    parts = parts_of(inputs.page_table.shape[1] * page_size)
    partial = out.new_empty(parts, nodes, q_heads, dim)
    top = out.new_empty(parts, nodes, q_heads)
    total = torch.empty_like(top)
    block_d = max(16, triton.next_power_of_2(dim))
    store = Stored.of(store_k, store_v)
    _ordered_kernel[(tiles, kv_heads, parts)](
        q.contiguous(), *store.tensors, partial, top, total, sinks, inputs.positions, inputs.words,
        inputs.causal, inputs.row_ptr, inputs.page_table, inputs.kv_lens, scale * LOG2_E, window or 0, rows, nodes,
        inputs.page_table.shape[1], kv_heads, GROUPS=groups, DIM=dim, PAGE=page_size, BLOCK_Q=block_q, BLOCK_M=block_m,
        BLOCK_D=block_d, SPLIT=SPLIT, WINDOWED=window is not None, FLOAT8=store.float8,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    _merge_kernel[(nodes * q_heads,)](
        partial, top, total, out, nodes * q_heads, parts, DIM=dim, BLOCK_D=block_d, num_warps=1, enable_fp_fusion=False
    )
    return out
