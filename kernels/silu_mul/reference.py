"""SwiGLU's elementwise half, one row at a time. Knows two matrices; refuses to know where they come from.

Vectorised exp() rounds differently in the vector body and in the scalar tail of a tensor, so an element's bits depend on
its index and on the tensor's size. Each row is therefore handled as a tensor of its own.
"""

from __future__ import annotations

import torch


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up; both [N, I] float32."""
    out = torch.empty_like(gate)
    for i in range(gate.shape[0]):
        g = gate[i].clone()  # [I]
        out[i] = g / (1.0 + torch.exp(-g)) * up[i]
    return out
