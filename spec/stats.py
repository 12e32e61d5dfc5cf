"""Counters of one engine. Knows what is counted and how each figure is defined; refuses to know how it is shown.

drafted: nodes the target verified. accepted: drafted tokens that were delivered (a token thrown away behind an end token,
max_tokens or the context edge is not accepted). Totals never fall.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from spec.request import PHASES, TokenEvent
from spec.tree import MAX_NODES, DraftTree


@dataclass(slots=True)
class EngineStats:
    steps: int = 0
    last_step_seconds: float = 0.0
    step_phases: tuple[float, ...] = ()  # seconds of the latest step in the order of PHASES; () = it had nothing to run
    phase_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    prompt_tokens: int = 0  # of requests that started, counted once
    generation_tokens: int = 0  # delivered
    finished: Counter[str] = field(default_factory=Counter)  # by finish_reason
    row_steps: int = 0  # target passes of decoding sequences, one a sequence and step
    emitted: int = 0  # tokens those passes delivered
    drafts: int = 0  # trees verified
    drafted: Counter[str] = field(default_factory=Counter)  # nodes by credited drafter
    accepted: Counter[str] = field(default_factory=Counter)
    accepted_per_position: list[int] = field(default_factory=lambda: [0] * MAX_NODES)  # [i] = delivered at depth i + 1

    judged_per_position: list[int] = field(default_factory=lambda: [0] * MAX_NODES)  # of those and of refused ones

    def count(self, event: TokenEvent, tree: DraftTree, decoding: bool) -> None:
        """One sequence's share of one step."""
        self.generation_tokens += len(event.token_ids)
        if event.finish_reason is not None:
            self.finished[event.finish_reason] += 1
        if decoding:
            self.row_steps += 1
            self.emitted += len(event.token_ids)
        if tree.token_ids:
            self.drafts += 1
            counts = event.counts
            for name, nodes in counts.drafted_by.items():
                self.drafted[name] += nodes
            for name, nodes in counts.accepted_by.items():
                self.accepted[name] += nodes
            for depth in range(counts.accepted):
                self.accepted_per_position[depth] += 1
            for depth in range(counts.judged):
                self.judged_per_position[depth] += 1

    def end_step(self, seconds: float, draft: float, verify: float, accept: float, commit: float) -> None:
        """Wall time of one step, and of its phases; what none of them claims goes to "other"."""
        self.steps += 1
        self.last_step_seconds = seconds
        other = max(seconds - draft - verify - accept - commit, 0.0)
        self.step_phases = (draft, verify, accept, commit, other)
        spent = self.phase_seconds
        spent["draft"] += draft
        spent["verify"] += verify
        spent["accept"] += accept
        spent["commit"] += commit
        spent["other"] += other
