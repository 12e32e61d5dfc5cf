"""Training curves as an SVG: loss and acceptance by position over steps. Knows a log's lines; needs no plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 300, 64, 110, 34, 40
_COLOURS = ("#0b6e99", "#c2410c", "#4d7c0f", "#7c3aed", "#b45309", "#be123c", "#334155", "#0f766e")
Line = tuple[str, list[tuple[float, float]]]


def curves(journal: Sequence[dict[str, Any]], title: str) -> str:
    """The text of an SVG file. Without any figures the panels are empty."""
    trained = [(float(line["step"]), float(line["loss"])) for line in journal if "loss" in line]
    judged = [line for line in journal if "held_out" in line]
    depths = max((len(line["held_out"]["top_1"]) for line in judged), default=0)
    acceptance: list[Line] = [
        (
            f"position {d + 1}",
            [(float(line["step"]), line["held_out"]["top_1"][d]) for line in judged if d < len(line["held_out"]["top_1"])],
        )
        for d in range(depths)
    ]
    last = max((float(line["step"]) for line in journal if "step" in line), default=1.0) or 1.0
    body = [
        _panel(
            0, last, f"{title}: training loss, all positions weighted", [("loss", trained), ("mean", _smooth(trained))], None
        ),
        _panel(_HEIGHT, last, "acceptance on held-out answers (greedy)", acceptance, (0.0, 1.0)),
    ]
    size = f'width="{_WIDTH}" height="{2 * _HEIGHT}" viewBox="0 0 {_WIDTH} {2 * _HEIGHT}"'
    style = 'font-family="sans-serif" font-size="12"'
    paper = '<rect width="100%" height="100%" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{paper}\n' + "\n".join(body) + "\n</svg>\n"


def _smooth(points: list[tuple[float, float]], span: int = 9) -> list[tuple[float, float]]:
    """Running mean; training losses jump with the batch."""
    if len(points) < 2 * span:
        return []
    return [(points[i][0], sum(y for _, y in points[i - span + 1 : i + 1]) / span) for i in range(span - 1, len(points))]


def _panel(top: int, last: float, title: str, lines: Sequence[Line], bounds: tuple[float, float] | None) -> str:
    """`last`: the greatest step. `bounds` None: by the values."""
    points = [point for _, line in lines for point in line]
    low, high = _bounds([y for _, y in points]) if bounds is None else bounds
    bottom, right = top + _HEIGHT - _BOTTOM, _WIDTH - _RIGHT

    def at(x: float, y: float) -> str:
        across = _LEFT + x / last * (right - _LEFT)
        up = bottom - (min(max(y, low), high) - low) / (high - low) * (bottom - top - _TOP)
        return f"{across:.1f},{up:.1f}"

    parts = [f'<text x="{_LEFT}" y="{top + 20}" font-weight="bold">{escape(title)}</text>']
    for value in _ticks(low, high):
        x, y = at(0, value).split(",")
        parts.append(f'<line x1="{x}" y1="{y}" x2="{right}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{float(y) + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in _ticks(0, last):
        x, y = at(value, low).split(",")
        parts.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{value:g}</text>')
    parts.append(f'<text x="{right}" y="{bottom + 32}" text-anchor="end">steps</text>')
    for number, (name, line) in enumerate(lines):
        if not line:
            continue
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(at(x, y) for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if len(line) < 40:
            parts += [
                f'<circle cx="{x}" cy="{y}" r="2" fill="{colour}"/>' for x, y in (at(*point).split(",") for point in line)
            ]
        label = f"{name} {line[-1][1]:.3g}"
        parts.append(f'<text x="{right + 8}" y="{top + _TOP + 8 + 16 * number}" fill="{colour}">{escape(label)}</text>')
    return "\n".join(parts)


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    """From the least to what nine tenths of the values stay under, and half as much again: the first steps tower above all."""
    if not values:
        return 0.0, 1.0
    ordered = sorted(values)
    low, body = ordered[0], ordered[int(0.9 * (len(ordered) - 1))]
    high = min(ordered[-1], body + 0.5 * (body - low))
    return (low, high) if high - low > 1e-9 else (low - 0.5, low + 0.5)


def _ticks(low: float, high: float, wanted: int = 6) -> list[float]:
    """Round values within the range."""
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1.0, 2.0, 2.5, 5.0, 10.0) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 10) for k in range(first, math.floor(high / step + 1e-9) + 1)]
