"""One tuning session on a loaded model: record, measure, and later confirm. Knows engines and requests; refuses to choose.

Every engine is fresh and every run a tenant of its own, so that nothing is known from the run before.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from server.compose import Parts, default_speculator, make_engine
from server.local import run_requests
from server.settings import Settings
from server.speculation import KeptSpeculator
from server.tuning.measure import Sample, chunk_curve, decode_table, draft_costs, page_factors, probe_ms, step_curves, target_of
from server.tuning.predict import Choice
from server.tuning.record import DraftSample, Recorder, metered, seconds_of
from server.tuning.search import CHUNKS, PAGES, Workload
from server.tuning.traces import Machine, Trace
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
ROUNDS = 3  # of such runs, so that one slow second does not count
SAMPLE_TOKENS = 32  # longest answer of the runs that tell costs
SAMPLE_PROMPTS = 4  # of each such run, or as many as there are places

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Confirmation:
    """Figures of each choice."""

    rates: list[float]  # tokens a second
    even_rates: list[float]  # the same had the machine been as fast all the time as when the tables were made
    acceptance_lengths: list[float]
    repeats: int  # that were made


@dataclass(slots=True)
class Session:
    """`calibration` is what a server would start from; `requests` the workload."""

    parts: Parts
    requests: Sequence[Request]
    loads: Sequence[int]
    drafters: str  # a setting: those to choose from, together
    calibration: Calibration
    _decode: CostTable | None = None
    _ids: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def usual(self) -> Choice:
        settings = self.parts.settings
        return Choice((), settings.max_tree_nodes, "", settings.page_size, settings.chunk_tokens)

    # --- recording and measuring --------------------------------------------------------------------------------------

    def record(self, note: Note) -> tuple[list[Trace], Recorder]:
        """The whole workload once, one conversation at a time, every drafter asked at every position."""
        recorder = Recorder(self.calibration)
        note("recording the workload")
        run = metered(self._recording(recorder), self._fresh(self.requests), 1)
        failed = next((c.error for c in run.completions if c.error), None)
        if failed:
            raise ConfigError(f"a prompt of the workload cannot be answered: {failed}")
        return recorder.traces(run.completions), recorder

    def measure(self, recorder: Recorder, note: Note) -> Machine:
        """Every table that predictions read."""
        note("timing passes")
        decode = self._decode = decode_table(self.parts, self.parts.settings.page_size, seconds=4.0)
        note("timing prompt chunks")
        chunk, per_key = chunk_curve(self.parts, CHUNK_SIZES, repeats=9)
        note("timing page sizes")
        contexts = [step.load.context for step in recorder.steps] or [1]
        pages = page_factors(self.parts, PAGES, int(statistics.median(contexts)), repeats=15)
        target, config = target_of(self.parts, self.parts.settings.page_size)
        once = decode.pass_ms(1, 0, 1)

        def sampled(engine: Engine, requests: Sequence[Request], load: int) -> Sample:
            before = probe_ms(target, config)
            costs = metered(engine, self._fresh(requests), load).costs
            return Sample(costs, 2.0 * once / (before + probe_ms(target, config)))

        plain: list[Sample] = []
        drafting: list[Sample] = []
        drafts: list[DraftSample] = []
        for load in sorted({1, *self.loads}):
            few = self._sample(load)
            engines = make_engine(self.parts, "none"), self._engine(self._default())
            for turn in range(ROUNDS):
                note(f"timing steps, {load} at once, {turn + 1} of {ROUNDS}")
                capped = Recorder(self.calibration, CAPS)
                plain.append(sampled(engines[0], few, load))
                drafting.append(sampled(engines[1], few, load))
                speed = sampled(self._recording(capped), few, load).speed
                drafts += [replace(s, ms={name: ms * speed for name, ms in s.ms.items()}) for s in capped.samples]
        context = statistics.mean(len(r.prompt_ids) + min(SAMPLE_TOKENS, r.sampling.max_tokens) / 2 for r in self.requests)
        return Machine(
            decode=decode,
            chunk=chunk,
            chunk_per_key=per_key,
            plain=step_curves(plain, decode, context),
            drafting=step_curves(drafting, decode, context),
            drafts=draft_costs(drafts),
            pages=pages,
        )

    def workload(self, traces: Sequence[Trace], machine: Machine) -> Workload:
        temperature = self.requests[0].sampling.temperature
        return Workload(traces, machine, self.calibration, self.parts.model.shape.vocab_size, temperature)

    # --- confirming ---------------------------------------------------------------------------------------------------

    def confirm(
        self,
        choices: Sequence[Choice],
        load: int,
        repeats: int,
        once_ms: float,
        note: Note,
        time_is_up: Callable[[], bool] = lambda: False,
    ) -> Confirmation:
        """All choices side by side: group after group of requests through every engine, in another order every time.

        Of the repeats of a group the middle one counts, so that a stall of the machine moves nothing. `once_ms`: a pass over one row when
        the tables were made; probes between the runs tell how fast the machine is now. When time is up no further repeat is begun, but
        one is always made.
        """
        engines = [self._engine(self.settings(choice)) for choice in choices]
        probe, config = target_of(self.parts, self.parts.settings.page_size)
        for engine in engines:
            run_requests(engine, self._fresh(self._sample(1)[:1]), 1)  # warms up
        size = group_size(load)
        starts = range(0, len(self.requests), size)
        raw: list[list[list[float]]] = [[[] for _ in starts] for _ in choices]
        even: list[list[list[float]]] = [[[] for _ in starts] for _ in choices]
        tokens, steps = [0] * len(choices), [[0, 0] for _ in choices]
        before = probe_ms(probe, config)
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
                    after = probe_ms(probe, config)
                    seconds, speed = seconds_of(answers), 2.0 * once_ms / (before + after)
                    before = after
                    if repeat == 0:
                        tokens[at] += sum(len(c.token_ids) for c in answers)
                        continue
                    raw[at][turn].append(seconds)
                    even[at][turn].append(seconds * speed)
                    steps[at][0] += sum(max(0, len(c.step_sizes) - 1) for c in answers)
                    steps[at][1] += sum(sum(c.step_sizes[1:]) for c in answers)
            made = repeat
        return Confirmation(
            rates=[count / _of_middles(each) for count, each in zip(tokens, raw, strict=True)],
            even_rates=[count / _of_middles(each) for count, each in zip(tokens, even, strict=True)],
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
            page_size=choice.page_size,
            chunk_tokens=choice.chunk_tokens,
        )

    def _spelling(self, name: str) -> str:
        """How the settings name a drafter that the engine calls `name`."""
        spelled = [item for item in self.drafters.split(",") if item.split(":")[0] == name]
        return spelled[0] if spelled else name

    # --- engines and requests -----------------------------------------------------------------------------------------

    def _default(self) -> Settings:
        return msgspec.structs.replace(self.parts.settings, drafters=self.drafters, tree_shape="")

    def _engine(self, settings: Settings) -> Engine:
        """As `serve` makes it, but for the costs, which were measured once for all, and the kept calibration, which stays as it is."""

        def speculator(parts: Parts, config: EngineConfig, target: TargetModel, drafters: Sequence[Drafter]) -> Speculator:
            if settings.tree_shape or self._decode is None:
                return default_speculator(parts, config, target, drafters)
            calibration = Calibration()
            calibration.restore(self.calibration.dump())
            return PriceSpeculator(calibration, copy.deepcopy(self._decode), vocab_size=target.vocab_size)

        return make_engine(dataclasses.replace(self.parts, settings=settings), speculator=speculator)

    def _recording(self, recorder: Recorder) -> Engine:
        return make_engine(self.parts, self.drafters, speculator=lambda *_: recorder)

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


def _of_middles(repeats: Sequence[Sequence[float]]) -> float:
    """Seconds in all, the middle of its repeats for every group."""
    return max(1e-9, sum(map(statistics.median, repeats)))


def known_calibration(parts: Parts) -> Calibration:
    """What a server of these parts would start from. An empty one where a fixed shape learns nothing."""
    found: list[Calibration] = []

    def look(parts: Parts, config: EngineConfig, target: TargetModel, drafters: Sequence[Drafter]) -> Speculator:
        speculator = default_speculator(parts, config, target, ())
        found.append(speculator.calibration if isinstance(speculator, KeptSpeculator) else Calibration())
        return speculator

    make_engine(parts, "none", speculator=look)
    return found[0]
