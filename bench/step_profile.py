"""What a decoding step's time goes to: draft, verify, accept, commit and the rest, plain and with the drafters of `auto`.

    ./dev bench step_profile [--streams 1 16] [--tokens 96] [--repeats 2] [--write docs/step-profile.md]

The real model, two engines over the same weights, run in turn. Only steps count in which every stream was decoding; the phases are the
engine's own clock. Prints a table for people and, last, one JSON line; --write puts the table into the page between its markers.
Half a minute on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from server.commands.common import requests_of
from server.compose import load_parts, make_engine
from server.local import settle
from server.prompts import Prompt
from server.settings import Settings
from spec.engine import Engine
from spec.errors import ForespeakError
from spec.request import PHASES, Request

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
_TASKS = (
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Explain how a bicycle stays upright, step by step.",
    "List ten ideas for a rainy afternoon with children, one line each.",
    "Repeat the following sentence three times, then translate it into French: The ferry leaves at noon from the old harbour.",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "Summarise: The town council met on Monday to discuss the new bridge. The bridge will cost two million and open next spring.",
    "A train travels 60 km in 45 minutes. How fast is it? Show your work.",
    "Compare tea and coffee in a small table.",
)


@dataclass(slots=True)
class Spent:
    """Sums over the counted steps of one engine."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def row(self, streams: int) -> dict[str, float]:
        total = sum(self.phases.values())
        shares = {f"{phase}_share": round(seconds / total, 4) for phase, seconds in self.phases.items()}
        return {
            "step_ms": round(1e3 * self.seconds / self.steps, 3),
            "tokens_per_pass": round(self.tokens / self.steps / streams, 3),
            "tokens_per_second": round(self.tokens / self.seconds, 1),
            **shares,
        }


def run(engine: Engine, requests: Sequence[Request], spent: Spent) -> None:
    """Answer the requests, all at once; count the steps in which all of them were decoding."""
    for request in requests:
        engine.add(request)
    before = engine.stats()["phase_seconds"]
    while engine.has_work():
        began = time.perf_counter()
        events = engine.step()
        took = time.perf_counter() - began
        after = engine.stats()["phase_seconds"]
        spoke = [event for event in events if event.token_ids]
        if len(spoke) == len(requests) and not any(event.started for event in spoke):
            spent.steps += 1
            spent.seconds += took
            spent.tokens += sum(len(event.token_ids) for event in spoke)
            for phase in PHASES:
                spent.phases[phase] += after[phase] - before[phase]
        before = after


def measure(settings: Settings, streams: Sequence[int], tokens: int, repeats: int) -> dict[str, dict[str, dict[str, float]]]:
    """By streams, then by drafters."""
    parts = load_parts(settings)
    engines = {"plain": make_engine(parts, "none"), settings.drafters: make_engine(parts)}
    settle()
    found: dict[str, dict[str, dict[str, float]]] = {}
    number = 0
    for count in streams:
        spent = {name: Spent() for name in engines}
        for repeat in range(repeats):
            for name, engine in engines.items():
                prompts = [_prompt(repeat * count + i) for i in range(count)]
                requests = requests_of(parts, prompts, tokens, 0.0, 0)
                number += len(requests)
                run(engine, [_renamed(request, number + i, repeat) for i, request in enumerate(requests)], spent[name])
        found[str(count)] = {name: sums.row(count) for name, sums in spent.items() if sums.steps}
    return found


def _prompt(number: int) -> Prompt:
    """Another one for every number: no answer is in the cache of an earlier one."""
    return Prompt(str(number), "all", ({"role": "user", "content": f"{_TASKS[number % len(_TASKS)]} (Task {number + 1})"},))


def _renamed(request: Request, number: int, repeat: int) -> Request:
    return msgspec.structs.replace(request, id=number, tenant=f"repeat {repeat}")


def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """In Markdown."""
    lines = [
        "| streams | drafters | step, ms | tokens a pass | tokens/s | " + " | ".join(PHASES) + " |",
        "|" + "---|" * (5 + len(PHASES)),
    ]
    for streams, by_name in found.items():
        for name, row in by_name.items():
            shares = " | ".join(f"{100 * row[f'{phase}_share']:.1f} %" for phase in PHASES)
            head = f"{row['step_ms']:.2f} | {row['tokens_per_pass']:.2f} | {row['tokens_per_second']:.0f}"
            lines.append(f"| {streams} | {name} | {head} | {shares} |")
    return "\n".join(lines)


def write(page: Path, text: str) -> None:
    """Put the table between the page's markers. Raises ValueError where there are none."""
    old = page.read_text(encoding="utf-8")
    if BEGIN not in old or END not in old:
        raise ValueError(f"{page} has no place for a table: {BEGIN} and {END}")
    head, tail = old.split(BEGIN)[0], old.split(END)[1]
    page.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}", encoding="utf-8")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=Settings().model)
    parser.add_argument("--drafters", default="auto")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--kv-memory", type=int, default=Settings().kv_memory, help="bytes of each engine's keys and values")
    parser.add_argument("--cache-dir", default=Settings().cache_dir)
    parser.add_argument("--write", type=Path, help="a page with markers for the table")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    args = parse(arguments)
    settings = Settings(
        model=args.model, drafters=args.drafters, threads=args.threads, kv_memory=args.kv_memory, cache_dir=args.cache_dir
    )
    try:
        found = measure(settings, args.streams, args.tokens, args.repeats)
        text = table(found)
        if args.write is not None:
            write(args.write, text)
    except (ForespeakError, ValueError) as error:
        print(f"step_profile: {error}", file=sys.stderr)
        return 2
    print(text)
    print(json.dumps({"bench": "step_profile", "tokens": args.tokens, "repeats": args.repeats, "results": found}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
