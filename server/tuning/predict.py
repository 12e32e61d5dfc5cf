"""Answers a workload on a simulated clock. Pure: traces and tables in, tokens and milliseconds out.

The speculator is the real one, fed with recorded offers and with milliseconds from the tables; the scheduler is the engine's in
small: prompts in chunks beside the running answers, a fixed number of conversations at once. Because text does not depend on
drafts, what a tree would have had accepted is read off the recorded answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from server.tuning.offered import offered
from server.tuning.traces import Machine, StepCurves, Trace
from spec.drafter import Budget, Outcome
from spec.drafting import TELL_EVERY
from spec.request import SamplingParams, SpeculationPolicy
from spec.scheduler import MAX_PREFILLING
from spec.speculator import Limit, Load, Speculator, StepRecord
from spec.tree import EMPTY_TREE, NOTHING, DraftTree, Proposal


@dataclass(frozen=True, slots=True)
class Choice:
    """One configuration: what tuning chooses between. Field names are those of the settings."""

    drafters: tuple[str, ...] = ()
    max_tree_nodes: int = 16
    tree_shape: str = ""
    page_size: int = 16
    chunk_tokens: int = 256
    draft_vocabulary: int = 0  # 0 = all that the drafters can say


@dataclass(slots=True)
class Prediction:
    """Figures of one simulated run. Times are milliseconds."""

    tokens: int = 0
    total_ms: float = 0.0
    pass_ms: float = 0.0
    draft_ms: float = 0.0
    steps: int = 0  # that decoded
    step_tokens: int = 0  # tokens those steps brought
    drafted: int = 0
    accepted: int = 0
    ttft_ms: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * self.tokens / self.total_ms if self.total_ms else 0.0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens a sequence gets from a pass."""
        return self.step_tokens / self.steps if self.steps else 0.0


@dataclass(slots=True)
class View:
    """A SequenceView of which only the length is real."""

    seq_id: int
    trace: Trace
    sampling: SamplingParams
    policy: SpeculationPolicy
    tenant: str = ""
    num_kv: int = 0
    said: int = 0  # tokens of the answer
    submitted: float = 0.0
    budget: Budget | None = None  # the latest one it was asked with

    @property
    def token_ids(self) -> list[int]:
        return []

    @property
    def page_ids(self) -> list[int]:
        return []

    @property
    def prompt_len(self) -> int:
        return self.trace.prompt_tokens

    @property
    def grammar(self) -> None:
        return None


def predict(
    traces: Sequence[Trace],
    machine: Machine,
    choice: Choice,
    concurrency: int,
    speculator: Callable[[], Speculator],
    temperature: float = 0.0,
    group: int = 0,
    passes: int = 1,
) -> Prediction:
    """The workload in the order given, `concurrency` conversations at once, a new one when one ends.

    `group`: so many are answered to the end before the next one is begun; 0 = no such pauses.
    `passes`: the workload is answered so often, and the last time counts: what the speculator learns it has learnt by then.
    """
    run = _Run(machine, choice, speculator() if choice.drafters else None)
    for _ in range(passes):
        run.result = Prediction()
        _answer(run, traces, concurrency, temperature, group)
    return run.result


def _answer(run: _Run, traces: Sequence[Trace], concurrency: int, temperature: float, group: int) -> None:
    sampling, policy = SamplingParams(max_tokens=1 << 30, temperature=temperature), SpeculationPolicy()
    views = [View(run.begun + i, trace, sampling, policy) for i, trace in enumerate(traces) if trace.answer]
    run.begun += len(views)  # a conversation that is answered again is another one
    size = group or max(1, len(views))
    for first in range(0, len(views), size):
        waiting = deque(views[first : first + size])
        while waiting or run.views:
            while waiting and len(run.views) < concurrency:
                view = waiting.popleft()
                view.submitted = run.result.total_ms
                run.views.append(view)
            run.step()


class _Run:
    def __init__(self, machine: Machine, choice: Choice, speculator: Speculator | None) -> None:
        self.machine = machine
        self.choice = choice
        self.speculator = speculator
        self.factor = machine.pages.get(choice.page_size, 1.0)
        self.glancing = bool(choice.drafters) and all(name in machine.glancing for name in choice.drafters)
        self.views: list[View] = []
        self.begun = 0  # views so far
        self.untold = 0  # plain steps the speculator does not know of
        self.result = Prediction()

    def curves(self, drafted: bool) -> StepCurves:
        if self.speculator is None:
            return self.machine.plain
        return self.machine.drafting if drafted else self.machine.resting or self.machine.plain

    def step(self) -> None:
        result, machine = self.result, self.machine
        decoding = [view for view in self.views if view.said]
        chunks = self._chunks()
        prompt_tokens = sum(tokens for _, tokens in chunks)
        prompt_context = sum(view.num_kv * tokens for view, tokens in chunks) / prompt_tokens if prompt_tokens else 0.0
        load = Load(prompt_tokens, len(decoding) + len(chunks), sum(v.num_kv for v in [*decoding, *(v for v, _ in chunks)]))
        # As the engine has it: a resting step is plain decoding that nobody looks at.
        resting = self.speculator is None or (bool(decoding) and self.speculator.rests(decoding))
        resting = resting or (self.glancing and bool(decoding) and not any(self._hopes(view) for view in decoding))
        trees, draft_ms, each = self._draft([] if resting else decoding, load)
        trees = trees or [EMPTY_TREE] * len(decoding)
        rows = len(decoding) + sum(len(tree) for tree in trees)
        context = sum(view.num_kv for view in decoding)
        count = max(1, load.sequences)
        curves = self.curves(any(trees))
        target = self.factor * curves.cold.at(count)
        target *= machine.pass_ms(rows, context, max(1, len(decoding)), prompt_tokens, prompt_context)
        total = target + draft_ms + curves.overhead.at(count) + (machine.asking_ms if each and not any(trees) else 0.0)
        result.total_ms += total
        result.pass_ms += target
        result.draft_ms += draft_ms
        paths = [accepted_path(tree, view.trace.answer[view.said :]) for view, tree in zip(decoding, trees, strict=True)]
        for view, tree, path in zip(decoding, trees, paths, strict=True):
            brought = min(len(path) + 1, len(view.trace.answer) - view.said)
            view.said += brought
            view.num_kv += brought
            result.steps += 1
            result.step_tokens += brought
            result.tokens += brought
            result.drafted += len(tree)
            result.accepted += min(len(path), brought)
        for view, tokens in chunks:
            view.num_kv += tokens
            if view.num_kv >= view.trace.prompt_tokens:
                view.said = 1
                result.tokens += 1
                result.ttft_ms.append(result.total_ms - view.submitted)
        if self.speculator is not None and resting:
            self.untold += 1
            if self.untold >= TELL_EVERY:
                self.speculator.passed(self.untold, len(decoding), load, target, total)
                self.untold = 0
        elif self.speculator is not None:
            outcomes = [
                Outcome(view, tree, path, 0, 0, 1 + len(tree), view.said >= len(view.trace.answer))
                for view, tree, path in zip(decoding, trees, paths, strict=True)
            ]
            self.speculator.record(StepRecord(rows + prompt_tokens, load, outcomes, each, target, total, self.glancing))
        self.views = [view for view in self.views if view.said < len(view.trace.answer)]

    def _chunks(self) -> list[tuple[View, int]]:
        """The oldest prompt has at least half of the chunk, the shortest of the others the rest; what they leave is its own."""
        prompts = [view for view in self.views if not view.said][:MAX_PREFILLING]
        if not prompts:
            return []
        left = self.choice.chunk_tokens
        oldest, others = prompts[0], sorted(prompts[1:], key=_missing)
        first = min(_missing(oldest), max(1, left // 2) if others else left)
        left -= first
        granted: list[tuple[View, int]] = []
        for view in others:
            tokens = min(left, _missing(view))
            left -= tokens
            if tokens:
                granted.append((view, tokens))
        return [(oldest, min(_missing(oldest), first + left)), *granted]

    def _hopes(self, view: View) -> bool:
        """Whether a drafter that looks before it is asked would find enough: a first token that pays by the latest prices."""
        for name in self.choice.drafters:
            offer = view.trace.offers[view.said - 1].get(name, NOTHING)
            if offer.token_ids and (
                view.budget is None or view.budget.chance(name, 1, 0, offer.confidence[0]) >= view.budget.entry
            ):
                return True
        return False

    def _draft(self, views: Sequence[View], load: Load) -> tuple[list[DraftTree], float, dict[str, float]]:
        """Trees as the speculator makes them of the recorded offers, drafting milliseconds in all and by drafter."""
        nothing: list[DraftTree] = [EMPTY_TREE] * len(views)
        if self.speculator is None or not views:
            return nothing, 0.0, {}
        most = self.choice.max_tree_nodes
        limits = []
        for view in views:
            left = len(view.trace.answer) - view.said - 1
            room = most if left > 0 and (not self.glancing or self._hopes(view)) else 0
            limits.append(Limit(room, max(0, min(left, room))))
        budgets = self.speculator.budgets(views, limits, load)
        for view, budget in zip(views, budgets, strict=True):
            if budget.max_nodes:
                view.budget = budget
        if not any(budget.max_nodes for budget in budgets):
            return nothing, 0.0, {}
        proposals: dict[str, list[Proposal]] = {}
        each: dict[str, float] = {}
        for name in self.choice.drafters:
            offers, ms = offered(name, views, budgets, self.machine)
            if ms is not None:
                each[name] = ms
                if any(offer.token_ids for offer in offers):
                    proposals[name] = offers
        trees = self.speculator.admit(views, budgets, proposals) if proposals else nothing
        return trees, sum(each.values()), each


def _missing(view: View) -> int:
    return view.trace.prompt_tokens - view.num_kv


def accepted_path(tree: DraftTree, truth: Sequence[int]) -> tuple[int, ...]:
    """The nodes that the recorded answer goes through, root side first."""
    path: list[int] = []
    at = -1
    for wanted in truth:
        found = next((n for n in range(at + 1, len(tree)) if tree.parents[n] == at and tree.token_ids[n] == wanted), None)
        if found is None:
            break
        path.append(found)
        at = found
    return tuple(path)
