"""Decoder weights on a device. Knows that weights are dataclasses of tensors; refuses to know what they compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from kernels.decoder import DecoderWeights


def placed(weights: DecoderWeights, device: str) -> DecoderWeights:
    """The same weights with every tensor on `device`; tensors that are there already, and tensors used twice, are not copied again."""
    moved: dict[int, torch.Tensor] = {}

    def once(tensor: torch.Tensor) -> torch.Tensor:
        key = id(tensor)  # every tensor lives as long as `weights`
        if key not in moved:
            moved[key] = tensor.to(device)
        return moved[key]

    result: DecoderWeights = _mapped(weights, once)
    return result


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_mapped(v, change) for v in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _mapped(getattr(value, f.name), change) for f in fields(value) if f.init})
    return value
