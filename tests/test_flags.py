"""server.flags: commands take settings as flags, each declared once."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from server.flags import ENGINE, SERVER, takes
from server.settings import Settings
from spec.errors import ConfigError


def application(seen: list[tuple[Settings, int]]) -> typer.Typer:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    @takes(*ENGINE, *SERVER)
    def command(settings: Settings, count: int = 3) -> None:
        """One command."""
        seen.append((settings, count))

    return app


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('page_size = 4\nthreads = 1\nallowed_origins = ["http://a.example"]\n')
    seen: list[tuple[Settings, int]] = []
    arguments = [
        "other.gguf",
        "--config",
        str(file),
        "--page-size",
        "8",
        "--count",
        "5",
        "--kv-memory",
        "1MiB",
        "--context",
        "2k",
    ]
    result = CliRunner().invoke(application(seen), arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    [(settings, count)] = seen
    assert count == 5
    assert settings == Settings(
        model="other.gguf", page_size=8, threads=1, allowed_origins=("http://a.example",), kv_memory=2**20, context=2048
    )


def test_repeated_flags_make_a_tuple() -> None:
    seen: list[tuple[Settings, int]] = []
    CliRunner().invoke(
        application(seen), ["--allowed-origin", "http://a", "--allowed-origin", "http://b"], catch_exceptions=False
    )
    assert seen[0][0].allowed_origins == ("http://a", "http://b")


def test_a_bad_value_names_its_setting() -> None:
    with pytest.raises(ConfigError, match="page_size is 999"):
        CliRunner().invoke(application([]), ["--page-size", "999"], catch_exceptions=False)


def test_every_setting_a_server_has_a_flag_for_is_a_field() -> None:
    assert set(ENGINE) | set(SERVER) <= set(Settings.__struct_fields__)
    assert not set(ENGINE) & set(SERVER)
