"""What one step will run, decided before any tensor exists. Knows ints only; a test refuses tensors here."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class PlanRow:
    """One sequence's known tokens in this step: a prefill chunk, or the pending root of a decoding sequence.

    `page_ids` is the sequence's own page table, which may still grow for a draft window until the inputs are built.
    """

    seq_id: int
    num_kv: int  # keys committed before the step
    token_ids: list[int]  # known tokens computed now
    page_ids: list[int]
    scored: bool  # the last known token is scored: a root, or the last chunk of a prompt
    decoding: bool
    prompt_scored: bool = False  # all known tokens are scored, for the log probabilities of the prompt


@dataclass(slots=True)
class StepPlan:
    """Decoding rows come first."""

    rows: list[PlanRow] = field(default_factory=list)
    num_decoding: int = 0
    prefill_tokens: int = 0
    admitted: list[int] = field(default_factory=list)  # ids that left the waiting queue
    preempted: list[int] = field(default_factory=list)  # ids that went back to it

    @property
    def context(self) -> int:
        """Committed keys of all rows together."""
        return sum([row.num_kv for row in self.rows])
