"""The profile of a step: every phase has its share, and the page keeps all but its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import write_rand_checkpoint

from bench import step_profile
from spec.request import PHASES


def test_shares_add_up_and_the_page_is_refreshed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rand_checkpoint(tmp_path / "rand")
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{step_profile.BEGIN}\nold\n{step_profile.END}\n\nafter\n")
    options = ["--model", str(tmp_path / "rand"), "--cache-dir", str(tmp_path / "cache"), "--kv-memory", str(2**24)]
    options += ["--streams", "1", "3", "--tokens", "12", "--repeats", "2", "--drafters", "suffix"]
    assert step_profile.main([*options, "--write", str(page)]) == 0
    lines = capsys.readouterr().out.splitlines()
    results = json.loads(lines[-1])["results"]
    assert {streams: set(rows) for streams, rows in results.items()} == {s: {"plain", "suffix"} for s in ("1", "3")}
    for rows in results.values():
        for row in rows.values():
            assert sum(row[f"{phase}_share"] for phase in PHASES) == pytest.approx(1.0, abs=1e-3)
            assert row["step_ms"] > 0.0
        assert rows["plain"]["draft_share"] < 0.05
        assert rows["plain"]["tokens_per_pass"] == 1.0
    text = page.read_text()
    assert text.startswith("before\n\n<!--")
    assert text.endswith("-->\n\nafter\n")
    assert "\n".join(lines[:-1]) in text
    assert "old" not in text


def test_a_page_without_a_place_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing here")
    with pytest.raises(ValueError, match="no place for a table"):
        step_profile.write(page, "table")
    assert page.read_text() == "nothing here"
