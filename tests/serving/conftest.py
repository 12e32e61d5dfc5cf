"""One toy server per test module, and the text side it shares with tests that need no server."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from serving import Running, running, toy_settings, toy_text

from server.ports import TextTools


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
