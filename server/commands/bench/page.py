"""The HTML report: one file without scripts and without anything fetched, readable on a phone, by day and by night.

Knows the figures' names and how a page is laid out; the drawings are `plots`' affair.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from server.commands.bench import figures as of
from server.commands.bench import plots
from server.commands.bench.records import Answer, Run
from server.commands.bench.tables import MILLISECONDS, number, remarks, title_of

TIMELINE_ROWS = 120

STYLE = """
:root { color-scheme: light dark; --bg: #fff; --panel: #f4f5f7; --ink: #1b1e24; --muted: #5c6370; --grid: #dfe2e7;
  --s0: #8b93a1; --s1: #2457d6; --s2: #c2410c; --s3: #0f766e; --s4: #a21caf; }
@media (prefers-color-scheme: dark) { :root { --bg: #14161a; --panel: #1c1f25; --ink: #e7e9ee; --muted: #a0a7b4; --grid: #343942;
  --s0: #8b93a1; --s1: #7fa6ff; --s2: #fb923c; --s3: #2dd4bf; --s4: #e879f9; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; background: var(--bg); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; } h3 { font-size: 1rem; margin: 0 0 .3rem; font-weight: 600; }
p { margin: .2rem 0; } p.muted { font-size: .92rem; } .muted { color: var(--muted); overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.2rem, 1fr)); gap: .6rem; margin: 1rem 0; }
.tile { background: var(--panel); border-radius: 10px; padding: .6rem .8rem; }
.tile b { display: block; font-size: 1.45rem; line-height: 1.3; font-variant-numeric: tabular-nums; } .tile span { color: var(--muted); font-size: .85rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: 1.2rem; margin: 1rem 0; align-items: start; }
figure { margin: 0; min-width: 0; } figure svg { display: block; width: 100%; height: auto; max-width: 34rem; font-family: system-ui, sans-serif; }
.scroll { overflow-x: auto; margin-bottom: .8rem; } table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .7rem; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th { color: var(--muted); font-weight: 600; } th:first-child, td:first-child { text-align: left; padding-left: 0; }
details { margin: 1rem 0; } summary { cursor: pointer; } pre { background: var(--panel); border-radius: 10px; padding: .8rem; overflow-x: auto; font-size: .82rem; }
"""


def report(found: Mapping[str, Any], runs: Mapping[str, Mapping[str, Sequence[Run]]]) -> str:
    """The page. `found` is the JSON line's object; `runs` are those of every traffic by label and lane, the judged lane first."""
    machine = found["machine"]
    subject = found.get("url") or f"{found.get('model', '')}, drafters {found.get('drafters', '')}"
    facts = f"{subject} · commit {found['commit'] or 'unknown'} · {machine['cpu']}, {machine['cores']} cores · load {machine['load']}"
    traffic = list(found["traffic"])
    sections = [_traffic(each, lanes) for each, lanes in zip(traffic, runs.values(), strict=True)]
    arguments = " ".join(["forespeak", *found["argv"]])
    return "\n".join([
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Forespeak bench: {escape(str(subject))}</title><style>{STYLE}</style></head><body>",
        f'<h1>Forespeak bench</h1><p class="muted">{escape(facts)}</p>',
        _tiles(traffic[0]),
        _against_load(traffic),
        *sections,
        f"<details><summary>How it was measured</summary><pre>{escape(arguments)}</pre>"
        f"<pre>{escape(json.dumps({'versions': found['versions'], 'machine': machine}, indent=1))}</pre></details>",
        f"<details><summary>All figures as JSON</summary><pre>{escape(json.dumps(found, indent=1))}</pre></details>",
        "</body></html>",
    ]) + "\n"  # fmt: skip


def _tiles(figures: Mapping[str, Any]) -> str:
    base = figures["baseline"]
    tiles = [
        (number(figures["decode_tokens_per_second"], 0), "tokens/s of one stream"),
        (number(figures["tokens_per_second"], 0), "tokens/s in all"),
        (number(figures["ttft_ms_p50"], 0) + " ms", "to the first token, median"),
    ]
    if base:
        tiles.append((number(figures["decode_speedup"]) + " ×", f"{base['name']}, one stream"))
    if figures["acceptance_length"]:
        tiles.append((number(figures["acceptance_length"]), "tokens a target pass"))
    if figures["goodput"]["limits_ms"]:
        tiles.append((f"{figures['goodput']['share']:.0%}", "of answers within the limits"))
    cells = "".join(f'<div class="tile"><b>{value}</b><span>{escape(words)}</span></div>' for value, words in tiles)
    return f'<div class="tiles">{cells}</div>'


def _against_load(traffic: Sequence[Mapping[str, Any]]) -> str:
    """Throughput and latency over users, and over rates, where there is more than one of them."""
    drawn = []
    for key, xlabel in (("concurrency", "users at once"), ("rate", "conversations a second")):
        rows = [row for row in traffic if row[key] is not None]
        if len(rows) < 2:
            continue
        for figure, ylabel, title in (
            ("tokens_per_second", "tokens/s", "Tokens a second"),
            ("ttft_ms_p99", "ms", "Time to first token, p99"),
            ("tpot_ms_p50", "ms", "Time per output token, median"),
        ):
            lanes = {rows[0]["name"]: [(row[key], row[figure]) for row in rows]}
            if all(row["baseline"] for row in rows):
                lanes = {rows[0]["baseline"]["name"]: [(row[key], row["baseline"][figure]) for row in rows]} | lanes
            drawn.append(_figure(title, plots.curves(f"{title}, by {xlabel}", lanes, xlabel, ylabel)))
    return f'<h2>Under load</h2><div class="plots">{"".join(drawn)}</div>' if drawn else ""


def _traffic(figures: Mapping[str, Any], lanes: Mapping[str, Sequence[Run]]) -> str:
    title = title_of(dict(figures))
    judged = next(iter(lanes.values()))
    drawings = _latency_plots(title, lanes) + _speculation_plots(title, figures) + _open_loop_plots(title, figures, judged)
    said = "".join(f'<p class="muted">{escape(line)}</p>' for line in remarks(dict(figures)))
    return f'<h2>{escape(title)}</h2>{_rates_table(figures)}{_table(figures)}{said}<div class="plots">{"".join(drawings)}</div>'


def _latency_plots(title: str, lanes: Mapping[str, Sequence[Run]]) -> list[str]:
    ordered = dict(reversed(list(lanes.items())))  # the baseline in the first, grey colour when there is one

    def values(of_answer: Callable[[Answer], Iterable[float | None]]) -> dict[str, list[float]]:
        return {
            name: [v for run in runs for a in run.answers if a.ok for v in of_answer(a) if v is not None]
            for name, runs in ordered.items()
        }

    drawn = []
    for words, found in (
        ("Time to first token", values(lambda a: [of.ttft_ms(a)])),
        ("Gap between chunks", values(of.chunk_gaps_ms)),
        ("Time per output token", values(lambda a: [of.tpot_ms(a)])),
        ("End to end", values(lambda a: [of.e2e_ms(a)])),
    ):
        if len(found) == 1:  # alone it is no baseline
            found = {"": [], **found}
        drawn.append(_figure(words, plots.distribution(f"{words}, {title}", found)))
    return drawn


def _speculation_plots(title: str, figures: Mapping[str, Any]) -> list[str]:
    drawn = []
    base = figures["baseline"]
    speed = {name: row["speedup"] for name, row in figures["by_category"].items() if row["speedup"] is not None}
    if len(speed) > 1:
        words = f"Speed over {base['name']} by category"
        drawn.append(_figure(words, plots.bars(f"{words}, {title}", speed, f"times {base['name']}", mark=1.0)))
    length = {name: row["acceptance_length"] for name, row in figures["by_category"].items() if row["acceptance_length"]}
    if len(length) > 1:
        words = "Acceptance length by category"
        drawn.append(_figure(words, plots.bars(f"{words}, {title}", length, "tokens a target pass", mark=1.0)))
    positions = {f"draft {i}": 100 * share for i, share in enumerate(figures["acceptance_per_position"][:8], 1)}
    if positions:
        words = "Passes that accepted the draft"
        drawn.append(_figure(words, plots.bars(f"{words}, by position, {title}", positions, "% of target passes")))
    phases = {figures["name"]: figures["phase_shares"]}
    if base and base["phase_shares"]:
        phases = {base["name"]: base["phase_shares"]} | phases
    if figures["phase_shares"]:
        words = "Where step time goes"
        drawn.append(_figure(words, plots.shares(f"{words}, {title}", phases)))
    return drawn


def _open_loop_plots(title: str, figures: Mapping[str, Any], judged: Sequence[Run]) -> list[str]:
    if figures["rate"] is None:
        return []
    answers = sorted((a for a in judged[0].answers if a.ok and a.chunk_times), key=lambda a: a.due)[:TIMELINE_ROWS]
    if not answers:
        return []
    start = answers[0].due
    rows = [(a.due - start, a.chunk_times[0] - start, a.chunk_times[-1] - start) for a in answers]
    return [_figure("Answers over time", plots.timeline(f"Answers over time, {title}", rows))]


def _figure(words: str, svg: str) -> str:
    return f"<figure><h3>{escape(words)}</h3>{svg}</figure>"


RATES = {
    "tokens_per_second": ("tokens/s", 1), "decode_tokens_per_second": ("of one stream", 1), "answers_per_second": ("answers/s", 2),
    "acceptance_length": ("acceptance length", 2), "rejected": ("rejected", 0), "errors": ("errors", 0),
}  # fmt: skip


def _rows(figures: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    base = figures["baseline"]
    return [*([(base["name"], base)] if base else []), (figures["name"], figures)]


def _rates_table(figures: Mapping[str, Any]) -> str:
    head = "".join(f"<th>{words}</th>" for words, _ in RATES.values()) + "<th>goodput, answers/s</th>"
    body = "".join(
        f"<tr><td>{escape(name)}</td>"
        + "".join(f"<td>{number(row[key], digits)}</td>" for key, (_, digits) in RATES.items())
        + f"<td>{number(row['goodput']['answers_per_second'])}</td></tr>"
        for name, row in _rows(figures)
    )
    return f'<div class="scroll"><table><tr><th></th>{head}</tr>{body}</table></div>'


def _table(figures: Mapping[str, Any]) -> str:
    rows = _rows(figures)
    head = "".join(f"<th>{escape(name)} p{p}</th>" for name, _ in rows for p in of.PERCENTILES)
    body = "".join(
        f"<tr><td>{escape(words)}</td>"
        + "".join(f"<td>{number(row[f'{key}_p{p}'], 1)}</td>" for _, row in rows for p in of.PERCENTILES)
        + "</tr>"
        for key, words in MILLISECONDS.items()
    )
    return f'<div class="scroll"><table><tr><th>milliseconds</th>{head}</tr>{body}</table></div>'
