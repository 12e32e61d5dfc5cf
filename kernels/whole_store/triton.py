"""Bytes of keys and values on the device: where they lie, and how they are made. Knows the form; refuses to know sequences.

Steps are float32 among the bytes, so kernels take the store twice: as bytes and as `steps`, the same memory seen as float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.linear import LEAST

_LEAST = tl.constexpr(LEAST)


def steps(store: torch.Tensor) -> torch.Tensor | None:
    """The store's memory as float32; None when it is kept in another form."""
    return store.view(torch.float32) if store.dtype == torch.uint8 else None


@triton.jit
def block_at(head, token, DIM: tl.constexpr, PAGE: tl.constexpr):
    """First byte of the block that holds `token` of a page; `head` = page * Hkv + head. int64."""
    return (head * (PAGE // 16) + token // 16) * (16 * (DIM + 4))


@triton.jit
def key_at(block, channel, token):
    """Byte of a key's channel."""
    return block + channel // 4 * 64 + token % 16 * 4 + channel % 4


@triton.jit
def value_at(block, channel, token, DIM: tl.constexpr):
    """Byte of a value's channel."""
    return block + token % 16 // 4 * (4 * DIM) + channel * 4 + token % 4


@triton.jit
def step_at(block, token, DIM: tl.constexpr):
    """float32 of a token's step, of keys and values alike."""
    return block // 4 + 4 * DIM + token % 16


@triton.jit
def number(code):
    """uint8 -> the whole number it stands for, float32."""
    return code.to(tl.float32) - 128.0


@triton.jit
def encoded(first, second):
    """Two halves of a vector (float32, lanes beyond its end zero) -> uint8 codes of each, and the step."""
    finite = tl.min(_is_finite(first), axis=0) + tl.min(_is_finite(second), axis=0) == 2
    first, second = tl.where(finite, first, 0.0), tl.where(finite, second, 0.0)
    largest = tl.maximum(tl.max(tl.abs(first), axis=0), tl.max(tl.abs(second), axis=0))
    empty = largest < _LEAST
    by = tl.where(empty, 0.0, tl.div_rn(127.0, tl.where(empty, 1.0, largest)))
    step = tl.where(empty, 0.0, tl.div_rn(largest, 127.0))
    return _codes(first, by), _codes(second, by), tl.where(finite, step, float("nan"))


@triton.jit
def keep_key(store_ptr, steps_ptr, block, token, channel, inside, first, second, DIM: tl.constexpr):
    """Put a key's halves (channels `channel` and DIM/2 + `channel`) into its place."""
    low, high, step = encoded(first, second)
    tl.store(store_ptr + key_at(block, channel, token), low, mask=inside)
    tl.store(store_ptr + key_at(block, DIM // 2 + channel, token), high, mask=inside)
    tl.store(steps_ptr + step_at(block, token, DIM), step)


@triton.jit
def keep_value(store_ptr, steps_ptr, block, token, channel, inside, first, second, DIM: tl.constexpr):
    """The same of a value."""
    low, high, step = encoded(first, second)
    tl.store(store_ptr + value_at(block, channel, token, DIM), low, mask=inside)
    tl.store(store_ptr + value_at(block, DIM // 2 + channel, token, DIM), high, mask=inside)
    tl.store(steps_ptr + step_at(block, token, DIM), step)


@triton.jit
def _is_finite(x):
    return (tl.abs(x) <= 3.4028234663852886e38).to(tl.int32)  # not for NaN either


@triton.jit
def _codes(x, by):
    # Adding 1.5 * 2^23 leaves no room for a fraction: rounds to the nearest integer, halves to even.
    nearest = (x * by + 12582912.0) - 12582912.0
    return (nearest.to(tl.int32) + 128).to(tl.uint8)
