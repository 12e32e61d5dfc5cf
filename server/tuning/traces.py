"""What is known of a workload and of a machine, as plain data: the input of `predict`. Refuses to know how any of it was measured."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from spec.cost_table import CostTable
from spec.tree import NOTHING, Proposal


@dataclass(frozen=True, slots=True)
class Trace:
    """One request as it was answered once. `offers[i]`: what each drafter offered when the answer had i + 1 tokens.

    Drafts never change an answer, so the same trace tells what any other set of drafts would have come to.
    """

    prompt_tokens: int
    answer: tuple[int, ...]
    offers: tuple[Mapping[str, Proposal], ...]


@dataclass(frozen=True, slots=True)
class Curve:
    """A piecewise-linear curve through (x, y), flat before the first x; after the last it goes on with the last slope (never
    falling), or stays where it is."""

    points: tuple[tuple[float, float], ...]
    goes_on: bool = True

    def at(self, x: float) -> float:
        points = self.points
        if len(points) == 1 or x <= points[0][0]:
            return points[0][1]
        if x >= points[-1][0] and not self.goes_on:
            return points[-1][1]
        i = min(max(bisect_right(points, (x, float("inf"))), 1), len(points) - 1)
        (left, low), (right, high) = points[i - 1], points[i]
        slope = (high - low) / (right - left)
        return low + (max(0.0, slope) if x > right else slope) * (x - left)


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Milliseconds of a drafter that is asked in a step, by the depth it drafts to (0 = it looked and found nothing), for one
    sequence; and what each further sequence adds, as a share."""

    by_depth: Curve
    per_sequence: float = 1.0

    def scaled(self, factor: float) -> DraftCost:
        return DraftCost(
            replace(self.by_depth, points=tuple((x, y * factor) for x, y in self.by_depth.points)), self.per_sequence
        )

    def ms(self, depth: int, sequences: int) -> float:
        return self.by_depth.at(depth) * (1.0 + self.per_sequence * (sequences - 1))


@dataclass(frozen=True, slots=True)
class StepCurves:
    """What steps cost besides the table of passes, by sequences: milliseconds that are neither pass nor drafting, and how much slower
    a pass is between other work than alone and again and again (caches are cold)."""

    overhead: Curve
    cold: Curve = Curve(((1.0, 1.0),))

    def at_least(self, least: StepCurves) -> StepCurves:
        """Nowhere below the others: a step that does more does not take less, whatever was measured."""
        return StepCurves(_higher(self.overhead, least.overhead), _higher(self.cold, least.cold))


def _higher(a: Curve, b: Curve) -> Curve:
    at = sorted({x for x, _ in (*a.points, *b.points)})
    return Curve(tuple((x, max(a.at(x), b.at(x))) for x in at), a.goes_on)


@dataclass(frozen=True, slots=True)
class Machine:
    """Every cost of a step, in milliseconds.

    `decode`: T(rows, context, sequences) of scored rows. `chunk`: a pass over so many prompt tokens, of which the last is scored.
    `chunk_per_key`: what a committed key adds to a prompt token. `plain`: steps of an engine without drafters; `drafting` and `resting`: of one with them, with and
    without a tree to verify (None: as plain), and `asking_ms` what a step without one costs more when drafters were asked.
    `glancing`: drafters that tell beforehand that they have nothing to offer. `pages`: the factor on passes by page size. `cuts`: the factor on a drafter's milliseconds when it may say so many tokens only.
    """

    decode: CostTable
    chunk: Curve
    plain: StepCurves
    drafting: StepCurves
    drafts: Mapping[str, DraftCost] = field(default_factory=dict)
    pages: Mapping[int, float] = field(default_factory=dict)
    chunk_per_key: float = 0.0
    cuts: Mapping[tuple[str, int], float] = field(default_factory=dict)
    resting: StepCurves | None = None
    asking_ms: float = 0.0
    glancing: frozenset[str] = frozenset()

    def cut(self, vocabulary: int) -> Machine:
        """With drafters that may say so many tokens; those without a list of their own cost what they cost."""
        drafts = {name: cost.scaled(self.cuts.get((name, vocabulary), 1.0)) for name, cost in self.drafts.items()}
        return replace(self, drafts=drafts)

    def pass_ms(self, rows: int, context: int, sequences: int, prompt_tokens: int, prompt_context: float) -> float:
        """One pass over `rows` scored rows and `prompt_tokens` tokens of chunks whose keys so far are `prompt_context` on average."""
        if not prompt_tokens:
            return self.decode.pass_ms(rows, context, sequences)
        ms = self.chunk.at(prompt_tokens) + self.chunk_per_key * prompt_tokens * prompt_context
        if rows:  # the weights are read once: scored rows beside a chunk cost what they add
            ms += self.decode.pass_ms(rows + 1, context, sequences) - self.decode.pass_ms(1, 0, 1)
        return ms


def depths_of(proposal: Proposal) -> list[int]:
    """Depth of every node, 1 = below the root."""
    depths: list[int] = []
    for parent in proposal.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def cut(trace: Trace, said: Mapping[str, Collection[int]]) -> Trace:
    """What the drafters would have offered that can say only these tokens. Nodes below one that falls away go with it; the scores
    of the others stay (a shorter list would raise them a little)."""
    return replace(trace, offers=tuple({name: _within(p, said.get(name)) for name, p in each.items()} for each in trace.offers))


def _within(proposal: Proposal, said: Collection[int] | None) -> Proposal:
    if said is None or all(token in said for token in proposal.token_ids):
        return proposal
    keep: list[bool] = []
    for token, parent in zip(proposal.token_ids, proposal.parents, strict=True):
        keep.append(token in said and (parent < 0 or keep[parent]))
    return kept(proposal, keep) if any(keep) else NOTHING


def kept(proposal: Proposal, keep: Sequence[bool]) -> Proposal:
    """The nodes marked, parents renumbered. A node whose parent goes must not be marked."""
    place: dict[int, int] = {}
    for i, wanted in enumerate(keep):
        if wanted:
            place[i] = len(place)
    parents = proposal.parents
    return Proposal(
        token_ids=tuple(proposal.token_ids[i] for i in place),
        parents=tuple(-1 if parents[i] < 0 else place[parents[i]] for i in place),
        confidence=tuple(proposal.confidence[i] for i in place),
        ranks=tuple(proposal.ranks[i] for i in place),
    )
