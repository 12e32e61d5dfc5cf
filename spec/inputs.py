"""Plan rows and trees -> the tensors of one forward pass. Knows the layout of `StepInputs`; refuses to know why a row is there.

Everything is gathered in plain lists and crosses into torch as three buffers, whatever the number of rows: the ints of all
fields in one, the ancestor words in one, the causal flags in one. On another device that is three copies.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from kernels.batch import StepInputs
from kernels.tree_attention.shared import shared_prefix
from spec.plan import PlanRow
from spec.tree import DraftTree


def build_inputs(rows: Sequence[PlanRow], trees: Sequence[DraftTree], page_size: int, device: torch.device) -> StepInputs:
    """One tree per row, empty where nothing was drafted. Row layout: known tokens, then the tree's nodes in order.

    A tree may hang only on a single known token (the root); rows without a tree are causal chains.
    """
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    row_ptr = [0]
    score_rows: list[int] = []
    words: list[int] | None = None
    causal = bytearray(b"\x01") * len(rows)
    used: list[int] = []  # pages of each row that the step reads or writes
    for index, row in enumerate(rows):
        start, known, tree, pages = row.num_kv, row.token_ids, trees[index], row.page_ids
        first = len(input_ids)
        stop = start + len(known)
        input_ids += known
        positions += range(start, stop)
        if tree.token_ids:
            if words is None:
                words = [0] * first
            words += tree.words()
            causal[index] = 0
            input_ids += tree.token_ids
            positions += [start + depth for depth in tree.depths]
            stop += len(tree.token_ids)
        elif words is not None:
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
        used.append(-(-stop // page_size))
    nodes, count, scored = len(input_ids), len(rows), len(score_rows)
    flat = input_ids + positions + slots + row_ptr + [row.num_kv for row in rows] + score_rows
    width = max(used)
    for row, needed in zip(rows, used, strict=True):
        flat += row.page_ids[:needed]
        flat += [0] * (width - needed)
    ints = torch.frombuffer(array("i", flat), dtype=torch.int32).to(device)
    ids, pos, slot_ids, ptr, kv, score, table = torch.split(
        ints, [nodes, nodes, nodes, count + 1, count, scored, count * width]
    )
    # Only kernels of other devices read shared keys once; on the CPU the search would cost and bring nothing.
    shared = None
    if count > 1 and device.type != "cpu":
        shared = shared_prefix([row.page_ids for row in rows], [row.num_kv for row in rows], row_ptr, page_size)
    return StepInputs(
        input_ids=ids,
        positions=pos,
        slots=slot_ids,
        words=_words(words, nodes, device),
        causal=torch.frombuffer(causal, dtype=torch.uint8).to(device),
        row_ptr=ptr,
        page_table=table.view(count, width),
        kv_lens=kv,
        score_rows=score,
        shared=shared,
    )


def _words(words: list[int] | None, nodes: int, device: torch.device) -> torch.Tensor:
    """[N] int64. Bit 63 is the sign bit: the words are packed unsigned and read signed."""
    if words is None:
        return torch.zeros(nodes, dtype=torch.int64, device=device)
    return torch.frombuffer(array("Q", words), dtype=torch.int64).to(device)
