"""`forespeak tune`: measure, record the workload once, predict every configuration, confirm the best, write one config.

Orders the steps and prints; the work is in `server.tuning`.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from server.commands.common import prompts_of, requests_of, table_console
from server.compose import load_parts, shipped_drafters
from server.settings import Settings
from server.tuning.config_file import config_text
from server.tuning.plot import by_load_svg, by_load_text
from server.tuning.predict import Choice
from server.tuning.search import LoadPoint, Ranked, Workload, by_load, finalists, search, stops_paying, verdict
from server.tuning.session import Effort, Session, group_size, known_calibration
from spec.errors import ConfigError

GOAL = 5.0  # percent of mean error between predicted and measured
SEARCH_SHARE = 0.4  # of the time that searching may take


@dataclass(frozen=True, slots=True)
class Confirmed:
    """One configuration at one load: tokens a second as predicted, the same on a machine as fast as it was while it was confirmed
    (plain decoding, which ran beside it, tells how fast), and as measured; tokens a pass as predicted and as measured."""

    choice: Choice
    load: int
    promised: float
    predicted: float
    measured: float
    lengths: tuple[float, float]

    @property
    def error(self) -> float:
        """Percent."""
        return 100.0 * (self.predicted / self.measured - 1.0)


def run(
    settings: Settings,
    prompts: Path | None,
    n: int | None,
    max_tokens: int,
    temperature: float,
    seed: int | None,
    loads: Sequence[int],
    repeats: int,
    minutes: float,
    out: Path,
    plot: Path | None,
) -> int:
    """Print tables and, last, one JSON line, then write the config; returns 0.

    `minutes`: searching ends after SEARCH_SHARE of it, and no repeat of confirming begins when all of it has passed since the start.
    Recording the workload, timing and one repeat at every load are always done.
    """
    began = time.monotonic()
    deadline = began + 60.0 * minutes
    _check_places(out, plot)
    chosen = prompts_of(prompts, n)
    parts = load_parts(msgspec.structs.replace(settings, tree_shape=""))
    drafters = _candidates(settings, parts.model.name)
    requests = requests_of(parts, chosen, max_tokens, temperature, 0 if seed is None else seed)
    session = Session(parts, requests, loads, drafters, known_calibration(parts), Effort.within(minutes))
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("starting", total=None)

        def note(text: str) -> None:
            progress.update(task, description=text)
            if not progress.console.is_terminal:  # a bar is of no use in a log
                print(f"{time.monotonic() - began:6.1f} s  {text}", file=sys.stderr, flush=True)

        def tried(done: int, total: int) -> None:
            progress.update(task, description="predicting", completed=done, total=total)

        traces = session.record(note)
        workload = session.workload(traces, session.measure(note))
        names = [item.split(":")[0] for item in drafters.split(",")]
        stop = time.monotonic() + 60.0 * minutes * SEARCH_SHARE
        note("predicting")
        ranked = search(workload, names, session.usual, loads, tried, lambda: time.monotonic() > stop)
        best = finalists(ranked, session.usual)
        plain = next(r for r in ranked if not r.choice.drafters and _same_sizes(r.choice, session.usual))
        rivals = [plain, *(r for r in best if r is not plain)]
        progress.update(task, completed=0, total=None)
        confirmed, made = _confirm(session, workload, rivals, loads, repeats, note, deadline)
        winner = choose(rivals, confirmed, loads)
        drafting = winner if winner.choice.drafters else next(r for r in ranked if r.choice.drafters)
        note("predicting loads")
        points = by_load(workload, drafting.choice)
    seconds = time.monotonic() - began
    text = config_text(
        session.settings(winner.choice), _comments(winner, confirmed, chosen_count=len(chosen), max_tokens=max_tokens)
    )
    report = {
        "choice": asdict(winner.choice),
        "config": str(out),
        "predictions": len(ranked),
        "mean_error_percent": round(mean_error(beside_plain(confirmed)), 2),
        "mean_error_before_drift_percent": round(mean_error([replace(c, predicted=c.promised) for c in confirmed]), 2),
        "stops_paying_at": stops_paying(points),
        "confirmed": [asdict(c) | {"error_percent": round(c.error, 2)} for c in confirmed],
        "by_load": [asdict(point) for point in points],
        "prompts": len(chosen), "max_tokens": max_tokens, "repeats": made, "minutes": minutes,
        "seconds": round(seconds, 1), "argv": sys.argv[1:],
    }  # fmt: skip
    show(ranked, confirmed, points, drafting, report)
    print(
        msgspec.json.encode(report).decode(), flush=True
    )  # before anything is written: what was found must not be lost to a full disk
    _write(out, text, plot, lambda path: by_load_svg(points, name_of(drafting.choice), path))
    print(f"written: {out}; use it with: forespeak serve --config {out}", file=sys.stderr)
    return 0


def _confirm(
    session: Session,
    workload: Workload,
    rivals: Sequence[Ranked],
    loads: Sequence[int],
    repeats: int,
    note: Callable[[str], None],
    deadline: float,
) -> tuple[list[Confirmed], int]:
    """Real runs of the rivals, the first of them plain decoding, at every load, and how many repeats every load got."""
    confirmed: list[Confirmed] = []
    made = repeats
    for load in loads:
        found = session.confirm([r.choice for r in rivals], load, repeats, note, lambda: time.monotonic() > deadline)
        made = min(made, found.repeats)
        for i, entry in enumerate(rivals):
            again = workload.predict(entry.choice, load, group_size(load))
            lengths = (again.acceptance_length, found.acceptance_lengths[i])
            promised, measured = again.tokens_per_second, found.rates[i]
            speed = confirmed[-i].measured / confirmed[-i].promised if i else measured / promised
            confirmed.append(Confirmed(entry.choice, load, promised, promised * speed, measured, lengths))
    return confirmed, made


def _write(out: Path, text: str, plot: Path | None, draw: Callable[[Path], None]) -> None:
    try:
        out.write_text(text, encoding="utf-8")
        if plot is not None:
            draw(plot)
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename or out}: {error.strerror}") from error


def _check_places(out: Path, plot: Path | None) -> None:
    """Raises ConfigError, before minutes are spent, when what is found could not be written."""
    for option, path in (("--out", out), ("--plot", plot)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise ConfigError(f"{option} {path}: {'this is a folder' if path.is_dir() else 'its folder does not exist'}")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'forespeak[report]'")


def _candidates(settings: Settings, model_name: str) -> str:
    """The drafters to choose from: those asked for, or all that are here. A comma list without spaces."""
    if settings.drafters == "none":
        raise ConfigError("--drafters none leaves nothing to tune; leave it out, or name the drafters to choose from")
    if settings.drafters == "auto":
        return ",".join(["suffix", *shipped_drafters(model_name)])
    return ",".join(item.strip() for item in settings.drafters.split(","))


def _same_sizes(a: Choice, b: Choice) -> bool:
    return (a.chunk_tokens, a.page_size) == (b.chunk_tokens, b.page_size)


def choose(rivals: Sequence[Ranked], confirmed: Sequence[Confirmed], loads: Sequence[int]) -> Ranked:
    """The fastest as measured, over all loads; the one predicted best among equals within one percent."""

    def worth(entry: Ranked) -> float:
        rates = [c.measured for c in confirmed if c.choice == entry.choice and c.load in loads]
        return statistics.geometric_mean(rates)

    top = max(worth(entry) for entry in rivals)
    return max((entry for entry in rivals if worth(entry) >= 0.99 * top), key=lambda entry: entry.worth)


def mean_error(confirmed: Sequence[Confirmed]) -> float:
    """Mean size of the errors, in percent."""
    return sum(abs(c.error) for c in confirmed) / len(confirmed) if confirmed else 0.0


def beside_plain(confirmed: Sequence[Confirmed]) -> list[Confirmed]:
    """Without the first of every load, which is the clock of the others and so has no error."""
    clocks = {c.load: c for c in reversed(confirmed)}
    return [c for c in confirmed if c is not clocks[c.load]]


def _comments(winner: Ranked, confirmed: Sequence[Confirmed], chosen_count: int, max_tokens: int) -> list[str]:
    lines = [f"Found by forespeak tune on {chosen_count} prompts with answers of at most {max_tokens} tokens."]
    for c in confirmed:
        if c.choice == winner.choice:
            lines.append(f"{c.load} at once: {c.measured:.0f} tokens/s measured, {c.predicted:.0f} predicted.")
    return lines


def name_of(choice: Choice) -> str:
    """One configuration in a few words."""
    if not choice.drafters:
        return "plain"
    said = f" of {choice.draft_vocabulary} tokens" if choice.draft_vocabulary else ""
    return f"{','.join(choice.drafters)}{said} {choice.tree_shape or f'up to {choice.max_tree_nodes} nodes'}"


def show(
    ranked: Sequence[Ranked],
    confirmed: Sequence[Confirmed],
    points: Sequence[LoadPoint],
    drafting: Ranked,
    report: dict[str, Any],
) -> None:
    console = table_console()
    loads = list(ranked[0].predictions)
    table = Table(
        "drafters", "chunk", "page", *(f"tokens/s, {load} at once" for load in loads), "acceptance length", "over plain",
        title=f"the best of {len(ranked)} predicted",
    )  # fmt: skip
    for entry in ranked[:10]:
        table.add_row(
            name_of(entry.choice),
            str(entry.choice.chunk_tokens),
            str(entry.choice.page_size),
            *(f"{entry.predictions[load].tokens_per_second:.0f}" for load in loads),
            f"{entry.predictions[loads[0]].acceptance_length:.2f}",
            f"{entry.worth:.3f}",
        )
    console.print(table)
    table = Table(
        "configuration", "chunk", "page", "at once", "predicted", "at this speed", "measured", "error", "tokens a pass", "measured",
        title="confirmed, tokens/s",
    )  # fmt: skip
    for c in confirmed:
        table.add_row(
            name_of(c.choice), str(c.choice.chunk_tokens), str(c.choice.page_size), str(c.load),
            f"{c.promised:.0f}", f"{c.predicted:.0f}", f"{c.measured:.0f}", f"{c.error:+.1f} %",
            f"{c.lengths[0]:.2f}", f"{c.lengths[1]:.2f}",
        )  # fmt: skip
    console.print(table)
    console.print(
        f"mean error {report['mean_error_percent']:.1f} % (goal {GOAL:g} %) beside plain decoding, which tells the machine's speed; "
        f"{report['mean_error_before_drift_percent']:.1f} % of all as predicted, at the speed it had before",
        highlight=False,
    )
    console.print(by_load_text(points, name_of(drafting.choice)), highlight=False, markup=False)
    console.print(verdict(points), highlight=False)
    console.print(
        f"{report['seconds']:.0f} s in all; --minutes {report['minutes']:g} bounds the search and the repeats "
        f"({report['repeats']} made at every load), not the recording and timing before them",
        highlight=False,
    )
