"""The unmodified openai client against the server: chat, completions, responses over HTTP and over its WebSocket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from serving import running, toy_settings, wait_for

from server.limits import Limits
from server.ports import TextTools
from server.serve import ServeOptions

# The client opens its socket in a way that websockets has deprecated; that is between those two.
LEGACY = pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")
USER: Any = [{"role": "user", "content": "hi"}]


def test_chat(client: openai.OpenAI) -> None:
    """OA-01, OA-02 as the client reads them."""
    answer = client.chat.completions.create(
        model="toy", messages=USER, max_tokens=24, seed=3, logprobs=True, top_logprobs=2, n=2
    )
    chunks = list(
        client.chat.completions.create(
            model="toy", messages=USER, max_tokens=24, seed=3, stream=True, stream_options={"include_usage": True}, n=2
        )
    )
    for choice in answer.choices:
        streamed = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == choice.index)
        assert choice.message.content == streamed
        assert choice.finish_reason == "length"
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert len(choice.logprobs.content) == 24
        assert len(choice.logprobs.content[0].top_logprobs) == 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 48
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 48
    assert answer.choices[0].message.content != answer.choices[1].message.content
    extra: Any = answer.model_extra
    assert extra["speculation"]["accepted"] > 0


def test_json_schema_and_stop(client: openai.OpenAI) -> None:
    schema = {"name": "s", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}, "strict": True}
    answer = client.chat.completions.create(
        model="toy",
        messages=USER,
        max_tokens=20,
        stop=["q", "z"],
        response_format={"type": "json_schema", "json_schema": schema},
    )
    assert not set("qz") & set(answer.choices[0].message.content or "")


def test_completions_and_models(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="toy", prompt="hi", max_tokens=9, temperature=0, logprobs=2)
    parts = list(client.completions.create(model="toy", prompt="hi", max_tokens=9, temperature=0, stream=True))
    assert whole.choices[0].text == "".join(c.text for part in parts for c in part.choices)
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.tokens or []) == 9
    assert whole.choices[0].logprobs.text_offset == list(range(9))
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").id == "toy"


def test_errors(client: openai.OpenAI) -> None:
    """OA-06 as the client raises them."""
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-6", messages=USER)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="toy", messages=USER, temperature=9, stream=True)
    assert bad.value.param == "temperature"


def test_failure_in_the_middle_of_a_stream(text: TextTools) -> None:
    """OA-06: one error event ends the stream; the client raises APIError, and others go on."""
    with (
        running(toy_settings("step_ms=5,run=1"), text) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client,
    ):
        stream = client.chat.completions.create(
            model="toy", messages=[{"role": "user", "content": "!"}], max_tokens=40, stream=True
        )
        seen = []
        with pytest.raises(openai.APIError) as broken:
            seen.extend(iter(stream))
        assert broken.value.code == "engine_crashed"
        assert len(seen) > 1
        raw = server.http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "!"}], "stream": True}
        ).text
        assert "[DONE]" not in raw
        assert json.loads(raw.split("data: ")[-1])["error"]["type"] == "server_error"


@pytest.mark.parametrize("stream", [False, True])
def test_responses(client: openai.OpenAI, stream: bool) -> None:
    first: Any = client.responses.create(model="toy", input="hello", instructions="be brief", max_output_tokens=8)
    assert isinstance(first, Response)
    assert (first.status, len(first.output_text) > 0) == ("incomplete", True)
    assert first.incomplete_details is not None
    assert first.usage is not None
    items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "more"}]}]
    options: Any = {"model": "toy", "input": items, "previous_response_id": first.id, "extra_body": {"stop": [" "], "seed": 4}}
    if stream:
        events = list(client.responses.create(**options, stream=True))
        kinds = [event.type for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        assert [event.sequence_number for event in events] == list(range(len(events)))
        second = events[-1].response
        assert second.output_text == "".join(e.delta for e in events if e.type == "response.output_text.delta")
    else:
        second = client.responses.create(**options)
    assert second.status == "completed"
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens


def test_responses_stream_helper(client: openai.OpenAI) -> None:
    with client.responses.stream(model="toy", input="hi", extra_body={"stop": [" "]}) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == "".join(deltas)


def test_unknown_previous_response(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as unknown:
        client.responses.create(model="toy", input="x", previous_response_id="resp_of_nobody")
    assert unknown.value.code == "previous_response_not_found"
    assert unknown.value.param == "previous_response_id"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"temperature": 2.5}, "temperature"),
        ({"text": {"format": {"type": "xml"}}}, "response_format.type"),
    ],
)
def test_illegal_responses(client: openai.OpenAI, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.post("/responses", body={"model": "toy", "input": "x"} | fields, cast_to=object)
    assert bad.value.param == param


def test_responses_logprobs(client: openai.OpenAI) -> None:
    answer: Any = client.responses.create(
        model="toy", input="hi", max_output_tokens=5, include=["message.output_text.logprobs"], top_logprobs=2
    )
    [content] = answer.output[0].content
    assert len(content.logprobs) == 5
    assert len(content.logprobs[0].top_logprobs) == 2


# ---- the Responses socket


@pytest.fixture
def connection(client: openai.OpenAI) -> Iterator[Any]:
    with client.responses.connect() as made:
        yield made


def turn(connection: Any, **fields: Any) -> Any:
    """One turn; returns the last event."""
    connection.response.create(model="toy", **{"max_output_tokens": 8} | fields)
    numbers = []
    for event in connection:
        if event.type != "error":
            numbers.append(event.sequence_number)
            assert numbers == list(range(len(numbers)))
        if event.type in ("response.completed", "response.incomplete", "response.failed", "error"):
            return event
    raise AssertionError("the connection ended within a turn")


@LEGACY
def test_three_turns_on_one_connection(connection: Any) -> None:
    previous, tokens = None, 0
    for question in ("one", "two", "three"):
        extra = {"previous_response_id": previous} if previous else {}
        response = turn(connection, input=question, **extra).response
        assert response.output_text
        assert response.usage.input_tokens > tokens
        previous, tokens = response.id, response.usage.input_tokens


@LEGACY
def test_socket_turns_equal_the_whole_conversation(connection: Any, client: openai.OpenAI) -> None:
    """previous_response_id means exactly the messages so far."""
    first = turn(connection, input="one", temperature=0).response
    second = turn(connection, input="two", temperature=0, previous_response_id=first.id).response
    items: Any = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "two"},
    ]
    assert (
        client.responses.create(model="toy", input=items, temperature=0, max_output_tokens=8).output_text == second.output_text
    )


@LEGACY
def test_socket_errors_leave_it_open(connection: Any) -> None:
    error = turn(connection, input="x", previous_response_id="resp_of_nobody")
    assert (error.type, error.status, error.error.code) == ("error", 400, "previous_response_not_found")
    for raw, code in (
        ("{bad", "invalid_json"),
        ('{"type":"dance"}', "invalid_value"),
        ('{"type":"response.create","input":3}', "invalid_type"),
    ):
        connection.send_raw(raw)
        assert connection.recv().error.code.startswith(code.split("_")[0])
    assert turn(connection, input="still here").response.output_text


@LEGACY
def test_socket_state_is_its_own(connection: Any, client: openai.OpenAI) -> None:
    mine = turn(connection, input="secret").response.id
    with client.responses.connect() as other:
        assert turn(other, input="x", previous_response_id=mine).error.code == "previous_response_not_found"


@LEGACY
def test_prepared_turn_and_lanes(connection: Any) -> None:
    connection.send_raw(json.dumps({"type": "response.create", "input": "context", "generate": False}))
    *_, prepared = [connection.recv() for _ in range(3)]
    assert (prepared.type, prepared.response.output) == ("response.completed", [])
    for lane in ("a", "b"):
        connection.response.create(
            model="toy", input=lane, max_output_tokens=6, previous_response_id=prepared.response.id, stream_id=lane
        )
    ended = {}
    while len(ended) < 2:
        event = connection.recv()
        if event.type == "response.incomplete":
            ended[event.stream_id] = event.response.output_text
    assert set(ended) == {"a", "b"}


@LEGACY
def test_every_turn_may_have_a_lane_of_its_own(connection: Any) -> None:
    """More lanes over a socket's life than may run at once: one that has nothing left to do is given back."""
    for number in range(Limits().requests_per_socket + 3):
        connection.response.create(model="toy", input="x", max_output_tokens=1, stream_id=f"lane {number}")
        while (event := connection.recv()).type != "response.incomplete":
            assert event.type != "error", event


@LEGACY
def test_socket_that_leaves_stops_its_work(text: TextTools) -> None:
    with (
        running(toy_settings("step_ms=20,run=1"), text, ServeOptions()) as slow,
        openai.OpenAI(base_url=slow.url + "/v1", api_key="x") as client,
    ):
        with client.responses.connect() as connection:
            connection.response.create(model="toy", input="x")
            while connection.recv().type != "response.output_text.delta":
                pass
        wait_for(lambda: slow.server.num_running == 0, 1)
