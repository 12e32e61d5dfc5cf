"""Attention over gathered paths, one node at a time. Knows slots and ancestor words; refuses to know tokens.

A node's keys are copied out of the store in order of absolute position, so what follows sees tensors whose shape and
content depend on the node's own path only: same token path, same bits, wherever its keys lie and whatever else runs.
"""

from __future__ import annotations

import torch

from kernels.batch import StepInputs, store_sizes
from kernels.float8.reference import codes
from kernels.tree_attention.whole import attend_node
from kernels.whole_store import reference as whole_store


def tree_attention(
    q: torch.Tensor,
    store_k: torch.Tensor,
    store_v: torch.Tensor,
    inputs: StepInputs,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """out [N, Hq, D]; the contract is the package's. `sinks` [Hq] float32 adds a key of logit sinks[h] and value zero."""
    paths = key_slots(inputs, store_sizes(store_k)[1], window)
    return attend(q, store_k, store_v, paths, scale, sinks, firsts=first_positions(inputs, paths))


def first_positions(inputs: StepInputs, paths: list[torch.Tensor]) -> list[int]:
    """The absolute position of each path's first key; its last one is the node's own."""
    return [position + 1 - path.shape[0] for position, path in zip(inputs.positions.tolist(), paths, strict=True)]


def key_slots(inputs: StepInputs, page_size: int, window: int | None) -> list[torch.Tensor]:
    """For every node, the slots of the keys it sees, by ascending absolute position: N tensors int64 [L_i]."""
    row_ptr = inputs.row_ptr.tolist()
    words = inputs.words.tolist()
    paths: list[torch.Tensor] = []
    for row, kv_len in enumerate(inputs.kv_lens.tolist()):
        first, last = row_ptr[row], row_ptr[row + 1]
        indices = torch.arange(kv_len + last - first)  # logical key indices of the row
        slots = inputs.page_table[row].long()[indices // page_size] * page_size + indices % page_size
        for i in range(last - first):
            if bool(inputs.causal[row]):
                path = slots[: kv_len + i + 1]
            else:
                # >> keeps the sign of node 63's word, & 1 drops it
                own = [kv_len + j for j in range(i + 1) if words[first + i] >> j & 1]
                path = torch.cat((slots[:kv_len], slots[own]))
            paths.append(path if window is None else path[-window:])
    return paths


def attend(
    q: torch.Tensor,
    store_k: torch.Tensor,
    store_v: torch.Tensor,
    paths: list[torch.Tensor],
    scale: float,
    sinks: torch.Tensor | None = None,
    *,
    firsts: list[int],
) -> torch.Tensor:
    """softmax(q k^T * scale) v per node and head over the node's own path. q [N, Hq, D]; paths and firsts as the functions above give."""
    if store_k.dtype == torch.uint8:
        return _attend_whole(q * scale, store_k, store_v, paths, firsts, sinks)
    heads, dim = q.shape[1:]
    kv_heads = store_k.shape[1]
    out = torch.empty_like(q)
    for i, path in enumerate(paths):
        page, offset = path // store_k.shape[-1], path % store_k.shape[-1]
        k, v = codes(store_k)[page, :, :, offset], codes(store_v)[page, :, offset, :]  # [L, Hkv, D]
        k = k.view(store_k.dtype).float().transpose(0, 1).contiguous()  # [Hkv, L, D]
        v = v.view(store_v.dtype).float().transpose(0, 1).contiguous()  # [Hkv, L, D]
        grouped = q[i].reshape(kv_heads, -1, 1, dim)  # [Hkv, G, 1, D]
        scores = (grouped * k.unsqueeze(1)).sum(-1).reshape(heads, -1) * scale  # [Hq, L]
        top = scores.amax(-1, keepdim=True)  # [Hq, 1]
        if sinks is not None:
            top = torch.maximum(top, sinks.unsqueeze(-1))
        weights = torch.exp(scores - top)  # [Hq, L]
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sinks.unsqueeze(-1) - top)
        mixed = (weights.reshape(kv_heads, -1, path.shape[0], 1) * v.unsqueeze(1)).sum(-2)  # [Hkv, G, D]
        out[i] = mixed.reshape(heads, dim) / total
    return out


def _attend_whole(
    q: torch.Tensor,
    store_k: torch.Tensor,
    store_v: torch.Tensor,
    paths: list[torch.Tensor],
    firsts: list[int],
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    page_size = store_sizes(store_k)[1]
    out = torch.empty_like(q)
    for i, (path, first) in enumerate(zip(paths, firsts, strict=True)):
        page, offset = path // page_size, path % page_size
        keys, values = whole_store.keys_at(store_k, page, offset), whole_store.values_at(store_v, page, offset)
        out[i] = attend_node(q[i], keys, values, first, sinks)
    return out
