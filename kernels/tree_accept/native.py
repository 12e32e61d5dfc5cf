"""tree_accept in C++: the same call as the reference."""

from __future__ import annotations

import torch

from kernels.native import require
from kernels.native.tensors import address


def tree_accept(
    input_ids: torch.Tensor,
    target_ids: torch.Tensor,
    parents: torch.Tensor,
    row_ptr: torch.Tensor,
    max_depth: int,
    isa: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(path [S, max_depth], num_accepted [S], next_ids [S]), all int32; the contract is the package's."""
    library = require()
    rows = row_ptr.shape[0] - 1
    path = torch.empty(rows, max_depth, dtype=torch.int32)
    num_accepted = torch.empty(rows, dtype=torch.int32)
    next_ids = torch.empty(rows, dtype=torch.int32)
    i32 = torch.int32
    library.c.fs_tree_accept(
        library.isa(isa),
        address(input_ids, i32, "input_ids"),
        address(target_ids, i32, "target_ids"),
        address(parents, i32, "parents"),
        address(row_ptr, i32, "row_ptr"),
        rows,
        max_depth,
        path.data_ptr(),
        num_accepted.data_ptr(),
        next_ids.data_ptr(),
    )
    return path, num_accepted, next_ids
