"""Rows of a draft model's pass -> the inputs of one forward. Knows the layout of `StepInputs`; refuses to know why a row runs.

A row here is a forest over committed keys: nodes in order parent before child, whose roots continue the key before `kv_len`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kernels.batch import PackedInputs


@dataclass(frozen=True, slots=True)
class DraftRow:
    """One sequence's nodes in one draft pass."""

    token_ids: Sequence[int]
    parents: Sequence[int] | None  # row-local, -1 = the key before kv_len; None = a causal chain of any length
    kv_len: int  # keys of this sequence that are valid in the draft store
    page_ids: Sequence[int]
    scored: Sequence[int]  # row-local nodes whose logits are wanted, ascending


def draft_inputs(rows: Sequence[DraftRow], page_size: int) -> PackedInputs:
    """The inputs of a draft pass; node i of a row lies at logical index kv_len + i."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    words: list[int] = []
    scored: list[int] = []
    row_ptr = [0]
    used: list[int] = []  # pages of each row that the pass reads or writes
    causal = array("B", bytes(len(rows)))
    for index, row in enumerate(rows):
        first, start, pages = len(ids), row.kv_len, row.page_ids
        stop = start + len(row.token_ids)
        ids += row.token_ids
        at = start
        while at < stop:  # one run of slots a page
            page, offset = divmod(at, page_size)
            end = min(stop, at + page_size - offset)
            slot = pages[page] * page_size + offset
            slots += range(slot, slot + end - at)
            at = end
        if row.parents is None:
            causal[index] = 1
            positions += range(start, stop)
            words += [0] * len(row.token_ids)
        else:
            own: list[int] = []
            depths: list[int] = []
            for i, parent in enumerate(row.parents):
                own.append((own[parent] if parent >= 0 else 0) | 1 << i)
                depths.append(depths[parent] + 1 if parent >= 0 else start)
            words += own
            positions += depths
        scored += [first + node for node in row.scored] if first else row.scored
        row_ptr.append(len(ids))
        used.append(-(-stop // page_size))
    nodes, count, width = len(ids), len(rows), max(used)
    flat = ids + positions + slots + row_ptr + [row.kv_len for row in rows] + scored
    for row, needed in zip(rows, used, strict=True):
        flat += row.page_ids[:needed]
        flat += [0] * (width - needed)
    return PackedInputs(array("i", flat), array("Q", words), causal, nodes, count, len(scored), width)
