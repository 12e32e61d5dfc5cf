"""Plan rows and trees -> the inputs of one forward pass. Knows the layout of `StepInputs`; refuses to know why a row is there.

Everything is gathered in plain lists and packed into three buffers, whatever the number of rows: the ints of all fields in one,
the ancestor words in one, the causal flags in one. On the CPU they are read where they are; on another device that is three copies.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from kernels.batch import PackedInputs, StepInputs
from kernels.tree_attention.shared import shared_prefix
from spec.plan import PlanRow
from spec.tree import DraftTree


def build_inputs(rows: Sequence[PlanRow], trees: Sequence[DraftTree], page_size: int, device: torch.device) -> StepInputs:
    """`pack_inputs` as tensors."""
    return pack_inputs(rows, trees, page_size, device.type != "cpu").tensors(device)


def pack_inputs(rows: Sequence[PlanRow], trees: Sequence[DraftTree], page_size: int, share: bool = False) -> PackedInputs:
    """One tree per row, empty where nothing was drafted. Row layout: known tokens, then the tree's nodes in order.

    A tree may hang only on a single known token (the root); rows without a tree are causal chains. `share`: look for keys that
    neighbouring rows share. Only kernels of other devices read those once; on the CPU the search would cost and bring nothing.
    """
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    row_ptr = [0]
    score_rows: list[int] = []
    kv_lens: list[int] = []
    words: list[int] | None = None
    causal = array("B", b"\x01" * len(rows))
    width = 0
    used: list[int] = []  # pages of each row that the step reads or writes
    for index, row in enumerate(rows):
        start, known, tree, pages = row.num_kv, row.token_ids, trees[index], row.page_ids
        first = len(input_ids)
        stop = start + len(known)
        input_ids += known
        if tree.token_ids:
            positions.append(start)
            positions += [start + depth for depth in tree.depths]
            if words is None:
                words = [0] * first
            words += tree.words()
            causal[index] = 0
            input_ids += tree.token_ids
            stop += len(tree.token_ids)
        else:
            positions += range(start, stop)
            if words is not None:
                words += [0] * len(known)
        at = start
        while at < stop:  # one run of slots a page
            page, offset = divmod(at, page_size)
            end = min(stop, at + page_size - offset)
            slot = pages[page] * page_size + offset
            slots += range(slot, slot + end - at)
            at = end
        if row.prompt_scored:
            score_rows += range(first, len(input_ids))
        elif row.scored:
            score_rows += range(first + len(known) - 1, len(input_ids))
        row_ptr.append(len(input_ids))
        kv_lens.append(start)
        needed = -(-stop // page_size)
        used.append(needed)
        if needed > width:
            width = needed
    ints = array("i", input_ids)
    for part in (positions, slots, row_ptr, kv_lens, score_rows):
        ints.fromlist(part)
    for row, needed in zip(rows, used, strict=True):
        ints.fromlist(row.page_ids[:needed])
        if needed < width:
            ints.frombytes(bytes(4 * (width - needed)))
    nodes, count = len(input_ids), len(rows)
    shared = None
    if share and count > 1:
        shared = shared_prefix([row.page_ids for row in rows], kv_lens, row_ptr, page_size)
    # Bit 63 is the sign bit: the words are packed unsigned and read signed.
    packed = array("Q", bytes(8 * nodes) if words is None else words)
    return PackedInputs(ints, packed, causal, nodes, count, len(score_rows), width, shared)
