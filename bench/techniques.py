"""What each technique of serving gains, one by one: a ladder from none of them to all.

    ./dev bench techniques [--model MODEL] [--users 4] [--repeats 3] [--minutes 8] [--write]

Every rung adds one technique to the rung below and is measured beside it, in alternation, on the same conversations: chats of two
turns behind one system prompt, with answers of unequal length, and now and then a long document. All answers must be the same on both
rungs, where both use the same weights. Prints a table for people and, last, one JSON line. `--minutes` bounds it: once half of them have
passed, a rung is measured once only. `--write` puts the table into docs/techniques.md, between its two marks.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from server.commands.bench import figures
from server.commands.bench.command import alternate
from server.commands.bench.facts import facts
from server.commands.bench.records import Run
from server.commands.bench.techniques import TECHNIQUES, Setup, everything, without
from server.commands.bench.traffic import Traffic
from server.commands.bench.workshop import Workshop
from server.prompts import Prompt
from server.settings import DEFAULT_MODEL, Settings
from spec.errors import ConfigError, ForespeakError
from spec.request import SamplingParams

# From the ground up. A technique stands above what it builds on: static batches before continuous ones, keys before sharing them.
LADDER = ("kv-cache", "quantised-weights", "batching", "continuous-batching", "prefix-cache", "chunked-prefill", "speculation")
WEIGHTS = "quantised-weights"  # the one rung that may change the text
LENGTHS = (24, 96, 40, 64)  # tokens of an answer, by turn: static batches wait for the longest
# The lowest rungs are slow: as many conversations and repeats as it takes to see factors as large as theirs.
FEWER = {"kv-cache": (1, 1), "quantised-weights": (2, 2)}
FIRST_TURNS = ("kv-cache",)  # and no second turn either
WARM_UP_TOKENS = 8
PAGE = Path(__file__).parents[1] / "docs" / "techniques.md"
MARKS = ("<!-- ladder -->", "<!-- end of ladder -->")  # around what --write replaces

SYSTEM = (
    "You are the assistant of a small public library in a harbour town. You help readers to find books, explain how lending works, "
    "and answer short questions about the collection. The library is open from nine to six on weekdays and from ten to two on Saturdays; "
    "it is closed on Sundays and holidays. A reader may borrow eight books for four weeks and films for one week. Loans can be renewed twice "
    "unless somebody waits for the item. Late returns cost ten cents a day, at most three euros an item. Children pay nothing. The reading room "
    "on the first floor has newspapers in six languages, the cellar holds maps and ship registers that may be read on request but not borrowed. "
    "Answer in plain sentences, name the shelf when you recommend a book, and say openly when you do not know something."
)
QUESTIONS = (
    ("Which books about lighthouses would you give a curious ten-year-old?", "Tell me more about the first one."),
    ("How long may I keep a film, and what happens if I bring it back late?", "Write that as a short note for my fridge."),
    ("I want to find out which ships my grandfather sailed on.", "What should I bring along when I come?"),
    ("Recommend three sea stories that are not about war.", "Which of them is the shortest?"),
    ("Is the library open on the Saturday before Easter?", "And may I return books when it is closed?"),
    ("Explain in simple words how a tide table is read.", "Give me an example with numbers."),
)
PARAGRAPH = (
    "The brig Marianne left the harbour on the third of May with timber, tar and eleven men, met fog off the cape, and lay still for two days. "
    "On the third day a westerly came up, and the master, who knew the coast from boyhood, brought her round the shoals without a pilot. "
)


def workload(conversations: int, long_every: int = 5, paragraphs: int = 16) -> dict[int, Prompt]:
    """Two turns each; every `long_every`-th conversation is one question about a long document instead."""
    system = {"role": "system", "content": SYSTEM}
    prompts = {}
    for i in range(conversations):
        first, later = QUESTIONS[i % len(QUESTIONS)]
        if i % long_every == long_every - 1:
            text = f"Page {i}. " + PARAGRAPH * paragraphs + "\nWho brought the brig round the shoals?"
            prompts[i] = Prompt(str(i), "document", (system, {"role": "user", "content": text}))
        else:
            prompts[i] = Prompt(str(i), "chat", (system, {"role": "user", "content": f"{first} ({i})"}), later=(later,))
    return prompts


def sampling(number: int) -> SamplingParams:
    return SamplingParams(max_tokens=LENGTHS[number % len(LENGTHS)], temperature=0.0, seed=number, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Rung:
    """One technique, its lane beside the one below, and what both measured."""

    technique: str
    users: int
    below: dict[str, Any]
    figures: dict[str, Any]
    ratios: dict[str, float | None]  # of the figures, this rung over the one below
    identical: bool


def setup_with(settings: Settings, techniques: Sequence[str], users: int) -> Setup:
    """Everything but what stands higher on the ladder than these."""
    missing = [name for name in LADDER if name not in techniques]
    return without(everything(settings), missing, users)


def climb(
    workshop: Workshop, settings: Settings, prompts: Mapping[int, Prompt], technique: str, users: int, repeats: int
) -> Rung:
    """Measure one rung beside the one below."""
    place = LADDER.index(technique)
    conversations, most = FEWER.get(technique, (len(prompts), repeats))
    chosen = dict(list(prompts.items())[:conversations])
    if technique in FIRST_TURNS:
        chosen = {number: replace(prompt, later=()) for number, prompt in chosen.items()}
    traffic = Traffic(users=users)
    lanes = [
        workshop.lane("below", setup_with(settings, LADDER[:place], users)),
        workshop.lane("rung", setup_with(settings, LADDER[: place + 1], users)),
    ]
    for lane in lanes:
        lane.run(dict(list(chosen.items())[:1]), traffic, "warm-up", lambda: None, WARM_UP_TOKENS)
    below, runs = alternate(lanes, chosen, traffic, min(repeats, most), lambda: None)
    low, high = ([_summary(run) for run in each] for each in (below, runs))
    ratios = {
        name: _median([over[name] / under[name] for over, under in zip(high, low, strict=True) if under[name]])
        for name in FIGURES
    }
    return Rung(technique, users, _medians(low), _medians(high), ratios, _same_text(technique, below, runs))


FIGURES = {
    "tokens_per_second": "tokens/s", "decode_tokens_per_second": "one stream", "ttft_ms_p50": "first token p50 ms",
    "ttft_ms_p99": "first token p99 ms", "longest_gap_ms": "longest gap ms",
}  # fmt: skip


COUNTS = ("acceptance_length", "cached_tokens", "prompt_tokens", "tokens", "seconds")


def _summary(run: Run) -> dict[str, Any]:
    """The bench's figures, and the longest gap between two chunks of an answer (a 99th percentile would hide one long prompt)."""
    gaps = [gap for answer in run.answers for gap in figures.chunk_gaps_ms(answer)]
    return figures.summary([run], {}) | {"longest_gap_ms": max(gaps, default=0.0)}


def _medians(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figure by figure over the repeats, percentiles too: one disturbed repeat then spoils nothing."""
    return {name: _median([summary[name] for summary in summaries]) for name in (*FIGURES, *COUNTS)}


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None


def _same_text(technique: str, below: Sequence[Run], runs: Sequence[Run]) -> bool:
    """Exit code 1 hangs on it: techniques may change the time, never the text. Other weights are another model."""
    return technique == WEIGHTS or figures.comparison(runs, below)["identical"]


def table(rungs: Sequence[Rung]) -> Table:
    result = Table(title="each rung, and its ratio to the one below (measured beside it)", title_justify="left")
    for column in ("technique", "users", *FIGURES.values()):
        result.add_column(column, justify="left" if column == "technique" else "right", no_wrap=True)
    ground = rungs[0]
    result.add_row(
        "none of them" if ground.technique == LADDER[0] else "the rung below",
        str(ground.users),
        *(f"{ground.below[name]:,.1f}      " for name in FIGURES),
    )
    for rung in rungs:
        cells = (f"{rung.figures[name]:,.1f} {_times(rung.ratios[name])}" for name in FIGURES)
        result.add_row(f"+ {rung.technique}", str(rung.users), *cells)
    return result


def page_text(rungs: Sequence[Rung], made: str) -> str:
    """The ladder as the page has it. `made`: when, where and how, in a sentence."""
    shown = ("tokens_per_second", "decode_tokens_per_second", "ttft_ms_p50", "longest_gap_ms")
    lines = [
        f"| rung ({rungs[0].users} users unless said) | tokens/s | tokens/s of one stream | first token, median ms | longest gap, ms |",
        "|---|---|---|---|---|",
        f"| {'none of them' if rungs[0].technique == LADDER[0] else 'the rung below'} | "
        + " | ".join(_short(rungs[0].below[name]) for name in shown) + " |",
    ]  # fmt: skip
    for rung in rungs:
        cells = []
        for name in shown:
            ratio = rung.ratios[name]
            cells.append(_short(rung.figures[name]) + ("" if ratio is None else f" ({ratio:.2f} ×)"))
        alone = ", one user" if rung.users == 1 and rungs[0].users > 1 else ""
        lines.append(f"| + {rung.technique.replace('-', ' ')}{alone} | " + " | ".join(cells) + " |")
    same = "was identical on every rung that must keep it" if all(r.identical for r in rungs) else "DIFFERED on a rung"
    return "\n".join([*lines, "", f"In brackets: the ratio to the rung below, measured beside it. {made} The text {same}."])


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def write_page(rungs: Sequence[Rung], made: str, page: Path) -> None:
    """Replace what stands between the page's marks. Raises ConfigError where they are missing."""
    text = page.read_text(encoding="utf-8")
    before, first, rest = text.partition(MARKS[0])
    _, last, after = rest.partition(MARKS[1])
    if not first or not last:
        raise ConfigError(f"{page} has no {MARKS[0]} ... {MARKS[1]} to write the ladder between")
    page.write_text(f"{before}{first}\n{page_text(rungs, made)}\n{last}{after}", encoding="utf-8")


def _times(ratio: float | None) -> str:
    return "     -" if ratio is None else f"x{ratio:.2f}".rjust(6)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--users", type=int, default=4, help="who ask at once")
    parser.add_argument("--conversations", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--drafters", default="auto")
    parser.add_argument("--minutes", type=float, default=8.0, help="once half of it has passed, rungs are measured once only")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    parser.add_argument("--only", choices=LADDER, action="append", help="these rungs alone")
    chosen = parser.parse_args(arguments)
    if chosen.write and chosen.only:
        parser.error("--write is for the whole ladder: leave --only out")
    for name in ("users", "conversations", "repeats"):
        if getattr(chosen, name) < 1:
            parser.error(f"--{name} must be at least 1")
    began = time.monotonic()
    settings = Settings(model=chosen.model, kv_memory=2**29, threads=chosen.threads, drafters=chosen.drafters)
    prompts = workload(chosen.conversations)
    workshop = Workshop(sampling, 0)
    console = Console(width=130)
    rungs = []
    climbs = [(name, chosen.users) for name in LADDER if not chosen.only or name in chosen.only]
    climbs += [
        (name, 1) for name, users in climbs if name == "speculation" and users > 1
    ]  # made for a machine with nothing else to do
    for name, users in climbs:
        Console(stderr=True).print(f"{name}: {TECHNIQUES[name][0]}, against not so; {users} at once ...", highlight=False)
        late = time.monotonic() - began > 30.0 * chosen.minutes
        rungs.append(climb(workshop, settings, prompts, name, users, 1 if late else chosen.repeats))
    seconds = time.monotonic() - began
    console.print(table(rungs))
    wrong = [rung.technique for rung in rungs if not rung.identical]
    if wrong:
        console.print(f"the text changed with: {', '.join(wrong)}")
    found = {"bench": "techniques", "users": chosen.users, "conversations": chosen.conversations, "repeats": chosen.repeats}
    found["total_seconds"] = round(seconds, 1)
    found |= {"rungs": [{name: getattr(rung, name) for name in Rung.__slots__} for rung in rungs]} | facts()
    print(msgspec.json.encode(found).decode(), flush=True)
    if chosen.write:
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        cpu = found["machine"].get("cpu", "this machine") if isinstance(found.get("machine"), dict) else "this machine"
        write_page(rungs, f"Taken on {today} ({cpu}), {chosen.repeats} repeats, {seconds / 60:.0f} minutes in one go.", PAGE)
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except ForespeakError as error:
        print(f"techniques: {error}", file=sys.stderr)
        raise SystemExit(2) from None
