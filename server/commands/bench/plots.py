"""Figures as SVG that lives inside a page: text stays text, and every colour is one of the page's variables, so that one drawing
serves light and dark. Knows matplotlib; refuses to know pages and what the numbers mean.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from server.commands.bench.figures import percentile
from spec.errors import ConfigError

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator
except ImportError as error:
    raise ConfigError("the HTML report needs matplotlib: pip install 'forespeak[report]'") from error

WIDTH, HEIGHT = 4.6, 2.9  # inches: 331 by 209 points, which a phone shows one to one
POINTS = 80  # of a distribution's curve
# Stand-ins that matplotlib takes for colours, and the variables they become.
INK, MUTED, GRID = "#010101", "#020202", "#030303"
SERIES = ("#040404", "#050505", "#060606", "#070707", "#080808")
_VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid"} | {colour: f"--s{i}" for i, colour in enumerate(SERIES)}

_STYLE: Any = {  # typed as strings matplotlib knows
    "svg.fonttype": "none", "svg.hashsalt": "forespeak", "font.family": "sans-serif", "font.size": 10, "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED, "text.color": INK, "xtick.color": MUTED, "ytick.color": MUTED, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.8, "axes.axisbelow": True,
    "xtick.major.size": 0, "ytick.major.size": 0, "xtick.minor.size": 0, "legend.frameon": False, "legend.fontsize": 9.5, "axes.labelsize": 9.5, "lines.linewidth": 1.8,
}  # fmt: skip


class Canvas:
    """One drawing: `with Canvas(label) as canvas: canvas.axes.plot(...)`, then `canvas.svg`. `label` is for screen readers."""

    def __init__(self, label: str, height: float = HEIGHT) -> None:
        self.svg = ""
        self._label = label
        self._height = height
        self._style = matplotlib.rc_context(_STYLE)

    def __enter__(self) -> Canvas:
        self._style.__enter__()
        self._figure = Figure(figsize=(WIDTH, self._height), layout="constrained")
        self.axes: Axes = self._figure.add_subplot()
        return self

    def __exit__(self, *exc: Any) -> None:
        if exc[0] is None:
            written = io.StringIO()
            self._figure.savefig(
                written, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Type": None, "Format": None}
            )
            self.svg = _inline(written.getvalue(), self._label)
        self._style.__exit__(*exc)


# What an inlined drawing does not need: descriptions, ids that several drawings would share, fonts the page chooses, turns by nothing.
_NEEDLESS = (
    r"<metadata>.*?</metadata>",
    r"<!--.*?-->",
    r"<style.*?</style>",
    r"font-family: [^;]*; ",
    r' transform="rotate\(-0 [^"]*"',
    r"<g/>",
    r"(?<=\d) L(?= )",
)
_BARE_GROUP = re.compile(r"<g> ?((?:(?!</?g\b).)*)</g>", re.DOTALL)


def _inline(text: str, label: str) -> str:
    """The <svg> alone, sized and coloured by the page, a third of what matplotlib wrote."""
    body = re.sub(r'<g id="[^"]*"', "<g", text[text.index("<svg") :])
    for needless in _NEEDLESS:
        body = re.sub(needless, "", body, flags=re.DOTALL)
    body = re.sub(r"\s+", " ", re.sub(r"(\d+\.\d)\d+", r"\1", body))  # a tenth of a point is finer than a screen
    while (thinner := _BARE_GROUP.sub(r"\1", body)) != body:
        body = thinner
    for stand_in, variable in _VARIABLES.items():
        body = body.replace(stand_in, f"var({variable})")
    head = f'<svg viewBox="0 0 {WIDTH * 72:g} \\1" role="img" aria-label="{escape(label)}" xmlns:xlink="http://www.w3.org/1999/xlink">'
    return re.sub(r"<svg [^>]*?viewBox=\"0 0 [\d.]+ ([\d.]+)\"[^>]*>", head, body, count=1)


def _logarithmic(values: Sequence[float]) -> bool:
    """Whether the middle of the values spans more than a straight axis can show."""
    return percentile(values, 5) > 0 and percentile(values, 99) > 20 * percentile(values, 5)


def distribution(label: str, lanes: Mapping[str, Sequence[float]], unit: str = "ms") -> str:
    """Share of values at or under x; the axis ends at the greatest 99th percentile, so that one straggler hides nothing."""
    with Canvas(label) as canvas:
        shares = [100 * i / (POINTS - 1) for i in range(POINTS)]
        for colour, (name, values) in zip(SERIES, lanes.items(), strict=False):
            if values:
                canvas.axes.plot([percentile(values, s) for s in shares], shares, color=colour, label=name)
        right = max((percentile(values, 99) for values in lanes.values() if values), default=1.0)
        if _logarithmic([v for values in lanes.values() for v in values]):
            canvas.axes.set_xscale("log")
            canvas.axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        else:
            canvas.axes.set_xlim(0, right * 1.05 or 1.0)
            canvas.axes.xaxis.set_major_locator(MaxNLocator(6))
        canvas.axes.set_ylim(0, 102)
        canvas.axes.set_xlabel(unit)
        canvas.axes.set_ylabel("% of values")
        if len(lanes) > 1:
            canvas.axes.legend(loc="lower right")
    return canvas.svg


def curves(label: str, lanes: Mapping[str, Sequence[tuple[float, float]]], xlabel: str, ylabel: str) -> str:
    """Points joined by lines, one line a lane, from zero; x is marked where there are points."""
    with Canvas(label) as canvas:
        for colour, (name, points) in zip(SERIES, lanes.items(), strict=False):
            canvas.axes.plot([x for x, _ in points], [y for _, y in points], color=colour, marker="o", markersize=4, label=name)
        canvas.axes.set_ylim(bottom=0)
        canvas.axes.set_xlabel(xlabel)
        canvas.axes.set_ylabel(ylabel)
        canvas.axes.set_xticks(sorted({x for points in lanes.values() for x, _ in points}))
        if len(lanes) > 1:
            canvas.axes.legend()
    return canvas.svg


def bars(label: str, values: Mapping[str, float], unit: str, mark: float | None = None) -> str:
    """Horizontal bars with their numbers, the first on top. `mark` draws a line, for what all bars are compared with."""
    with Canvas(label, height=max(1.1, 0.55 + 0.27 * len(values))) as canvas:
        names = list(values)[::-1]
        drawn = canvas.axes.barh(names, [values[n] for n in names], color=SERIES[1], height=0.68)
        canvas.axes.bar_label(drawn, fmt="%.3g", padding=3, color=INK, fontsize=9.5)
        canvas.axes.grid(visible=False, axis="y")
        canvas.axes.margins(x=0.12)
        canvas.axes.set_xlabel(unit)
        if mark is not None:
            canvas.axes.axvline(mark, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    return canvas.svg


def shares(label: str, lanes: Mapping[str, Mapping[str, float]]) -> str:
    """Stacked bars, one a lane, of parts that make one whole."""
    parts = list(dict.fromkeys(part for lane in lanes.values() for part in lane))
    with Canvas(label, height=1.0 + 0.36 * len(lanes)) as canvas:
        names = list(lanes)[::-1]
        left = [0.0] * len(names)
        for colour, part in zip(SERIES, parts, strict=False):
            widths = [100 * lanes[name].get(part, 0.0) for name in names]
            canvas.axes.barh(names, widths, left=left, color=colour, height=0.6, label=part)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        canvas.axes.grid(visible=False, axis="y")
        canvas.axes.set_xlim(0, 100)
        canvas.axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
        canvas.axes.legend(
            loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=len(parts), columnspacing=0.9, handlelength=1.0
        )
    return canvas.svg


def timeline(label: str, rows: Sequence[tuple[float, float, float]]) -> str:
    """One line an answer: (asked, first token, last token) in seconds; thin while waiting, thick while speaking."""
    with Canvas(label, height=min(4.2, 1.2 + 0.06 * len(rows))) as canvas:
        numbers = range(len(rows))
        thick = max(1.0, min(4.0, 150 / max(len(rows), 1)))
        canvas.axes.hlines(
            numbers, [r[0] for r in rows], [r[1] for r in rows], color=SERIES[0], linewidth=thick / 2, label="waiting"
        )
        canvas.axes.hlines(
            numbers, [r[1] for r in rows], [r[2] for r in rows], color=SERIES[1], linewidth=thick, label="answering"
        )
        canvas.axes.invert_yaxis()
        canvas.axes.set_xlabel("seconds")
        canvas.axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        canvas.axes.set_ylabel("answer")
        canvas.axes.legend(loc="lower left")
    return canvas.svg
