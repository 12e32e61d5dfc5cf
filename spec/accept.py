"""What the target keeps of each tree. Pure: reads trees, scores and sequences, changes nothing.

accepted: draft nodes the target keeps · next: the token the target itself adds after the last accepted node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spec.drafter import SequenceView
from spec.request import TokenLogprob
from spec.target import TargetScores
from spec.tree import DraftTree


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """One row whose nodes were scored: the root and every node of `tree`, at score rows first .. first + len(tree)."""

    view: SequenceView
    tree: DraftTree
    first: int
    grammar: object | None = None  # spec.grammar.GrammarState of the sequence, at the root (read only)


@dataclass(frozen=True, slots=True)
class Acceptance:
    path: tuple[int, ...]  # accepted nodes as indices into the tree, root side first
    next_id: int
    logprobs: tuple[TokenLogprob, ...] = ()  # one per accepted node and one for next, when the request asked


def accept(rows: Sequence[ScoredRow], scores: TargetScores) -> list[Acceptance]:
    raise NotImplementedError
