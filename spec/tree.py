"""Draft trees as plain ints. Knows parents, depths and ancestor words; refuses to know tensors and drafters' insides."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from spec.errors import InvariantError

MAX_NODES = 63  # root + 63 nodes fit one 64-bit ancestor word
ROOT = -1


@dataclass(frozen=True, slots=True)
class DraftProbs:
    """The distribution a node was really drawn from (the rejection rule's q). None of it is read by the exact rule."""

    token_ids: torch.Tensor  # [K] int64, support
    probs: torch.Tensor  # [K] float32, sums to 1 before any removal of earlier siblings


@dataclass(frozen=True, slots=True)
class Proposal:
    """What one drafter offers for one sequence: nodes in order parent before child, siblings best first.

    `confidence[i]` in [0, 1] is the drafter's own raw score for node i given its parent; `ranks[i]` its place among siblings.
    `draft_probs[i]` is set only for nodes drawn at random; None means a deterministic (point mass) proposal.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()  # index into this proposal, ROOT = the sequence's last token
    confidence: tuple[float, ...] = ()
    ranks: tuple[int, ...] = ()
    draft_probs: tuple[DraftProbs | None, ...] | None = None


NOTHING = Proposal()


@dataclass(frozen=True, slots=True)
class DraftTree:
    """The tree one row verifies. Node 0 of the step's row is the root (the last committed token) and is not listed here:
    entry i here is node i + 1 of the row. Siblings are ordered best first, the most probable path comes first.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()  # index into this tree or ROOT; parents[i] < i
    chances: tuple[float, ...] = ()  # calibrated chance of acceptance given the parent was accepted
    sources: tuple[tuple[str, ...], ...] = ()  # drafters that proposed the node, the one credited first
    origins: tuple[tuple[tuple[int, int], ...], ...] = ()  # calibration cells: per source (rank, confidence bin)
    draft_probs: tuple[DraftProbs | None, ...] | None = None
    depths: tuple[int, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        depths: list[int] = []
        for i, parent in enumerate(self.parents):
            if not ROOT <= parent < i:
                raise InvariantError(f"node {i} has parent {parent}; a parent must come before its child")
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        if len(self.parents) > MAX_NODES:
            raise InvariantError(f"a tree has {len(self.parents)} nodes; at most {MAX_NODES} fit")
        object.__setattr__(self, "depths", tuple(depths))

    def __len__(self) -> int:
        return len(self.token_ids)

    def words(self) -> list[int]:
        """Ancestor words of root and nodes, len + 1 entries: bit j = row node j is self or an ancestor (root is bit 0)."""
        words = [1]
        for i, parent in enumerate(self.parents):
            words.append(words[parent + 1] | (1 << (i + 1)))
        return words

    def children(self) -> list[list[int]]:
        """children()[i + 1] lists the children of node i in order; children()[0] those of the root."""
        lists: list[list[int]] = [[] for _ in range(len(self.parents) + 1)]
        for i, parent in enumerate(self.parents):
            lists[parent + 1].append(i)
        return lists


EMPTY_TREE = DraftTree()
