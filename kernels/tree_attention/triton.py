"""Tree attention over the paged store on the device. Knows pages, ancestor words and tiles; refuses to know tokens.

Flash-style online softmax (Dao et al. 2022) in base 2. A tile is BLOCK_Q nodes of one row times the query heads that share
one key/value head, so a page is read once for all of them. Long rows are cut into splits of keys that run side by
side and are merged by their log-sum-exp (Flash-Decoding, Dao et al. 2023). Attention sinks follow Xiao et al. 2023 in the
learned-logit form: one more key of a given logit and value zero.

Keys are visited in slot order of the row (committed, then node order), and keys that are no ancestors weigh zero: equal to
the reference in value, not in the grouping of the sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.batch import SharedPrefix, StepInputs, store_sizes
from kernels.interpreter import interpreted
from kernels.tree_attention.shared.triton import _shared_kernel
from kernels.tree_attention.stored import Stored, read_keys, read_steps, read_values

LOG2_E = 1.4426950408889634
BLOCK_N = 64  # keys visited at once
WANTED_PROGRAMS = 264  # two for each multiprocessor of a large device; more splits than that only add merging
MIN_SPLIT_KEYS = 256
MOST_SHARED_SPLITS = 15  # a step is sized for them and one part more, however many keys are shared


@triton.jit
def _row_of_tile(row_ptr, rows, tile, BLOCK_Q: tl.constexpr):
    """The row that owns `tile`. Row s's tiles start at row_ptr[s] // BLOCK_Q + s, which leaves room for its own count."""
    low = 0
    high = rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(row_ptr + middle) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    return low


# Sizes that change from step to step are not specialised on: no compilation once the server is ready.
@triton.jit(
    do_not_specialize=[
        "window", "rows", "nodes", "table_width", "split_keys", "shared_first", "shared_last", "shared_keys",
    ]
)  # fmt: skip
def _attention_kernel(
    q_ptr,  # [N, Hq, D] float32
    k_ptr,  # [pages, Hkv, D, PAGE] float32, bfloat16, or uint8 (FLOAT8); or bytes with steps
    v_ptr,  # [pages, Hkv, PAGE, D]
    k_steps_ptr,  # the same memory as float32 where it is bytes with steps, else None
    v_steps_ptr,
    out_ptr,  # [N, Hq, D] float32; with splits [SPLITS, N, Hq, D], not yet divided by the sum
    top_ptr,  # [SPLITS, N, Hq] float32 largest scaled score in base 2, or None without splits
    sum_ptr,  # [SPLITS, N, Hq] float32
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
    split_keys,  # keys of one split, a multiple of BLOCK_N
    shared_first,  # rows shared_first .. shared_last - 1 skip their first shared_keys keys: another kernel takes them
    shared_last,
    shared_keys,
    GROUPS: tl.constexpr,  # Hq / Hkv
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOWED: tl.constexpr,
    FLOAT8: tl.constexpr,  # the store holds e4m3, seen as bytes
    WIDEN: tl.constexpr,  # multiply in float32 (the interpreter)
):
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
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
    if not WIDEN:
        q = q.to(tl.bfloat16 if k_ptr.dtype.element_ty == tl.uint8 else k_ptr.dtype.element_ty)
    word = tl.load(words_ptr + first + node, mask=live, other=0)
    position = tl.load(positions_ptr + first + node, mask=live, other=0)

    # The keys of this tile, then of this split. Both ends are fixed by absolute index, never by the batch.
    end = kv_len + tl.where(causal, tl.minimum(start_node + BLOCK_Q, size), size)
    begin = 0
    if WINDOWED:
        oldest = kv_len + tl.where(causal, start_node, 0) - window + 1
        begin = tl.maximum(oldest, 0) // BLOCK_N * BLOCK_N
    begin = tl.maximum(begin, tl.where((row >= shared_first) & (row < shared_last), shared_keys, 0))
    begin = tl.maximum(begin, split * split_keys)
    end = tl.minimum(end, (split + 1) * split_keys)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:  # noqa: SIM102 - known when compiling, which `split` is not
        if split == 0:
            top = tl.load(sinks_ptr + head, mask=live, other=0.0) * 1.4426950408889634
            total = tl.full([BLOCK_M], 1.0, tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        inside = key < end
        page = tl.load(table_ptr + row * table_width + key // PAGE, mask=inside, other=0).to(tl.int64)
        held = page * kv_heads + kv_head
        tile_mask = real[:, None] & inside[None, :]  # [D, keys]
        k = read_keys(
            k_ptr, k_steps_ptr, held[None, :], (key % PAGE)[None, :], channel[:, None], tile_mask, DIM, PAGE, FLOAT8, WIDEN
        )
        score = tl.dot(q, k, input_precision="ieee") * scale
        if k_steps_ptr is not None:
            score *= read_steps(k_steps_ptr, held, key % PAGE, inside, DIM, PAGE)[None, :]

        own = key - kv_len  # index among the row's nodes of this step; negative for committed keys
        bit = (word[:, None] >> tl.minimum(tl.maximum(own, 0), 63).to(tl.int64)[None, :]) & 1
        ancestor = tl.where(causal, own[None, :] <= node[:, None], bit != 0)
        seen = inside[None, :] & ((own < 0)[None, :] | ancestor)
        if WINDOWED:
            node_position = tl.load(positions_ptr + first + own, mask=inside & (own >= 0), other=0)
            key_position = tl.where(own < 0, key, node_position)
            seen = seen & (position[:, None] - key_position[None, :] < window)
        score = tl.where(seen, score, float("-inf"))

        new_top = tl.maximum(top, tl.max(score, axis=1))
        origin = tl.where(new_top == float("-inf"), 0.0, new_top)  # a lane that has seen nothing: keeps -inf - -inf away
        weight = tl.exp2(score - origin[:, None])
        fade = tl.exp2(top - origin)
        tile_mask = inside[:, None] & real[None, :]  # [keys, D]
        v = read_values(
            v_ptr, v_steps_ptr, held[:, None], (key % PAGE)[:, None], channel[None, :], tile_mask, DIM, PAGE, FLOAT8, WIDEN
        )
        share = weight
        if v_steps_ptr is not None:  # an unseen key's step may be anything, but a broken score must stay one
            share = tl.where(weight == 0.0, 0.0, weight * read_steps(v_steps_ptr, held, key % PAGE, inside, DIM, PAGE)[None, :])
        mixed = mixed * fade[:, None] + tl.dot(share.to(v.dtype), v, input_precision="ieee")
        total = total * fade + tl.sum(weight, axis=1)
        top = new_top

    if top_ptr is not None:
        lane_at += split.to(tl.int64) * nodes * (kv_heads * GROUPS)
        tl.store(top_ptr + lane_at, top, mask=live)
        tl.store(sum_ptr + lane_at, total, mask=live)
    else:
        mixed = mixed / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out_ptr + lane_at[:, None] * DIM + channel[None, :], mixed, mask=live[:, None] & real[None, :])


@triton.jit(do_not_specialize=["count", "splits"])
def _merge_kernel(
    part_ptr,  # [SPLITS, N, Hq, D]
    top_ptr,  # [SPLITS, N, Hq]
    sum_ptr,  # [SPLITS, N, Hq]
    out_ptr,  # [N, Hq, D]
    count,  # N * Hq
    splits,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK_D)
    inside = channel < DIM
    top = tl.load(top_ptr + at)
    for split in range(1, splits):
        top = tl.maximum(top, tl.load(top_ptr + split * count + at))
    total = 0.0
    mixed = tl.zeros([BLOCK_D], tl.float32)
    for split in range(splits):
        here = split * count + at
        weight = tl.exp2(tl.load(top_ptr + here) - top)
        total += weight * tl.load(sum_ptr + here)
        mixed += weight * tl.load(part_ptr + here * DIM + channel, mask=inside, other=0.0)
    tl.store(out_ptr + at * DIM + channel, mixed / total, mask=inside)


def tree_attention(
    q: torch.Tensor,
    store_k: torch.Tensor,
    store_v: torch.Tensor,
    inputs: StepInputs,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None = None,
    split_keys: int | None = None,
) -> torch.Tensor:
    """out [N, Hq, D] float32; the contract is the package's, `sinks` [Hq] float32.

    `split_keys` fixes how many keys of a row one program takes (rounded up to BLOCK_N); None lets the batch's size decide, so
    that the device is full. Keys that `inputs.shared` names are read once for all of its rows. Nothing is read back from the device.
    """
    nodes, q_heads, dim = q.shape
    kv_heads, page_size = store_k.shape[1], store_sizes(store_k)[1]
    out = torch.empty_like(q)
    if nodes == 0:
        return out
    groups, rows = q_heads // kv_heads, inputs.num_rows
    store = Stored.of(store_k, store_v)
    block_m = min(128, max(16, triton.next_power_of_2(triton.cdiv(nodes, rows) * groups)))
    block_m = max(block_m, triton.next_power_of_2(groups))
    block_q = block_m // groups
    tiles = nodes // block_q + rows
    longest = inputs.page_table.shape[1] * page_size
    if split_keys is None:
        splits = max(1, min(WANTED_PROGRAMS // (tiles * kv_heads), triton.cdiv(longest, MIN_SPLIT_KEYS)))
        split_keys = triton.cdiv(longest, splits)
    split_keys = triton.cdiv(split_keys, BLOCK_N) * BLOCK_N
    splits = triton.cdiv(longest, split_keys)

    shared, shared_splits = inputs.shared, 0
    if shared is not None:
        shared_splits = splits_of_shared((shared.nodes[1] - shared.nodes[0]) * groups, kv_heads, shared.keys)
    parts = splits + shared_splits
    pieces = _pieces(q, parts, empty=shared is not None) if parts > 1 else None
    target, top, total = pieces or (out, None, None)
    block_d = max(16, triton.next_power_of_2(dim))
    q = q.contiguous()
    _attention_kernel[(tiles, kv_heads, splits)](
        q, *store.tensors, target, top, total, sinks, inputs.positions, inputs.words, inputs.causal,
        inputs.row_ptr, inputs.page_table, inputs.kv_lens, scale * LOG2_E, window or 0, rows, nodes,
        inputs.page_table.shape[1], kv_heads, split_keys, *((*shared.rows, shared.keys) if shared else (0, 0, 0)),
        GROUPS=groups, DIM=dim, PAGE=page_size, BLOCK_Q=block_q,
        BLOCK_M=block_m, BLOCK_N=BLOCK_N, BLOCK_D=block_d, WINDOWED=window is not None, FLOAT8=store.float8,
        WIDEN=interpreted(_attention_kernel), num_warps=4, num_stages=2,
        enable_fp_fusion=False,
    )  # fmt: skip
    if shared is not None and pieces is not None:
        _shared_level(q, store, page_size, pieces, inputs, shared, scale, window, splits, shared_splits)
    if pieces is not None:
        _merge_kernel[(nodes * q_heads,)](
            *pieces, out, nodes * q_heads, parts, DIM=dim, BLOCK_D=block_d, num_warps=1, enable_fp_fusion=False
        )
    return out


def splits_of_shared(lanes: int, kv_heads: int, keys: int) -> int:
    """How many parts `keys` shared keys are cut into, under tiles of `lanes` nodes times grouped heads in all."""
    tiles = triton.cdiv(lanes, _shared_height(lanes))
    return int(max(1, min(WANTED_PROGRAMS // (tiles * kv_heads), triton.cdiv(keys, MIN_SPLIT_KEYS), MOST_SHARED_SPLITS)))


def _shared_height(lanes: int) -> int:
    return min(128, max(16, int(triton.next_power_of_2(lanes))))


def _pieces(q: torch.Tensor, parts: int, empty: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums [parts, N, Hq, D], tops and totals [parts, N, Hq] of every part. `empty`: rows that share nothing leave some as they are."""
    nodes, q_heads, dim = q.shape
    sums, total = q.new_empty(parts, nodes, q_heads, dim), q.new_empty(parts, nodes, q_heads)
    top = torch.empty_like(total)
    if empty:
        sums.zero_()
        total.zero_()
        top.fill_(float("-inf"))
    return sums, top, total


def _shared_level(
    q: torch.Tensor,
    store: Stored,
    page_size: int,
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],  # sums, tops and totals, as `_merge_kernel` reads them
    inputs: StepInputs,
    shared: SharedPrefix,
    scale: float,
    window: int | None,
    place: int,  # the first part that is written
    splits: int,
) -> None:
    nodes, q_heads, dim = q.shape
    kv_heads = store.tensors[0].shape[1]
    groups, (first, last) = q_heads // kv_heads, shared.nodes
    lanes = (last - first) * groups
    block_m = _shared_height(lanes)
    split_keys = triton.cdiv(triton.cdiv(shared.keys, splits), BLOCK_N) * BLOCK_N
    _shared_kernel[(triton.cdiv(lanes, block_m), kv_heads, splits)](
        q, *store.tensors, *parts, inputs.positions, inputs.page_table, scale * LOG2_E, window or 0, first, last,
        shared.rows[0], shared.keys, nodes, inputs.page_table.shape[1], kv_heads, split_keys, place, GROUPS=groups, DIM=dim,
        PAGE=page_size, BLOCK_M=block_m, BLOCK_N=BLOCK_N, BLOCK_D=max(16, triton.next_power_of_2(dim)),
        WINDOWED=window is not None, FLOAT8=store.float8, WIDEN=interpreted(_shared_kernel), num_warps=4, num_stages=2,
        enable_fp_fusion=False,
    )  # fmt: skip
