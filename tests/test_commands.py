"""The local commands end to end on a tiny checkpoint: what they print, what they count, how they exit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_rand_checkpoint
from typer.testing import CliRunner

from server.cli import app
from spec.errors import ForespeakError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rand_checkpoint(tmp_path_factory.mktemp("model") / "rand")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "aaaa aaaa aaaa aaaa"},
        {"messages": [{"role": "user", "content": "hello"}]},
        {"question_id": 7, "category": "qa", "turns": ["one two one two", "three"]},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def run(tmp_path: Path, model: Path, command: str, *arguments: object) -> Any:
    sizes = ["--backend", "reference", "--kv-memory", "8MiB", "--cache-dir", str(tmp_path / "cache")]
    return CliRunner().invoke(app, [command, str(model), *map(str, arguments), *sizes])


def test_generate_gives_the_same_tokens_with_and_without_drafts(tmp_path: Path, model: Path, prompts: Path) -> None:
    lines = {}
    for drafters in ("none", "suffix"):
        result = run(
            tmp_path,
            model,
            "generate",
            "--prompts",
            prompts,
            "--max-tokens",
            24,
            "--drafters",
            drafters,
            "--tree-shape",
            "chain:4",
            "--json",
        )
        assert result.exit_code == 0, result.output
        lines[drafters] = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    plain, drafted = lines["none"], lines["suffix"]
    assert [line["token_ids"] for line in plain] == [line["token_ids"] for line in drafted]
    assert [line["id"] for line in plain] == ["1", "2", "7"]
    assert sum(line["speculation"]["drafted"] for line in drafted) > 0
    assert all(line["usage"]["completion_tokens"] == len(line["token_ids"]) for line in drafted)


def test_verify_compares_and_exits_0(tmp_path: Path, model: Path, prompts: Path) -> None:
    result = run(tmp_path, model, "verify", "--prompts", prompts, "--max-tokens", 12, "--drafters", f"suffix,model:{model}")
    assert result.exit_code == 0, result.output
    assert "identical: 9 combinations x 3 prompts" in result.stdout


def test_bench_ends_with_one_json_line(tmp_path: Path, model: Path, prompts: Path) -> None:
    result = run(
        tmp_path, model, "bench", "--prompts", prompts, "--max-tokens", 12, "--drafters", "suffix", "--concurrency", "1,2"
    )
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout.strip().splitlines()[-1])
    wanted = {
        "decode_tokens_per_second",
        "tokens_per_second",
        "ttft_ms_p50",
        "acceptance_length",
        "acceptance_per_position",
        "by_category",
        "speedup_over_plain",
    }
    assert wanted <= figures.keys()
    assert figures["identical_to_plain"] is True
    assert set(figures["by_category"]) == {"all", "qa"}
    assert set(figures["by_concurrency"]) == {"1", "2"}


def test_bench_repeats_learn_nothing_from_each_other(tmp_path: Path, model: Path, prompts: Path) -> None:
    """Answers given before, and their pages, would make every repeat after the first a look-up."""
    figures = [
        run(tmp_path, model, "bench", "--prompts", prompts, "--max-tokens", 24, "--drafters", "suffix", "--tree-shape", "chain:4",
            "--repeats", repeats)
        for repeats in (1, 3)
    ]  # fmt: skip
    once, thrice = (json.loads(result.stdout.strip().splitlines()[-1]) for result in figures)
    assert once["acceptance_length"] == thrice["acceptance_length"]
    assert once["acceptance_per_position"] == thrice["acceptance_per_position"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate"], "give either --prompt TEXT or --prompts FILE"),
        (["generate", "--prompt", "x", "--drafters", "nonsense"], "unknown drafter 'nonsense'"),
        (["generate", "--prompt", "x", "--tree-shape", "round"], "tree shape 'round' is unknown"),
        (["verify", "--prompts", "missing.jsonl"], "cannot read the prompt file missing.jsonl"),
    ],
)
def test_bad_usage_is_one_clear_error(tmp_path: Path, model: Path, arguments: list[str], said: str) -> None:
    result = run(tmp_path, model, *arguments)
    assert result.exit_code != 0
    assert isinstance(result.exception, ForespeakError)  # main() prints it as one line and exits 2
    assert said in str(result.exception)


def with_other_tokens(folder: Path, kind: str) -> Path:
    """The checkpoint with two tokens changed for each other, or with its last merge gone."""
    file = folder / "tokenizer.json"
    text = json.loads(file.read_text())
    words = text["model"]["vocab"]
    first, last = "a", max(words, key=lambda word: words[word])
    if kind == "swapped":
        words[first], words[last] = words[last], words[first]
    else:
        del words[last]
        text["model"]["merges"].pop()
    file.write_text(json.dumps(text))
    return folder


@pytest.mark.parametrize(("kind", "said"), [("swapped", "512 tokens) of the same size"), ("smaller", "511 tokens")])
def test_a_draft_model_with_other_tokens_is_refused_by_both_names(tmp_path: Path, model: Path, kind: str, said: str) -> None:
    """SD-10: one line that names both, before anything is loaded; exit code 2."""
    other = with_other_tokens(write_rand_checkpoint(tmp_path / "other", seed=1), kind)
    arguments = ["generate", str(model), "--prompt", "x", "--drafters", f"model:{other}", "--backend", "reference"]
    done = subprocess.run(
        [sys.executable, "-m", "server.cli", *arguments, "--cache-dir", str(tmp_path / "cache")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("forespeak: the draft model's tokenizer (other, ")
    assert f"({model.name}, 512 tokens)" in line
    assert said in line
    assert "Traceback" not in done.stderr
    same = write_rand_checkpoint(tmp_path / "same", seed=1)
    fine = run(tmp_path, model, "generate", "--prompt", "x", "--max-tokens", 4, "--drafters", f"model:{same}")
    assert fine.exit_code == 0, fine.output
