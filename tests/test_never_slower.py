"""The race of a plain and a drafting engine: both answer everything alike, and its verdict is the exit code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
from checkpoints import write_rand_checkpoint

from bench import never_slower
from spec.engine import Engine
from spec.request import Request, SamplingParams, TokenEvent


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
    prompts = [never_slower.Prompt(str(i), "all", ()) for i in range(12)]
    usual = never_slower.queued(1)
    firsts = [[int(p.id) for p in never_slower.group(prompts, 1, repeat)][:usual] for repeat in range(3)]
    assert firsts == [[(repeat * usual + i) % 12 for i in range(usual)] for repeat in range(3)]


def test_a_prompt_that_comes_again_is_another_tenant_s() -> None:
    prompts = [never_slower.Prompt(name, "all", ()) for name in "abab"]
    tenants = never_slower.tenants(prompts, 0)
    assert tenants[0] == tenants[1] != tenants[2] == tenants[3]
    assert not set(tenants) & set(never_slower.tenants(prompts, 1))


class Says:
    """An engine that says what it is told, a token a step."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens, self._left = tokens, {}
        self.begun = self.spoken = 0

    def add(self, request: Request) -> None:
        self.begun += 1
        self._left[request.id] = list(self._tokens)

    def cancel(self, request_id: int) -> None:
        self._left.pop(request_id, None)

    def step(self) -> list[TokenEvent]:
        events = []
        for key, left in list(self._left.items()):
            token = left.pop(0)
            self.spoken += 1
            events.append(
                TokenEvent(
                    key, (token,), ("",), started=len(left) == len(self._tokens) - 1, finish_reason=None if left else "stop"
                )
            )
            if not left:
                del self._left[key]
        return events


@pytest.mark.parametrize(
    ("other", "same"), [([1, 2, 3], True), ([1, 2, 4], False), ([1, 2], False), ([1, 2, 3, 4], False), ([9], False)]
)
def test_any_difference_is_seen(other: list[int], same: bool) -> None:
    requests = [Request(i, (1,), SamplingParams(8)) for i in range(4)]
    pair = never_slower.race(cast(Engine, Says([1, 2, 3])), cast(Engine, Says(other)), requests, 2, 0)
    assert pair.same is same


def test_short_answers_are_raced_for_more_steps() -> None:
    """Two at a time, each of four tokens: the usual eight answers would be twelve full steps and no more."""
    requests = [Request(i, (1,), SamplingParams(8)) for i in range(200)]
    plain = Says([1, 2, 3, 4])
    pair = never_slower.race(cast(Engine, plain), cast(Engine, Says([1, 2, 3, 4])), requests, 2, 0)
    assert pair.same
    assert plain.spoken >= 2 * never_slower.FULL
    assert plain.begun < 200, "but not for ever"


def test_what_cannot_be_raced_is_said_in_a_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert race(folder, "--loads", "4096") == 2
    assert race(folder, "--loads", "1", "--max-tokens", "1") == 2
    assert "raise --max-tokens" in capsys.readouterr().err
