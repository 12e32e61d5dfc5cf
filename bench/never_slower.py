"""Is speculation ever slower than plain decoding? Every category of a prompt file, several loads, one table.

    ./dev bench never_slower --prompts FILE [--loads 1 4 16] [--categories writing rag ...] [--max-tokens 128] [--repeats 5]

Two engines over the same weights, one plain and one drafting, answer the same prompts *step by step in turn*: a step of one, a
step of the other. Machines drift from second to second; steps that follow each other within milliseconds do not. Each engine
is kept at its load from a queue of a quarter more prompts, eight at least, and only full decoding steps count: everybody said something and nobody
started. (With the queue empty a stream that is done early leaves a smaller batch behind, which says nothing of a server's load.)
Where answers are short, sixteen streams are seldom all at it: the queue then goes on until 64 full steps' worth of tokens was said.
Every repeat is a tenant of its own, so neither prefix pages nor drafts come from an earlier one, and so is every further time that a
prompt of a short category comes round. Both engines stay for a whole load, as a server's would.

Every pair is printed as soon as it is known; then a table of categories by loads (median over repeats of drafting over plain) and, last, one
JSON line with the least of them. About twenty minutes for 13 categories at loads 1, 4 and 16 on two cores.
A cell in which no step was a full one (long prompts, short answers) is named in "unmeasured"; the others are told all the same.
Exit code 1 when an answer differed between the engines, a cell is unmeasured, or the least ratio is below --least.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from server.commands.common import requests_of, table_console
from server.compose import load_parts, make_engine
from server.local import settle
from server.prompts import Prompt, read_prompts
from server.settings import Settings
from spec.engine import Engine
from spec.errors import ConfigError, ForespeakError
from spec.request import Request

LEAST = 0.98
FULL = 64  # full steps' worth of tokens a race says at least: a few steps tell the machine's noise
ROUNDS = 4  # times the usual prompts it may take to get there


@dataclass(slots=True)
class Side:
    """One engine, kept at `load` answers from its queue until the first `wanted` of it were begun and enough full steps seen."""

    engine: Engine
    load: int
    queue: deque[Request]
    wanted: int
    answers: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, str | None] = field(default_factory=dict)  # why, of those that were not given up
    running: set[int] = field(default_factory=set)
    seconds: float = 0.0
    tokens: int = 0
    row_steps: int = 0

    def step(self) -> bool:
        """One step, counted when it is a full one. False once the load cannot be kept; what still runs is then given up."""
        while self.queue and len(self.running) < self.load and not self.done:
            request = self.queue.popleft()
            self.engine.add(request)
            self.running.add(request.id)
            self.answers[request.id] = []
        if len(self.running) < self.load:
            for left in self.running:
                self.engine.cancel(left)
            self.engine.step()
            return False
        began = time.perf_counter()
        events = self.engine.step()
        took = time.perf_counter() - began
        spoke = [event for event in events if event.token_ids]
        if len(spoke) == self.load and not any(event.started for event in spoke):
            self.seconds += took
            self.row_steps += self.load
            self.tokens += sum(len(event.token_ids) for event in spoke)
        for event in events:
            self.answers[event.request_id] += event.token_ids
            if event.finish_reason is not None:
                self.running.discard(event.request_id)
                self.finished[event.request_id] = event.finish_reason
        return True

    @property
    def done(self) -> bool:
        return len(self.answers) >= self.wanted and self.tokens >= FULL * self.load

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Pair:
    """Both engines' tokens a second on one group, the mean tokens of a drafting pass, and whether the answers were the same."""

    plain: float
    drafting: float
    acceptance: float
    same: bool

    @property
    def line(self) -> str:
        if not self.plain or not self.drafting:
            return "no step in which all were decoding"
        ratio = (
            f"{self.drafting / self.plain:.3f} ({self.drafting:.0f} of {self.plain:.0f} tokens/s, {self.acceptance:.2f} a pass)"
        )
        return ratio if self.same else f"{ratio}  THE ANSWERS DIFFER"


def race(plain: Engine, drafting: Engine, requests: Sequence[Request], load: int, first: int) -> Pair:
    """Answer `queued(load)` of the requests, or more where that takes too few steps, with both engines, step by step in turn;
    `first` is who begins."""
    sides = [Side(engine, load, deque(requests), queued(load)) for engine in (plain, drafting)]
    racing = [sides[first], sides[1 - first]]
    while racing:
        racing = [side for side in racing if side.step()]
    one, other = sides
    acceptance = other.tokens / other.row_steps if other.row_steps else 0.0
    return Pair(one.rate, other.rate, acceptance, identical(one, other))


def identical(one: Side, other: Side) -> bool:
    """Whether the sides said the same: answers that ended on both to the last token, those given up as far as they got. (One side may
    have had its full steps before it began the last ones.)"""
    for key, mine in one.answers.items():
        theirs = other.answers.get(key)
        if theirs is None:
            continue
        reasons = one.finished.get(key), other.finished.get(key)
        if None not in reasons:
            if reasons[0] != reasons[1] or mine != theirs:
                return False
            continue
        common = min(len(mine), len(theirs))  # one that ended is the longer one
        ended = mine if reasons[0] is not None else theirs if reasons[1] is not None else None
        if mine[:common] != theirs[:common] or (ended is not None and len(ended) < max(len(mine), len(theirs))):
            return False
    return True


def group(prompts: Sequence[Prompt], load: int, repeat: int) -> list[Prompt]:
    """A race's prompts, of a category: other ones every repeat while there are any; a short category begins anew."""
    usual = queued(load)
    return [prompts[(repeat * usual + i) % len(prompts)] for i in range(ROUNDS * usual)]


def tenants(prompts: Sequence[Prompt], repeat: int) -> list[str]:
    """Whose each of a group's prompts is: a repeat is a tenant, and so is every further time that a prompt comes in it."""
    seen: Counter[str] = Counter()
    found = []
    for prompt in prompts:
        seen[prompt.id] += 1
        found.append(f"repeat {repeat}, round {seen[prompt.id]}")
    return found


FEWEST = 8  # answers a race: how much a text copies differs more from text to text than from category to category


def queued(load: int) -> int:
    """Prompts that keep a load going: enough that answers end and others begin, few enough that reading them does not take most of the
    time."""
    return max(FEWEST, load + max(1, load // 4))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--model", default=Settings().model)
    parser.add_argument("--loads", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--categories", nargs="+", default=None)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--drafters", default="auto")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--kv-memory", type=int, default=Settings().kv_memory, help="bytes of each engine's keys and values")
    parser.add_argument("--cache-dir", default=Settings().cache_dir)
    parser.add_argument("--least", type=float, default=LEAST, help="exit 1 below this ratio")
    return parser.parse_args(arguments)


def _settings(args: argparse.Namespace) -> Settings:
    return Settings(
        model=args.model, drafters=args.drafters, threads=args.threads, kv_memory=args.kv_memory, cache_dir=args.cache_dir
    )


def main(arguments: Sequence[str]) -> int:
    """0 when it holds, 1 when it does not, 2 when it cannot be run."""
    try:
        return _run(parse(arguments))
    except ForespeakError as error:
        print(f"never_slower: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    parts = load_parts(_settings(args))
    by_category: dict[str, list[Prompt]] = {}
    for prompt in read_prompts(args.prompts):
        by_category.setdefault(prompt.category, []).append(prompt)
    chosen = args.categories or list(by_category)
    unknown = [name for name in chosen if name not in by_category]
    if unknown:
        print(f"no prompts of category {unknown[0]!r}; there are: {', '.join(by_category)}", file=sys.stderr)
        return 2
    most = parts.settings.max_sequences
    if min(args.loads) < 1 or max(args.loads) > most:
        print(f"--loads: an engine keeps 1 to {most} answers going at once", file=sys.stderr)
        return 2
    found: dict[str, dict[int, list[Pair]]] = {name: {load: [] for load in args.loads} for name in chosen}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(args.loads) * args.repeats * len(chosen))
        for load in args.loads:
            plain, drafting = make_engine(parts, "none"), make_engine(parts)
            settle()
            number = 0
            for repeat in range(args.repeats):
                for category in chosen:
                    progress.update(task, description=f"{load} at once, {category}")
                    prompts = group(by_category[category], load, repeat)
                    requests = requests_of(parts, prompts, args.max_tokens, args.temperature, 0)
                    number += 1
                    mine = [
                        msgspec.structs.replace(r, id=number * 10**4 + i, tenant=tenant)
                        for i, (r, tenant) in enumerate(zip(requests, tenants(prompts, repeat), strict=True))
                    ]
                    pair = race(plain, drafting, mine, load, number % 2)
                    found[category][load].append(pair)
                    print(f"{load:>3} at once  {category:<16} {pair.line}", flush=True)
                    progress.advance(task)
    return _report(table_console(), args, found)


def _report(console: Console, args: argparse.Namespace, found: dict[str, dict[int, list[Pair]]]) -> int:
    table = Table(
        "category", *[f"{load} at once" for load in args.loads], title="drafting over plain, median (acceptance length)"
    )
    ratios: dict[str, dict[str, float]] = {}
    unmeasured: list[str] = []
    for category, by_load in found.items():
        cells = []
        ratios[category] = {}
        for load, pairs in by_load.items():
            measured = [pair.drafting / pair.plain for pair in pairs if pair.plain and pair.drafting]
            if not measured:
                cells.append("no full step; raise --max-tokens")
                unmeasured.append(f"{category} at {load}")
                continue
            ratio = statistics.median(measured)
            ratios[category][str(load)] = round(ratio, 4)
            cells.append(f"{ratio:.3f} ({statistics.mean(pair.acceptance for pair in pairs):.2f})")
        table.add_row(category, *cells)
    console.print(table)
    flat: list[tuple[float, str, str]] = [(r, name, load) for name, row in ratios.items() for load, r in row.items()]
    if not flat:
        raise ConfigError("no step in which all were decoding; raise --max-tokens")
    least = min(flat)
    same = all(pair.same for by_load in found.values() for pairs in by_load.values() for pair in pairs)
    result: dict[str, Any] = {
        "least_ratio": least[0],
        "least_at": {"category": least[1], "load": int(least[2])},
        "median_ratio": round(statistics.median(ratio for ratio, _, _ in flat), 4),
        "greatest_ratio": max(flat)[0],
        "plain_tokens_per_second": {
            str(load): round(statistics.median(p.plain for by_load in found.values() for p in by_load[load]), 1)
            for load in args.loads
        },
        "identical": same,
        "unmeasured": unmeasured,
        "ratios": ratios,
        "drafters": args.drafters,
        "repeats": args.repeats,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
    }
    print(json.dumps(result))
    return 0 if same and not unmeasured and least[0] >= args.least else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
