"""tree_attention with bits that depend on a node's own path only: the contract of the package above, in full.

The fast kernel visits keys by slot, sixty-four at once, so the same path in another tree is summed in another grouping. Here keys
enter one at a time in order of absolute position, and a key that is no ancestor leaves a node's sums as they were, bit for
bit. Parts of SPLIT positions are summed side by side and merged in order; their borders are absolute positions too. Nothing about
the batch enters: not its row counts, not the height of a tile, not the number of parts.
"""

SPLIT = 256  # positions of one part


def parts_of(positions: int) -> int:
    """Parts that so many positions are summed in; a step holds a result of every one of them for each node and head."""
    return -(-positions // SPLIT)
