"""What a model says arrives as it was said, on every way out: characters split over tokens, separators, control characters, spaces.

The engine says the user's message in tokens cut at odd places of characters, in runs of one to eight tokens a step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import websockets.sync.client as ws_client
from serving import SUPPORT, Running, running, toy_settings, toy_text

from server.ports import TextTools
from server.serve import ServeOptions
from server.template import ChatTemplate
from server.tokenizer import load_tokenizer

ECHO = ServeOptions(factory="toy_engine:build_echo", factory_paths=(str(SUPPORT),))
CHAT = "/v1/chat/completions"
SPLIT = [
    "\U0001f642",
    "family \U0001f468\u200d\U0001f469\u200d\U0001f467 and flag \U0001f1e9\U0001f1ea",
    "a \u4f60\u597d b",
    "e\u0301 a\u0308o\u0302 combining",
    "\u05e9\u05dc\u05d5\u05dd",
    "x\ufeffy",
]
SEPARATED = ["a\u2028b", "a\u2029b", "a\u0085b", "a\rb", "a\nb\r\nc", "a\x00b", "ok \u2714\ufe0f done"]
SPACED = [" leads", "two  spaces", "line\n\ttab", "ends "]


@pytest.fixture(scope="module", params=[1, 3, 8], ids=lambda run: f"{run} tokens a step")
def echo(text: TextTools, request: pytest.FixtureRequest) -> Iterator[Running]:
    with running(toy_settings(f"step_ms=0,run={request.param}"), text, ECHO) as run:
        yield run


def body(said: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": said}], "max_tokens": 200} | fields


def streamed(server: Running, said: str, **fields: Any) -> tuple[list[str], str]:
    """(content of every chunk, the raw stream)."""
    raw = server.http.post(CHAT, json=body(said, stream=True, **fields)).content.decode()
    chunks = [json.loads(event.removeprefix("data: ")) for event in raw.split("\n\n")[:-2]]
    return [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]], raw


@pytest.mark.parametrize("said", SPLIT + SEPARATED + SPACED)
def test_every_way_out_says_the_same(echo: Running, said: str) -> None:
    """TS-01, TS-04, TS-06: no half characters, no duplicates, every token of a step, streamed or not, over HTTP and sockets."""
    whole = echo.http.post(CHAT, json=body(said)).json()
    assert whole["choices"][0]["message"]["content"] == said
    parts, _ = streamed(echo, said)
    with ws_client.connect(echo.ws_url) as ws:
        ws.recv()
        ws.send(json.dumps({"type": "chat", "id": 1} | body(said)))
        frames = []
        while not frames or frames[-1]["type"] != "done":
            frames.append(json.loads(ws.recv(timeout=10)))
    deltas = [frame["text"] for frame in frames if frame["type"] == "delta"]
    for pieces in (parts, deltas):
        assert "".join(pieces) == said
        assert not any("\ufffd" in piece for piece in pieces)
        assert all(piece.encode() for piece in pieces if piece)
    assert frames[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] > 1


@pytest.mark.parametrize("said", SEPARATED)
def test_every_reader_of_lines_sees_the_text(echo: Running, said: str) -> None:
    """TS-05: a strict reader, the openai client, and one that splits lines the Unicode way."""
    parts, raw = streamed(echo, said)
    assert "".join(parts) == said
    lines = [line for line in raw.splitlines() if line]
    naive = [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]
    assert "".join(choice["delta"].get("content") or "" for chunk in naive for choice in chunk["choices"]) == said
    with openai.OpenAI(base_url=echo.url + "/v1", api_key="x") as client:
        stream: Any = client.chat.completions.create(model="toy", **body(said), stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == said


@pytest.mark.parametrize(
    ("stop", "visible"),
    [("our f", "one two three f"), (["five", "five six"], "one two three four "), ("four x", None), ([], None), (None, None)],
)
def test_stop_strings_over_tokens(echo: Running, stop: Any, visible: str | None) -> None:
    """TS-03: text ends before the earliest match; a near miss is released; nothing asked for is nothing stopped."""
    said = "one two three four five six seven"
    whole = echo.http.post(CHAT, json=body(said, stop=stop)).json()["choices"][0]
    parts, _ = streamed(echo, said, stop=stop)
    assert "".join(parts) == whole["message"]["content"] == (said if visible is None else visible)
    assert whole["finish_reason"] == "stop"


# ---- templates that refuse

STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>model\n"
)


def test_what_the_template_refuses_is_the_clients_fault(tmp_path: Path) -> None:
    """CT-02: 400 with the template's own message, an error frame on an open socket, and no trace of the inside."""
    toy_text(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": STRICT}))
    tokenizer = load_tokenizer(tmp_path, None)
    user = {"role": "user", "content": "hi"}
    refused = [
        ([{"role": "system", "content": "x"}, user], "System role not supported"),
        ([{"role": "developer", "content": "x"}, user], "System role not supported"),
        ([user, user], "Roles must alternate"),
        ([{"role": "assistant", "content": "x"}], "Roles must alternate"),
    ]
    with (
        running(toy_settings(), TextTools.of(tokenizer, ChatTemplate(tokenizer))) as server,
        ws_client.connect(server.ws_url) as ws,
    ):
        ws.recv()
        for number, (messages, message) in enumerate(refused):
            answer = server.http.post(CHAT, json={"messages": messages, "max_tokens": 2})
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
            assert message in error["message"]
            assert "Traceback" not in answer.text
            ws.send(json.dumps({"type": "chat", "id": number, "messages": messages}))
            frame = json.loads(ws.recv(timeout=5))
            assert (frame["type"], frame["id"]) == ("error", number)
            assert message in frame["message"]
        ws.send(json.dumps({"type": "chat", "id": "good", "messages": [user], "max_tokens": 2}))
        assert json.loads(ws.recv(timeout=5))["type"] == "started"
