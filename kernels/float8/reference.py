"""Rounding to 8-bit floats in plain torch."""

from __future__ import annotations

import torch

from kernels.float8 import LARGEST


def encode(x: torch.Tensor) -> torch.Tensor:
    """float32 -> float8_e4m3fn of the same shape; torch alone would make NaN of what is too large."""
    return x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 as a store of `dtype` keeps it."""
    return encode(x) if dtype == torch.float8_e4m3fn else x.to(dtype)


def codes(store: torch.Tensor) -> torch.Tensor:
    """The bytes of a store of 8-bit floats, any other store as it is: indexing and copying are defined for bytes everywhere."""
    return store.view(torch.uint8) if store.dtype == torch.float8_e4m3fn else store
