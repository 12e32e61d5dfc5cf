"""Answers the workload and writes down what the drafters offer at every position and what every step cost.

Knows engines and their statistics; refuses to know how the figures are used. Nothing that is offered is verified, so a recording
takes as many steps as plain decoding, and every drafter is asked at every position of the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.local import Completion, in_turn, stepping
from server.tuning.traces import Trace, depths_of
from spec.calibration import Calibration
from spec.drafter import Budget, SequenceView
from spec.drafting import nobody
from spec.engine import Engine
from spec.request import Request
from spec.speculator import Limit, Load, Speculator, StepRecord
from spec.tree import EMPTY_TREE, NOTHING, DraftTree, Proposal

PRICE = 0.01  # nodes less likely than this are not worth writing down
UNLIMITED = (16,)


def _free(_: float) -> float:
    return 0.0


@dataclass(frozen=True, slots=True)
class DraftSample:
    """One step's drafting: the depth reached by drafter, and milliseconds by drafter."""

    sequences: int
    depths: Mapping[str, int]
    ms: Mapping[str, float]


class Recorder:
    """A Speculator that asks for everything and verifies nothing. `caps`: depths allowed, one after the other, step by step."""

    def __init__(self, calibration: Calibration, caps: Sequence[int] = UNLIMITED) -> None:
        self.offers: dict[tuple[int, int], dict[str, Proposal]] = {}  # by sequence and tokens of its answer so far
        self.samples: list[DraftSample] = []
        self.steps: list[StepRecord] = []
        self._calibration = calibration
        self._caps = caps
        self._at = 0
        self._depths: dict[str, int] = {}

    def rests(self, views: Sequence[SequenceView]) -> bool:
        return False

    def passed(self, steps: int, sequences: int, load: Load, target_ms: float, total_ms: float) -> None:
        """Does not happen: no step rests, and its drafters always hope."""

    def budgets(self, views: Sequence[SequenceView], limits: Sequence[Limit], load: Load) -> list[Budget]:
        self._at += 1
        self._depths = {}
        cap = self._caps[self._at % len(self._caps)]
        found = []
        for view, limit in zip(views, limits, strict=True):
            greedy = view.sampling.temperature == 0.0

            def chance(drafter: str, depth: int, rank: int, confidence: float, greedy: bool = greedy) -> float:
                return self._calibration.chance(drafter, depth, rank, confidence, greedy=greedy) if depth <= cap else 0.0

            found.append(Budget(limit.max_nodes, min(limit.max_depth, cap), PRICE, _free, chance))
        return found

    def admit(
        self, views: Sequence[SequenceView], budgets: Sequence[Budget], proposals: Mapping[str, Sequence[Proposal]]
    ) -> list[DraftTree]:
        for i, view in enumerate(views):
            offers = {name: per_view[i] for name, per_view in proposals.items() if per_view[i] is not NOTHING}
            self.offers[view.seq_id, len(view.token_ids) - view.prompt_len] = offers
            for name, proposal in offers.items():
                self._depths[name] = max(self._depths.get(name, 0), *depths_of(proposal), 0)
        return [EMPTY_TREE] * len(views)

    def record(self, step: StepRecord) -> None:
        if step.load.prefill_tokens or not step.outcomes:
            return
        self.steps.append(step)
        depths = {name: self._depths.get(name, 0) for name in step.draft_ms}
        self.samples.append(DraftSample(len(step.outcomes), depths, dict(step.draft_ms)))

    def traces(self, completions: Sequence[Completion]) -> list[Trace]:
        """The recorded workload, in the order of its requests."""
        found = []
        for completion in completions:
            said = completion.token_ids
            offers = tuple(self.offers.get((completion.request.id, i + 1), {}) for i in range(len(said)))
            found.append(Trace(len(completion.request.prompt_ids), tuple(said), offers))
        return found


class Watched:
    """A speculator whose questions are counted."""

    def __init__(self, inner: Speculator) -> None:
        self._inner = inner
        self.patient: bool = getattr(inner, "patient", False)
        self.refused = getattr(inner, "refused", nobody)
        self.asked = 0  # steps in which somebody might draft
        self.rests, self.passed, self.admit, self.record = inner.rests, inner.passed, inner.admit, inner.record

    def budgets(self, views: Sequence[SequenceView], limits: Sequence[Limit], load: Load) -> list[Budget]:
        found = self._inner.budgets(views, limits, load)
        self.asked += any(budget.max_nodes > 0 for budget in found)
        return found


@dataclass(frozen=True, slots=True)
class StepCost:
    """One step of decoding rows only: seconds by where they went. `other` is all that is neither pass nor drafting."""

    sequences: int
    nodes: int  # drafted ones that were verified
    verify: float
    drafters: float
    other: float
    asked: bool = False  # drafters were asked for something


@dataclass(slots=True)
class Metered:
    """A run with its step costs. `seconds`: from the first submission to the last token."""

    completions: list[Completion] = field(default_factory=list)
    costs: list[StepCost] = field(default_factory=list)
    seconds: float = 0.0


def metered(
    engine: Engine,
    requests: Sequence[Request],
    concurrency: int,
    on_finish: Callable[[Completion], None] | None = None,
    watched: Watched | None = None,
) -> Metered:
    """Run the requests and say where every decoding step's time went. `watched`: the engine's speculator, where it is one."""
    return in_turn([metering(engine, requests, concurrency, on_finish, watched)])[0]


def metering(
    engine: Engine,
    requests: Sequence[Request],
    concurrency: int,
    on_finish: Callable[[Completion], None] | None = None,
    watched: Watched | None = None,
) -> Generator[None, None, Metered]:
    """`metered`, stopping ahead of every step, so that several runs can take turns."""
    found = Metered()
    before: dict[str, Any] = {}
    began = 0.0

    def counts() -> dict[str, Any]:
        return engine.stats() | {"asked": watched.asked if watched else 0}

    def start(_: int) -> None:
        nonlocal before, began
        before = counts()
        began = time.perf_counter()

    def read() -> None:
        wall = time.perf_counter() - began
        cost = _difference(before, counts(), wall)
        if cost is not None:
            found.costs.append(cost)

    found.completions = yield from stepping(engine, requests, concurrency, on_finish, start, read)
    found.seconds = seconds_of(found.completions)
    return found


def seconds_of(completions: Sequence[Completion]) -> float:
    """From the first submission to the last token; 0 when nothing was answered."""
    answered = [c for c in completions if c.token_times]
    return max(c.token_times[-1] for c in answered) - min(c.submitted for c in answered) if answered else 0.0


def _difference(before: Mapping[str, Any], after: Mapping[str, Any], wall: float) -> StepCost | None:
    rows = after["row_steps"] - before["row_steps"]
    if not rows or after["prompt_tokens"] != before["prompt_tokens"] or rows < after["num_requests_running"]:
        return None  # a step with prompt tokens in it
    verify = after["phase_seconds"]["verify"] - before["phase_seconds"]["verify"]
    drafters = sum(after["drafter_seconds"].values()) - sum(before["drafter_seconds"].values())
    nodes = sum(after["spec_decode_num_draft_tokens"].values()) - sum(before["spec_decode_num_draft_tokens"].values())
    asked = after["asked"] > before["asked"]
    return StepCost(rows, nodes, verify, drafters, max(0.0, wall - verify - drafters), asked)
