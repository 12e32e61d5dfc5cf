"""Every configuration predicted, the best ones named, and the load found at which drafting stops paying. Pure.

A configuration's worth is its tokens a second over those of plain decoding with the same sizes, the geometric mean over the loads.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations

from server.tuning.predict import Choice, Prediction, predict
from server.tuning.traces import Machine, Trace, cut
from spec.budget import PriceSpeculator
from spec.calibration import Calibration
from spec.shapes import ShapeSpeculator
from spec.speculator import Speculator

BUDGETS = (2, 4, 8, 16)
VOCABULARIES = (2, 4, 8)  # parts of a drafter's list of tokens
FEWEST_TOKENS = 16
SHAPES = ("chain:1", "chain:2", "chain:4")
CHUNKS = (64, 128, 256, 512)
PAGES = (8, 16, 32, 64)
LOADS = (1, 2, 4, 8, 16, 32)
PASSES = 2  # over the workload, of which the last counts
CLOSE = 0.03  # a chunk or page size must promise this much more than the usual one to be chosen


@dataclass(frozen=True, slots=True)
class Workload:
    """Traces, and what the price rule knows when a server starts. `says`: the tokens of drafters with a list of their own, rising."""

    traces: Sequence[Trace]
    machine: Machine
    calibration: Calibration
    vocab_size: int
    temperature: float = 0.0
    says: Mapping[str, Sequence[int]] = field(default_factory=dict)
    _cuts: dict[int, tuple[Sequence[Trace], Machine]] = field(default_factory=dict, init=False, compare=False)

    def predict(self, choice: Choice, concurrency: int, group: int = 0) -> Prediction:
        def speculator() -> Speculator:
            if choice.tree_shape:
                return ShapeSpeculator(choice.tree_shape, vocab_size=self.vocab_size)
            calibration = Calibration()
            calibration.restore(self.calibration.dump())
            return PriceSpeculator(calibration, copy.deepcopy(self.machine.decode), vocab_size=self.vocab_size)

        traces, machine = self._cut(choice.draft_vocabulary)
        return predict(traces, machine, choice, concurrency, speculator, self.temperature, group, PASSES)

    def _cut(self, vocabulary: int) -> tuple[Sequence[Trace], Machine]:
        """Offers and costs when drafters may say so many tokens, made once."""
        if vocabulary == 0:
            return self.traces, self.machine
        if vocabulary not in self._cuts:
            said = {name: frozenset(ids[:vocabulary]) for name, ids in self.says.items()}
            self._cuts[vocabulary] = [cut(trace, said) for trace in self.traces], self.machine.cut(vocabulary)
        return self._cuts[vocabulary]


def vocabularies(says: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """Sizes to try besides the whole lists: shares of the longest one."""
    longest = max(map(len, says.values()), default=0)
    return tuple(size for share in VOCABULARIES if (size := longest // share) >= FEWEST_TOKENS)


def drafter_sets(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Every non-empty choice of drafters, single ones first."""
    return list(chain.from_iterable(combinations(names, size) for size in range(1, len(names) + 1)))


def choices(names: Sequence[str], usual: Choice, says: Mapping[str, Sequence[int]] | None = None) -> Iterator[Choice]:
    """Plain decoding first, then all drafters as usual, then every set of them with every budget and shape, and where one
    has a list of tokens with every share of it; sizes stay as usual."""
    shares = vocabularies(says or {})
    yield replace(usual, drafters=(), tree_shape="")
    yield replace(usual, drafters=tuple(names), tree_shape="")
    for drafters in drafter_sets(names):
        for size in (0, *(shares if any(name in (says or {}) for name in drafters) else ())):
            base = replace(usual, drafters=drafters, draft_vocabulary=size)
            for budget in BUDGETS:
                yield replace(base, max_tree_nodes=budget, tree_shape="")
            for shape in SHAPES:
                yield replace(base, tree_shape=shape)


@dataclass(frozen=True, slots=True)
class Ranked:
    """A configuration with its predictions by concurrency. `worth`: over plain decoding with the usual sizes."""

    choice: Choice
    predictions: Mapping[int, Prediction]
    worth: float


def search(
    workload: Workload,
    names: Sequence[str],
    usual: Choice,
    loads: Sequence[int],
    on_tried: Callable[[int, int], None] = lambda done, total: None,
    time_is_up: Callable[[], bool] = lambda: False,
) -> list[Ranked]:
    """All configurations, best first; plain decoding is among them. Drafts are chosen first, then sizes with the best drafts:
    page size moves every pass alike and chunk size the prompts, so neither changes which drafts are best.

    When time is up what was tried is ranked; plain decoding and all drafters together are always among it.
    """
    wanted = list(dict.fromkeys(choices(names, usual, workload.says)))
    sizes = [
        (chunk, page)
        for chunk in sorted({*CHUNKS, usual.chunk_tokens})
        for page in sorted({*workload.machine.pages, usual.page_size})
        if (chunk, page) != (usual.chunk_tokens, usual.page_size)
    ]
    total, done = len(wanted) + 2 * len(sizes), 0
    plain: dict[int, Prediction] = {}
    ranked: list[Ranked] = []

    def attempt(choice: Choice) -> None:
        nonlocal done, plain
        found = {load: workload.predict(choice, load) for load in loads}
        plain = plain or found
        ratios = [found[load].tokens_per_second / plain[load].tokens_per_second for load in loads]
        ranked.append(Ranked(choice, found, math.exp(sum(map(math.log, ratios)) / len(ratios))))
        done += 1
        on_tried(done, total)

    for choice in wanted:
        if len(ranked) > 1 and time_is_up():
            break
        attempt(choice)
    best = max(ranked, key=lambda r: r.worth).choice
    for base in dict.fromkeys([best, wanted[0]]):
        for chunk, page in sizes:
            if time_is_up():
                break
            attempt(replace(base, chunk_tokens=chunk, page_size=page))
    return sorted(ranked, key=lambda r: -r.worth)


def finalists(ranked: Sequence[Ranked], usual: Choice, count: int = 3) -> list[Ranked]:
    """The best `count` that differ in their drafts, each with its best sizes.

    A chunk or page size that is not the usual one must promise CLOSE more than the same drafts with the usual sizes.
    """
    usual_worth: dict[Choice, float] = {}
    for entry in ranked:
        if (entry.choice.chunk_tokens, entry.choice.page_size) == (usual.chunk_tokens, usual.page_size):
            usual_worth.setdefault(_drafts(entry.choice), entry.worth)
    found: list[Ranked] = []
    for entry in ranked:
        at_usual = (entry.choice.chunk_tokens, entry.choice.page_size) == (usual.chunk_tokens, usual.page_size)
        gain = entry.worth / usual_worth.get(_drafts(entry.choice), entry.worth) - 1.0
        seen = any(_drafts(entry.choice) == _drafts(other.choice) for other in found)
        if not seen and (at_usual or gain >= CLOSE):
            found.append(entry)
        if len(found) == count:
            break
    return found


def _drafts(choice: Choice) -> Choice:
    """What is left of a configuration without its sizes, that of the drafters' vocabulary included."""
    return Choice(choice.drafters, choice.max_tree_nodes, choice.tree_shape)


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """A load, and tokens a second with and without drafts."""

    concurrency: int
    plain: float
    drafting: float


def by_load(workload: Workload, choice: Choice, loads: Sequence[int] = LOADS) -> list[LoadPoint]:
    """The workload repeated until every load has a few conversations for each place."""
    points = []
    for load in loads:
        times = max(1, -(-2 * load // max(1, len(workload.traces))))
        more = replace(workload, traces=list(workload.traces) * times)
        plain = more.predict(replace(choice, drafters=(), tree_shape=""), load)
        points.append(LoadPoint(load, plain.tokens_per_second, more.predict(choice, load).tokens_per_second))
    return points


def stops_paying(points: Sequence[LoadPoint]) -> int | None:
    """The lowest load from which on drafting is no faster than plain decoding; None = it is faster at the highest load tried."""
    found = None
    for point in reversed(points):
        if point.drafting > point.plain:
            break
        found = point.concurrency
    return found


def verdict(points: Sequence[LoadPoint]) -> str:
    """Where drafting pays, in a sentence."""
    paying = [point.concurrency for point in points if point.drafting > point.plain]
    end = stops_paying(points)
    if len(paying) == len(points):
        return "speculation pays at every load tried"
    if not paying:
        return "speculation pays at no load tried"
    if end is not None:
        return f"speculation stops paying at {end} at once"
    return f"speculation pays at {', '.join(map(str, paying))} at once only"
