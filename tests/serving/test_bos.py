"""CT-01 over HTTP: what reaches the engine begins with exactly as many beginning-of-text tokens as it should.

The scripted engine answers with the ids of its own prompt, so the test reads what was really served, besides usage and /tokenize.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from channel_kit import SCRIPTED, text_tools
from serving import Running, running, toy_settings

BOS, IM_START, IM_END = 256, 257, 258
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"


@dataclass(frozen=True)
class Kind:
    """A model, and the beginnings its prompts have. A chat is what the template wrote, with nothing added."""

    name: str
    template: str
    adds: bool
    in_chat: int
    in_raw: int


KINDS = (
    Kind("A: both write it", "{{ bos_token }}" + CHATML, True, 1, 1),
    Kind("B: the tokenizer alone", CHATML, True, 0, 1),
    Kind("C: neither", CHATML, False, 0, 0),
    Kind("D: the template alone", "{{ bos_token }}" + CHATML, False, 1, 0),
)


@pytest.fixture(scope="module", params=KINDS, ids=[kind.name for kind in KINDS])
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[tuple[Running, Kind]]:
    kind: Kind = request.param
    folder = tmp_path_factory.mktemp("model")
    text = text_tools(folder, kind.template, bos_token="<|endoftext|>", add_bos_token=kind.adds)
    with running(toy_settings("step_ms=0"), text, SCRIPTED) as server:
        yield server, kind


def served(answer: dict[str, Any], text: str) -> list[int]:
    """The ids the engine was given, as many as usage says."""
    ids = [int(word) for word in text.split()]
    assert answer["usage"]["prompt_tokens"] == len(ids)
    return ids


def test_a_chat_begins_as_its_template_wrote_it(model: tuple[Running, Kind]) -> None:
    server, kind = model
    messages = [{"role": "user", "content": "hi"}]
    answer = server.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 300}).json()
    ids = served(answer, answer["choices"][0]["message"]["content"])
    assert ids.count(BOS) == kind.in_chat
    assert ids[kind.in_chat] == IM_START
    assert ids == server.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    response = server.http.post("/v1/responses", json={"input": messages, "max_output_tokens": 300}).json()
    assert response["usage"]["input_tokens"] == len(ids)


def test_a_raw_prompt_begins_as_the_models_texts_do(model: tuple[Running, Kind]) -> None:
    server, kind = model
    for prompt in ("hi", "<|endoftext|>hi"):  # a token's name that a user writes out is text
        answer = server.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 300}).json()
        ids = served(answer, answer["choices"][0]["text"])
        assert ids.count(BOS) == kind.in_raw
        assert ids[: kind.in_raw] == [BOS] * kind.in_raw
        assert ids == server.http.post("/tokenize", json={"prompt": prompt}).json()["tokens"]


def test_ids_are_taken_as_they_are(model: tuple[Running, Kind]) -> None:
    server, _ = model
    for prompt in ([104, 105], [BOS, 104, 105]):
        answer = server.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 300}).json()
        assert served(answer, answer["choices"][0]["text"]) == prompt
