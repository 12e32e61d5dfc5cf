"""What steps cost, from short runs taken in turn -> step curves and draft samples of one speed. Pure: costs in, tables out.

A shared machine changes speed from one second to the next, so no run is compared with one of another time: in every turn all kinds
of run follow each other, and a turn is as fast or slow as its plain steps say.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from server.tuning.measure import Sample, cut_factors, draft_costs, middle, page_factors, step_curves
from server.tuning.record import DraftSample, StepCost
from server.tuning.traces import Machine, StepCurves
from spec.cost_table import CostTable

ENOUGH = 20  # steps of a kind that a cost is made of


@dataclass(slots=True)
class Turn:
    """Runs that follow each other under one load: without drafters, with them under the price rule, and with every depth asked for in
    turn, the last also with drafters of a shorter list of tokens (by its length), and without drafters in pages of another size."""

    load: int
    plain: list[StepCost] = field(default_factory=list)
    drafting: list[StepCost] = field(default_factory=list)
    drafts: list[DraftSample] = field(default_factory=list)
    cut: dict[int, list[DraftSample]] = field(default_factory=dict)
    pages: dict[int, list[StepCost]] = field(default_factory=dict)


def paces(turns: Sequence[Turn], decode: CostTable, context: float) -> list[float]:
    """How fast the machine was in each turn, over its middle under the same load, by the plain passes of the turn."""
    taken = [
        middle(c.verify / decode.pass_ms(c.sequences, int(context * c.sequences), c.sequences) for c in turn.plain)
        for turn in turns
    ]
    usual = {
        load: statistics.median(t for t, turn in zip(taken, turns, strict=True) if turn.load == load)
        for load in {t.load for t in turns}
    }
    return [usual[turn.load] / own if own > 0.0 else 1.0 for own, turn in zip(taken, turns, strict=True)]


def with_steps(machine: Machine, turns: Sequence[Turn], context: float, names: set[str]) -> Machine:
    """The machine with what steps and drafters cost. `context`: keys a sequence holds on average. `names`: drafters with a list of
    tokens of their own."""
    speeds = paces(turns, machine.decode, context)

    def curves_of(costs: Callable[[Turn], Sequence[StepCost]]) -> Sequence[Sample]:
        return [Sample(costs(turn), speed) for turn, speed in zip(turns, speeds, strict=True)]

    def samples_of(drafts: Callable[[Turn], Sequence[DraftSample]]) -> list[DraftSample]:
        return [
            replace(sample, ms={name: ms * speed for name, ms in sample.ms.items()})
            for turn, speed in zip(turns, speeds, strict=True)
            for sample in drafts(turn)
        ]

    drafts = samples_of(lambda turn: turn.drafts)
    sizes = {size for turn in turns for size in turn.cut}
    cut = {size: samples_of(lambda turn, size=size: turn.cut.get(size, ())) for size in sizes}  # type: ignore[misc]
    trees = curves_of(lambda turn: [c for c in turn.drafting if c.nodes])
    resting = curves_of(lambda turn: [_at_rest(c) for c in turn.drafting if not c.asked])
    vain = curves_of(lambda turn: [c for c in turn.drafting if c.asked and not c.nodes])
    plain = step_curves(curves_of(lambda turn: turn.plain), machine.decode, context)
    drafting = _curves(trees, machine.decode, context) or step_curves(curves_of(lambda t: t.drafting), machine.decode, context)
    rest = _curves(resting, machine.decode, context) or plain
    return replace(
        machine,
        plain=plain,
        drafting=drafting.at_least(plain),
        resting=rest.at_least(plain),
        asking_ms=max(0.0, middle(_others(vain)) - middle(_others(resting))) if len(_others(vain)) >= ENOUGH else 0.0,
        drafts=draft_costs(drafts),
        cuts=cut_factors(drafts, cut, names),
        pages={**machine.pages, **page_factors((turn.plain, turn.pages) for turn in turns)},
    )


def _at_rest(cost: StepCost) -> StepCost:
    """Drafters that only watch are part of what the step costs besides."""
    return replace(cost, other=cost.other + cost.drafters)


def _others(samples: Sequence[Sample]) -> list[float]:
    """Milliseconds besides pass and drafting, of steps of one sequence."""
    return [cost.other * 1e3 * sample.speed for sample in samples for cost in sample.costs if cost.sequences == 1]


def _curves(samples: Sequence[Sample], decode: CostTable, context: float) -> StepCurves | None:
    enough = sum(len(sample.costs) for sample in samples) >= ENOUGH
    return step_curves(samples, decode, context) if enough else None
