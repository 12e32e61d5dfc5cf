"""One tuning session on a loaded model: record, measure, and later confirm. Knows engines and requests; refuses to choose.

Every engine is fresh and every run a tenant of its own, so that nothing is known from the run before.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from server.compose import Parts, default_speculator, make_engine
from server.local import Completion, run_requests
from server.settings import Settings
from server.speculation import KeptSpeculator
from server.tuning.measure import chunk_curve, decode_table, draft_costs, overhead_curve, page_factors
from server.tuning.predict import Choice
from server.tuning.record import DraftSample, Recorder, StepCost, metered
from server.tuning.search import CHUNKS, PAGES, Workload
from server.tuning.traces import Machine, Trace
from spec.calibration import Calibration
from spec.config import EngineConfig
from spec.drafter import Drafter
from spec.engine import Engine
from spec.errors import ConfigError
from spec.request import Request
from spec.speculator import Speculator
from spec.target import TargetModel

CAPS = (1, 2, 3, 4, 6, 10, 16)  # depths in turn, for the cost of drafting
CHUNK_SIZES = (8, 16, 32, *CHUNKS)
SAMPLE_TOKENS = 48  # longest answer of the runs that tell costs
SAMPLE_PROMPTS = 4  # of each such run, or as many as there are places

Note = Callable[[str], None]


@dataclass(slots=True)
class Session:
    """`calibration` is what a server would start from; `requests` the workload, with a category each."""

    parts: Parts
    requests: Sequence[Request]
    categories: Sequence[str]
    loads: Sequence[int]
    drafters: str  # a setting: those to choose from, together
    calibration: Calibration
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
        return recorder.traces(run.completions, self.categories), recorder

    def measure(self, recorder: Recorder, note: Note) -> Machine:
        """Every table that predictions read."""
        note("timing passes")
        decode = decode_table(self.parts, self.parts.settings.page_size, seconds=4.0)
        for step in recorder.steps:  # real steps move the curve to where the workload is
            decode.record(step.nodes, step.load.context, step.load.sequences, step.target_ms, None)
        note("timing prompt chunks")
        chunk, per_key = chunk_curve(self.parts, CHUNK_SIZES, repeats=5)
        note("timing page sizes")
        contexts = [step.load.context for step in recorder.steps] or [1]
        pages = page_factors(self.parts, PAGES, int(statistics.median(contexts)), repeats=15)
        plain: list[StepCost] = []
        drafting: list[StepCost] = []
        samples: list[DraftSample] = []
        for load in sorted({1, *self.loads}):
            note(f"timing steps, {load} at once")
            few = self._sample(load)
            plain += metered(make_engine(self.parts, "none"), self._fresh(few), load).costs
            drafting += metered(self._engine(self._default()), self._fresh(few), load).costs
            capped = Recorder(self.calibration, CAPS)
            metered(self._recording(capped), self._fresh(few), load)
            samples += capped.samples
        return Machine(
            decode=decode,
            chunk=chunk,
            chunk_per_key=per_key,
            overhead=overhead_curve(plain),
            drafting_overhead=overhead_curve(drafting),
            drafts=draft_costs(samples),
            pages=pages,
        )

    def workload(self, traces: Sequence[Trace], machine: Machine) -> Workload:
        temperature = self.requests[0].sampling.temperature
        return Workload(traces, machine, self.calibration, self.parts.model.shape.vocab_size, temperature)

    # --- confirming ---------------------------------------------------------------------------------------------------

    def confirm(self, choices: Sequence[Choice], load: int, repeats: int, note: Note) -> list[float]:
        """Tokens a second of each choice: runs in turn, medians."""
        rates: list[list[float]] = [[] for _ in choices]
        for repeat in range(repeats):
            order = list(range(len(choices)))
            for at in order if repeat % 2 == 0 else reversed(order):
                note(f"confirming, {load} at once")
                engine = self._engine(self.settings(choices[at]))
                rates[at].append(_rate(run_requests(engine, self._fresh(self.requests), load)))
        return [statistics.median(values) for values in rates]

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
        return make_engine(dataclasses.replace(self.parts, settings=settings))

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


def _rate(completions: Sequence[Completion]) -> float:
    """Tokens a second from the first submission to the last token."""
    answered = [c for c in completions if c.token_times]
    if not answered:
        return 0.0
    seconds = max(c.token_times[-1] for c in answered) - min(c.submitted for c in answered)
    return sum(len(c.token_ids) for c in answered) / seconds


def known_calibration(parts: Parts) -> Calibration:
    """What a server of these parts would start from. An empty one where a fixed shape learns nothing."""
    found: list[Calibration] = []

    def look(parts: Parts, config: EngineConfig, target: TargetModel, drafters: Sequence[Drafter]) -> Speculator:
        speculator = default_speculator(parts, config, target, ())
        found.append(speculator.calibration if isinstance(speculator, KeptSpeculator) else Calibration())
        return speculator

    make_engine(parts, "none", speculator=look)
    return found[0]
