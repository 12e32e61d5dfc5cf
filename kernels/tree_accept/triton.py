"""The acceptance walk on the device, one program a row. Knows token ids and parents; refuses to know sampling."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["max_depth"])
def _tree_accept_kernel(
    ids_ptr,  # [N]
    targets_ptr,  # [N]
    parents_ptr,  # [N] row-local
    row_ptr,  # [S+1]
    path_ptr,  # [S, max_depth], filled with -1
    accepted_ptr,  # [S]
    next_ptr,  # [S]
    max_depth,
    BLOCK: tl.constexpr,  # at least the nodes of the longest row
):
    row = tl.program_id(0)
    first = tl.load(row_ptr + row)
    size = tl.load(row_ptr + row + 1) - first
    index = tl.arange(0, BLOCK)
    draft = (index > 0) & (index < size)
    ids = tl.load(ids_ptr + first + index, mask=draft, other=-1)
    parents = tl.load(parents_ptr + first + index, mask=draft, other=-1)
    node = 0
    depth = 0
    walking = max_depth > 0
    while walking:
        wanted = tl.load(targets_ptr + first + node)
        child = tl.min(tl.where(draft & (parents == node) & (ids == wanted), index, BLOCK), axis=0)
        if child < BLOCK:
            tl.store(path_ptr + row * max_depth + depth, child)
            node = child
            depth += 1
            walking = depth < max_depth
        else:
            walking = False
    tl.store(accepted_ptr + row, depth)
    tl.store(next_ptr + row, tl.load(targets_ptr + first + node))


def tree_accept(
    input_ids: torch.Tensor, target_ids: torch.Tensor, parents: torch.Tensor, row_ptr: torch.Tensor, max_depth: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(path [S, max_depth], num_accepted [S], next_ids [S]), all int32 on the device; the contract is the package's."""
    rows, device = row_ptr.shape[0] - 1, row_ptr.device
    path = torch.full((rows, max_depth), -1, dtype=torch.int32, device=device)
    accepted = torch.empty(rows, dtype=torch.int32, device=device)
    next_ids = torch.empty(rows, dtype=torch.int32, device=device)
    if rows:
        block = triton.next_power_of_2(input_ids.shape[0])  # the longest row's length is not known on the host
        _tree_accept_kernel[(rows,)](
            input_ids, target_ids, parents, row_ptr, path, accepted, next_ids, max_depth, BLOCK=block, num_warps=1,
            enable_fp_fusion=False,
        )  # fmt: skip
    return path, accepted, next_ids
