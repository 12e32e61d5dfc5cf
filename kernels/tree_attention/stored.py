"""Reading keys and values on the device, whatever form they are kept in. Knows pages; refuses to know rows and sums.

`head` = page * Hkv + head (int64) and `token` = place in the page, one for each key; they and `channel` are shaped so that they
broadcast to the tile that is wanted. With `steps_ptr` None the store is [pages, Hkv, D, PAGE] keys and [pages, Hkv, PAGE, D] values,
numbers or (FLOAT8) codes; else bytes with steps, and a tile holds the whole numbers, to be multiplied by `read_steps`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.float8.reference import codes
from kernels.float8.triton import from_e4m3
from kernels.whole_store.triton import block_at, key_at, number, step_at, steps, value_at


class Stored(NamedTuple):
    """One layer's store as kernels take it."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]  # keys, values, steps of both or None
    float8: bool

    @staticmethod
    def of(store_k: torch.Tensor, store_v: torch.Tensor) -> Stored:
        float8 = store_k.dtype == torch.float8_e4m3fn
        return Stored((codes(store_k), codes(store_v), steps(store_k), steps(store_v)), float8)


@triton.jit
def read_keys(
    k_ptr, steps_ptr, head, token, channel, mask, DIM: tl.constexpr, PAGE: tl.constexpr, FLOAT8: tl.constexpr, WIDEN: tl.constexpr
):  # fmt: skip
    """A tile of keys, as `_number` makes it."""
    if steps_ptr is not None:
        at = key_at(block_at(head, token, DIM, PAGE), channel, token)
    else:
        at = head * (DIM * PAGE) + channel * PAGE + token
    return _number(tl.load(k_ptr + at, mask=mask, other=0), steps_ptr, FLOAT8, WIDEN)


@triton.jit
def read_values(
    v_ptr, steps_ptr, head, token, channel, mask, DIM: tl.constexpr, PAGE: tl.constexpr, FLOAT8: tl.constexpr, WIDEN: tl.constexpr
):  # fmt: skip
    """A tile of values, as `_number` makes it."""
    if steps_ptr is not None:
        at = value_at(block_at(head, token, DIM, PAGE), channel, token, DIM)
    else:
        at = head * (DIM * PAGE) + token * DIM + channel
    return _number(tl.load(v_ptr + at, mask=mask, other=0), steps_ptr, FLOAT8, WIDEN)


@triton.jit
def read_steps(steps_ptr, head, token, mask, DIM: tl.constexpr, PAGE: tl.constexpr):
    """float32, one for each key."""
    return tl.load(steps_ptr + step_at(block_at(head, token, DIM, PAGE), token, DIM), mask=mask, other=0.0)


@triton.jit
def _number(raw, steps_ptr, FLOAT8: tl.constexpr, WIDEN: tl.constexpr):
    """float32 (WIDEN), else bfloat16 where the store holds codes or bytes (exactly) and its own type where it does not."""
    if steps_ptr is not None:
        found = number(raw)
        if not WIDEN:
            found = found.to(tl.bfloat16)
    elif FLOAT8:
        found = from_e4m3(raw.to(tl.int32))
        if not WIDEN:
            found = found.to(tl.bfloat16)
    elif WIDEN:
        found = raw.to(tl.float32)
    else:
        found = raw
    return found
