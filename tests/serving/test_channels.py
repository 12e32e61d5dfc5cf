"""TS-06, second half: models that think aloud. One step may bring the end of the thinking, a header and the start of the answer.

The engine says what the test writes, control tokens included, in steps of one to nine tokens, all but the last of each drafted.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import websockets.sync.client as ws_client
from channel_kit import ANSWER, CALL, CHANNELS, MESSAGE, SCRIPTED, THINK, THINKING, THINKING_OPEN, in_channels, text_tools, told
from rich.console import Console
from serving import Running, running, toy_settings

from server.chat import Terminal
from server.client import Client

CHAT = "/v1/chat/completions"
THOUGHT = "The user said h\u00e9llo \u4f60\u597d \U0001f642; the answer is a list. Let me be short"
SAID = "Here: one, two \u4f60\u597d, three \U0001f468\u200d\U0001f469\u200d\U0001f467. That is the whole of it, and the end."
STEPS = range(1, 10)


@pytest.fixture(scope="module")
def channels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(toy_settings("step_ms=0"), text_tools(tmp_path_factory.mktemp("channels"), CHANNELS), SCRIPTED) as run:
        yield run


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(toy_settings("step_ms=0"), text_tools(tmp_path_factory.mktemp("thinking"), THINKING), SCRIPTED) as run:
        yield run


@pytest.fixture(scope="module")
def thinking_open(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(toy_settings("step_ms=0"), text_tools(tmp_path_factory.mktemp("open"), THINKING_OPEN), SCRIPTED) as run:
        yield run


def body(script: str, step: int = 8, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": told(script)}], "max_tokens": 400, "seed": step} | fields


def events(raw: str) -> list[dict[str, Any]]:
    lines = [line for line in raw.split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def seen(content: str | None, reasoning: str | None, finish: str, usage: dict[str, Any]) -> tuple[Any, ...]:
    details = usage.get("completion_tokens_details") or usage["output_tokens_details"]
    total = usage.get("completion_tokens", usage.get("output_tokens"))
    return content or "", reasoning or "", finish, total, details["reasoning_tokens"]


def whole(server: Running, sent: dict[str, Any]) -> tuple[Any, ...]:
    answer = server.http.post(CHAT, json=sent).json()
    [choice] = answer["choices"]
    if choice["logprobs"] is not None:
        assert len(choice["logprobs"]["content"]) == answer["usage"]["completion_tokens"]
    message = choice["message"]
    return seen(message["content"], message.get("reasoning_content"), choice["finish_reason"], answer["usage"])


def streamed(server: Running, sent: dict[str, Any]) -> tuple[Any, ...]:
    sent = sent | {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(server.http.post(CHAT, json=sent).text)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    deltas = [choice["delta"] for choice in choices]
    assert not any("content" in delta and "reasoning_content" in delta for delta in deltas)
    usage = chunks[-1]["usage"]
    if sent.get("logprobs"):
        assert sum(len(c["logprobs"]["content"]) for c in choices if c["logprobs"]) == usage["completion_tokens"]
    content = "".join(delta.get("content") or "" for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content") or "" for delta in deltas)
    return seen(content, reasoning, choices[-1]["finish_reason"], usage)


def over_socket(server: Running, sent: dict[str, Any], **fields: Any) -> tuple[Any, ...]:
    with ws_client.connect(server.ws_url) as ws:
        ws.recv()
        ws.send(json.dumps({"type": "chat", "id": 1} | sent | fields))
        frames = []
        while not frames or frames[-1]["type"] not in ("done", "error"):
            frames.append(json.loads(ws.recv(timeout=10)))
    deltas, done = [frame for frame in frames if frame["type"] == "delta"], frames[-1]
    assert sum(delta["tokens"] for delta in deltas) == done["usage"]["completion_tokens"]
    assert all("".join(text for text, _ in delta["pieces"]) == delta["text"] for delta in deltas if "pieces" in delta)
    texts = ["".join(delta.get(field, "") for delta in deltas) for field in ("text", "reasoning")]
    return seen(*texts, done["finish_reason"], done["usage"])


def as_response(server: Running, sent: dict[str, Any], stream: bool) -> tuple[Any, ...]:
    """The Responses API: reasoning and message are items of the output."""
    fields = {"input": sent["messages"], "max_output_tokens": sent["max_tokens"], "seed": sent["seed"]}
    fields |= {"include": ["message.output_text.logprobs"]} if sent.get("logprobs") else {}
    fields |= {"stop": sent["stop"]} if "stop" in sent else {}
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x") as client:
        made: Any = client.responses.create(model="toy", stream=stream, extra_body=fields)
        deltas: dict[str, str] = {"response.output_text.delta": "", "response.reasoning_text.delta": ""}
        if stream:
            for event in made:
                if event.type in deltas:
                    deltas[event.type] += event.delta
            made = event.response
    thoughts = [part.text for item in made.output if item.type == "reasoning" for part in item.content]
    if stream:
        assert (made.output_text, "".join(thoughts)) == tuple(deltas.values())
    reason = "stop" if made.status == "completed" else "length"
    return seen(made.output_text, "".join(thoughts), reason, made.usage.model_dump())


def size(server: Running, script: str) -> int:
    """Tokens of a script: its control characters are one token each, as the control tokens they stand for."""
    return int(server.http.post("/tokenize", json={"prompt": script}).json()["count"])


def every_way(server: Running, script: str, **fields: Any) -> tuple[Any, ...]:
    """What every way out and every size of step has in common: (content, reasoning, finish_reason, tokens, reasoning tokens)."""
    first = whole(server, body(script, 1, **fields))
    for step in STEPS:
        sent = body(script, step, **fields)
        assert whole(server, sent) == streamed(server, sent) == over_socket(server, sent) == first, step
    for step in (1, 8):
        sent = body(script, step, **fields)
        assert over_socket(server, sent, pace=True) == first
        assert as_response(server, sent, False) == as_response(server, sent, True) == first
    return first


def test_channels_stay_apart_for_every_size_of_step(channels: Running) -> None:
    script = in_channels(("analysis", THOUGHT), ("final", SAID))
    said, thought, finish, tokens, reasoning_tokens = every_way(channels, script, logprobs=True)
    assert (said, thought, finish) == (SAID, THOUGHT, "stop")
    assert tokens == size(channels, script) + 1 > 64
    assert reasoning_tokens == size(channels, THOUGHT)


def test_any_number_of_parts_and_the_names_in_their_headers(channels: Running) -> None:
    """Only `final` is said. Recipients and further words of a header are no part of a name, and `<|call|>` ends a part too."""
    script = in_channels(
        ("analysis", "one "), ("commentary to=functions.f json", '{"x": 1}'), ("final", "said "), ("analysis", "two")
    )
    script += f"{CALL}stray{in_channels(('final <|constrain|>json', 'more'))}"
    assert every_way(channels, script)[:3] == ("said more", 'one {"x": 1}two', "stop")


def test_a_part_may_begin_without_a_channel(channels: Running) -> None:
    assert every_way(channels, f"{MESSAGE}said")[:2] == ("said", "")


def test_stop_strings_end_what_is_said_and_not_what_is_thought(channels: Running) -> None:
    script = in_channels(("analysis", "a STOP in thought, then two"), ("final", "three four STOP five"))
    said, thought, finish, tokens, _ = every_way(channels, script, stop=["STOP", "two three"], logprobs=True)
    assert (said, thought, finish) == ("three four ", "a STOP in thought, then two", "stop")
    assert tokens == size(channels, script) - size(channels, " five")


@pytest.mark.parametrize("text", ["", "analysis", "analysis " * 3])
def test_an_answer_cut_off_in_its_header_shows_nothing_of_it(channels: Running, text: str) -> None:
    script = in_channels(("analysis", "x"), (text, ""))
    for limit in range(1, size(channels, script)):
        said, thought, finish, tokens, _ = whole(channels, body(script, max_tokens=limit))
        assert said == ""
        assert thought in ("", "x")
        assert (finish, tokens) == ("length", limit)


def test_half_a_character_stays_in_its_part(channels: Running) -> None:
    """The first two bytes of a character end the thinking, the third begins what is said: neither is text."""
    ids = channels.http.post("/tokenize", json={"prompt": "\u4f60"}).json()["tokens"]
    assert len(ids) > 1
    first, last = "\x10", "\x11"  # see scripted_engine
    assert every_way(channels, in_channels(("analysis", f"a{first}"), ("final", f"{last}b")))[:2] == ("b", "a")
    assert every_way(channels, in_channels(("analysis", f"a{first}"), ("other", f"{last}b")))[:2] == ("", "ab")


@pytest.mark.parametrize("said", ["plain", "a longer answer without a single mark in it, which is shown"])
def test_an_answer_without_any_mark_is_content(channels: Running, said: str) -> None:
    assert every_way(channels, said)[:3] == (said, "", "stop")
    assert every_way(channels, said, stop=[said[-3:]])[:3] == (said[:-3], "", "stop")


def test_a_stop_string_in_what_was_held_back_to_the_end_ends_it(channels: Running) -> None:
    """The first tokens wait for a mark that may come; max_tokens comes first."""
    assert every_way(channels, "plain", stop=["ai"], max_tokens=4)[:3] == ("pl", "", "stop")
    assert every_way(channels, "plain", stop=["zz"], max_tokens=4)[:3] == ("plain", "", "length")


def test_a_constrained_answer_and_a_raw_completion_have_no_parts(channels: Running) -> None:
    assert whole(channels, body('{"a": 1}', response_format={"type": "json_object"}))[:2] == ('{"a": 1}', "")
    script = in_channels(("analysis", "x"), ("final", "y"))
    raw = channels.http.post("/v1/completions", json={"prompt": told(script), "max_tokens": 99, "seed": 8}).json()
    assert raw["choices"][0]["text"] == "analysisxassistantfinaly"


def test_a_message_may_carry_its_reasoning(channels: Running) -> None:
    """Clients send back what they got. A template that does not ask for the reasoning does not see it."""
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with_reasoning = [asked[0], asked[1] | {"reasoning_content": "thought"}]
    counts = [channels.http.post("/tokenize", json={"messages": m}).json()["count"] for m in (asked, with_reasoning)]
    assert counts[0] == counts[1]
    last = {"role": "user", "content": told(in_channels(("final", "c")))}
    assert whole(channels, {"messages": [*with_reasoning, last], "max_tokens": 50})[:2] == ("c", "")


def test_the_next_turn_does_not_see_the_reasoning(channels: Running) -> None:
    script = in_channels(("analysis", THOUGHT), ("final", "c"))
    first = channels.http.post("/v1/responses", json={"input": told(script)}).json()
    again = {"input": told(script), "previous_response_id": first["id"]}
    second = channels.http.post("/v1/responses", json=again).json()
    user = {"role": "user", "content": told(script)}
    messages = [user, {"role": "assistant", "content": "c"}, user]
    assert second["usage"]["input_tokens"] == channels.http.post("/tokenize", json={"messages": messages}).json()["count"]


def test_an_answer_of_nothing_but_reasoning_is_a_response_without_a_message(channels: Running) -> None:
    script = in_channels(("analysis", "thought"), ("final", "")).removesuffix(MESSAGE)
    for step in STEPS:
        made = channels.http.post("/v1/responses", json={"input": told(script), "seed": step}).json()
        assert [item["type"] for item in made["output"]] == ["reasoning"]


def test_a_resumed_answer_has_its_reasoning(channels: Running) -> None:
    """The messages of a finished answer are kept in packed form."""

    def until_done(ws: Any) -> list[Any]:
        frames: list[Any] = []
        while not frames or frames[-1]["type"] not in ("done", "error"):
            frames.append(json.loads(ws.recv(timeout=10)))
        return frames[1:] if frames[0]["type"] == "hello" else frames

    with ws_client.connect(channels.ws_url) as ws:
        script = in_channels(("analysis", THOUGHT), ("final", SAID))
        ws.send(json.dumps({"type": "chat", "id": 1, "resumable": True} | body(script)))
        first = until_done(ws)
    with ws_client.connect(channels.ws_url) as ws:
        ws.send(json.dumps({"type": "resume", "id": 1, "response_id": first[0]["response_id"], "after_seq": 0}))
        again = until_done(ws)
    assert again == first[1:]
    assert "".join(frame.get("reasoning", "") for frame in again) == THOUGHT


def test_the_terminal_shows_the_reasoning_above_the_answer(channels: Running) -> None:
    shown = io.StringIO()
    terminal = Terminal(Console(file=shown, width=200), None, {"seed": 9})

    async def ask() -> None:
        async with Client(channels.ws_url) as client:
            await terminal.ask(client, told(in_channels(("analysis", "why"), ("final", "because"))))

    asyncio.run(ask())
    assert shown.getvalue() == "why\nbecause\n"
    assert terminal.messages[-1] == {"role": "assistant", "content": "because"}


# ---- thinking between two marks


def test_thinking_in_front_of_the_answer(thinking: Running) -> None:
    """Line breaks behind the marks are the template's layout; those further on are text."""
    script = f"{THINK}\n{THOUGHT}{ANSWER}\n\n{SAID}\n\nEnd"
    said, thought, finish, tokens, _ = every_way(thinking, script, logprobs=True, stop=["never"])
    assert (said, thought, finish) == (f"{SAID}\n\nEnd", THOUGHT, "stop")
    assert tokens == size(thinking, script) + 1


def test_thinking_that_the_prompt_has_begun(thinking_open: Running) -> None:
    assert every_way(thinking_open, f"{THOUGHT}{ANSWER}\n{SAID}")[:3] == (SAID, THOUGHT, "stop")
    assert every_way(thinking_open, THOUGHT)[:3] == ("", THOUGHT, "stop")
    forced = body('{"a": 1}', response_format={"type": "json_object"})
    assert whole(thinking_open, forced)[:2] == ('{"a": 1}', "")


def test_the_marks_are_text_where_they_mark_nothing(thinking: Running) -> None:
    said = f"In HTML {THINK} and {ANSWER} are no tags"
    assert every_way(thinking, said)[:2] == ("In HTML <think> and </think> are no tags", "")
    asked = [{"role": "user", "content": f"what is <think>?{told('an answer')}"}]
    assert whole(thinking, body("") | {"messages": asked})[:2] == ("an answer", "")
