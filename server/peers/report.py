"""The comparison as a table for people and as ratios for machines. Knows figures only."""

from __future__ import annotations

import statistics
from typing import Any

from rich.table import Table

from server.peers.compare import OUR_AUTO, OUR_PLAIN, PREFILL_LENGTHS, Findings

# What the project aims at: ours over the best peer.
GOALS = {
    "one_stream_plain": 2.3,
    "one_stream_auto": 2.0,
    **{f"prompt_processing_{n}": 1.2 for n in PREFILL_LENGTHS},
    "many_streams": 2.5,
}
OURS = (OUR_PLAIN, OUR_AUTO)


def _lengths(findings: Findings) -> list[int]:
    """Prompt lengths that were measured."""
    return sorted({length for by_length in findings.prefill.values() for length in by_length})


def table(findings: Findings, streams: int) -> Table:
    """A row per contestant: figures, and how many times each our own are."""
    lengths = _lengths(findings)
    columns = ("", "tokens/s", "ours plain x", "ours auto x", *(f"prompt {n}/s" for n in lengths), "ours x")
    out = Table(*columns, f"{streams} streams/s", "ours auto x", "agrees for", "sane", title="ours and the peers")
    plain, auto = findings.single[OUR_PLAIN], findings.single[OUR_AUTO]
    for name in dict.fromkeys((*findings.single, *findings.many)):
        single, prefill, many = findings.single.get(name), findings.prefill.get(name, {}), _median(findings.many.get(name))
        row = [name]
        has = single is not None and bool(single.answers)
        row += [f"{single.rate():.0f}", f"{plain.over(single):.2f}", f"{auto.over(single):.2f}"] if single and has else [""] * 3
        row += [f"{prefill[n]:.0f}" if n in prefill else "" for n in lengths]
        row.append(" ".join(f"{findings.prefill[OUR_PLAIN][n] / prefill[n]:.2f}" for n in lengths if n in prefill))
        row += [f"{many:.0f}", f"{_median(findings.many.get(OUR_AUTO)) / many:.2f}"] if many else [""] * 2
        sane = findings.sanity.get(name)
        row += [f"{sane.agreed:.0f} tokens", "yes" if sane.sane else "NO"] if sane and has else [""] * 2
        out.add_row(*row)
    return out


def ratios(findings: Findings) -> dict[str, float]:
    """Ours over the best peer, by goal; a goal that no peer could be measured for is missing. `by_prompt`: the median over single answers."""
    found: dict[str, float] = {}
    plain, auto = findings.single.get(OUR_PLAIN), findings.single.get(OUR_AUTO)
    rivals = {n: s for n, s in findings.single.items() if n not in OURS and s.answers and findings.sanity[n].sane}
    if plain and auto and rivals:
        plains = [s for n, s in rivals.items() if not findings.speculates[n]]
        if plains:
            found["one_stream_plain"] = min(plain.over(s) for s in plains)
            found["one_stream_plain_by_prompt"] = min(plain.usually_over(s) for s in plains)
        found["one_stream_auto"] = min(auto.over(s) for s in rivals.values())
        found["one_stream_auto_by_prompt"] = min(auto.usually_over(s) for s in rivals.values())
    for length in _lengths(findings):
        theirs = [by[length] for n, by in findings.prefill.items() if n not in OURS and length in by]
        mine = findings.prefill.get(OUR_PLAIN, {}).get(length)
        if theirs and mine:
            found[f"prompt_processing_{length}"] = mine / max(theirs)
    many = [_median(runs) for n, runs in findings.many.items() if n not in OURS and runs]
    if many and findings.many.get(OUR_AUTO):
        found["many_streams"] = _median(findings.many[OUR_AUTO]) / max(many)
    return found


def as_json(findings: Findings, streams: int) -> dict[str, Any]:
    """Ratios, goals and every contestant's figures."""
    found = ratios(findings)
    contestants: dict[str, Any] = {}
    for name in dict.fromkeys((*findings.single, *findings.many)):
        single, sane = findings.single.get(name), findings.sanity.get(name)
        figures: dict[str, Any] = {"prompt_tokens_per_second": _rounded(findings.prefill.get(name, {}))}
        if single is not None and single.answers:
            figures["decode_tokens_per_second"] = round(single.rate(), 1)
            figures["answers"] = len(single.answers)
        if findings.many.get(name):
            figures["streams_tokens_per_second"] = round(_median(findings.many[name]), 1)
        if sane is not None:
            figures |= {
                "sane": sane.sane,
                "first_tokens_equal": round(sane.agreed, 1),
                "first_equal": round(sane.first_equal, 3),
            }
        contestants[name] = figures
    return {
        "ratios": {name: round(value, 3) for name, value in found.items()},
        "goals": GOALS,
        "missed": [name for name, goal in GOALS.items() if found.get(name, 0.0) < goal],
        "contestants": contestants,
        "unavailable": findings.unavailable,
        "peer_versions": findings.versions,
        "streams": streams,
        "answer_tokens": findings.tokens,
    }


def _rounded(by: dict[int, float]) -> dict[str, float]:
    return {str(key): round(value, 1) for key, value in by.items()}


def _median(runs: list[float] | None) -> float:
    return statistics.median(runs) if runs else 0.0
