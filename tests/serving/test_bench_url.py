"""`forespeak bench --url` against a real server on real sockets: both wires, refusals, servers that are not there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Running, running, toy_settings
from typer.testing import CliRunner

from server.cli import app
from server.ports import TextTools
from spec.errors import ConfigError

KEY = "a-key-for-the-bench"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Conversations of two turns, one of one, and one that the toy's context of 512 does not hold."""
    path = tmp_path / "prompts.jsonl"
    lines = [{"question_id": i, "category": ("qa", "math")[i % 2], "turns": [f"say {i}", "go on"]} for i in range(4)]
    lines.append({"prompt": "alone"})
    lines.append({"prompt": "too long " * 200})
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def bench(prompts: Path, url: str, *arguments: object) -> dict[str, Any]:
    common = ["--url", url, "--prompts", str(prompts), "--max-tokens", "12", "--temperature", "1"]
    result = CliRunner().invoke(app, ["bench", *common, *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return found


def test_our_socket_is_compared_with_its_own_plain_decoding(server: Running, prompts: Path) -> None:
    found = bench(prompts, server.ws_url, "--turns", "all", "--concurrency", 3, "--limit", "ttft=60000")
    assert (found["answers"], found["rejected"], found["errors"]) == (10, 1, 0)
    assert "context is 512 tokens" in found["first_error"]
    assert found["tokens"] == 9 * 12
    assert found["identical_to_plain"] is True
    assert found["by_drafter"]["toy"]["drafted"] > found["by_drafter"]["toy"]["accepted"] > 0
    assert found["baseline"]["by_drafter"] == {}
    assert found["acceptance_per_position"][0] > 0
    assert found["gap_ms_p50"] <= found["chunk_gap_ms_p50"]  # tokens arrive several at once
    assert 0 < found["ttft_ms_p50"] <= found["e2e_ms_p50"]
    assert found["goodput"]["share"] == 0.9
    assert set(found["by_category"]) == {"qa", "math", "all"}
    assert found["url"] == server.ws_url
    assert {"commit", "argv", "versions", "machine"} <= found.keys()


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_openai_streams(server: Running, prompts: Path, api: str) -> None:
    found = bench(prompts, server.url + "/v1", "--turns", "all", "--concurrency", 2, "--rate", 50, "--api", api, "--warm-up", 1)
    for each in found["traffic"]:
        assert (each["answers"], each["rejected"], each["errors"]) == (10, 1, 0)
        assert each["first_error"].startswith("HTTP 400: ")
        assert each["tokens"] == 9 * 12
        assert each["acceptance_length"] > 1
        assert each["e2e_ms_p50"] >= each["ttft_ms_p50"] > 0
        assert each["gap_ms_p50"] is None  # four tokens a chunk, and nothing in the stream says so
        assert each["baseline"] is None
        assert each["speedup_over_plain"] is None
    assert list(found["by_concurrency"]) == ["2"]
    assert list(found["by_rate"]) == ["50"]


def test_both_wires_hear_the_same_text(server: Running, prompts: Path) -> None:
    """The second turn holds the first answer, so one wrong character would change everything after it."""
    from server.commands.bench.remote import Remote
    from server.commands.bench.traffic import Traffic
    from server.commands.bench.wires import openai_wire, socket_wire
    from server.prompts import read_prompts
    from spec.request import SamplingParams

    chosen = dict(enumerate(read_prompts(prompts, 4, "all")))
    texts = []
    for wire in (lambda: socket_wire(server.ws_url, None, {}), lambda: openai_wire(server.url, None, None, "chat", {})):
        lane = Remote("x", wire, lambda n: SamplingParams(max_tokens=12, temperature=1.0, seed=n))
        run = lane.run(chosen, Traffic(users=4), "r", lambda: None)
        texts.append([(a.prompt, a.turn, a.text, a.prompt_tokens) for a in run.answers])
    assert texts[0] == texts[1]
    assert len({text for _, _, text, _ in texts[0]}) > 4


@pytest.fixture(scope="module")
def locked(text: TextTools, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Path]]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEY + "\n")
    with running(toy_settings(api_key_file=str(keys)), text) as run:
        yield run, keys


def test_keys(locked: tuple[Running, Path], prompts: Path) -> None:
    server, keys = locked
    for url in (server.url, server.ws_url):
        assert bench(prompts, url, "-n", 2, "--api-key-file", keys)["errors"] == 0
    with pytest.raises(ConfigError, match="answers 401"):
        bench(prompts, server.url)
    with pytest.raises(ConfigError, match="API key"):
        bench(prompts, server.ws_url)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:1", "cannot reach http://127.0.0.1:1"),
        ("ws://127.0.0.1:1/v1/ws", "cannot connect to ws://127.0.0.1:1"),
        ("ftp://somewhere", "write http://HOST:PORT"),
    ],
)
def test_nobody_there(prompts: Path, url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        bench(prompts, url)


def test_a_dying_server_is_errors_not_a_crash(text: TextTools, prompts: Path) -> None:
    """Answers that never come are counted; the rest of the run goes on."""
    from server.commands.bench.remote import Remote
    from server.commands.bench.traffic import Traffic
    from server.commands.bench.wires import openai_wire
    from server.prompts import read_prompts
    from spec.request import SamplingParams

    chosen = dict(enumerate(read_prompts(prompts, 5)))
    with running(toy_settings("step_ms=20", drain_seconds=0.0), text) as server:
        lane = Remote("x", lambda: openai_wire(server.url, "toy", None, "chat", {}), lambda n: SamplingParams(max_tokens=200))
        stop = iter([server.stop])  # once one answer is there; a second call would not let it end in peace
        run = lane.run(chosen, Traffic(users=1), "r", lambda: next(stop, lambda: None)())
        server.thread.join(30)
    assert run.answers[0].finish_reason == "length"
    assert {a.finish_reason for a in run.answers[1:]} <= {"error", "rejected"}
    assert len(run.answers) == 5
