"""`forespeak bench`: time to first token, gaps, tokens a second and acceptance on real prompts, beside plain decoding.

Plain and speculative runs alternate prompt by prompt on the same weights, so that a drifting machine shifts both alike.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from server.commands.common import chosen_prompts, requests_of, table_console
from server.commands.verify import mean_acceptance_length
from server.compose import load_parts, make_engine
from server.local import Completion, run_requests
from server.prompts import Prompt
from server.settings import Settings
from spec.engine import Engine
from spec.request import Request

WARM_UP_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Run:
    """All completions of one engine at one concurrency, and the seconds its steps took together."""

    completions: list[Completion]
    seconds: float


def run(
    settings: Settings,
    prompts: Path | None,
    n: int | None,
    max_tokens: int,
    temperature: float,
    seed: int | None,
    concurrency: Sequence[int],
    repeats: int,
) -> int:
    """Print a table and, last, one JSON line; returns 0."""
    chosen = chosen_prompts(None, prompts, n)
    parts = load_parts(settings)
    requests = requests_of(parts, chosen, max_tokens, temperature, 0 if seed is None else seed)
    results = []
    console = table_console()
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("warming up", total=repeats * len(concurrency) * len(requests) * 2)
        for streams in concurrency:
            plain_engine, engine = make_engine(parts, "none"), make_engine(parts)
            for each in (plain_engine, engine):
                warm = [msgspec.structs.replace(r, id=10**9 + r.id, tenant="warm-up", sampling=_short(r)) for r in requests[:2]]
                run_requests(each, warm, streams)
            progress.update(task, description=f"{streams} at once")
            pairs = _alternate(
                plain_engine,
                engine,
                requests,
                streams,
                repeats,
                lambda s: progress.advance(task, s),
            )
            results.append(_report(chosen, streams, *pairs))
    for result in results:
        _print(console, result)
    best = dict(results[0])
    best["by_concurrency"] = {
        str(r["concurrency"]): {k: r[k] for k in ("decode_tokens_per_second", "tokens_per_second", "speedup_over_plain")}
        for r in results
    }
    best |= {
        "drafters": settings.drafters, "prompts": len(requests), "max_tokens": max_tokens, "temperature": temperature,
        "backend": parts.backend.name, "threads": settings.threads, "repeats": repeats, "commit": _commit(), "argv": sys.argv[1:],
        "versions": {"python": sys.version.split()[0], "torch": str(torch.__version__)},
    }  # fmt: skip
    print(msgspec.json.encode(best).decode())
    return 0


def _short(request: Request) -> Any:
    return msgspec.structs.replace(request.sampling, max_tokens=min(WARM_UP_TOKENS, request.sampling.max_tokens))


def _alternate(
    plain: Engine, drafting: Engine, requests: Sequence[Request], streams: int, repeats: int, tick: Any
) -> tuple[list[Run], list[Run]]:
    """Groups of `streams` requests, first through one engine and then through the other, the order swapped every group.

    Every repeat is a tenant of its own: else the prefix cache and the suffix drafter's store would hold the last repeat's answers.
    """
    runs: tuple[list[Run], list[Run]] = ([], [])
    for repeat in range(repeats):
        done: tuple[list[Completion], list[Completion]] = ([], [])
        seconds = [0.0, 0.0]
        for index, start in enumerate(range(0, len(requests), streams)):
            group = [
                msgspec.structs.replace(r, id=(repeat + 1) * 10**6 + r.id, tenant=f"repeat {repeat}")
                for r in requests[start : start + streams]
            ]
            for which in (0, 1) if (index + repeat) % 2 == 0 else (1, 0):
                answers = run_requests((plain, drafting)[which], group, streams)
                done[which].extend(answers)
                seconds[which] += max(c.token_times[-1] for c in answers if c.token_times) - min(c.submitted for c in answers)
                tick(len(group))
        for which in (0, 1):
            runs[which].append(Run(done[which], seconds[which]))
    return runs


def decode_rate(completions: Sequence[Completion]) -> float:
    """Tokens after the first over the time from first to last, summed over answers (tokens/s of one stream)."""
    seconds = sum(c.decode_seconds for c in completions)
    return sum(len(c.token_times) - 1 for c in completions if c.token_times) / seconds if seconds else 0.0


def _median(runs: Sequence[Run], figure: Callable[[Run], float]) -> float:
    return statistics.median(figure(r) for r in runs)


def _report(prompts: Sequence[Prompt], streams: int, plain: list[Run], drafting: list[Run]) -> dict[str, Any]:
    rate = _median(drafting, lambda r: decode_rate(r.completions))
    plain_rate = _median(plain, lambda r: decode_rate(r.completions))
    total = _median(drafting, lambda r: sum(len(c.token_ids) for c in r.completions) / r.seconds)
    plain_total = _median(plain, lambda r: sum(len(c.token_ids) for c in r.completions) / r.seconds)
    flat = [c for r in drafting for c in r.completions]
    gaps = sorted(b - a for c in flat for a, b in zip(c.token_times, c.token_times[1:], strict=False))
    by_category: dict[str, Any] = {}
    for category in dict.fromkeys(p.category for p in prompts):
        picks = [i for i, p in enumerate(prompts) if p.category == category]
        mine = [[r.completions[i] for i in picks] for r in drafting]
        theirs = [[r.completions[i] for i in picks] for r in plain]
        ratio = statistics.median(
            decode_rate(a) / decode_rate(b) for a, b in zip(mine, theirs, strict=True) if decode_rate(b) > 0
        )
        by_category[category] = {
            "acceptance_length": round(mean_acceptance_length([c for m in mine for c in m]), 3),
            "decode_tokens_per_second": round(statistics.median(decode_rate(m) for m in mine), 1),
            "speedup_over_plain": round(ratio, 3),
        }
    identical = all(
        a.token_ids == b.token_ids
        for r, s in zip(plain, drafting, strict=True)
        for a, b in zip(r.completions, s.completions, strict=True)
    )
    return {
        "concurrency": streams,
        "decode_tokens_per_second": round(rate, 1),
        "plain_decode_tokens_per_second": round(plain_rate, 1),
        "tokens_per_second": round(total, 1),
        "plain_tokens_per_second": round(plain_total, 1),
        "speedup_over_plain": round(statistics.median(decode_rate(a.completions) / decode_rate(b.completions) for a, b in zip(drafting, plain, strict=True)), 3),
        "ttft_ms_p50": round(statistics.median(c.ttft for c in flat) * 1e3, 2),
        "gap_ms_p50": round(gaps[len(gaps) // 2] * 1e3, 3) if gaps else 0.0,
        "gap_ms_p99": round(gaps[int(len(gaps) * 0.99)] * 1e3, 3) if gaps else 0.0,
        "acceptance_length": round(mean_acceptance_length(flat), 3),
        "acceptance_per_position": _per_position(flat),
        "identical_to_plain": identical,
        "by_category": by_category,
    }  # fmt: skip


def _per_position(completions: Sequence[Completion]) -> list[float]:
    """Share of target passes that delivered at least i accepted drafts, i = 1, 2, ..."""
    passes = sum(max(len(c.step_sizes) - 1, 0) for c in completions)
    depth = max((len(c.accepted_per_position) for c in completions), default=0)
    counts = [sum(c.accepted_per_position[i] for c in completions if i < len(c.accepted_per_position)) for i in range(depth)]
    return [round(count / passes, 4) if passes else 0.0 for count in counts]


def _print(console: Console, result: dict[str, Any]) -> None:
    table = Table("category", "acceptance length", "tokens/s", "over plain", title=f"{result['concurrency']} at once")
    for category, row in result["by_category"].items():
        table.add_row(
            category,
            f"{row['acceptance_length']:.2f}",
            f"{row['decode_tokens_per_second']:.0f}",
            f"{row['speedup_over_plain']:.2f}",
        )
    table.add_section()
    table.add_row(
        "all",
        f"{result['acceptance_length']:.2f}",
        f"{result['decode_tokens_per_second']:.0f}",
        f"{result['speedup_over_plain']:.2f}",
    )
    console.print(table)


def _commit() -> str:
    try:
        here = Path(__file__).resolve().parent
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
