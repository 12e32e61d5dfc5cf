"""The tables a person reads. Knows the figures' names; refuses to know how they were measured."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

MILLISECONDS = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "gap_ms": "gap between tokens",
    "chunk_gap_ms": "gap between chunks",
    "e2e_ms": "end to end",
}


def title_of(figures: dict[str, Any]) -> str:
    return f"{figures['concurrency']} at once" if figures["rate"] is None else f"{figures['rate']:g} conversations a second"


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def print_result(console: Console, figures: dict[str, Any]) -> None:
    """One kind of traffic: rates and latencies beside the baseline's, then the categories."""
    console.print(rates(figures))
    console.print(latencies(figures))
    console.print(categories(figures))
    for line in remarks(figures):
        console.print(line)


def rates(figures: dict[str, Any]) -> Table:
    base = figures["baseline"]
    table = Table(title=title_of(figures), title_justify="left")
    for column in ("", "tokens/s", "tokens/s of one stream", "answers/s", "goodput answers/s", "acceptance length"):
        table.add_column(column, justify="left" if not column else "right")
    for name, row in ([(base["name"], base)] if base else []) + [(figures["name"], figures)]:
        table.add_row(
            name,
            number(row["tokens_per_second"], 1),
            number(row["decode_tokens_per_second"], 1),
            number(row["answers_per_second"]),
            number(row["goodput"]["answers_per_second"]),
            number(row["acceptance_length"]),
        )
    if base:
        table.add_row("ratio", number(figures["throughput_ratio"]), number(figures["decode_speedup"]))
    return table


def latencies(figures: dict[str, Any]) -> Table:
    base = figures["baseline"]
    table = Table("milliseconds")
    for name in ([base["name"]] if base else []) + [figures["name"]]:
        for percent in (50, 90, 99):
            table.add_column(f"{name} p{percent}", justify="right")
    for key, words in MILLISECONDS.items():
        rows = [*([base] if base else []), figures]
        table.add_row(words, *(number(row[f"{key}_p{p}"], 1) for row in rows for p in (50, 90, 99)))
    return table


def categories(figures: dict[str, Any]) -> Table:
    base = figures["baseline"]
    table = Table("category")
    for column in ("acceptance length", "tokens/s", *([f"over {base['name']}"] if base else [])):
        table.add_column(column, justify="right")
    rows = list(figures["by_category"].items())
    rows.append(("all", figures | {"speedup": figures.get("decode_speedup")}))
    for place, (category, row) in enumerate(rows):
        if place == len(rows) - 1:
            table.add_section()
        cells = [number(row["acceptance_length"]), number(row["decode_tokens_per_second"], 0)]
        table.add_row(category, *cells, *([number(row["speedup"])] if base else []))
    return table


def remarks(figures: dict[str, Any]) -> list[str]:
    """One line each: drafters, positions, phases, limits, troubles."""
    lines = []
    if figures["by_drafter"]:
        shares = (f"{name} {row['acceptance']:.0%} of {row['drafted']}" for name, row in figures["by_drafter"].items())
        lines.append("drafts accepted: " + ", ".join(shares))
    if figures["acceptance_per_position"]:
        lines.append(
            "passes that accepted draft 1, 2, ...: " + " ".join(f"{p:.0%}" for p in figures["acceptance_per_position"][:8])
        )
    if figures["phase_shares"]:
        lines.append("step time: " + ", ".join(f"{name} {share:.0%}" for name, share in figures["phase_shares"].items()))
    limits = figures["goodput"]["limits_ms"]
    if limits:
        told = ", ".join(f"{name} {value:g} ms" for name, value in limits.items())
        lines.append(f"answers within {told}: {figures['goodput']['share']:.0%}")
    if figures["rejected"] or figures["errors"]:
        lines.append(f"{figures['rejected']} rejected, {figures['errors']} failed; the first: {figures['first_error']}")
    if figures["gap_ms_p50"] is None:
        lines.append("this server does not say how many tokens a chunk holds, so gaps between tokens are not known")
    return lines
