"""The bench's report in a browser: by day and by night, on a phone, with nothing fetched and nothing complained about.

SCREENSHOTS=docs/images ./dev test tests/page/test_bench_page.py writes the picture of the documentation anew.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_rand_checkpoint
from playwright.sync_api import Browser
from typer.testing import CliRunner

from server.cli import app

SHOTS: dict[str, dict[str, Any]] = {
    "bench-light": {"viewport": {"width": 1100, "height": 900}, "color_scheme": "light"},
    "bench-dark": {"viewport": {"width": 1100, "height": 900}, "color_scheme": "dark"},
    "bench-phone": {"viewport": {"width": 360, "height": 740}, "color_scheme": "dark", "device_scale_factor": 2},
}
LARGEST = 180_000  # bytes of a report on three kinds of traffic


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report on a tiny random model, or the one that REPORT names."""
    if "REPORT" in os.environ:
        return Path(os.environ["REPORT"]).resolve()
    folder = tmp_path_factory.mktemp("bench")
    model = write_rand_checkpoint(folder / "rand")
    prompts = folder / "prompts.jsonl"
    lines = [{"category": ("qa", "<b>math</b>")[i % 2], "question_id": i, "turns": [f"say {i}", "more"]} for i in range(2)]
    prompts.write_text("\n".join(json.dumps(line) for line in lines))
    out = folder / "report.html"
    engine = ["--backend", "reference", "--kv-memory", "16MiB", "--cache-dir", str(folder / "cache"), "--drafters", "suffix"]
    load = [
        "--concurrency",
        "1,2",
        "--rate",
        "20",
        "--max-tokens",
        "4",
        "--warm-up",
        "0",
        "--limit",
        "ttft=1000",
        "--tree-shape",
        "chain:4",
    ]
    arguments = ["bench", str(model), "--prompts", str(prompts), "--html", str(out), *engine, *load]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return out


def test_one_light_file(report: Path) -> None:
    page = report.read_text(encoding="utf-8")
    assert "<script" not in page
    assert not re.search(r"(src|href)=\"(?!#)", page)  # nothing is fetched
    assert not re.search(r"#0[0-9]0[0-9]0[0-9]\b", page.split("<body>")[1])  # every stand-in became a colour of the page
    if "REPORT" not in os.environ:
        assert len(page.encode()) < LARGEST
        assert "&lt;b&gt;math&lt;/b&gt;" in page
        assert "<b>math</b>" not in page


@pytest.mark.parametrize("name", SHOTS)
def test_in_a_browser(browser: Browser, report: Path, tmp_path: Path, name: str) -> None:
    context = browser.new_context(**SHOTS[name])
    page = context.new_page()
    complaints: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(report.as_uri())
    folder = Path(os.environ.get("SCREENSHOTS") or tmp_path)
    page.screenshot(path=folder / f"{name}.png", full_page="SCREENSHOTS" not in os.environ)
    assert complaints == []
    assert requests == [report.as_uri()]
    width = page.viewport_size["width"] if page.viewport_size else 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width  # tables scroll in themselves, the page does not
    drawings = page.locator("figure svg")
    assert drawings.count() >= 6
    labels = page.locator("figure svg text")
    smallest = labels.evaluate_all("all => Math.min(...all.map(e => e.getBoundingClientRect().height))")
    assert smallest >= 9  # pixels: readable on a phone
    paper, ink = (page.evaluate(f"getComputedStyle(document.body).{what}") for what in ("backgroundColor", "color"))
    drawn = labels.first.evaluate("e => getComputedStyle(e).fill")
    assert contrast(paper, ink) > 7
    assert contrast(paper, drawn) > 4.5
    context.close()


def contrast(one: str, other: str) -> float:
    """WCAG's ratio of two css rgb() colours."""

    def light(colour: str) -> float:
        parts = [int(n) / 255 for n in re.findall(r"\d+", colour)[:3]]
        red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    bright, dark = sorted((light(one), light(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)
