"""The price rule made ready: costs measured on the loaded target, calibration kept between runs. Part of the composition root."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch

from kernels.batch import StepInputs
from spec.budget import PriceSpeculator
from spec.calibration import Calibration
from spec.config import EngineConfig
from spec.cost_table import CostTable
from spec.speculator import Load, Speculator, StepRecord
from spec.target import TargetModel

MEASURE_SECONDS = 1.0
SAVE_EVERY_SECONDS = 30.0
LEARN_FROM = 8  # steps at once

log = logging.getLogger("forespeak.speculation")


def starting_calibration(
    kept: Path, shipped: Path | None, weights: Mapping[str, str] | None = None, not_shipped: Collection[str] = ()
) -> Calibration:
    """What was learnt here, in `kept`; drafters it does not know start from what ships with them.

    `weights` name what the drafters are now: what another draft model, or other heads, taught is not theirs. `not_shipped` are
    drafters that what ships says nothing of."""
    calibration, prior = Calibration(), Calibration()
    calibration.load(kept, log.warning)
    calibration.claim(weights or {})
    if shipped is not None and prior.load(shipped, log.warning):
        own = calibration.dump()
        theirs = {name: cells for name, cells in prior.dump()["drafters"].items() if name not in not_shipped}
        calibration.restore(own | {"drafters": theirs | own["drafters"]})
    return calibration


def measured_price_speculator(
    target: TargetModel, config: EngineConfig, calibration_file: Path, calibration: Calibration, measure: bool
) -> Speculator:
    """The price rule over this machine's own pass times. `measure` off leaves the table to be learnt from real steps."""
    costs = CostTable()
    if measure:
        measure_costs(costs, target, config, MEASURE_SECONDS)
    inner = PriceSpeculator(calibration, costs, vocab_size=target.vocab_size, batch=LEARN_FROM)
    return KeptSpeculator(inner, calibration, calibration_file)


def measure_costs(costs: CostTable, target: TargetModel, config: EngineConfig, seconds: float) -> None:
    """Fill the table by passes that fit the model's positions and the store."""
    room, longest = config.num_pages * config.page_size, target.decoder.shape.max_position
    costs.measure(
        lambda *sizes: pass_ms(target, config, *sizes),
        max_rows=max(1, min(64, room // 2, longest)),
        max_context=min(room, longest) - 1,
        seconds=seconds,
    )


def pass_ms(target: TargetModel, config: EngineConfig, rows: int, context: int, sequences: int) -> float:
    """Milliseconds of one pass of `rows` nodes over `sequences` rows with `context` committed keys in all.

    Runs on the empty store of an engine that has not started; what it writes there is never read.
    """
    inputs = _inputs(target, config, rows, context, sequences)
    start = time.perf_counter()
    target.run(inputs, need_logits=False)
    return (time.perf_counter() - start) * 1e3


def _inputs(target: TargetModel, config: EngineConfig, rows: int, context: int, sequences: int) -> StepInputs:
    size = config.page_size
    counts = [rows // sequences + (i < rows % sequences) for i in range(sequences)]
    lens = [context // sequences] * sequences
    if max(lens) + max(counts) > min(config.num_pages * size, target.decoder.shape.max_position):
        raise ValueError(f"a pass over {rows} rows with {context} keys does not fit the store or the model's positions")
    pages = -(-(max(lens) + max(counts)) // size)
    table = [[(i * pages + j) % config.num_pages for j in range(pages)] for i in range(sequences)]
    positions = [n + i for n, count in zip(lens, counts, strict=True) for i in range(count)]
    slots = [
        table[s][(n + i) // size] * size + (n + i) % size
        for s, (n, count) in enumerate(zip(lens, counts, strict=True))
        for i in range(count)
    ]
    device = target.store.k.device

    def ints(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    ends = [0]
    for count in counts:
        ends.append(ends[-1] + count)
    return StepInputs(
        input_ids=ints([i % target.vocab_size for i in range(rows)]),
        positions=ints(positions),
        slots=ints(slots),
        words=torch.zeros(rows, dtype=torch.int64, device=device),
        causal=torch.ones(sequences, dtype=torch.uint8, device=device),
        row_ptr=ints(ends),
        page_table=ints(table),
        kv_lens=ints(lens),
        score_rows=ints(list(range(rows))),
    )


class KeptSpeculator:
    """The price rule, whose calibration is written to a file now and then and at the end, so that a restart begins where this run
    ended."""

    patient = True

    def __init__(
        self, inner: PriceSpeculator, calibration: Calibration, path: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._inner = inner
        self._calibration = calibration
        self._path = path
        self._clock = clock
        self._saved = clock()
        self._learnt = False  # something since it was saved
        self.rests = inner.rests  # every plain step calls it: without a frame between
        self.budgets, self.admit, self.refused = inner.budgets, inner.admit, inner.refused

    @property
    def calibration(self) -> Calibration:
        """What is known now; for reading."""
        return self._calibration

    def record(self, step: StepRecord) -> None:
        self._inner.record(step)
        self._learnt = True
        self._save_now_and_then()

    def passed(self, steps: int, sequences: int, load: Load, target_ms: float, total_ms: float) -> None:
        self._inner.passed(steps, sequences, load, target_ms, total_ms)
        if self._learnt:
            self._save_now_and_then()

    def close(self) -> None:
        self._inner.catch_up()
        if self._learnt:
            self._save()

    def _save_now_and_then(self) -> None:
        if self._clock() - self._saved >= SAVE_EVERY_SECONDS:
            self._save()

    def _save(self) -> None:
        self._saved, self._learnt = self._clock(), False
        try:
            self._calibration.save(self._path)
        except OSError as error:
            log.warning("the calibration cannot be kept in %s: %s", self._path, error.strerror)
