"""tree_attention in C++, one layer. The decoder calls the same code without this wrapper."""

from __future__ import annotations

import torch

from kernels.batch import StepInputs, store_sizes
from kernels.native import require
from kernels.native.library import check
from kernels.native.tensors import address, layered_store, step_data


def tree_attention(
    q: torch.Tensor,
    store_k: torch.Tensor,
    store_v: torch.Tensor,
    inputs: StepInputs,
    scale: float,
    window: int | None,
    threads: int = 1,
    isa: str | None = None,
) -> torch.Tensor:
    """out [N, Hq, D] float32; the contract is the package's. Raises NativeError on indices out of bounds."""
    library = require()
    nodes, q_heads, dim = q.shape
    kv_heads, store_dim = store_k.shape[1], store_sizes(store_k)[0]
    if nodes != inputs.num_nodes or dim != store_dim or q_heads % kv_heads != 0 or q_heads // kv_heads > 256:
        raise ValueError(f"q {list(q.shape)} does not fit {inputs.num_nodes} nodes and a store of {list(store_k.shape)}")
    out = torch.empty_like(q)
    check(
        library.c.fs_tree_attention(
            library.isa(isa),
            library.team(threads).handle,
            address(q, torch.float32, "q"),
            q_heads,
            layered_store(store_k, store_v, 1),
            0,
            step_data(inputs),
            scale,
            window or 0,
            out.data_ptr(),
        )
    )
    return out
