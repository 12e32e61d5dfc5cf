"""The ragged batch every op sees. Knows tensors and shapes; refuses to know requests, drafters or text.

One *row* is one sequence's contribution to a step: a prefill chunk (a causal chain of known tokens), a plain decode
step (one node) or a draft tree (the root, then its nodes). Words used in shapes: N nodes of all rows together, S rows,
P pages in the longest row's table, R scored nodes, L layers, Hq query heads, Hkv key/value heads, D head dimension.
"""

from __future__ import annotations

import math
import mmap
from array import array
from contextlib import suppress
from dataclasses import dataclass

import torch

from kernels.whole_store import BLOCK, why_not


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Neighbouring rows whose first keys lie in the same pages. Plain ints, known on the host; a hint that changes no value."""

    rows: tuple[int, int]  # rows first .. last - 1
    nodes: tuple[int, int]  # their nodes
    keys: int  # committed keys in common, whole pages


@dataclass(frozen=True, slots=True)
class StepInputs:
    """All tensors of one forward pass. Integers are int32 unless said otherwise; all live on the model's device.

    Node i of row s has logical key index ``kv_lens[s] + i``: its K and V go to slot
    ``page_table[s, index // page_size] * page_size + index % page_size``, which `slots` spells out.
    """

    input_ids: torch.Tensor  # [N] token of each node
    positions: torch.Tensor  # [N] rotary position = kv_lens[row] + depth of the node (a root has depth 0)
    slots: torch.Tensor  # [N] where the node's K and V are written
    words: torch.Tensor  # [N] int64; bit j set = node j of the same row is this node or one of its ancestors; 0 in causal rows
    causal: torch.Tensor  # [S] uint8; 1 = the row is a chain of any length and `words` is not read
    row_ptr: torch.Tensor  # [S+1] row s owns nodes row_ptr[s]:row_ptr[s+1]
    page_table: torch.Tensor  # [S, P] page ids, padded with 0
    kv_lens: torch.Tensor  # [S] keys committed to the store before this step
    score_rows: torch.Tensor  # [R] node indices whose logits are wanted, ascending
    shared: SharedPrefix | None = None  # for devices that read shared keys once; None is always right

    @property
    def num_nodes(self) -> int:
        return self.input_ids.shape[0]

    @property
    def num_rows(self) -> int:
        return self.kv_lens.shape[0]


@dataclass(frozen=True, slots=True)
class PackedInputs:
    """The fields of `StepInputs`, one after the other in plain buffers: making nine tensors would be a good part of a short pass."""

    ints: array[
        int
    ]  # "i": input_ids, positions, slots [nodes each], row_ptr [rows + 1], kv_lens [rows], score_rows, page_table
    words: array[int]  # "Q" [nodes]
    causal: array[int]  # "B" [rows]
    nodes: int
    rows: int
    scored: int
    pages: int  # columns of the page table
    shared: SharedPrefix | None = None

    def tensors(self, device: torch.device) -> StepInputs:
        nodes, rows = self.nodes, self.rows
        ints = torch.frombuffer(self.ints, dtype=torch.int32).to(device)
        sizes = [nodes, nodes, nodes, rows + 1, rows, self.scored, rows * self.pages]
        ids, positions, slots, row_ptr, kv_lens, score_rows, table = torch.split(ints, sizes)
        return StepInputs(
            input_ids=ids,
            positions=positions,
            slots=slots,
            words=torch.frombuffer(self.words, dtype=torch.int64).to(device),
            causal=torch.frombuffer(self.causal, dtype=torch.uint8).to(device),
            row_ptr=row_ptr,
            page_table=table.view(rows, self.pages),
            kv_lens=kv_lens,
            score_rows=score_rows,
            shared=self.shared,
        )


@dataclass(frozen=True, slots=True)
class KVTensors:
    """The keys and values of one model over the shared page pool. Same layout on every device.

    K is stored transposed inside a page so that one vector load takes the same channel of a whole page of keys.
    dtype float32, bfloat16 or float8_e4m3fn; or uint8, whole numbers with steps: both are then
    [L, pages, Hkv, page_size/16, 16 * (D + 4)] bytes, in the form of kernels/whole_store.
    """

    k: torch.Tensor  # [L, pages, Hkv, D, page_size]
    v: torch.Tensor  # [L, pages, Hkv, page_size, D]

    @property
    def page_size(self) -> int:
        return store_sizes(self.k)[1]

    @property
    def num_pages(self) -> int:
        return self.k.shape[1]

    @staticmethod
    def allocate(
        layers: int, pages: int, kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype, device: str = "cpu"
    ) -> KVTensors:
        """Zero-filled store. On the CPU the system commits its memory as pages are first written."""
        zeros = _lazy_zeros if device == "cpu" else torch.zeros
        every = (layers, pages, kv_heads)
        if dtype == torch.uint8:
            reason = why_not(head_dim, page_size)
            if reason is not None:
                raise ValueError(reason)
            blocks = (*every, page_size // BLOCK, BLOCK * (head_dim + 4))
            return KVTensors(*(zeros(blocks, dtype=dtype, device=device) for _ in range(2)))
        return KVTensors(
            k=zeros((*every, head_dim, page_size), dtype=dtype, device=device),
            v=zeros((*every, page_size, head_dim), dtype=dtype, device=device),
        )


def store_sizes(store_k: torch.Tensor) -> tuple[int, int]:
    """Channels of a head and tokens of a page, of all layers' keys or of one's."""
    if store_k.dtype == torch.uint8:
        return store_k.shape[-1] // BLOCK - 4, store_k.shape[-2] * BLOCK
    return store_k.shape[-2], store_k.shape[-1]


def fitting(dtype: torch.dtype, head_dim: int, page_size: int) -> torch.dtype:
    """`dtype`, or bfloat16 where bytes were wanted and heads or pages of this size cannot be kept so."""
    return torch.bfloat16 if dtype == torch.uint8 and why_not(head_dim, page_size) is not None else dtype


def bytes_per_token(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """What a token takes in a store, steps included."""
    head = head_dim + 4 if dtype == torch.uint8 else head_dim * dtype.itemsize
    return 2 * layers * kv_heads * head


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Zeros in a private mapping of their own: `torch.zeros` would write all of them now, which makes a gigabyte resident.

    In large pages where the system has them: with small ones sixteen sequences' keys take 5 % longer to read once the store was
    written to in an order other than its own."""
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)  # holds the mapping as long as any view of it lives
