"""Engines over tiny decoders for tests: a drafter that knows the answer, a speculator that keeps every node, a run loop.

ScriptDrafter is given the target's true continuations, so a test chooses exactly which nodes will be accepted: all of them
(oracle), the second sibling (swapped), about 60 % (noisy), none (unrelated), in any tree shape.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import toy

from kernels.batch import KVTensors
from kernels.decoder import Decoder, DecoderShape, DecoderWeights
from kernels.kv_slots import native as native_slots
from kernels.native import load
from kernels.sample.native import NativeSample
from spec.budget import PriceSpeculator
from spec.config import EngineConfig
from spec.drafter import Budget, Drafter, Outcome, SequenceView
from spec.engine import Engine
from spec.grammar import GrammarCompiler
from spec.pages import PagePool
from spec.request import FinishReason, Request, SamplingParams, SpeculationPolicy, TokenEvent, TokenLogprob
from spec.sampling import REFERENCE_OPS
from spec.speculator import Limit, Load, Speculator, StepRecord
from spec.store import REFERENCE_MOVE
from spec.target import TargetModel
from spec.tree import EMPTY_TREE, NOTHING, ROOT, DraftTree, Proposal

OFF = SpeculationPolicy(mode="off")

# --- shapes: children of each node, as (width at the root, then width below each node) ---------------------------------

SHAPES: dict[str, tuple[int, ...]] = {
    "chain": (1, 1, 1, 1, 1),
    "2x4": (2, 1, 1, 1),
    "4x3": (4, 1, 1),
    "wide": (8,),
    "bushy": (3, 2, 2),
}


@dataclass(frozen=True)
class Skill:
    """How well a drafter guesses: the true token is among the siblings with chance `accuracy`, at sibling `rank`."""

    accuracy: float
    rank: int = 0


ORACLE = Skill(1.0)
SWAPPED = Skill(1.0, rank=1)
NOISY = Skill(0.6)
UNRELATED = Skill(0.0)

Truth = Callable[[SequenceView], Sequence[int]]  # what really comes next in a sequence


def answers_of(known: Mapping[tuple[int, ...], Sequence[int]]) -> Truth:
    """Truth from a table prompt -> whole answer."""

    def truth(view: SequenceView) -> Sequence[int]:
        answer = known.get(tuple(view.token_ids[: view.prompt_len]), ())
        return answer[len(view.token_ids) - view.prompt_len :]

    return truth


class ScriptDrafter:
    """Builds trees of one shape around the true continuation."""

    watches = True

    def __init__(
        self, truth: Truth, shape: Sequence[int], skill: Skill = ORACLE, *, vocab: int = 512, name: str = "script"
    ) -> None:
        self.name = name
        self.truth = truth
        self.shape = shape
        self.skill = skill
        self.vocab = vocab
        self.opened: set[int] = set()
        self.outcomes = 0
        self._random = random.Random(7)

    def open(self, view: SequenceView) -> None:
        assert view.seq_id not in self.opened
        self.opened.add(view.seq_id)

    def close(self, seq_id: int) -> None:
        self.opened.discard(seq_id)

    def observe(self, outcomes: Sequence[Outcome], hidden: torch.Tensor) -> None:
        self.outcomes += len(outcomes)
        assert sum(outcome.num_nodes for outcome in outcomes) <= hidden.shape[0]

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Proposal]:
        return [self._tree(self.truth(view), budget) for view, budget in zip(views, budgets, strict=True)]

    def _tree(self, truth: Sequence[int], budget: Budget) -> Proposal:
        tokens: list[int] = []
        parents: list[int] = []
        ranks: list[int] = []

        def grow(parent: int, depth: int, on_path: bool) -> None:
            """Depth first, the first sibling first: the order the engine promises to drafters and kernels."""
            if depth >= min(len(self.shape), budget.max_depth):
                return
            width = self.shape[depth]
            true_token = truth[depth] if on_path and depth < len(truth) else None
            hit = true_token is not None and self._random.random() < self.skill.accuracy
            true_rank = min(self.skill.rank, width - 1)
            for rank in range(width):
                if len(tokens) >= budget.max_nodes:
                    return
                right = hit and rank == true_rank
                token = true_token if right and true_token is not None else self._wrong(true_token)
                tokens.append(token)
                parents.append(parent)
                ranks.append(rank)
                grow(len(tokens) - 1, depth + 1, right)

        grow(ROOT, 0, True)
        count = len(tokens)
        return Proposal(tuple(tokens), tuple(parents), (0.5,) * count, tuple(ranks)) if count else NOTHING

    def _wrong(self, true_token: int | None) -> int:
        while (token := self._random.randrange(self.vocab)) == true_token:
            pass
        return token


class RandomTreeDrafter(ScriptDrafter):
    """A tree of a new random shape and a random mixture of right and wrong nodes each time."""

    def __init__(self, truth: Truth, seed: int, *, vocab: int = 512, name: str = "random") -> None:
        super().__init__(truth, (), vocab=vocab, name=name)
        self._random = random.Random(seed)

    def _tree(self, truth: Sequence[int], budget: Budget) -> Proposal:
        chance = self._random
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        for node in range(chance.randint(0, budget.max_nodes)):
            parent = chance.randint(ROOT, node - 1)
            depth = 1 if parent == ROOT else depths[parent] + 1
            if depth > budget.max_depth:
                parent, depth = ROOT, 1
            right = depth <= len(truth) and chance.random() < 0.6
            tokens.append(truth[depth - 1] if right else chance.randrange(self.vocab))
            parents.append(parent)
            depths.append(depth)
        count = len(tokens)
        return Proposal(tuple(tokens), tuple(parents), (0.5,) * count, (0,) * count) if count else NOTHING


def _free(ms: float) -> float:
    return 0.0


def _even(drafter: str, depth: int, rank: int, confidence: float) -> float:
    return 0.5


class KeepAll:
    """A speculator without prices: the budget is the limit, the first drafter with a proposal gets its tree verified."""

    patient = False

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def budgets(self, views: Sequence[SequenceView], limits: Sequence[Limit], load: Load) -> list[Budget]:
        return [Budget(limit.max_nodes, limit.max_depth, 0.0, _free, _even) for limit in limits]

    def admit(
        self, views: Sequence[SequenceView], budgets: Sequence[Budget], proposals: Mapping[str, Sequence[Proposal]]
    ) -> list[DraftTree]:
        trees: list[DraftTree] = []
        for i in range(len(views)):
            named = [(name, offered[i]) for name, offered in proposals.items() if offered[i].token_ids]
            if not named:
                trees.append(EMPTY_TREE)
                continue
            name, proposal = named[0]
            count = len(proposal.token_ids)
            trees.append(
                DraftTree(
                    proposal.token_ids,
                    proposal.parents,
                    proposal.confidence,
                    ((name,),) * count,
                    tuple(((rank, 0),) for rank in proposal.ranks),
                )
            )
        return trees

    def passed(self, steps: int, sequences: int, load: Load, target_ms: float, total_ms: float) -> None: ...

    def rests(self, views: Sequence[SequenceView]) -> bool:
        return False

    def record(self, step: StepRecord) -> None:
        self.records.append(step)


class Clocked(PriceSpeculator):
    """The price rule told made-up times, so that a test does the same on every machine: rows cost a tenth of the first."""

    def record(self, step: StepRecord) -> None:
        target_ms = 2.0 + 0.2 * step.nodes + (1.5 if step.nodes % 7 == 0 else 0.0)  # and some steps stumble
        draft_ms = dict.fromkeys(step.draft_ms, 0.1)
        total_ms = target_ms + 0.1 * len(draft_ms) + 0.2
        super().record(replace(step, target_ms=target_ms, draft_ms=draft_ms, total_ms=total_ms))

    def passed(self, steps: int, sequences: int, load: Load, target_ms: float, total_ms: float) -> None:
        target_ms = 2.0 + 0.2 * sequences
        super().passed(steps, sequences, load, target_ms, target_ms + 0.2)


# --- decoders ------------------------------------------------------------------------------------------------------------


def has_native() -> bool:
    """Whether the C++ kernels are here; engines and decoders of these tests use them then, the references otherwise."""
    return load() is not None


def quick(shape: DecoderShape, weights: DecoderWeights) -> Decoder:
    """The fastest decoder there is for toy weights."""
    return toy.decoder(shape, weights, native=has_native())


def quick_rand(seed: int = 0, **sizes: int) -> Decoder:
    """RAND; `sizes` as toy.rand_weights."""
    return quick(*toy.rand_weights(seed, **sizes))  # type: ignore[arg-type]


# --- engines and requests ----------------------------------------------------------------------------------------------


def make_engine(
    decoder: Decoder,
    drafters: Sequence[Drafter] = (),
    *,
    speculator: Speculator | None = None,
    eos_ids: tuple[int, ...] = (),
    num_pages: int = 96,
    page_size: int = 4,
    context: int = 256,
    pool: PagePool | None = None,
    native: bool = True,
    grammars: GrammarCompiler | None = None,
    clock: Callable[[], float] = time.perf_counter,
    **settings: int | bool | str,
) -> Engine:
    """An engine over `decoder` with a fresh store, poisoned with NaN so that a key nobody wrote shows."""
    fast = native and has_native()
    shape = decoder.shape
    store = KVTensors.allocate(shape.layers, num_pages, shape.kv_heads, shape.head_dim, page_size, torch.float32)
    store.k.fill_(float("nan"))
    store.v.fill_(float("nan"))
    config = EngineConfig(num_pages=num_pages, page_size=page_size, context=context, **settings)  # type: ignore[arg-type]
    return Engine(
        config,
        TargetModel(decoder, store),
        list(drafters),
        speculator or KeepAll(),
        eos_ids,
        grammars,
        clock=clock,
        pool=pool,
        ops=NativeSample() if fast else REFERENCE_OPS,
        move=native_slots.move if fast else REFERENCE_MOVE,
    )


def greedy_request(request_id: int, prompt: Sequence[int], max_tokens: int = 16, **options: object) -> Request:
    """`options` go to SamplingParams, except speculation, tenant and generated_ids."""
    outer = {key: options.pop(key) for key in ("speculation", "tenant", "generated_ids") if key in options}
    sampling = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **options})  # type: ignore[arg-type]
    return Request(id=request_id, prompt_ids=tuple(prompt), sampling=sampling, **outer)  # type: ignore[arg-type]


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    error_code: str | None = None
    cached_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    steps: list[int] = field(default_factory=list)  # engine step of each event that carried tokens

    def take(self, event: TokenEvent, step: int) -> None:
        assert self.finish_reason is None, "an event came after the last one"
        assert event.started == (not self.steps) or not event.token_ids
        if event.started:
            self.cached_tokens = event.cached_tokens
        self.token_ids += event.token_ids
        self.sources += event.sources
        self.logprobs += event.logprobs
        self.drafted += event.counts.drafted
        self.accepted += event.counts.accepted
        self.finish_reason, self.stop_token, self.error_code = event.finish_reason, event.stop_token, event.error_code
        if event.token_ids:
            self.steps.append(step)


class Runner:
    """Steps an engine and gathers answers, checking every invariant after every step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answers: dict[int, Answer] = {}
        self.steps = 0

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.engine.add(request)
            self.answers[request.id] = Answer()

    def step(self) -> list[TokenEvent]:
        events = self.engine.step()
        self.engine.check()
        for event in events:
            self.answers[event.request_id].take(event, self.steps)
        self.steps += 1
        return events

    def finish(self, limit: int = 5000) -> dict[int, Answer]:
        """Step until nothing is left to do; the engine must then hold nothing."""
        while self.engine.has_work():
            assert self.steps < limit, "the engine makes no progress"
            self.step()
        self.engine.idle_check()
        return self.answers


def run(engine: Engine, requests: Iterable[Request]) -> dict[int, Answer]:
    """All requests at once, to the end."""
    runner = Runner(engine)
    runner.add(*requests)
    return runner.finish()


def prompts_of(lengths: Iterable[int], seed: int = 0, vocab: int = 512) -> list[tuple[int, ...]]:
    """Random prompts of the given lengths."""
    chance = random.Random(seed)
    return [tuple(chance.randrange(vocab) for _ in range(length)) for length in lengths]
