"""Where Triton kernels run in this suite: the GPU when torch sees one, else Triton's interpreter on the CPU."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import TypeVar

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Largest relative error of one conversion to bfloat16: devices round to nearest, Triton's interpreter cuts bits off.
BFLOAT16_STEP = 2.0**-8 if DEVICE == "cuda" else 2.0**-7

T = TypeVar("T")


def to_device(value: T, device: str = DEVICE) -> T:
    """Tensors, and dataclasses and tuples of them, on the device; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(to_device(v, device) for v in value)  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: to_device(getattr(value, f.name), device) for f in fields(value) if f.init})
    return value
