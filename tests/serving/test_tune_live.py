"""`forespeak tune --live` against a running server: with a key, without one, and against what is no server of ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from serving import running, toy_settings
from typer.testing import CliRunner

from server.cli import app
from server.ports import TextTools
from spec.errors import ForespeakError


def test_a_running_server_is_read_with_its_key(text: TextTools, tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("me:secret-secret-secret\n")
    with running(toy_settings(api_key_file=str(keys)), text) as run:
        answer = run.http.post(
            "/v1/completions",
            json={"prompt": "hello", "max_tokens": 5},
            headers={"authorization": "Bearer secret-secret-secret"},
        )
        assert answer.status_code == 200
        result = CliRunner().invoke(app, ["tune", "--live", run.url + "/v1", "--api-key-file", str(keys)])
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout.splitlines()[-1]) == {"url": run.url, "advice": []}
        assert "nothing to change" in result.stdout
        refused = CliRunner().invoke(app, ["tune", "--live", run.url])
        assert isinstance(refused.exception, ForespeakError)
        assert "--api-key-file" in str(refused.exception)
        lost = CliRunner().invoke(app, ["tune", "--live", run.url + "/elsewhere", "--api-key-file", str(keys)])
        assert isinstance(lost.exception, ForespeakError)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nonsense"])
def test_an_address_without_a_server_is_one_line(url: str) -> None:
    result = CliRunner().invoke(app, ["tune", "--live", url])
    assert isinstance(result.exception, ForespeakError)
    assert url in str(result.exception)
    assert "\n" not in str(result.exception)
