"""OpenAI's endpoints over raw HTTP: every legal shape is taken, every illegal one refused with the field's name."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from serving import Running, running, toy_settings, wait_for

from server.ports import TextTools
from spec.request import SamplingParams

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
GOLDEN = {"messages": [{"role": "user", "content": "golden"}], "max_tokens": 12, "temperature": 0}


def post(server: Running, path: str, body: Any, **options: Any) -> httpx.Response:
    content = body if isinstance(body, bytes | str) else json.dumps(body)
    return server.http.post(path, content=content, **options)


def chat(server: Running, **fields: Any) -> httpx.Response:
    return post(server, CHAT, {"messages": USER, "max_tokens": 4} | fields)


def complete(server: Running, **fields: Any) -> httpx.Response:
    return post(server, COMPLETIONS, {"prompt": "hi", "max_tokens": 4} | fields)


def events(text: str) -> list[Any]:
    """A strict SSE reader: lines end in LF only, one data line per event here."""
    found: list[Any] = []
    for event in text.split("\n\n")[:-1]:
        assert event.startswith("data: ")
        assert "\n" not in event
        data = event.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


@pytest.fixture(scope="module")
def golden(server: Running) -> str:
    return str(post(server, CHAT, GOLDEN).json()["choices"][0]["message"]["content"])


@pytest.fixture(autouse=True)
def nothing_broke(request: pytest.FixtureRequest, server: Running, golden: str) -> Any:
    """After every test the same engine process still gives the golden answer."""
    pid = server.engine_pid()
    yield
    assert post(server, CHAT, GOLDEN).json()["choices"][0]["message"]["content"] == golden
    assert server.engine_pid() == pid


# ---- messages


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
@pytest.mark.parametrize("content", [None, "", "text", [], [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]])
def test_legal_messages(server: Running, role: str, content: Any) -> None:
    """LM-04: empty and null contents are legal for every role."""
    message = {"role": role, "content": content, "name": None, "surprise": 1}
    if role == "tool":
        message["tool_call_id"] = "call_1"
    response = chat(server, messages=[message, *USER])
    assert response.status_code == 200, response.text


def test_parts_are_joined(server: Running) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    answers = [chat(server, messages=[{"role": "user", "content": c}], temperature=0).json() for c in ("hi", parts)]
    assert answers[0]["choices"] == answers[1]["choices"]


def test_assistant_with_tool_calls_needs_no_content(server: Running) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    answered = {"role": "tool", "tool_call_id": "c1", "content": "2"}
    assert chat(server, messages=[*USER, said, answered]).status_code == 200


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ({}, "messages"),
        ("hi", "messages"),
        ([{"role": "SYSTEM", "content": "x"}], "messages[0].role"),
        ([{"role": "foo", "content": "x"}], "messages[0].role"),
        ([{"role": "", "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 7, "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": {"text": "x"}}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}], "messages[0].tool_calls"),
        (
            [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": '{"a":' * 5000 + "1" + "}" * 5000}}],
                }
            ],
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_illegal_messages(server: Running, messages: Any, param: str) -> None:
    """LM-04: nothing to do; CT-02: roles and contents that are none."""
    response = chat(server, messages=messages)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    if messages == []:
        assert error["code"] == "empty_array"


def test_missing_messages(server: Running) -> None:
    """LM-04: no messages at all."""
    response = post(server, CHAT, {"max_tokens": 3})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")


# ---- options

NULLABLE = [
    *("max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "stop"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words", "stop_token_ids", "ignore_eos"),
    *("speculation", "response_format", "stream", "stream_options", "logprobs", "model", "user", "metadata", "store"),
]


def test_every_option_may_be_null(server: Running) -> None:
    """OA-03: null is the default of every optional field, and stray fields are ignored."""
    nulls = dict.fromkeys(NULLABLE)
    for response in (
        post(server, CHAT, nulls | {"messages": USER, "top_logprobs": None, "tools": None, "tool_choice": None, "stop": "q"}),
        post(server, COMPLETIONS, nulls | {"prompt": "hi", "suffix": None, "echo": None, "best_of": None, "stop": "q"}),
    ):
        assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 2},
        {"temperature": 1e-45},
        {"top_p": 1e-9},
        {"top_p": 0},
        {"top_k": -1},
        {"top_k": 10**9},
        {"min_p": 1},
        {"seed": 2**63 - 1},
        {"seed": 0},
        {"presence_penalty": -2},
        {"frequency_penalty": 2},
        {"repetition_penalty": 1.3},
        {"logit_bias": {"5": -100, "511": 100}},
        {"logit_bias": {}},
        {"stop": []},
        {"stop": "z"},
        {"stop": ["a" * 20, "b"]},
        {"stop_token_ids": [0, 511]},
        {"bad_words": ["no", "never"]},
        {"min_tokens": 2},
        {"ignore_eos": True},
        {"logprobs": True},
        {"logprobs": True, "top_logprobs": 20},
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "json_object"}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
            }
        },
        {"response_format": {"type": "regex", "regex": "a+"}},
        {"max_tokens": 2**63},
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "surprise": [1, {"x": None}]},
        {"speculation": {"mode": "off"}},
        {"speculation": {"mode": "auto", "drafters": ["toy"], "max_nodes": 4, "rule": "rejection"}},
        {"model": "toy"},
    ],
)
def test_legal_options(server: Running, fields: dict[str, Any]) -> None:
    """LM-02, LM-05: the edges of what is legal work."""
    response = chat(server, **{"stop": "q"} | fields)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "nan"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": "5"}, "top_k"),
        ({"top_k": True}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.01}, "min_p"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 9}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": 10**9}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 1e300}, "max_tokens"),
        ({"max_tokens": "10"}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"seed": "7"}, "seed"),
        ({"logit_bias": {"512": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1e6}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
        ({"stop": [""]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 600}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stop_token_ids": [512]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 2 * 10**9}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
        ({"response_format": "json"}, "response_format"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"speculation": {"mode": "on"}}, "speculation.mode"),
        ({"speculation": {"drafters": ["oracle"]}}, "speculation.drafters"),
        ({"speculation": {"max_nodes": 64}}, "speculation.max_nodes"),
        ({"speculation": {"rule": "lossy"}}, "speculation.rule"),
        ({"bad_words": [""]}, "bad_words"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_illegal_options(server: Running, fields: dict[str, Any], param: str, stream: bool) -> None:
    """LM-01, LM-02, LM-05: out-of-range options are refused with the field's name, also before a stream; OA-03:
    stream_options without stream."""
    if param == "stream_options" and stream:
        return
    response = chat(server, **({"stream": True} if stream else {}), **fields)
    assert response.status_code == 400, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert error["param"] == param
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "logit_bias"])
def test_numbers_that_are_not(server: Running, field: str, number: str) -> None:
    """LM-01: NaN and infinities in raw JSON."""
    value = f'{{"5": {number}}}' if field == "logit_bias" else number
    response = post(server, CHAT, f'{{"messages": {json.dumps(USER)}, "{field}": {value}}}')
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(field)


def test_refused_by_the_engine_is_a_400_before_the_stream(server: Running) -> None:
    """OA-06: a request the engine refuses fails before the stream opens."""
    for stream in (False, True):
        response = chat(server, stream=stream, response_format={"type": "grammar", "grammar": "refuse"})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "response_format"


def test_newer_token_limit_wins(server: Running) -> None:
    """OA-04: max_completion_tokens, its elder, both, and none."""
    for fields, count in (
        ({"max_completion_tokens": 5}, 5),
        ({"max_completion_tokens": 5, "max_tokens": 9}, 5),
        ({"max_tokens": 6}, 6),
    ):
        answer = post(server, CHAT, {"messages": USER} | fields).json()
        assert answer["usage"]["completion_tokens"] == count
        assert answer["choices"][0]["finish_reason"] == "length"
    answer = post(server, CHAT, {"messages": USER}).json()
    assert answer["usage"]["total_tokens"] == 512  # none given: up to the context


# ---- prompts


@pytest.mark.parametrize("prompt", ["hi", ["hi"], ["a", "b"], [104, 105], [[104, 105], [97]]])
def test_legal_prompts(server: Running, prompt: Any) -> None:
    answer = complete(server, prompt=prompt, n=2).json()
    prompts = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    assert [c["index"] for c in answer["choices"]] == list(range(2 * prompts))
    assert answer["usage"]["completion_tokens"] == 8 * prompts


@pytest.mark.parametrize(
    "prompt", ["", [""], [], [[]], None, {}, 5, [512], [-1], [[97], [99999]], ["a", 5], [1.5], [True], ["x"] * 17, [["a"]]]
)
def test_illegal_prompts(server: Running, prompt: Any) -> None:
    """LM-04, LM-05: empty prompts and ids outside the vocabulary."""
    response = complete(server, prompt=prompt)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt"), response.text


def test_unsupported_completion_options(server: Running) -> None:
    assert complete(server, suffix="x").json()["error"]["param"] == "suffix"
    assert complete(server, best_of=3).json()["error"]["param"] == "best_of"
    assert complete(server, best_of=2, n=2).status_code == 200
    assert complete(server, logprobs=21).json()["error"]["param"] == "logprobs"


def test_echo(server: Running) -> None:
    plain = complete(server, temperature=0).json()["choices"][0]["text"]
    assert complete(server, temperature=0, echo=True).json()["choices"][0]["text"] == "hi" + plain
    parts = [c["choices"][0]["text"] for c in events(complete(server, temperature=0, echo=True, stream=True).text)[:-1]]
    assert "".join(parts) == "hi" + plain


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [511, 512, 513, 5120])
def test_prompts_around_the_context(server: Running, length: int, stream: bool) -> None:
    """LM-03: one token short of the context, at it, above it and far above it."""
    response = complete(server, prompt=[97] * length, stream=stream)
    if length < 512:
        assert response.status_code == 200
        if not stream:
            assert response.json()["usage"]["completion_tokens"] == 1
            assert response.json()["choices"][0]["finish_reason"] == "length"
        return
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert str(length) in error["message"]
    assert "512" in error["message"]


def test_long_texts_are_refused_fast(server: Running) -> None:
    """LM-07: a megabyte of anything is refused by its bytes before it is tokenised."""
    for text in ("a" * 10**6, " " * 10**6, "_" * 10**6, "🙂" * 8 * 10**4):
        began = time.perf_counter()
        response = chat(server, messages=[{"role": "user", "content": text}])
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert time.perf_counter() - began < 2


def test_many_prompts_over_the_context_at_once(server: Running) -> None:
    """LM-03: fifty at once."""
    with ThreadPoolExecutor(16) as pool:
        codes = set(pool.map(lambda _: complete(server, prompt=[97] * 600).status_code, range(50)))
    assert codes == {400}


# ---- answers


def whole(chunks: list[Any], index: int = 0) -> tuple[str, list[str]]:
    """(text, finish reasons) of one choice of a chat stream."""
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(c["delta"].get("content") or "" for c in choices), [
        c["finish_reason"] for c in choices if c["finish_reason"]
    ]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stop", [None, "e", ["er", "th"]])
def test_streamed_and_whole_answers_are_equal(server: Running, n: int, stop: Any) -> None:
    """OA-01: one usage chunk at the end, equal to the whole answer's; TS-03: text ends before the stop string, streamed
    or not."""
    fields = {"n": n, "seed": 11, "max_tokens": 40, "stop": stop, "logprobs": True, "top_logprobs": 2}
    answer = chat(server, **fields).json()
    *chunks, done = events(chat(server, **fields, stream=True, stream_options={"include_usage": True}).text)
    assert done == "[DONE]"
    *chunks, last = chunks
    assert last["choices"] == []
    assert last["usage"] == answer["usage"] | {"prompt_tokens_details": last["usage"]["prompt_tokens_details"]}
    assert last["speculation"] == answer["speculation"]
    assert {"queue_ms", "ttft_ms", "decode_ms", "tokens_per_second", "phases_ms"} == set(last["timings"])
    tokens = 0
    for index in range(n):
        choice = answer["choices"][index]
        text, reasons = whole(chunks, index)
        assert (text, reasons) == (choice["message"]["content"], [choice["finish_reason"]])
        entries = [
            e for c in chunks for o in c["choices"] if o["index"] == index and o["logprobs"] for e in o["logprobs"]["content"]
        ]
        assert entries == choice["logprobs"]["content"]
        tokens += len(entries)
        assert all(bytes(e["bytes"]).decode() == e["token"] and len(e["top_logprobs"]) == 2 for e in entries)
    assert tokens == answer["usage"]["completion_tokens"]
    if stop is None:
        assert tokens == 40 * n
    else:
        assert not any(
            s in c["message"]["content"] for c in answer["choices"] for s in ([stop] if isinstance(stop, str) else stop)
        )


@pytest.mark.parametrize("n", [1, 2])
def test_chunk_shape(server: Running, n: int) -> None:
    """OA-02: one id, a role first, finish_reason in every chunk and once not null, then [DONE]."""
    response = chat(server, stream=True, n=n)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert chunks[0]["id"].startswith("chatcmpl-")
    assert not any("usage" in c for c in chunks)
    for index in range(n):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert all("finish_reason" in c for c in mine)
        assert [c["finish_reason"] for c in mine][-1] == "length"
        assert [c["finish_reason"] for c in mine].count(None) == len(mine) - 1
        assert mine[-1]["delta"] == {}


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_no_usage_unless_asked(server: Running, options: Any) -> None:
    """OA-01: usage only when asked for."""
    chunks = events(chat(server, stream=True, stream_options=options).text)[:-1]
    assert all(c["choices"] and not c.get("usage") for c in chunks)


def test_empty_answer(server: Running) -> None:
    """OA-02: an answer whose first token ends it."""
    first = chat(server, temperature=0, max_tokens=1, logprobs=True).json()["choices"][0]["logprobs"]["content"][0]["bytes"][0]
    fields = {"temperature": 0, "stop_token_ids": [first]}
    answer = chat(server, **fields).json()
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 1
    text, reasons = whole(events(chat(server, **fields, stream=True).text)[:-1])
    assert (text, reasons) == ("", ["stop"])


def test_separators_are_escaped() -> None:
    """TS-05: an event is one line for every reader of lines."""
    from server.httpio import sse_event

    text = "a\u2028b\u2029c\x85d\r\n\x00✓\U0001f642"
    raw = sse_event({"t": text})
    assert raw.decode().splitlines() == [raw.decode().split("\n")[0], ""]
    assert json.loads(raw.decode().removeprefix("data: ")) == {"t": text}


def test_first_event_does_not_wait_for_the_second_token(text: TextTools) -> None:
    """OA-07: not compressed and not gathered, whatever the client would accept."""
    with running(toy_settings("step_ms=300,run=1"), text) as slow, socket.create_connection(("127.0.0.1", slow.port)) as raw:
        body = json.dumps({"messages": USER, "max_tokens": 4, "stream": True}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAccept-Encoding: gzip, br\r\nContent-Length: {len(body)}\r\n\r\n"
        raw.sendall(head.encode() + body)
        received, arrivals = b"", []
        while b"[DONE]" not in received:
            received += raw.recv(65536)
            arrivals.append((time.perf_counter(), received.count(b'"content":"') - 1))
        assert b"content-encoding" not in received.lower()
        assert b"x-accel-buffering: no" in received.lower()
        first = next(when for when, count in arrivals if count >= 1)
        last = next(when for when, count in arrivals if count >= 4)
        assert last - first > 0.5


# ---- errors and limits


def test_errors_have_one_shape(server: Running) -> None:
    """OA-06: status and body of errors."""
    for response, status, code in (
        (post(server, CHAT, "{bad"), 400, "invalid_json"),
        (post(server, CHAT, b"\xff"), 400, "invalid_json"),
        (post(server, CHAT, "[]"), 400, "invalid_type"),
        (chat(server, model="gpt-6"), 404, "model_not_found"),
        (server.http.get(CHAT), 405, "method_not_allowed"),
        (server.http.get("/nowhere"), 404, "not_found"),
        (server.http.get("/v1/models/other"), 404, "model_not_found"),
    ):
        assert response.status_code == status
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == code
        assert "Traceback" not in response.text


def test_models_and_tokenize(server: Running) -> None:
    [model] = server.http.get("/v1/models").json()["data"]
    assert (model["id"], model["object"]) == ("toy", "model")
    assert server.http.get("/v1/models/toy").json()["id"] == "toy"
    assert post(server, "/tokenize", {"prompt": "hq"}).json()["tokens"] == [104, 113]
    counted = post(server, "/tokenize", {"messages": USER}).json()["count"]
    assert counted == chat(server).json()["usage"]["prompt_tokens"]
    assert post(server, "/tokenize", {}).status_code == 400


@pytest.mark.parametrize("extra", [-1, 0, 1, 5 * 2**20])
@pytest.mark.parametrize("chunked", [False, True])
def test_body_limit(server: Running, extra: int, chunked: bool) -> None:
    """WS-04 over HTTP: 413 above the limit, with and without Content-Length."""
    body = json.dumps({"messages": USER, "max_tokens": 1, "metadata": ""}).encode()
    body = body[:-2] + b"x" * (2**20 + extra - len(body)) + body[-2:]

    def parts() -> Any:
        for start in range(0, len(body), 65536):
            yield body[start : start + 65536]

    try:
        response = server.http.post(CHAT, content=parts() if chunked else body)
    except (httpx.WriteError, httpx.ReadError):
        assert extra > 0  # the connection was closed in the middle of a body that is far too large
        return
    assert response.status_code == (200 if extra <= 0 else 413)
    if extra > 0:
        assert response.json()["error"]["code"] == "request_too_large"


def test_clients_that_leave_stop_the_work(text: TextTools) -> None:
    """WS-01 over HTTP: streamed and whole answers of clients that close, reset or half-close."""
    with running(toy_settings("step_ms=20,run=1"), text) as slow:
        body = {"messages": USER, "max_tokens": 400}
        for stream in (True, False):
            data = json.dumps(body | {"stream": stream}).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode()
            for leave in ("close", "reset", "half"):
                raw = socket.create_connection(("127.0.0.1", slow.port))
                raw.sendall(head + data)
                wait_for(lambda: slow.metric("forespeak:generation_tokens_total") > 0 and slow.server.num_running > 0, 5)
                if leave == "reset":
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
                if leave == "half":
                    raw.shutdown(socket.SHUT_WR)
                else:
                    raw.close()
                wait_for(lambda: slow.server.num_running == 0, 1)
                raw.close()
        wait_for(lambda: slow.metric("forespeak:kv_pages", state="live") == 0, 3)
        assert slow.metric("forespeak:request_success_total", finished_reason="cancelled") == 6
        assert slow.metric("forespeak:num_requests_running") == 0


def test_pathological_prompt_does_not_hold_up_neighbours(text: TextTools) -> None:
    """LM-07: a megabyte of one letter is refused or tokenised beside the event loop, while another client streams on."""
    with running(toy_settings("step_ms=5,run=1"), text) as server:
        arrivals: list[float] = []

        def stream() -> None:
            body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 200, "stream": True}
            with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
                arrivals.extend(time.perf_counter() for line in response.iter_lines() if line)

        thread = threading.Thread(target=stream)
        thread.start()
        for letter in "a _" * 3:
            answer = server.http.post("/tokenize", json={"prompt": letter * 10**6})
            assert answer.status_code == 400
            server.http.post("/tokenize", json={"prompt": letter * 2500})
        thread.join()
        gaps = sorted(b - a for a, b in itertools.pairwise(arrivals))
        assert gaps[-2] < 0.25


def test_defaults_reach_the_engine() -> None:
    """What the options module fills in is what the engine's contract calls off."""
    plain = SamplingParams(max_tokens=1)
    assert (plain.temperature, plain.top_p, plain.top_k, plain.min_p) == (1.0, 1.0, 0, 0.0)
