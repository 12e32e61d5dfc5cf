"""Speed by load as a drawing: in letters for a terminal, or as SVG by matplotlib where it is installed. Knows points only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from server.tuning.search import LoadPoint
from spec.errors import ConfigError

WIDTH = 48  # letters of the longest bar


def by_load_text(points: Sequence[LoadPoint], name: str) -> str:
    """Two bars a load, tokens a second."""
    most = max([p.plain for p in points] + [p.drafting for p in points], default=0.0) or 1.0
    lines = [f"predicted tokens/s by conversations at once; {name} (#) over plain (-)"]
    for point in points:
        ratio = point.drafting / point.plain if point.plain else 0.0
        lines.append(
            f"{point.concurrency:4d} {'#' * round(WIDTH * point.drafting / most):{WIDTH}} {point.drafting:6.0f}  x {ratio:.2f}"
        )
        lines.append(f"     {'-' * round(WIDTH * point.plain / most):{WIDTH}} {point.plain:6.0f}")
    return "\n".join(lines)


def by_load_svg(points: Sequence[LoadPoint], name: str, path: Path) -> None:
    """The same as lines over a logarithmic axis of loads. ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import ScalarFormatter
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'forespeak[report]'") from error
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    loads = [point.concurrency for point in points]
    axes.plot(loads, [point.drafting for point in points], marker="o", label=name)
    axes.plot(loads, [point.plain for point in points], marker="o", linestyle="--", label="plain")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_xticks(loads)
    axes.set_xlabel("conversations at once")
    axes.set_ylabel("tokens/s, predicted")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    figure.savefig(path, format="svg", metadata={"Date": None})
