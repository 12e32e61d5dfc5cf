"""How much to draft and which nodes to verify: the interface between the engine step and the price rule.

The engine asks for budgets, hands them to every drafter, and has the proposals merged into one tree per sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from spec.drafter import Budget, Outcome, SequenceView
from spec.tree import DraftTree, Proposal


@dataclass(frozen=True, slots=True)
class Limit:
    """Hard limits of one decoding sequence in this step, from pages, max_tokens, the context edge and its policy."""

    max_nodes: int
    max_depth: int


@dataclass(frozen=True, slots=True)
class Load:
    """What else this step carries."""

    prefill_tokens: int
    sequences: int  # rows in the step, decoding and prefilling
    context: int  # committed keys of all rows together


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What a finished step cost. Milliseconds of wall time."""

    nodes: int  # N of the pass, prefill tokens included
    load: Load
    outcomes: Sequence[Outcome]  # decoding rows only
    draft_ms: Mapping[str, float]  # per drafter
    target_ms: float
    total_ms: float
    hoped: bool = False  # only sequences were asked about that drafters had hope for


class Speculator(Protocol):
    def rests(self, views: Sequence[SequenceView]) -> bool:
        """Asked first in a step. True: nobody drafts in it, whatever the limits; `budgets` is not asked then. False says nothing
        of what `budgets` will answer."""

    def passed(self, steps: int, sequences: int, load: Load, target_ms: float, total_ms: float) -> None:
        """Told now and then, instead of `record`, of the steps that were plain decoding since it was told last (they rested, or no
        drafter had anything to offer), and what the latest of them cost, which had so many decoding sequences."""

    def budgets(self, views: Sequence[SequenceView], limits: Sequence[Limit], load: Load) -> list[Budget]: ...

    def admit(
        self,
        views: Sequence[SequenceView],
        budgets: Sequence[Budget],
        proposals: Mapping[str, Sequence[Proposal]],  # by drafter name, one per view
    ) -> list[DraftTree]:
        """Merge by prefix, estimate, keep what its price allows. Never more than the budget's max_nodes / max_depth."""

    def record(self, step: StepRecord) -> None:
        """Keep the cost table and the calibration current."""


class Patient(Speculator, Protocol):
    """A speculator for whom drafters may look less often than in every step, where looks come to nothing."""

    patient: bool

    def refused(self, sequences: int) -> Collection[str]:
        """Drafters whose hope would be in vain now, with so many sequences decoding: `budgets` will not let them draft."""


class Keeping(Speculator, Protocol):
    """A speculator that keeps what it learnt for the next run."""

    def close(self) -> None:
        """The engine ends. Called once or never; a fault costs what was learnt since it was last kept."""
