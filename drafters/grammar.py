"""Drafts what a request's grammar forces: keys, quotes and brackets that no model has a say in. Knows no model.

The target is still asked at every node, so a token that is not forced after all costs speed, never correctness.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spec.drafter import Budget, Outcome, SequenceView
from spec.grammar import GrammarState
from spec.tree import NOTHING, ROOT, Proposal


class GrammarDrafter:
    """One chain of forced tokens under the root, confidence 1. Stateless: the state is the sequence's own."""

    name = "grammar"
    watches = False
    sure = True

    def open(self, view: SequenceView) -> None:
        pass

    def hopes(self, views: Sequence[SequenceView]) -> list[int]:
        return [i for i, view in enumerate(views) if view.grammar is not None]

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Proposal]:
        return [self._propose(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def observe(self, outcomes: Sequence[Outcome], hidden: torch.Tensor) -> None:
        pass

    def close(self, seq_id: int) -> None:
        pass

    def _propose(self, view: SequenceView, budget: Budget) -> Proposal:
        state = view.grammar
        if not isinstance(state, GrammarState) or not budget.wants(self.name):
            return NOTHING
        room = min(budget.max_nodes, budget.max_depth)
        chain = state.forced()[:room]
        count = len(chain)
        return Proposal(chain, tuple(range(ROOT, count - 1)), (1.0,) * count, (0,) * count)
