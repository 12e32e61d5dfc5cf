"""rope in C++. The decoder calls the same code without this wrapper."""

from __future__ import annotations

import torch

from kernels.native import require
from kernels.native.tensors import address


def rope(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, isa: str | None = None
) -> torch.Tensor:
    """Rotate pairs (i, i + D/2) of x [N, H, D] float32 by the angle of `positions` [N] int32. Raises IndexError past the tables."""
    rows, heads, dim = x.shape
    if cos.shape != sin.shape or cos.shape[1] * 2 != dim:
        raise ValueError(f"tables {list(cos.shape)} and {list(sin.shape)} do not fit heads of {dim}")
    if rows and not 0 <= int(positions.min()) <= int(positions.max()) < cos.shape[0]:
        raise IndexError(f"positions must lie in 0..{cos.shape[0] - 1}")
    library = require()
    out = torch.empty_like(x)
    library.c.fs_rope(
        library.isa(isa),
        address(x, torch.float32, "x"),
        address(positions, torch.int32, "positions"),
        address(cos, torch.float32, "cos"),
        address(sin, torch.float32, "sin"),
        rows,
        heads,
        dim,
        out.data_ptr(),
    )
    return out
