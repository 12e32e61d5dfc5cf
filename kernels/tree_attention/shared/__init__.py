"""The shared level of tree_attention: rows whose first keys lie in the same pages read them once, all nodes together.

Many chats on one system prompt share its pages. Their nodes are one tall tile over those keys (no causality, no ancestors: the
keys are older than all of them), and each row goes on with its own keys behind; both meet in the merge by log-sum-exp
(Hydragen: Juravsky et al. 2024; cascade inference: Ye et al. 2024). Equal to the contract in value, not in the grouping of the sums.
"""

from __future__ import annotations

from collections.abc import Sequence

from kernels.batch import SharedPrefix

WORTH_KEYS = 128  # fewer shared keys than this cost more in merging than they save


def shared_prefix(
    pages: Sequence[Sequence[int]], kv_lens: Sequence[int], row_ptr: Sequence[int], page_size: int
) -> SharedPrefix | None:
    """The run of neighbouring rows that saves most reads of keys, on the host. None where no two share WORTH_KEYS committed keys.

    Neighbours i and i + 1 share `common[i]` whole committed pages; the run is the largest rectangle under that histogram, found in
    one pass with a stack of rising heights.
    """
    common = [_common(pages[i], pages[i + 1], min(kv_lens[i], kv_lens[i + 1]) // page_size) for i in range(len(pages) - 1)]
    best, area = None, 0
    rising: list[tuple[int, int]] = []  # (first row of the run, pages it shares), pages ascending
    for i, height in enumerate([*common, 0]):
        first = i
        while rising and rising[-1][1] >= height:
            first, pages_shared = rising.pop()
            if (i - first) * pages_shared > area and pages_shared * page_size >= WORTH_KEYS:
                area = (i - first) * pages_shared
                best = SharedPrefix((first, i + 1), (row_ptr[first], row_ptr[i + 1]), pages_shared * page_size)
        rising.append((first, height))
    return best


def _common(a: Sequence[int], b: Sequence[int], most: int) -> int:
    for i in range(most):
        if a[i] != b[i]:
            return i
    return most
