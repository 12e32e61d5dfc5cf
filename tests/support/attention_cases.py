"""Ragged attention problems with poisoned unused slots, and their answer from torch's dense masked attention."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from toy import Row, step_inputs

from kernels.batch import KVTensors, StepInputs
from kernels.kv_slots import reference as slots
from kernels.tree_attention import reference as attention
from kernels.whole_store.reference import keys_at, values_at


@dataclass(frozen=True)
class Shape:
    """One row: `kind` is chain (causal row), deep (a tree that is a path), star (all children of the root) or random."""

    kv_len: int
    nodes: int
    kind: str = "random"


@dataclass(frozen=True)
class AttentionCase:
    q: torch.Tensor  # [N, Hq, D]
    store_k: torch.Tensor  # [pages, Hkv, D, page_size]
    store_v: torch.Tensor  # [pages, Hkv, page_size, D]
    inputs: StepInputs
    scale: float
    window: int | None
    sinks: torch.Tensor | None
    expected: torch.Tensor  # [N, Hq, D] from scaled_dot_product_attention in float32


# One node, page boundary +-1, a wide star, a deep chain of 64 nodes, prefill chunks with and without a past.
ODD_ROWS: dict[str, tuple[Shape, ...]] = {
    "one node, no past": (Shape(0, 1),),
    "page boundary -1": (Shape(14, 1), Shape(13, 2)),
    "page boundary": (Shape(15, 1), Shape(16, 1), Shape(16, 16, "chain")),
    "page boundary +1": (Shape(17, 1), Shape(16, 5)),
    "wide star": (Shape(5, 33, "star"),),
    "deep chain": (Shape(31, 64, "deep"),),
    "full tree": (Shape(3, 64),),
    "chunk 123": (Shape(0, 123, "chain"), Shape(7, 5)),
    "mixed": (Shape(40, 3, "star"), Shape(9, 21, "chain"), Shape(0, 1, "chain"), Shape(65, 7), Shape(1, 2)),
}


def tree_parents(shape: Shape, rng: random.Random) -> list[int] | None:
    if shape.kind == "chain":
        return None
    pick = {"deep": lambda i: i - 1, "star": lambda i: 0, "random": rng.randrange}[shape.kind]
    return [-1] + [pick(i) for i in range(1, shape.nodes)]


def make_case(
    shapes: Sequence[Shape],
    q_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    with_sinks: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> AttentionCase:
    rng = random.Random(seed)
    g = torch.Generator().manual_seed(seed)
    needed = [-(-(s.kv_len + s.nodes) // page_size) for s in shapes]
    ids = list(range(sum(needed) + 2))
    rng.shuffle(ids)
    store_k = torch.full((len(ids), kv_heads, head_dim, page_size), float("nan"), dtype=dtype)
    store_v = torch.full((len(ids), kv_heads, page_size, head_dim), float("nan"), dtype=dtype)
    sinks = torch.randn(q_heads, generator=g) * 2 if with_sinks else None
    scale = head_dim**-0.5
    rows, queries, answers = [], [], []
    for shape, count in zip(shapes, needed, strict=True):
        pages, ids = ids[:count], ids[count:]
        row = Row(range(shape.nodes), pages, shape.kv_len, tree_parents(shape, rng))
        keys = torch.randn(shape.kv_len + shape.nodes, kv_heads, head_dim, generator=g).to(dtype)
        values = torch.randn(shape.kv_len + shape.nodes, kv_heads, head_dim, generator=g).to(dtype)
        for index in range(shape.kv_len + shape.nodes):
            store_k[pages[index // page_size], :, :, index % page_size] = keys[index]
            store_v[pages[index // page_size], :, index % page_size] = values[index]
        q = torch.randn(shape.nodes, q_heads, head_dim, generator=g) * 1.5
        rows.append(row)
        queries.append(q)
        answers.append(_dense(q, keys.float(), values.float(), _mask(row, window), scale, sinks))
    case = AttentionCase(
        torch.cat(queries), store_k, store_v, step_inputs(rows, page_size, device), scale, window, sinks, torch.cat(answers)
    )
    if device == "cpu":
        return case
    moved = {n: getattr(case, n).to(device) for n in ("q", "store_k", "store_v", "expected")}
    return AttentionCase(
        inputs=case.inputs, scale=scale, window=window, sinks=None if sinks is None else sinks.to(device), **moved
    )


def _mask(row: Row, window: int | None) -> torch.Tensor:
    """[nodes, kv_len + nodes] bool, from parents, not from words."""
    nodes = len(row.tokens)
    mask = torch.zeros(nodes, row.kv_len + nodes, dtype=torch.bool)
    for i in range(nodes):
        path, at = [], i
        while at >= 0:
            path.append(row.kv_len + at)
            at = at - 1 if row.parents is None else row.parents[at]
        seen = [*range(row.kv_len), *reversed(path)]
        mask[i, seen if window is None else seen[-window:]] = True
    return mask


def _dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, sinks: torch.Tensor | None
) -> torch.Tensor:
    """q [n, Hq, D]; k, v [L, Hkv, D]; mask [n, L] -> [n, Hq, D]. A sink is one more key, of zero value and given logit."""
    groups = q.shape[1] // k.shape[1]
    q = q.transpose(0, 1)  # [Hq, n, D]
    k = k.transpose(0, 1).repeat_interleave(groups, 0)  # [Hq, L, D]
    v = v.transpose(0, 1).repeat_interleave(groups, 0)
    bias = torch.zeros(mask.shape).masked_fill(~mask, float("-inf")).expand(q.shape[0], -1, -1)
    if sinks is not None:
        k = torch.cat((k, torch.zeros_like(k[:, :1])), 1)
        v = torch.cat((v, torch.zeros_like(v[:, :1])), 1)
        bias = torch.cat((bias, sinks[:, None, None].expand(-1, mask.shape[0], 1)), -1)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale).transpose(0, 1)


def poisoned(pages: int, heads: int, dim: int, page_size: int, layers: int = 1) -> KVTensors:
    """A store whose slots have steps NaN until they are written."""
    store = KVTensors.allocate(layers, pages, heads, dim, page_size, torch.uint8)
    store.k.fill_(255)
    store.v.fill_(255)
    return store


def as_bytes(case: AttentionCase) -> KVTensors:
    """The case's keys and values as bytes; slots that nobody wrote stay poisoned."""
    pages, heads, dim, page_size = case.store_k.shape
    store = poisoned(pages, heads, dim, page_size)
    slot = (~case.store_k.isnan().flatten(1, 2).any(1)).flatten().nonzero().flatten()
    page, offset = slot // page_size, slot % page_size
    slots.write(case.store_k[page, :, :, offset], case.store_v[page, :, offset], slot, store.k[0], store.v[0])
    return store


def dequantised(case: AttentionCase, store: KVTensors) -> torch.Tensor:
    """Attention in float32 over the numbers that the bytes stand for."""
    pages, page_size = case.store_k.shape[0], case.store_k.shape[-1]
    slot = torch.arange(pages * page_size)
    page, offset = slot // page_size, slot % page_size
    k, v = torch.empty_like(case.store_k), torch.empty_like(case.store_v)
    for target, (numbers, steps) in (
        (k.transpose(2, 3), keys_at(store.k[0], page, offset)),
        (v, values_at(store.v[0], page, offset)),
    ):
        target[page, :, offset] = numbers * steps[..., None]
    return attention.tree_attention(case.q, k, v, case.inputs, case.scale, case.window, case.sinks)
