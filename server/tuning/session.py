"""One tuning session on a loaded model: record, measure, and later confirm. Knows engines and requests; refuses to choose.

Every engine is fresh and every run a tenant of its own, so that nothing is known from the run before.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from server.compose import Parts, default_speculator, draft_vocabularies, make_engine
from server.local import in_turn, run_requests
from server.settings import Settings
from server.speculation import KeptSpeculator
from server.tuning.measure import chunk_curve, decode_table
from server.tuning.predict import Choice
from server.tuning.record import Recorder, Watched, metered, metering, seconds_of
from server.tuning.search import CHUNKS, PAGES, Workload, vocabularies
from server.tuning.traces import Curve, Machine, StepCurves, Trace
from server.tuning.turns import Turn, with_steps
from spec.budget import PriceSpeculator
from spec.calibration import Calibration
from spec.config import EngineConfig
from spec.cost_table import CostTable
from spec.drafter import Drafter
from spec.engine import Engine
from spec.errors import ConfigError
from spec.request import Request
from spec.speculator import Speculator
from spec.target import TargetModel

CAPS = (1, 2, 3, 4, 6, 10, 16)  # depths in turn, for the cost of drafting
CHUNK_SIZES = (8, 16, 32, *CHUNKS)
SAMPLE_TOKENS = 32  # longest answer of the runs that tell costs
SAMPLE_PROMPTS = 4  # of each such run, or as many as there are places

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Confirmation:
    """Figures of each choice."""

    rates: list[float]  # tokens a second, by the first choice's clock: see `paired`
    acceptance_lengths: list[float]
    repeats: int  # that were made


@dataclass(frozen=True, slots=True)
class Effort:
    """How long costs are timed."""

    table_seconds: float = 4.0
    chunk_repeats: int = 9
    rounds: int = 5  # of runs that tell what steps and drafters cost, so that one slow second does not count

    @staticmethod
    def within(minutes: float) -> Effort:
        """Less of everything where there are less than four minutes for the whole of tuning."""
        share = min(1.0, max(0.05, minutes / 4.0))
        return Effort(4.0 * share, max(3, round(9 * share)), max(1, round(5 * share)))


@dataclass(slots=True)
class Session:
    """`calibration` is what a server would start from; `requests` the workload."""

    parts: Parts
    requests: Sequence[Request]
    loads: Sequence[int]
    drafters: str  # a setting: those to choose from, together
    calibration: Calibration
    effort: Effort = Effort()
    _decode: CostTable | None = None
    _glancing: frozenset[str] = frozenset()
    _ids: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def usual(self) -> Choice:
        settings = self.parts.settings
        return Choice((), settings.max_tree_nodes, page_size=settings.page_size, chunk_tokens=settings.chunk_tokens)

    @property
    def says(self) -> dict[str, tuple[int, ...]]:
        """The tokens of each drafter that has a list of its own, rising."""
        return draft_vocabularies(self.parts, self.drafters)

    # --- recording and measuring --------------------------------------------------------------------------------------

    def record(self, note: Note) -> list[Trace]:
        """The whole workload once, one conversation at a time, every drafter asked at every position."""
        recorder = Recorder(self.calibration)
        note("recording the workload")
        run = metered(self._recording(recorder), self._fresh(self.requests), 1)
        failed = next((c.error for c in run.completions if c.error), None)
        if failed:
            raise ConfigError(f"a prompt of the workload cannot be answered: {failed}")
        return recorder.traces(run.completions)

    def measure(self, note: Note) -> Machine:
        """Every table that predictions read."""
        note("timing passes")
        decode = self._decode = decode_table(self.parts, self.parts.settings.page_size, self.effort.table_seconds)
        note("timing prompt chunks")
        chunk, per_key = chunk_curve(self.parts, CHUNK_SIZES, self.effort.chunk_repeats)
        sizes, here = vocabularies(self.says), self.parts.settings.page_size
        turns = []
        for number in range(self.effort.rounds):
            for load in sorted({1, *self.loads}):
                note(f"timing steps, {load} at once, {number + 1} of {self.effort.rounds}")
                plain, (engine, watched) = make_engine(self.parts, "none"), self._watched()
                few = self._sample(load)
                for start in range(0, len(few), load):
                    kinds = (sizes, [size for size in PAGES if size != here]) if load == 1 and start < 2 else ((), ())
                    turns.append(self._turn(few[start : start + load], load, plain, (engine, watched), *kinds))
        context = statistics.mean(len(r.prompt_ids) + min(SAMPLE_TOKENS, r.sampling.max_tokens) / 2 for r in self.requests)
        level = StepCurves(Curve(((1.0, 0.0),)))
        machine = Machine(decode, chunk, level, level, pages={here: 1.0}, chunk_per_key=per_key, glancing=self._glancing)
        return with_steps(machine, turns, context, set(self.says))

    def _turn(
        self,
        requests: Sequence[Request],
        load: int,
        plain: Engine,
        drafting: tuple[Engine, Watched],
        vocabularies: Sequence[int],
        pages: Sequence[int],
    ) -> Turn:
        """All kinds of run step by step in turn, so that a machine that changes its speed changes that of all of them."""
        turn = Turn(load)
        recorders = {size: Recorder(self.calibration, CAPS) for size in (0, *vocabularies)}
        engines = [
            plain,
            drafting[0],
            *(self._engine(self.settings(dataclasses.replace(self.usual, page_size=n))) for n in pages),
        ]
        runs = [
            metering(engine, self._fresh(requests), load, watched=drafting[1] if engine is drafting[0] else None)
            for engine in engines
        ]
        runs += [metering(self._recording(r, size), self._fresh(requests), load) for size, r in recorders.items()]
        done = in_turn(runs)
        turn.plain, turn.drafting = done[0].costs, done[1].costs
        turn.pages = {size: run.costs for size, run in zip(pages, done[2:], strict=False)}
        turn.drafts = recorders[0].samples
        turn.cut = {size: recorders[size].samples for size in vocabularies}
        return turn

    def workload(self, traces: Sequence[Trace], machine: Machine) -> Workload:
        temperature = self.requests[0].sampling.temperature
        return Workload(traces, machine, self.calibration, self.parts.model.shape.vocab_size, temperature, self.says)

    # --- confirming ---------------------------------------------------------------------------------------------------

    def confirm(
        self,
        choices: Sequence[Choice],
        load: int,
        repeats: int,
        note: Note,
        time_is_up: Callable[[], bool] = lambda: False,
    ) -> Confirmation:
        """All choices side by side: group after group of requests through every engine, in another order every time.

        The first choice is the clock of the others: what counts of one is its time over the first one's on the same requests a moment
        before or after, the middle of the repeats, so that neither a stall nor a slow minute of the machine moves anything. When time is up
        no further repeat is begun, but one is always made.
        """
        engines = [self._engine(self.settings(choice)) for choice in choices]
        for engine in engines:
            run_requests(engine, self._fresh(self._sample(1)[:1]), 1)  # warms up
        size = group_size(load)
        starts = range(0, len(self.requests), size)
        raw: list[list[list[float]]] = [[[] for _ in starts] for _ in choices]
        tokens, steps = [0] * len(choices), [[0, 0] for _ in choices]
        made = 0
        for repeat in range(repeats + 1):  # the first time is for learning
            if made and time_is_up():
                break
            note(f"confirming, {load} at once, {f'{repeat} of at most {repeats}' if repeat else 'once to learn'}")
            fresh = self._fresh(self.requests)
            for turn, start in enumerate(starts):
                for offset in range(len(choices)):
                    at = (offset + turn + repeat) % len(choices)
                    answers = run_requests(engines[at], fresh[start : start + size], load)
                    if repeat == 0:
                        tokens[at] += sum(len(c.token_ids) for c in answers)
                        continue
                    raw[at][turn].append(seconds_of(answers))
                    steps[at][0] += sum(max(0, len(c.step_sizes) - 1) for c in answers)
                    steps[at][1] += sum(sum(c.step_sizes[1:]) for c in answers)
            made = repeat
        return Confirmation(
            rates=[count / paired(each, raw[0]) for count, each in zip(tokens, raw, strict=True)],
            acceptance_lengths=[brought / max(1, passes) for passes, brought in steps],
            repeats=made,
        )

    def settings(self, choice: Choice) -> Settings:
        """The session's settings with a choice's."""
        return msgspec.structs.replace(
            self.parts.settings,
            drafters=",".join(self._spelling(name) for name in choice.drafters) or "none",
            max_tree_nodes=choice.max_tree_nodes,
            tree_shape=choice.tree_shape,
            draft_vocabulary=choice.draft_vocabulary,
            page_size=choice.page_size,
            chunk_tokens=choice.chunk_tokens,
        )

    def _spelling(self, name: str) -> str:
        """How the settings name a drafter that the engine calls `name`."""
        spelled = [item for item in self.drafters.split(",") if item.split(":")[0] == name]
        return spelled[0] if spelled else name

    # --- engines and requests -----------------------------------------------------------------------------------------

    def _default(self) -> Settings:
        return msgspec.structs.replace(self.parts.settings, drafters=self.drafters, tree_shape="", draft_vocabulary=0)

    def _watched(self) -> tuple[Engine, Watched]:
        """The engine with all drafters, and its speculator."""
        made: list[Watched] = []

        def wrap(speculator: Speculator) -> Speculator:
            made.append(Watched(speculator))
            return made[0]

        return self._engine(self._default(), wrap), made[0]

    def _engine(self, settings: Settings, wrap: Callable[[Speculator], Speculator] = lambda speculator: speculator) -> Engine:
        """As `serve` makes it, but for the costs, which were measured once for all, and the kept calibration, which stays as it is."""

        def speculator(parts: Parts, config: EngineConfig, target: TargetModel, drafters: Sequence[Drafter]) -> Speculator:
            self._glancing |= {drafter.name for drafter in drafters if hasattr(drafter, "hopes")}
            if settings.tree_shape or self._decode is None:
                return wrap(default_speculator(parts, config, target, drafters))
            calibration = Calibration()
            calibration.restore(self.calibration.dump())
            return wrap(PriceSpeculator(calibration, copy.deepcopy(self._decode), vocab_size=target.vocab_size))

        return make_engine(dataclasses.replace(self.parts, settings=settings), speculator=speculator)

    def _recording(self, recorder: Recorder, vocabulary: int = 0) -> Engine:
        settings = msgspec.structs.replace(self.parts.settings, draft_vocabulary=vocabulary)
        parts = dataclasses.replace(self.parts, settings=settings)
        return make_engine(parts, self.drafters, speculator=lambda *_: recorder)

    def _sample(self, load: int) -> list[Request]:
        """A few requests with short answers, enough that all places are taken for a while."""
        count = max(SAMPLE_PROMPTS, 2 * load)
        picked = list(itertools.islice(itertools.cycle(self.requests), count))
        short = [min(SAMPLE_TOKENS, request.sampling.max_tokens) for request in picked]
        return [
            msgspec.structs.replace(r, sampling=msgspec.structs.replace(r.sampling, max_tokens=n))
            for r, n in zip(picked, short, strict=True)
        ]

    def _fresh(self, requests: Sequence[Request]) -> list[Request]:
        """The same requests under new ids, of a tenant that was never seen."""
        run = next(self._ids)
        return [
            msgspec.structs.replace(request, id=(run + 1) * 10**6 + i, tenant=f"tune {run}")
            for i, request in enumerate(requests)
        ]


def group_size(load: int) -> int:
    """Requests that a confirming run answers in one go: enough that places are taken again."""
    return 2 * load if load > 1 else 1


def paired(own: Sequence[Sequence[float]], first: Sequence[Sequence[float]]) -> float:
    """Seconds in all, of groups by repeats: for every group the middle of the first choice's repeats, times the middle of how much
    longer the own ones took than the first's of the same repeat."""
    total = 0.0
    for mine, others in zip(own, first, strict=True):
        total += statistics.median(others) * statistics.median(m / max(o, 1e-9) for m, o in zip(mine, others, strict=True))
    return max(1e-9, total)


def known_calibration(parts: Parts) -> Calibration:
    """What a server of these parts would start from. An empty one where a fixed shape learns nothing."""
    found: list[Calibration] = []

    def look(parts: Parts, config: EngineConfig, target: TargetModel, drafters: Sequence[Drafter]) -> Speculator:
        speculator = default_speculator(parts, config, target, ())
        found.append(speculator.calibration if isinstance(speculator, KeptSpeculator) else Calibration())
        return speculator

    make_engine(parts, "none", speculator=look)
    return found[0]
