"""`forespeak bench --compare`: ours and other engines on the same prompts, turn by turn; a table and one JSON line."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TaskID, TimeElapsedColumn

from server.commands.bench.facts import facts
from server.commands.common import encode, prompts_of, table_console
from server.compose import load_parts, thread_count
from server.peers import report
from server.peers.compare import CONTEXT, Order, compare, named, peers_root
from server.settings import Settings
from spec.errors import ConfigError

DEFAULT_PROMPTS, DEFAULT_TOKENS, DEFAULT_STREAMS = 26, 96, 16


class ToldProgress(Progress):
    """A bar, and in a log, where a bar is of no use, a line for everything that begins ("one stream: NAME" is one thing)."""

    _told = ""

    def update(self, task_id: TaskID, *, description: str | None = None, **changes: Any) -> None:
        super().update(task_id, description=description, **changes)
        begun = description.split(":")[0] if description else self._told
        if begun != self._told and not self.console.is_terminal:
            print(begun, file=sys.stderr, flush=True)
        self._told = begun


def run(
    settings: Settings,
    peers: str,
    prompts: Path | None,
    n: int | None,
    max_tokens: int,
    repeats: int,
    streams: int = DEFAULT_STREAMS,
    peers_dir: Path | None = None,
) -> int:
    """Print the table and, last, one JSON line. 0, or 1 when no peer at all could be measured."""
    found = figures(settings, peers, prompts, n, max_tokens, repeats, streams, peers_dir)
    print(msgspec.json.encode(found).decode())
    return 0 if found["ratios"] else 1


def figures(
    settings: Settings,
    peers: str,
    prompts: Path | None,
    n: int | None,
    max_tokens: int,
    repeats: int,
    streams: int,
    peers_dir: Path | None,
) -> dict[str, Any]:
    """Measure, print the table, and return what the JSON line holds."""
    chosen = named(peers)
    parts = load_parts(settings)
    encoded = [encode(parts, prompt) for prompt in prompts_of(prompts, n or DEFAULT_PROMPTS)]
    ids = [prompt for prompt in encoded if len(prompt) + max_tokens <= CONTEXT]
    if not ids:
        raise ConfigError(f"no prompt leaves room for {max_tokens} tokens in a context of {CONTEXT}")
    threads = thread_count(settings)
    order = Order(chosen, peers_root(parts, peers_dir), max_tokens, repeats, streams, threads)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    signal.signal(signal.SIGTERM, _leave)  # a peer that stands still would outlive us
    with ToldProgress(*columns, console=Console(stderr=True)) as progress:
        findings = compare(order, parts, ids, progress)
    console = table_console()
    console.print(report.table(findings, streams))
    for name, reason in findings.unavailable.items():
        console.print(f"not measured: {name}: {reason}", markup=False)
    return report.as_json(findings, streams) | {
        "prompts": len(ids), "max_tokens": max_tokens, "repeats": repeats, "threads": threads, "backend": parts.backend.name,
        "drafters": settings.drafters, "model": parts.model.name,
    } | facts()  # fmt: skip


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)
