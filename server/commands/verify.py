"""`forespeak verify`: the same prompts with speculation off and in every combination; any different token id is a failure."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kernels.whole_store import BLOCK
from server.commands.common import prompts_of, requests_of, table_console
from server.compose import Parts, kv_bytes_per_token, load_parts, make_engine, shipped_drafters
from server.local import Completion, run_requests
from server.settings import Settings
from spec.request import Request

SHAPES = ("", "chain:4", "2x4", "4x3", "wide", "mixed")
SHAPE_NAMES = {"": "auto"}
SHAPE_BATCH = (
    8  # answers at once where a fixed shape is tried: three times as fast as one by one, and one thing more that differs
)


@dataclass(frozen=True, slots=True)
class Combination:
    """One way to run the prompts. `settings` differ from the baseline's only in what the name says."""

    drafters: str
    shape: str
    change: str
    settings: Settings
    concurrency: int = 1
    warm_cache: bool = False  # answer everything once before the run that counts


def combinations(parts: Parts, baseline: Sequence[Completion], everything: bool) -> list[Combination]:
    """Every drafter alone and all together; with `everything` also tree shapes, page sizes, chunks, batches, cache states."""
    settings = parts.settings
    names = drafter_sets(settings, parts.model.name)
    longest = max(len(c.request.prompt_ids) + len(c.token_ids) for c in baseline)

    def change(**values: object) -> Settings:
        return msgspec.structs.replace(settings, **values)

    rows = [Combination(name, "", "", change(drafters=name)) for name in names]
    rows += [
        Combination(name, shape, f"batch {SHAPE_BATCH}", change(drafters=name, tree_shape=shape), SHAPE_BATCH)
        for name in names
        for shape in (SHAPES[1:] if everything else SHAPES[1:3])
    ]
    if not everything:
        return rows
    best = names[-1]
    sizes = (BLOCK, 2 * BLOCK) if parts.kv_dtype == torch.uint8 else (1, 4, 32)  # bytes are kept in whole blocks
    rows += [Combination(best, "", f"page size {p}", change(drafters=best, page_size=p)) for p in sizes]
    rows += [Combination(best, "", f"chunk {c}", change(drafters=best, chunk_tokens=c)) for c in (7, 64)]
    for name in ("none", *names):
        rows += [Combination(name, "", f"batch {b}", change(drafters=name), concurrency=b) for b in (4, 16)]
    rows.append(Combination(best, "", "cache hit", change(drafters=best), warm_cache=True))
    rows.append(Combination(best, "", "cache off", change(drafters=best, prefix_cache=False), concurrency=4))
    # Room for about two of the longest conversations while eight run: sequences are preempted and recomputed.
    per_token = kv_bytes_per_token(parts.model.shape, parts.kv_dtype)
    tight = (2 * longest + 4 * settings.page_size) * per_token
    tight_set = ",".join(kind for kind in best.split(",") if kind in ("suffix", "heads")) or "none"
    rows.append(Combination(tight_set, "", "preemption", change(drafters=tight_set, kv_memory=tight), concurrency=8))
    return rows


def drafter_sets(settings: Settings, model_name: str) -> list[str]:
    """The drafters to check: those asked for, or all that are here, each alone and then together."""
    if settings.drafters not in ("auto", "none"):
        single = settings.drafters.split(",")
    else:
        single = ["suffix", *shipped_drafters(model_name)]
        single.append(f"model:{settings.model}")
    return [*single, ",".join(single)] if len(single) > 1 else single


def run(
    settings: Settings,
    prompts: Path | None,
    n: int | None,
    max_tokens: int,
    temperature: float,
    seed: int | None,
    everything: bool,
) -> int:
    """Print one row a combination; returns 1 when any token id differs or a request failed."""
    chosen = prompts_of(prompts, n)
    parts = load_parts(settings)
    requests = requests_of(parts, chosen, max_tokens, temperature, 0 if seed is None else seed)
    console = table_console()
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("plain decoding", total=None)
        plain = msgspec.structs.replace(settings, drafters="none", tree_shape="")
        baseline, seconds = _answers(parts, Combination("none", "", "", plain), requests)
        rows = combinations(parts, baseline, everything)
        table = Table("drafters", "shape", "change", "identical", "acceptance length", "drafted", "accepted", "seconds")
        table.add_row("none", "", "baseline", f"{len(baseline)}/{len(baseline)}", "1.00", "0", "0", f"{seconds:.1f}")
        progress.update(task, total=len(rows))
        failures: list[str] = []
        for row in rows:
            label = f"{row.drafters} {SHAPE_NAMES.get(row.shape, row.shape)} {row.change}".strip()
            progress.update(task, description=label)
            answers, seconds = _answers(parts, row, requests)
            same = _compare(baseline, answers, row, failures)
            if not progress.console.is_terminal:  # a log has no bar to look at
                progress.console.print(f"{label}: {same}/{len(requests)} in {seconds:.0f} s", highlight=False, markup=False)
            table.add_row(
                row.drafters,
                SHAPE_NAMES.get(row.shape, row.shape),
                row.change,
                f"{same}/{len(requests)}",
                f"{mean_acceptance_length(answers):.2f}",
                str(sum(c.drafted for c in answers)),
                str(sum(c.accepted for c in answers)),
                f"{seconds:.1f}",
            )
            progress.advance(task)
    console.print(table)
    for failure in failures:
        console.print(failure, highlight=False, markup=False)
    console.print(f"{'DIFFERENT' if failures else 'identical'}: {len(rows)} combinations x {len(requests)} prompts")
    return 1 if failures else 0


def mean_acceptance_length(completions: Sequence[Completion]) -> float:
    """Tokens delivered per target pass after the first token, over all answers together."""
    steps = [size for c in completions for size in c.step_sizes[1:]]
    return sum(steps) / len(steps) if steps else 0.0


def _answers(parts: Parts, row: Combination, requests: Sequence[Request]) -> tuple[list[Completion], float]:
    engine = make_engine(with_settings(parts, row.settings))
    if row.warm_cache:
        again = [msgspec.structs.replace(r, id=r.id + len(requests)) for r in requests]
        run_requests(engine, again, row.concurrency)
    start = time.perf_counter()
    answers = run_requests(engine, requests, row.concurrency)
    engine.idle_check()
    return answers, time.perf_counter() - start


def with_settings(parts: Parts, settings: Settings) -> Parts:
    """The same loaded weights under other settings."""
    return dataclasses.replace(parts, settings=settings)


def _compare(baseline: Sequence[Completion], answers: Sequence[Completion], row: Combination, failures: list[str]) -> int:
    same = 0
    for want, got in zip(baseline, answers, strict=True):
        if (want.token_ids, want.finish_reason) == (got.token_ids, got.finish_reason) and not got.error:
            same += 1
            continue
        pairs = zip(want.token_ids, got.token_ids, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(want.token_ids), len(got.token_ids)))
        label = f"{row.drafters} {SHAPE_NAMES.get(row.shape, row.shape)} {row.change}".strip()
        reason = (
            got.error
            or f"first difference at token {first}: {want.token_ids[first : first + 3]} became {got.token_ids[first : first + 3]}"
        )
        failures.append(f"{label}: prompt {want.request.id}: {reason}")
    return same
