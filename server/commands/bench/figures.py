"""Records to figures. Knows every figure's definition; refuses to know how records came about and how figures are shown.

ttft: from when the user asked to the first token. e2e: to the last. tpot: (last - first) / (tokens - 1) of one answer. chunk gap:
between two arrivals of the same answer. gap: between two tokens, 0 for tokens that arrived together. All in milliseconds; an
answer that was refused or failed has none of them. goodput: answers that kept every limit, refused and failed ones did not.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from server.commands.bench.records import Answer, Run
from spec.errors import ConfigError

PERCENTILES = (50, 90, 99)
LIMITS = ("ttft", "tpot", "e2e", "gap")  # what `--limit` may name; gap is the longest chunk gap of an answer


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest of the sorted values; 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


# ---- of one answer, milliseconds; None where there is no such figure


def ttft_ms(answer: Answer) -> float | None:
    return (answer.chunk_times[0] - answer.due) * 1e3 if answer.ok and answer.chunk_times else None


def e2e_ms(answer: Answer) -> float | None:
    return (answer.chunk_times[-1] - answer.due) * 1e3 if answer.ok and answer.chunk_times else None


def tpot_ms(answer: Answer) -> float | None:
    """Without chunk sizes the first chunk counts as one token; an answer that came in one piece has no such figure."""
    after = _after_first(answer)
    return _decode_seconds(answer) * 1e3 / after if answer.ok and after > 0 and len(answer.chunk_times) > 1 else None


def chunk_gaps_ms(answer: Answer) -> list[float]:
    return [(b - a) * 1e3 for a, b in zip(answer.chunk_times, answer.chunk_times[1:], strict=False)]


def token_gaps_ms(answer: Answer) -> list[float] | None:
    """None where the server does not say how many tokens a chunk holds."""
    if answer.chunk_tokens is None:
        return None
    gaps: list[float] = []
    for index, tokens in enumerate(answer.chunk_tokens):
        if index and tokens:
            gaps.append((answer.chunk_times[index] - answer.chunk_times[index - 1]) * 1e3)
        gaps += [0.0] * (tokens - 1)
    return gaps


def _decode_seconds(answer: Answer) -> float:
    return answer.chunk_times[-1] - answer.chunk_times[0] if answer.chunk_times else 0.0


def _after_first(answer: Answer) -> int:
    return max(answer.tokens - 1, 0) if answer.ok and answer.chunk_times else 0


# ---- of a run


def decode_rate(answers: Iterable[Answer]) -> float:
    """Tokens after the first over the time from first to last, summed over answers (tokens/s of one stream)."""
    answers = list(answers)
    seconds = sum(_decode_seconds(a) for a in answers)
    return sum(_after_first(a) for a in answers) / seconds if seconds > 0 else 0.0


def token_rate(run: Run) -> float:
    """All delivered tokens over the run's wall time."""
    return sum(a.tokens for a in run.answers if a.ok) / run.seconds if run.seconds > 0 else 0.0


def acceptance_length(answers: Iterable[Answer]) -> float:
    """Mean tokens a target pass delivered, the prompt's own pass left out."""
    answers = list(answers)
    passes = sum(a.passes for a in answers)
    return sum(a.passed_tokens for a in answers) / passes if passes else 0.0


def acceptance_per_position(answers: Sequence[Answer]) -> list[float]:
    """Share of target passes that delivered at least i accepted drafts, i = 1, 2, ..."""
    passes = sum(a.passes for a in answers)
    depth = max((len(a.accepted_per_position) for a in answers), default=0)
    counts = [sum(a.accepted_per_position[i] for a in answers if i < len(a.accepted_per_position)) for i in range(depth)]
    return [round(count / passes, 4) if passes else 0.0 for count in counts]


def by_drafter(answers: Sequence[Answer]) -> dict[str, Any]:
    """Nodes the target verified and those delivered, credited to the drafter that proposed them."""
    names = sorted({name for a in answers for name in a.drafted_by})
    rows = {}
    for name in names:
        drafted, accepted = (
            sum(d.get(name, 0) for d in ds) for ds in zip(*((a.drafted_by, a.accepted_by) for a in answers), strict=True)
        )
        rows[name] = {"drafted": drafted, "accepted": accepted, "acceptance": round(accepted / drafted, 4) if drafted else 0.0}
    return rows


def parse_limits(text: str) -> dict[str, float]:
    """'ttft=500,tpot=50' in milliseconds. Raises ConfigError naming what may stand there."""
    limits: dict[str, float] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = item.partition("=")
        try:
            limits[name.strip()] = float(value)
        except ValueError:
            raise ConfigError(f"--limit {item!r}: write NAME=MILLISECONDS, for example ttft=500,tpot=50") from None
        if name.strip() not in LIMITS or not limits[name.strip()] > 0:
            raise ConfigError(f"--limit {item!r}: limits are {', '.join(LIMITS)}, in milliseconds above 0")
    return limits


def keeps(answer: Answer, limits: Mapping[str, float]) -> bool:
    """Whether an answer was given within every limit; an answer too short to have a figure keeps its limit."""
    if not answer.ok:
        return False
    found = {
        "ttft": ttft_ms(answer),
        "tpot": tpot_ms(answer),
        "e2e": e2e_ms(answer),
        "gap": max(chunk_gaps_ms(answer), default=None),
    }
    return all(value is None or value <= limits[name] for name, value in found.items() if name in limits)


def summary(runs: Sequence[Run], limits: Mapping[str, float]) -> dict[str, Any]:
    """Every figure of one lane under one kind of traffic. Rates are medians over the repeats, percentiles are of all answers."""
    answers = [a for run in runs for a in run.answers]
    answered = [a for a in answers if a.ok]
    seconds = sum(run.seconds for run in runs)
    result: dict[str, Any] = {
        "decode_tokens_per_second": round(_median(runs, lambda r: decode_rate(r.answers)), 1),
        "tokens_per_second": round(_median(runs, token_rate), 1),
        "answers_per_second": round(len(answered) / seconds, 3) if seconds > 0 else 0.0,
    }
    for name, values in _distributions(answered).items():
        result |= {f"{name}_p{p}": None if values is None else round(percentile(values, p), 3) for p in PERCENTILES}
    kept = sum(keeps(a, limits) for a in answers)
    result |= {
        "acceptance_length": round(acceptance_length(answered), 3),
        "acceptance_per_position": acceptance_per_position(answered),
        "by_drafter": by_drafter(answered),
        "answers": len(answers),
        "rejected": sum(a.finish_reason == "rejected" for a in answers),
        "errors": sum(a.finish_reason == "error" for a in answers),
        "first_error": next((a.error for a in answers if a.error), ""),
        "tokens": sum(a.tokens for a in answered),
        "prompt_tokens": sum(a.prompt_tokens for a in answered),
        "cached_tokens": sum(a.cached_tokens for a in answered),
        "seconds": round(seconds, 3),
        "goodput": {
            "limits_ms": dict(limits),
            "share": round(kept / len(answers), 4) if answers else 0.0,
            "answers_per_second": round(kept / seconds, 3) if seconds > 0 else 0.0,
        },
        "phase_shares": _shares(runs),
    }
    return result


def _median(runs: Sequence[Run], figure: Callable[[Run], float]) -> float:
    return statistics.median(figure(run) for run in runs)


def _distributions(answers: Sequence[Answer]) -> dict[str, list[float] | None]:
    """Milliseconds by name, over all answers."""
    token_gaps = [token_gaps_ms(a) for a in answers]
    return {
        "ttft_ms": [v for a in answers if (v := ttft_ms(a)) is not None],
        "e2e_ms": [v for a in answers if (v := e2e_ms(a)) is not None],
        "tpot_ms": [v for a in answers if (v := tpot_ms(a)) is not None],
        "chunk_gap_ms": [v for a in answers for v in chunk_gaps_ms(a)],
        "gap_ms": None if any(g is None for g in token_gaps) else [v for gaps in token_gaps for v in gaps or ()],
    }


def _shares(runs: Sequence[Run]) -> dict[str, float]:
    """Where the engine's step time went; empty where only the server knows."""
    totals: dict[str, float] = {}
    for run in runs:
        for name, seconds in run.phases.items():
            totals[name] = totals.get(name, 0.0) + seconds
    whole = sum(totals.values())
    return {name: round(seconds / whole, 4) for name, seconds in totals.items()} if whole > 0 else {}


def comparison(ours: Sequence[Run], base: Sequence[Run]) -> dict[str, Any]:
    """Ours over the baseline, repeat by repeat (medians of the ratios), and whether both said the same."""
    pairs = list(zip(ours, base, strict=True))
    said = [[{(a.prompt, a.turn): a.said for a in run.answers if a.ok} for run in pair] for pair in pairs]
    return {
        "decode_speedup": _ratio((decode_rate(a.answers), decode_rate(b.answers)) for a, b in pairs),
        "throughput_ratio": _ratio((token_rate(a), token_rate(b)) for a, b in pairs),
        "identical": all(a == b for a, b in said) and any(a for a, _ in said),  # nothing said is nothing shown
    }


def _ratio(pairs: Iterable[tuple[float, float]]) -> float | None:
    ratios = [a / b for a, b in pairs if b > 0]
    return round(statistics.median(ratios), 3) if ratios else None


def by_category(ours: Sequence[Run], base: Sequence[Run] | None) -> dict[str, Any]:
    """Acceptance, speed and the ratio to the baseline (None without one) of every category."""
    rows: dict[str, Any] = {}
    for category in dict.fromkeys(a.category for run in ours for a in run.answers):
        mine = [[a for a in run.answers if a.category == category] for run in ours]
        rows[category] = {
            "acceptance_length": round(acceptance_length(a for m in mine for a in m), 3),
            "acceptance_per_position": acceptance_per_position([a for m in mine for a in m]),
            "by_drafter": by_drafter([a for m in mine for a in m]),
            "decode_tokens_per_second": round(statistics.median(decode_rate(m) for m in mine), 1),
            "speedup": None,
        }
        if base is not None:
            theirs = [[a for a in run.answers if a.category == category] for run in base]
            rows[category]["speedup"] = _ratio((decode_rate(m), decode_rate(t)) for m, t in zip(mine, theirs, strict=True))
    return rows
