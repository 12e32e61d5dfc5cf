"""The race of a plain and a drafting engine: both answer everything alike, and its verdict is the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import write_rand_checkpoint

from bench import never_slower


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("race")
    write_rand_checkpoint(made / "rand")
    lines = [{"question_id": i, "category": name, "turns": [f"say {i}"]} for i, name in enumerate(("rag", "rag", "qa"))]
    (made / "prompts.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return made


def race(folder: Path, *extra: str) -> int:
    return never_slower.main(
        [
            *("--model", str(folder / "rand"), "--prompts", str(folder / "prompts.jsonl"), "--kv-memory", str(2**24)),
            *("--cache-dir", str(folder / "cache"), "--max-tokens", "12", "--repeats", "2", "--drafters", "suffix", *extra),
        ]
    )


def test_every_category_and_load_is_raced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert race(folder, "--loads", "1", "3", "--least", "0.01") == 0
    out = capsys.readouterr().out.splitlines()
    result = json.loads(out[-1])
    assert {name: set(row) for name, row in result["ratios"].items()} == {"rag": {"1", "3"}, "qa": {"1", "3"}}
    assert result["identical"] is True
    assert 0.01 < result["least_ratio"] <= result["median_ratio"] <= result["greatest_ratio"]
    assert result["least_ratio"] == min(ratio for row in result["ratios"].values() for ratio in row.values())


def test_the_verdict_is_the_exit_code(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert race(folder, "--loads", "1", "--categories", "qa", "--least", "1000") == 1
    assert race(folder, "--categories", "nosuch") == 2
    assert "there are: rag, qa" in capsys.readouterr().err


def test_groups_differ_and_short_categories_begin_anew() -> None:
    prompts = [never_slower.Prompt(str(i), "all", ()) for i in range(3)]
    names = [[p.id for p in never_slower.groups(prompts, 2, repeat)] for repeat in range(3)]
    assert names == [["0", "1"], ["2", "0"], ["1", "2"]]
