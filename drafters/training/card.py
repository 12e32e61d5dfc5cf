"""The card beside trained weights, as Markdown. Knows figures; every number in it was measured by the run or by `forespeak bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Figures = Mapping[str, Sequence[float]]


def card(facts: Mapping[str, Any], judged: Mapping[str, Figures], bench: Sequence[Mapping[str, Any]] = ()) -> str:
    """`facts` as `run.facts_of` makes them and the log keeps them. `judged`: held-out figures by kind of answer.
    `bench`: last lines of `forespeak bench`."""
    lines = [
        f"# {facts['what'].capitalize()} for {facts['target']}",
        "",
        f"Made by {facts.get('maker', '`forespeak train`')} on {facts['date']}. They only guess: what the target says does not change.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in _rows(facts)),
        "",
        "## Acceptance on held-out answers",
        "",
        f"{facts['held_out']} conversations that were never trained on. A guess at position i is made where those before it were",
        "right. *top n*: the target's own choice is among the n best guesses (n = 1 is the acceptance rate of a greedy chain, the",
        "others what a tree can reach). *overlap*: the acceptance rate of a sampled guess at temperature 1.",
        "",
    ]
    for name, figures in judged.items():
        lines += [*_table(name, figures), ""]
    for result in bench:
        lines += [*_bench(result), ""]
    lines += ["## Licence", "", str(facts.get("licence", "the target's own; these weights are derived from it")), ""]
    return "\n".join(lines)


def _rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    names = {
        "architecture": "architecture",
        "parameters": "parameters",
        "vocabulary": "tokens it can say",
        "coverage": "share of the answers' tokens among them",
        "data": "data",
        "conversations": "conversations trained on",
        "answer_tokens": "answer tokens in them",
        "dropped": "dropped",
        "steps": "steps",
        "tokens": "answer tokens seen",
        "minutes": "minutes of training",
        "device": "machine",
        "loss": "training loss of the last 100 steps",
        "options": "options",
    }
    return [(label, str(facts[name])) for name, label in names.items() if name in facts]


def _table(name: str, figures: Figures) -> list[str]:
    depths = len(next(iter(figures.values()), ()))
    head = " | ".join(str(d + 1) for d in range(depths))
    rows = [f"| {label.replace('_', ' ')} | {' | '.join(f'{v:.3f}' for v in values)} |" for label, values in figures.items()]
    return [f"{name} answers, by position:", "", f"| | {head} |", f"|---|{'---|' * depths}", *rows]


def _bench(result: Mapping[str, Any]) -> list[str]:
    """Acceptance by position and category, as measured by `forespeak bench`."""
    positions = result.get("acceptance_per_position", ())
    how = [f"{result[name]} {word}" for name, word in (("prompts", "prompts"), ("max_tokens", "new tokens")) if name in result]
    how += [f"temperature {result['temperature']:g}"] if "temperature" in result else []
    about = [f"acceptance length {result['acceptance_length']:.2f}"] if "acceptance_length" in result else []
    about += [f"{result['speedup_over_plain']:.2f} times plain decoding"] if result.get("speedup_over_plain") else []
    lines = [f"## Measured: drafters {result.get('drafters', '')}", "", f"{', '.join(how)}: {', '.join(about)}.".lstrip(": ")]
    if positions:
        shares = ", ".join(f"{value:.3f}" for value in positions)
        lines += ["", f"Share of the target's passes that kept at least 1, 2, ... drafted tokens: {shares}."]
    if result.get("by_category"):
        lines += ["", "| category | acceptance length |", "|---|---|"]
        lines += [f"| {name} | {row['acceptance_length']:.2f} |" for name, row in sorted(result["by_category"].items())]
    return lines
