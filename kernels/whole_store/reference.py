"""Bytes of keys and values in plain torch. Knows the form; refuses to know pages and sequences."""

from __future__ import annotations

import torch

from kernels.linear import LEAST
from kernels.whole_store import BLOCK


def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors [..., D] float32 -> bytes uint8 [..., D] and steps float32 [...]."""
    largest = x.abs().amax(dim=-1)
    finite = x.isfinite().all(dim=-1)
    empty = largest < LEAST
    most = torch.full_like(largest, 127.0)
    by = torch.where(finite & ~empty, most / largest, 0.0)
    numbers = torch.round(torch.where(finite[..., None], x, 0.0) * by[..., None])  # half to even
    step = torch.where(empty, 0.0, largest / most)
    return (numbers + 128.0).to(torch.uint8), torch.where(finite, step, torch.nan)


def key_parts(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of keys [..., 16 * (D + 4)] -> views: bytes [..., D/4, 16, 4], steps float32 [..., 16]."""
    codes, steps = _parts(blocks)
    return codes.view(*codes.shape[:-1], -1, BLOCK, 4), steps


def value_parts(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of values [..., 16 * (D + 4)] -> views: bytes [..., 4, D, 4], steps float32 [..., 16]."""
    codes, steps = _parts(blocks)
    return codes.view(*codes.shape[:-1], BLOCK // 4, -1, 4), steps


def _parts(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes = blocks.shape[-1] - 4 * BLOCK
    return blocks[..., :codes], blocks[..., codes:].view(torch.float32)


def keys_at(store_k: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers float32 [M, Hkv, D] and steps [M, Hkv] of M tokens of one layer."""
    codes, steps = key_parts(store_k)
    found = codes[page, :, offset // BLOCK, :, offset % BLOCK]  # [M, Hkv, D/4, 4]
    return found.flatten(-2).float() - 128.0, steps[page, :, offset // BLOCK, offset % BLOCK]


def values_at(store_v: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of values."""
    codes, steps = value_parts(store_v)
    block, at = offset // BLOCK, offset % BLOCK
    return codes[page, :, block, at // 4, :, at % 4].float() - 128.0, steps[page, :, block, at]


def write(
    k: torch.Tensor, v: torch.Tensor, page: torch.Tensor, offset: torch.Tensor, store_k: torch.Tensor, store_v: torch.Tensor
) -> None:
    """Rows k, v [N, Hkv, D] float32 into one layer."""
    block, at = offset // BLOCK, offset % BLOCK
    codes, steps = key_parts(store_k)
    numbers, step = encode(k)
    codes[page, :, block, :, at] = numbers.view(*numbers.shape[:-1], -1, 4)  # indexed view [N, Hkv, D/4, 4]
    steps[page, :, block, at] = step
    codes, steps = value_parts(store_v)
    numbers, step = encode(v)
    codes[page, :, block, at // 4, :, at % 4] = numbers
    steps[page, :, block, at] = step


def move(src: torch.Tensor, dst: torch.Tensor, page_size: int, store_k: torch.Tensor, store_v: torch.Tensor) -> None:
    """Tokens of slots `src` to `dst` (int64) in all layers, codes and steps; every source is read before any target is written."""
    held = [part[at] for part, at in _places(src, page_size, store_k, store_v)]
    for (part, at), values in zip(_places(dst, page_size, store_k, store_v), held, strict=True):
        part[at] = values


_Index = tuple[torch.Tensor | slice, ...]


def _places(
    slots: torch.Tensor, page_size: int, store_k: torch.Tensor, store_v: torch.Tensor
) -> list[tuple[torch.Tensor, _Index]]:
    """Where the parts of those tokens lie in the stores of all layers."""
    page, block, at = slots // page_size, slots % page_size // BLOCK, slots % BLOCK
    every = slice(None)
    keys, key_steps = key_parts(store_k)
    values, value_steps = value_parts(store_v)
    return [
        (keys, (every, page, every, block, every, at)),
        (key_steps, (every, page, every, block, at)),
        (values, (every, page, every, block, at // 4, every, at % 4)),
        (value_steps, (every, page, every, block, at)),
    ]
