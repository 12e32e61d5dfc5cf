"""Is the price rule any good? On a simulated clock it is set against the best fixed budget, found by exhaustive search.

The world is made of coin flips whose odds are known: at every position of every stream the drafter's first guess is right
with chance a (drawn from two kinds of positions, which the drafter tells apart, through an over-confident score), its second
and third guesses with part of the rest. So the tokens expected of a tree are exact, both sides are measured without luck,
and nothing sleeps: time is a table. The rule is told only what an engine would tell it, costs with noise and stalls included;
the rival is told the true chances, and its grid is searched with the true costs. Exit status 1 when a cell misses a bound.

    python -m bench.price_simulation [--quick]
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from statistics import mean

from drafters.growth import Growth, Node, worthwhile
from spec.budget import PriceSpeculator
from spec.calibration import Calibration
from spec.cost_table import CostTable
from spec.drafter import Budget, Outcome
from spec.request import SamplingParams, SpeculationPolicy
from spec.speculator import Limit, Load, StepRecord
from spec.tree import DraftTree, Proposal

FAN = 3
MAX_NODES = 16
CONTEXT = 300  # keys a stream holds, for the cost of attention
FIXED_NODES = (1, 2, 3, 4, 6, 8, 12, 16)
FIXED_DEPTHS = (1, 2, 3, 4, 6, 8)
OF_BEST = 0.97  # least share of the best fixed budget's speed
OF_PLAIN = 0.995  # and of plain decoding's


@dataclass(frozen=True)
class Machine:
    """Milliseconds of a target pass by rows, and of one drafting pass."""

    name: str
    knots: tuple[tuple[int, float], ...]
    draft_first: float
    draft_row: float

    def target_ms(self, rows: int, context: int) -> float:
        """Linear between knots, and on with the last slope."""
        low, high = self.knots[-2], self.knots[-1]
        for left, right in zip(self.knots, self.knots[1:], strict=False):
            if rows <= right[0]:
                low, high = left, right
                break
        ms = low[1] + (high[1] - low[1]) * (rows - low[0]) / (high[0] - low[0])
        return ms + 2e-4 * context

    def overhead_ms(self, streams: int) -> float:
        return 0.1 + 0.01 * streams

    def draft_ms(self, rows: float) -> float:
        return self.draft_first + self.draft_row * rows


MACHINES = (
    Machine("cpu", ((1, 2.3), (4, 2.7), (6, 3.7), (8, 4.6), (16, 8.8), (64, 30.0)), 0.12, 0.02),
    Machine("cpu-slow-drafter", ((1, 2.3), (4, 2.7), (6, 3.7), (8, 4.6), (16, 8.8), (64, 30.0)), 0.6, 0.05),
    Machine("gpu", ((1, 4.0), (32, 4.3), (64, 5.0), (256, 12.0)), 0.3, 0.001),
)


@dataclass(frozen=True)
class World:
    """`acceptance`: mean chance that a first guess is right; `second`: share of the rest that the second guess takes."""

    acceptance: float
    seed: int = 0
    second: float = 0.35

    def kinds(self) -> tuple[float, float]:
        """First-guess chances at hard and at easy positions; both are equally common."""
        spread = 0.6 * min(self.acceptance, 1.0 - self.acceptance)
        return self.acceptance - spread, self.acceptance + spread

    def chances(self, stream: int, position: int) -> tuple[float, float, float]:
        """True chances of the three guesses at a position."""
        return self.of_kind(_hash(self.seed, stream, position, 0) & 1)

    def of_kind(self, kind: int) -> tuple[float, float, float]:
        first = self.kinds()[kind]
        return first, self.second * (1.0 - first), 0.4 * self.second * (1.0 - first)

    def truth(self, stream: int, position: int) -> int:
        """The token that comes: 1, 2 or 3 = that guess, 9 = something else."""
        u = _hash(self.seed, stream, position, 1) / 2**64
        for guess, chance in enumerate(self.chances(stream, position), 1):
            u -= chance
            if u < 0.0:
                return guess
        return 9

    def scores(self, stream: int, position: int) -> tuple[float, float, float]:
        """What the drafter says: over-confident, but in the right order."""
        first, second, third = self.chances(stream, position)
        return math.sqrt(first), math.sqrt(second) * 0.8, math.sqrt(third) * 0.6

    def chance(self, rank: int, score: float) -> float:
        """The true chance behind a score; of a guess not scored yet (below 0) the mean one."""
        if score >= 0.0:
            return (score / (1.0, 0.8, 0.6)[rank]) ** 2
        return (self.acceptance, self.second * (1 - self.acceptance), 0.4 * self.second * (1 - self.acceptance))[rank]


def _hash(*parts: int) -> int:
    """64 mixed bits (the finaliser of SplitMix64, Steele et al. 2014)."""
    z = 0
    for part in parts:
        z = (z + part + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        z ^= z >> 31
    return z


@dataclass
class Stream:
    """A SequenceView whose text has only a length."""

    seq_id: int
    length: int
    sampling: SamplingParams
    policy: SpeculationPolicy
    prompt_len: int = 0
    tenant: str = ""
    num_kv: int = 0

    @property
    def token_ids(self) -> list[int]:
        return []

    @property
    def page_ids(self) -> list[int]:
        return []

    @property
    def grammar(self) -> None:
        return None


def draft(world: World, machine: Machine, streams: Sequence[Stream], budgets: Sequence[Budget]) -> tuple[list[Proposal], float]:
    """A head-like drafter: a batched pass scores the children of the likeliest nodes. Returns proposals and milliseconds."""
    growing = [(s, b, Growth("guess", b, FAN)) for s, b in zip(streams, budgets, strict=True)]
    asked = [(s, g) for s, b, g in growing if b.wants("guess")]
    ms = 0.0
    picks: list[tuple[float, Stream, Growth, Node | None]] = [(g.promise(None), s, g, None) for s, g in asked]
    while True:
        picks.sort(key=lambda item: -item[0])
        count = worthwhile([gain for gain, _, _, _ in picks], lambda rows: budgets[0].pass_price(machine.draft_ms(rows)))
        if not count:
            break
        ms += machine.draft_ms(count)
        for _, stream, growth, node in picks[:count]:
            depth = 0 if node is None else node.depth
            growth.add_children(node, (1, 2, 3), world.scores(stream.seq_id, stream.length + depth))
        picks = [(gain, s, g, node) for s, g in asked for gain, node in g.next_to_expand(4)]
    return [g.proposal() for _, _, g in growing], ms


def expected_tokens(world: World, stream: Stream, token_ids: Sequence[int], parents: Sequence[int]) -> float:
    """1 + sum of true path chances."""
    paths: list[float] = []
    depths: list[int] = []
    for token, parent in zip(token_ids, parents, strict=True):
        depth = 0 if parent < 0 else depths[parent] + 1
        depths.append(depth)
        above = 1.0 if parent < 0 else paths[parent]
        paths.append(above * world.chances(stream.seq_id, stream.length + depth)[token - 1])
    return 1.0 + sum(paths)


def accept(world: World, stream: Stream, tree: DraftTree) -> tuple[int, ...]:
    path: list[int] = []
    below = tree.children()
    while True:
        wanted = world.truth(stream.seq_id, stream.length + len(path))
        at = path[-1] if path else -1
        child = next((c for c in below[at + 1] if tree.token_ids[c] == wanted), None)
        if child is None:
            return tuple(path)
        path.append(child)


def make_streams(count: int) -> list[Stream]:
    return [
        Stream(i, 0, SamplingParams(max_tokens=1 << 30, temperature=0.0), SpeculationPolicy(max_nodes=MAX_NODES))
        for i in range(count)
    ]


def plain_speed(machine: Machine, streams: int) -> float:
    """Tokens per millisecond."""
    return streams / (machine.target_ms(streams, streams * CONTEXT) + machine.overhead_ms(streams))


class Pattern(World):
    """A world whose stream number spells the kinds of its first positions, bit by bit."""

    def chances(self, stream: int, position: int) -> tuple[float, float, float]:
        return self.of_kind(stream >> position & 1)


@dataclass(frozen=True)
class FixedTree:
    """What one fixed budget drafts at one place: true expected tokens, nodes, and nodes expanded by each pass."""

    tokens: float
    nodes: int
    passes: tuple[int, ...]


@cache
def fixed_trees(world: World) -> dict[tuple[int, int], list[FixedTree]]:
    """By (nodes, depth), under every pattern of kinds as deep as it looks. All patterns are equally common, so means are exact."""
    found: dict[tuple[int, int], list[FixedTree]] = {}
    patterns = Pattern(world.acceptance, world.seed, world.second)
    for nodes in FIXED_NODES:
        for depth in [d for d in FIXED_DEPTHS if d <= nodes]:
            # The rival is told the true chances: with raw scores it would choose worse nodes than it could.
            limit = Budget(nodes, depth, 0.0, lambda ms: 0.0, lambda name, deep, rank, score: world.chance(rank, score))
            streams = make_streams(2**depth)
            proposals = [draft(patterns, MACHINES[0], [stream], [limit])[0][0] for stream in streams]
            found[(nodes, depth)] = [
                FixedTree(expected_tokens(patterns, s, p.token_ids, p.parents), len(p.token_ids), _passes(p))
                for s, p in zip(streams, proposals, strict=True)
            ]
    return found


def _passes(proposal: Proposal) -> tuple[int, ...]:
    """Nodes expanded at each level: a lower bound of what a drafter spends on this tree (it also expands nodes that then win
    no place), so the rival is flattered."""
    inner: dict[int, set[int]] = {}
    depths: list[int] = []
    for parent in proposal.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
        inner.setdefault(depths[-1], set()).add(parent)
    return tuple(len(parents) for parents in inner.values())


def fixed_speeds(world: World, machine: Machine, streams: int) -> dict[tuple[int, int], float]:
    """Tokens per millisecond of every fixed budget (nodes, depth); (0, 0) is plain decoding."""
    speeds = {(0, 0): plain_speed(machine, streams)}
    for budget, trees in fixed_trees(world).items():
        ms = mean(machine.target_ms(streams * (1 + tree.nodes), streams * CONTEXT) for tree in trees)
        ms += machine.overhead_ms(streams) + _drafting_ms(machine, streams, trees)
        speeds[budget] = streams * mean(tree.tokens for tree in trees) / ms
    return speeds


def _drafting_ms(machine: Machine, streams: int, trees: Sequence[FixedTree]) -> float:
    """Expected of a step in which every stream's tree is one of these, by equal chances: a batched pass is run where any stream
    has nodes for it."""
    ms = 0.0
    for level in range(max(len(tree.passes) for tree in trees)):
        counts = [tree.passes[level] for tree in trees if len(tree.passes) > level]
        nobody = (1.0 - len(counts) / len(trees)) ** streams
        ms += (1.0 - nobody) * machine.draft_ms(0) + machine.draft_ms(streams * sum(counts) / len(trees)) - machine.draft_ms(0)
    return ms


@dataclass(frozen=True)
class Noise:
    """Relative spread of measured milliseconds, and how often a step stalls to `stall` times its time."""

    spread: float = 0.0
    stalls: float = 0.0
    stall: float = 5.0

    def factor(self, rng: random.Random) -> float:
        return math.exp(rng.gauss(0.0, self.spread)) * (self.stall if rng.random() < self.stalls else 1.0)


def run(
    world: World,
    machine: Machine,
    count: int,
    *,
    warm_up: int,
    steps: int,
    noise: Noise = Noise(),
    speculator: PriceSpeculator | None = None,
    on_step: Callable[[int], None] | None = None,
) -> float:
    """Expected tokens per true millisecond of the price rule over `steps` steps after `warm_up`."""
    rng = random.Random(world.seed * 1000 + count)
    rule = speculator or started(machine, noise, rng)
    streams = make_streams(count)
    load = Load(prefill_tokens=0, sequences=count, context=count * CONTEXT)
    limits = [Limit(MAX_NODES, 32)] * count
    tokens = spent = 0.0
    for index in range(warm_up + steps):
        budgets = rule.budgets(streams, limits, load)
        trees, draft_ms = [DraftTree()] * count, 0.0
        asked = any(budget.max_nodes for budget in budgets)
        if asked:
            proposals, draft_ms = draft(world, machine, streams, budgets)
            if any(proposal.token_ids for proposal in proposals):
                trees = rule.admit(streams, budgets, {"guess": proposals})
        rows = count + sum(len(tree) for tree in trees)
        target = machine.target_ms(rows, load.context)
        other = machine.overhead_ms(count)
        if index >= warm_up:
            spent += target + other + draft_ms
            tokens += sum(expected_tokens(world, s, t.token_ids, t.parents) for s, t in zip(streams, trees, strict=True))
        outcomes = []
        for stream, tree in zip(streams, trees, strict=True):
            path = accept(world, stream, tree)
            outcomes.append(Outcome(stream, tree, path, 0, 0, 1 + len(tree), False))
        seen = noise.factor(rng)
        rule.record(
            StepRecord(
                nodes=rows,
                load=load,
                outcomes=outcomes,
                draft_ms={"guess": draft_ms} if asked else {},
                target_ms=target * seen,
                total_ms=target * seen + other + draft_ms,
            )
        )
        for outcome, stream in zip(outcomes, streams, strict=True):
            stream.length += len(outcome.path) + 1
        if on_step is not None:
            on_step(rows)
    return tokens / spent


def started(machine: Machine, noise: Noise, rng: random.Random) -> PriceSpeculator:
    """A price rule with its cost table measured, as at an engine's start, on a clock that only passes move."""
    now = [0.0]

    def pass_ms(rows: int, context: int, sequences: int) -> float:
        ms = machine.target_ms(rows, context) * noise.factor(rng)
        now[0] += ms * 1e-3
        return ms

    costs = CostTable()
    costs.measure(pass_ms, max_rows=256, seconds=3.0, clock=lambda: now[0])
    return PriceSpeculator(Calibration(), costs)


@dataclass(frozen=True)
class Line:
    machine: str
    streams: int
    acceptance: float
    plain: float
    best_fixed: float
    best_nodes: int
    best_depth: int
    price: float

    @property
    def of_best(self) -> float:
        return self.price / self.best_fixed

    @property
    def of_plain(self) -> float:
        return self.price / self.plain


def missed(lines: Sequence[Line]) -> list[Line]:
    """Cells below a bound."""
    return [line for line in lines if line.of_best < OF_BEST or line.of_plain < OF_PLAIN]


def compare(machine: Machine, streams: int, acceptance: float, *, steps: int, noise: Noise, seed: int = 0) -> Line:
    """One cell of the table. `steps` are measured, after as many to warm up."""
    world = World(acceptance, seed)
    speeds = fixed_speeds(world, machine, streams)
    (nodes, depth), best = max(speeds.items(), key=lambda item: item[1])
    price = run(world, machine, streams, warm_up=steps, steps=steps, noise=noise)
    return Line(machine.name, streams, acceptance, speeds[(0, 0)], best, nodes, depth, price)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer cells and steps")
    parser.add_argument("--machine", choices=[machine.name for machine in MACHINES], help="one machine only")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    acceptances = (0.2, 0.5, 0.8) if options.quick else (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    noise = Noise(spread=0.05, stalls=0.01)
    lines = []
    print(
        f"{'machine':18}{'streams':>8}{'accept':>8}{'plain':>9}{'fixed':>9}{'(n, d)':>9}{'price':>9}{'of best':>9}{'of plain':>9}"
    )
    for machine in [m for m in MACHINES if options.machine in (None, m.name)]:
        for streams in (1, 4, 16, 64):
            for acceptance in acceptances:
                line = compare(
                    machine,
                    streams,
                    acceptance,
                    steps=max(150, (2000 if options.quick else 6000) // streams),
                    noise=noise,
                    seed=options.seed,
                )
                lines.append(line)
                print(
                    f"{line.machine:18}{streams:8d}{acceptance:8.1f}{line.plain:9.3f}{line.best_fixed:9.3f}"
                    f"{f'{line.best_nodes},{line.best_depth}':>9}{line.price:9.3f}{line.of_best:9.3f}{line.of_plain:9.3f}",
                    flush=True,
                )
    short = missed(lines)
    for line in short:
        print(
            f"missed: {line.machine}, {line.streams} streams, acceptance {line.acceptance}: "
            f"{line.of_best:.3f} of the best, {line.of_plain:.3f} of plain"
        )
    summary = {
        "benchmark": "price_simulation",
        "missed": len(short),
        "argv": list(argv if argv is not None else sys.argv[1:]),
        "min_of_best_fixed": round(min(line.of_best for line in lines), 4),
        "min_of_plain": round(min(line.of_plain for line in lines), 4),
        "rows": [{k: round(v, 5) if isinstance(v, float) else v for k, v in asdict(line).items()} for line in lines],
    }
    print(json.dumps(summary, separators=(",", ":")))
    return 1 if short else 0


if __name__ == "__main__":
    raise SystemExit(main())
