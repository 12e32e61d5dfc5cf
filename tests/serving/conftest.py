"""One toy server per test module, and the text side it shares with tests that need no server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import openai
import pytest
from serving import Running, running, toy_settings, toy_text

from server.ports import TextTools

FUZZED = pytest.StashKey[Counter[str]]()


@pytest.fixture(scope="session")
def fuzzed(pytestconfig: pytest.Config) -> Counter[str]:
    """How many of each kind of fuzzed input were tried; printed at the end of the run."""
    return pytestconfig.stash.setdefault(FUZZED, Counter())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if counts := config.stash.get(FUZZED, None):
        terminalreporter.write_line("fuzzed: " + ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextTools:
    return toy_text(tmp_path_factory.mktemp("toy-tokenizer"))


@pytest.fixture(scope="module")
def server(text: TextTools) -> Iterator[Running]:
    with running(toy_settings(), text) as run:
        yield run


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as made:
        yield made
