"""Rotary embedding on the device, alone or fused with the write of K and V. Knows heads, tables and slots; refuses to
know sequences.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.batch import store_sizes
from kernels.float8.reference import codes
from kernels.float8.triton import rounded
from kernels.whole_store.triton import block_at, keep_key, keep_value, steps


@triton.jit
def _rotated(
    x_ptr,  # [D] one head of one node
    norm_ptr,  # [D] float32 or None: RMSNorm of the head first (Qwen3)
    cos_ptr,  # [D/2] of the node's position
    sin_ptr,
    eps,
    HALF: tl.constexpr,  # D/2
    BLOCK: tl.constexpr,
):
    """The two rotated halves, BLOCK channels each."""
    channel = tl.arange(0, BLOCK)
    inside = channel < HALF
    first = tl.load(x_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + HALF + channel, mask=inside, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        mean = (tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0)) / (2 * HALF)
        root = tl.sqrt_rn(mean + eps)
        first = tl.div_rn(first, root) * tl.load(norm_ptr + channel, mask=inside, other=0.0)
        second = tl.div_rn(second, root) * tl.load(norm_ptr + HALF + channel, mask=inside, other=0.0)
    cos = tl.load(cos_ptr + channel, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + channel, mask=inside, other=0.0)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _rope_kernel(
    x_ptr,  # [N, H, D]
    positions_ptr,  # [N]
    cos_ptr,  # [max_position, D/2]
    sin_ptr,
    out_ptr,  # [N, H, D]
    heads,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    node, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    angle = tl.load(positions_ptr + node).to(tl.int64) * HALF
    at = (node * heads + head) * (2 * HALF)
    first, second = _rotated(x_ptr + at, None, cos_ptr + angle, sin_ptr + angle, 0.0, HALF, BLOCK)
    channel = tl.arange(0, BLOCK)
    tl.store(out_ptr + at + channel, first, mask=channel < HALF)
    tl.store(out_ptr + at + HALF + channel, second, mask=channel < HALF)


@triton.jit
def _rope_write_kernel(
    q_ptr,  # [N, Hq * D], rows q_stride apart; k and v alike
    k_ptr,
    v_ptr,
    q_stride,
    k_stride,
    v_stride,
    q_norm_ptr,  # [D] or None
    k_norm_ptr,
    positions_ptr,  # [N]
    slots_ptr,  # [N]
    cos_ptr,  # [max_position, D/2]
    sin_ptr,
    q_out_ptr,  # [N, Hq, D]
    store_k_ptr,  # [pages, Hkv, D, PAGE], or bytes with steps
    store_v_ptr,  # [pages, Hkv, PAGE, D]
    k_steps_ptr,  # the same memory as float32 where it is bytes with steps, else None
    v_steps_ptr,
    eps,
    q_heads,
    kv_heads,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    node, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    DIM: tl.constexpr = 2 * HALF
    angle = tl.load(positions_ptr + node).to(tl.int64) * HALF
    channel = tl.arange(0, BLOCK)
    inside = channel < HALF
    if head < q_heads:
        x_ptr = q_ptr + node * q_stride + head * DIM
        first, second = _rotated(x_ptr, q_norm_ptr, cos_ptr + angle, sin_ptr + angle, eps, HALF, BLOCK)
        out = q_out_ptr + (node * q_heads + head) * DIM + channel
        tl.store(out, first, mask=inside)
        tl.store(out + HALF, second, mask=inside)
    else:
        head -= q_heads
        slot = tl.load(slots_ptr + node).to(tl.int64)
        held, token = slot // PAGE * kv_heads + head, slot % PAGE
        x_ptr = k_ptr + node * k_stride + head * DIM
        first, second = _rotated(x_ptr, k_norm_ptr, cos_ptr + angle, sin_ptr + angle, eps, HALF, BLOCK)
        value = v_ptr + node * v_stride + head * DIM + channel
        v_first, v_second = tl.load(value, mask=inside, other=0.0), tl.load(value + HALF, mask=inside, other=0.0)
        if k_steps_ptr is not None:
            block = block_at(held, token, DIM, PAGE)
            keep_key(store_k_ptr, k_steps_ptr, block, token, channel, inside, first, second, DIM)
            v_first, v_second = v_first.to(tl.float32), v_second.to(tl.float32)
            keep_value(store_v_ptr, v_steps_ptr, block, token, channel, inside, v_first, v_second, DIM)
        else:
            base = held * (DIM * PAGE)
            k_out = store_k_ptr + base + channel * PAGE + token
            tl.store(k_out, rounded(first, store_k_ptr), mask=inside)
            tl.store(k_out + HALF * PAGE, rounded(second, store_k_ptr), mask=inside)
            v_out = store_v_ptr + base + token * DIM + channel
            tl.store(v_out, rounded(v_first, store_v_ptr), mask=inside)
            tl.store(v_out + HALF, rounded(v_second, store_v_ptr), mask=inside)


def rope(x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [N, H, D] float32; the contract is the package's."""
    x = x.contiguous()
    out = torch.empty_like(x)
    nodes, heads, dim = x.shape
    if nodes:
        _rope_kernel[(nodes, heads)](
            x, positions, cos, sin, out, heads, HALF=dim // 2, BLOCK=triton.next_power_of_2(dim // 2), num_warps=1,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


def rope_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    store_k: torch.Tensor,
    store_v: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Normalise (when norms are given) and rotate q and k, write k and v to their slots, return q [N, Hq, D] float32.

    q [N, Hq * D], k and v [N, Hkv * D] have contiguous rows; they may be column ranges of one matrix. One layer's store.
    """
    kv_heads, (dim, page_size) = store_k.shape[1], store_sizes(store_k)
    nodes, q_heads = q.shape[0], q.shape[1] // dim
    out = torch.empty(nodes, q_heads, dim, dtype=torch.float32, device=q.device)
    store = (codes(store_k), codes(store_v), steps(store_k), steps(store_v))
    if nodes:
        _rope_write_kernel[(nodes, q_heads + kv_heads)](
            q, k, v, q.stride(0), k.stride(0), v.stride(0), q_norm, k_norm, positions, slots, cos, sin, out, *store,
            eps, q_heads, kv_heads, HALF=dim // 2, PAGE=page_size, BLOCK=triton.next_power_of_2(dim // 2), num_warps=1,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out
