"""Walking trees along the target's choices. Knows token ids and parents; refuses to know how the choices were made."""

from __future__ import annotations

import torch


def tree_accept(
    input_ids: torch.Tensor, target_ids: torch.Tensor, parents: torch.Tensor, row_ptr: torch.Tensor, max_depth: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(path [S, max_depth], num_accepted [S], next_ids [S]), all int32; the contract is the package's.

    A walk stops after max_depth nodes; its next token is then the target's at the node it stopped on.
    """
    ids, targets, parent = input_ids.tolist(), target_ids.tolist(), parents.tolist()
    ptr = row_ptr.tolist()
    rows = len(ptr) - 1
    path = torch.full((rows, max_depth), -1, dtype=torch.int32)
    num_accepted = torch.zeros(rows, dtype=torch.int32)
    next_ids = torch.zeros(rows, dtype=torch.int32)
    for row in range(rows):
        first, size = ptr[row], ptr[row + 1] - ptr[row]
        node, depth = 0, 0
        while depth < max_depth:
            wanted = targets[first + node]
            child = next((c for c in range(1, size) if parent[first + c] == node and ids[first + c] == wanted), None)
            if child is None:
                break
            path[row, depth] = child
            node, depth = child, depth + 1
        num_accepted[row] = depth
        next_ids[row] = targets[first + node]
    return path, num_accepted, next_ids
