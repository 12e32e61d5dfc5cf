"""Plain decoding as a drafter: it proposes nothing and remembers nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spec.drafter import Budget, Outcome, SequenceView
from spec.tree import NOTHING, Proposal


class NothingDrafter:
    name = "nothing"
    watches = False

    def open(self, view: SequenceView) -> None:
        pass

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Proposal]:
        return [NOTHING] * len(views)

    def observe(self, outcomes: Sequence[Outcome], hidden: torch.Tensor) -> None:
        pass

    def close(self, seq_id: int) -> None:
        pass
