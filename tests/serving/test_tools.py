"""Tool calls: declarations, the reader of calls at every chunking, and calls through the endpoints."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
import websockets.sync.client as ws_client
from hypothesis import given
from hypothesis import strategies as st
from serving import SUPPORT, running, toy_settings, toy_text

from server.api_error import ApiError
from server.limits import Limits
from server.ports import TextTools
from server.serve import ServeOptions
from server.template import ChatTemplate
from server.tokenizer import load_tokenizer
from server.tool_events import CallArguments, CallEnd, CallStart, Text
from server.tool_parser import ToolParser, reader_for
from server.tools import MARKS, Tools, detect_format, read_tools
from spec.errors import RequestError
from spec.grammar import GrammarCompiler

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
TIME = {"type": "function", "function": {"name": "time", "description": "the time"}}


def read(
    text: str, format: Any = "tags", sizes: tuple[int, ...] = (1,), parallel: bool = True
) -> tuple[str, list[tuple[str, str]]]:
    """(text, [(name, arguments)]) of an answer cut into chunks of these sizes, in turn."""
    parser = reader_for(format, parallel)
    events, start, turn = [], 0, 0
    while start < len(text):
        size = sizes[turn % len(sizes)]
        events += parser.feed(text[start : start + size])
        start, turn = start + size, turn + 1
    events += parser.finish()
    shown, calls, open_call = "", [], None
    for event in events:
        if isinstance(event, Text):
            assert open_call is None
            shown += event.text
        elif isinstance(event, CallStart):
            assert event.index == len(calls)
            assert event.id.isalnum() and len(event.id) == 9 if format == "mistral" else event.id.startswith("call_")
            open_call = [event.name, ""]
        elif isinstance(event, CallArguments):
            assert open_call is not None
            open_call[1] += event.text
        elif isinstance(event, CallEnd):
            assert open_call is not None
            calls.append((open_call[0], open_call[1]))
            open_call = None
    assert open_call is None
    return shown, calls


ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln \\"}<", "n": [1, {"x": null}]}}\n</tool_call>'
ARGUMENTS = '{"city": "Köln \\"}<", "n": [1, {"x": null}]}'
CASES = [
    ("tags", "plain text < <tool <tool_cal", "plain text < <tool <tool_cal", []),
    ("tags", ONE, "", [("weather", ARGUMENTS)]),
    ("tags", "Let me look. " + ONE, "Let me look. ", [("weather", ARGUMENTS)]),
    ("tags", ONE + "\n" + ONE, "", [("weather", ARGUMENTS)] * 2),
    ("tags", ONE + " and more", " and more", [("weather", ARGUMENTS)]),
    ("tags", '<tool_call>{"arguments": {}, "name": "time"}</tool_call>', "", [("time", "{}")]),
    ("tags", '<tool_call>{"name": "time"}</tool_call>', "", [("time", "{}")]),
    ("tags", '<tool_call>{"id": 5, "name": "time", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("time", '{"a": 1}')]),
    ("tags", "<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
    ("tags", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    ("tags", '<tool_call>{"nam', '<tool_call>{"nam', []),
    ("tags", '<tool_call>{"name": "time", "arguments": {"a": ', "", [("time", '{"a": ')]),
    ("json", '{"name": "time", "parameters": {"zone": "x"}}', "", [("time", '{"zone": "x"}')]),
    ("json", ' \n{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}', "", [("a", "{}"), ("b", "{}")]),
    ("json", 'The object {"name": "x"} is text', 'The object {"name": "x"} is text', []),
    ("json", '{"answer": 42}', '{"answer": 42}', []),
    ("json", "", "", []),
    ("mistral", f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}]', "", [("weather", ARGUMENTS)]),
    (
        "mistral",
        f'Well. [TOOL_CALLS][{{"arguments": {ARGUMENTS}, "name": "weather", "id": "x"}}]',
        "Well. ",
        [("weather", ARGUMENTS)],
    ),
    ("mistral", '[TOOL_CALLS][{"name": "a"}, {"name": "b", "arguments": {}}] \n', "", [("a", "{}"), ("b", "{}")]),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}", "", [("weather", ARGUMENTS)]),
    ("mistral", " [TOOL_CALLS] a[CALL_ID]x1[ARGS]{}\n[TOOL_CALLS]b{} Done.", " Done.", [("a", "{}"), ("b", "{}")]),
    ("mistral", '[TOOL_CALLS]time[ARGS]{"a": ', "", [("time", '{"a": ')]),
    ("mistral", "[TOOL_CALLS] not a call {}", "[TOOL_CALLS] not a call {}", []),
    ("mistral", "[TOOL_CALLS][7]", "[TOOL_CALLS][7]", []),
    ("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    ("mistral", "[TOOL_CALLS]" + "x" * 300, "[TOOL_CALLS]" + "x" * 300, []),
    ("mistral", "a list [1] and [TOOL", "a list [1] and [TOOL", []),
]


@pytest.mark.parametrize(("format", "text", "shown", "calls"), CASES)
@pytest.mark.parametrize("sizes", [(1,), (2,), (3, 1, 7), (1000,)])
def test_calls_are_read_whatever_the_chunks(
    format: Any, text: str, shown: str, calls: list[Any], sizes: tuple[int, ...]
) -> None:
    assert read(text, format, sizes) == (shown, calls)


@given(st.sampled_from(CASES), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_random_chunks(case: Any, sizes: list[int]) -> None:
    format, text, shown, calls = case
    assert read(text, format, tuple(sizes)) == (shown, calls)


PIECES = st.sampled_from([*'<>/{}[]":, \\x', "<tool_call>", "</tool_call>", *MARKS, '"name"', '"arguments"', "name"])


@given(st.lists(PIECES, max_size=30).map("".join), st.sampled_from(["tags", "json", "mistral"]))
def test_no_text_is_lost(text: str, format: Any) -> None:
    """Whatever is not a call comes out again, and chunking never changes what is read."""
    shown, calls = read(text, format)
    assert read(text, format, (1000,)) == (shown, calls)
    if not calls:
        assert shown == text


def test_arguments_stream() -> None:
    parser = ToolParser("tags")
    before = [e for e in parser.feed(ONE[:60]) if isinstance(e, CallArguments)]
    assert "".join(e.text for e in before) == ARGUMENTS[: len("".join(e.text for e in before))]
    assert before


def test_one_call_when_parallel_is_off() -> None:
    assert read(ONE + ONE, parallel=False) == ("", [("weather", ARGUMENTS)])
    for second in (
        '[TOOL_CALLS]a[ARGS]{"n": 1}[TOOL_CALLS]b[ARGS]{"n": 2}',
        '[TOOL_CALLS][{"name": "a", "arguments": {"n": 1}}, {"name": "b"}]',
    ):
        assert read(second, "mistral", parallel=False) == ("", [("a", '{"n": 1}')])


@pytest.mark.parametrize(
    ("template", "format"),
    [
        (None, "tags"),
        ("... <tool_call> ...", "tags"),
        ("... <|python_tag|> ...", "json"),
        ("... [AVAILABLE_TOOLS] ... [TOOL_CALLS] [ ...", "mistral"),
        ("... [TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}", "mistral_args"),
    ],
)
def test_the_template_tells_how_a_model_writes_calls(template: str | None, format: str) -> None:
    assert detect_format(template) == format


# ---- declarations


def tools(**fields: Any) -> Tools | None:
    given = {
        "declared": [WEATHER, TIME],
        "choice": None,
        "parallel": None,
        "format": "tags",
        "limits": Limits(tools=3),
    } | fields
    return read_tools(**given)


def test_choices() -> None:
    made = tools()
    assert made is not None
    assert made.grammar() is None
    assert tools(choice="none") is None
    assert tools(declared=None) is None
    for choice, names in (
        ("required", ("weather", "time")),
        ({"type": "function", "function": {"name": "time"}}, ("time",)),
        ({"type": "function", "name": "time"}, ("time",)),
    ):
        forced = tools(choice=choice)
        assert forced is not None
        assert forced.forced == names
        grammar = forced.grammar()
        assert grammar is not None
        assert grammar.kind == "grammar"
        assert '%json {"type": "object"' in grammar.source


def test_flat_declarations_are_nested() -> None:
    made = tools(declared=[{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}])
    assert made is not None
    assert made.declared[0]["function"]["name"] == "f"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"declared": [{"type": "web_search"}]}, "tools[0].type"),
        ({"declared": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"declared": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"declared": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
        ({"declared": [{"type": "function", "function": {"name": "f", "description": 5}}]}, "tools[0].function.description"),
        ({"declared": [{"type": "function", "function": 5}]}, "tools[0].function"),
        ({"declared": [TIME, TIME]}, "tools"),
        ({"declared": [TIME] * 4}, "tools"),
        ({"choice": "sometimes"}, "tool_choice"),
        ({"choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"declared": None, "choice": "required"}, "tool_choice"),
        ({"format": None}, "tools"),
    ],
)
def test_illegal_declarations(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        tools(**fields)
    assert refused.value.param == param
    json.dumps(refused.value.body())


@pytest.mark.parametrize("format", ["tags", "json", "mistral", "mistral_args"])
def test_forced_grammar_takes_calls_and_nothing_else(text: TextTools, format: Any) -> None:
    """The grammar as the engine compiles it, token by token."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
    strict = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    made = tools(declared=[strict, TIME], choice="required", format=format)
    grammar = made.grammar() if made is not None else None
    assert grammar is not None
    compiler = GrammarCompiler(text.tokenizer.tokenizer_json(), (258,), 512)
    key = "parameters" if format == "json" else "arguments"
    call = f'{{"name": "weather", "{key}": {{"city": "Oslo"}}}}'
    said = {
        "tags": f"<tool_call>\n{call}\n</tool_call>",
        "json": call,
        "mistral": f"[TOOL_CALLS][{call}]",
        "mistral_args": '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}',
    }[format]
    state = compiler.compile(grammar)
    state.advance(text.tokenizer.encode(said))
    assert state.is_complete
    assert read(said, format.removesuffix("_args")) == ("", [("weather", '{"city": "Oslo"}')])
    for wrong in ("weather is nice", said.replace("weather", "wether"), said.replace('"Oslo"', "5")):
        with pytest.raises(RequestError):
            compiler.compile(grammar).advance(text.tokenizer.encode(wrong))


# ---- through the endpoints: a model that says what its last user message tells it to

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}<tool_call>{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.city }}{% endfor %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
SAID = 'I look. <tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("speaker")
    toy_text(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    tokenizer = load_tokenizer(folder, None)
    text = TextTools.of(tokenizer, ChatTemplate(tokenizer))
    assert text.tool_format == "tags"
    options = ServeOptions(factory="toy_engine:build_echo", factory_paths=(str(SUPPORT),))
    with running(toy_settings("step_ms=5"), text, options) as run:
        yield run


BODY = {"messages": [{"role": "user", "content": SAID}], "tools": [WEATHER], "max_tokens": 200}


def test_calls_in_chat_completions(speaker: Any) -> None:
    with openai.OpenAI(base_url=speaker.url + "/v1", api_key="x") as client:
        whole: Any = client.chat.completions.create(model="toy", **BODY)
        chunks: Any = list(client.chat.completions.create(model="toy", **BODY, stream=True))
    message = whole.choices[0].message
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "tool_calls"
    assert message.content == "I look. "
    assert (message.tool_calls[0].function.name, message.tool_calls[0].function.arguments) == ("weather", '{"city": "Oslo"}')
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "I look. "
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert (calls[0].function.name, calls[0].index) == ("weather", 0)
    assert calls[0].id.startswith("call_")
    assert "".join(call.function.arguments for call in calls) == '{"city": "Oslo"}'
    assert len(calls) > 2  # streamed, not given at the end


def test_calls_go_back_into_the_conversation(speaker: Any) -> None:
    answer = speaker.http.post("/v1/chat/completions", json=BODY).json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "rain"}
    messages = [*BODY["messages"], answer, result, {"role": "user", "content": "plain"}]
    again = speaker.http.post("/v1/chat/completions", json=BODY | {"messages": messages}).json()["choices"][0]
    assert (again["message"]["content"], again["finish_reason"]) == ("plain", "stop")
    assert "tool_calls" not in again["message"]


def test_text_is_untouched_without_tools(speaker: Any) -> None:
    for body in ({"tools": None}, {"tool_choice": "none"}):
        answer = speaker.http.post("/v1/chat/completions", json=BODY | body).json()["choices"][0]
        assert (answer["message"]["content"], answer["finish_reason"]) == (SAID, "stop")


def test_calls_on_the_native_socket(speaker: Any) -> None:
    with ws_client.connect(speaker.ws_url) as ws:
        ws.recv()
        ws.send(json.dumps(BODY | {"type": "chat", "id": 1}))
        frames = []
        while not frames or frames[-1]["type"] != "done":
            frames.append(json.loads(ws.recv(timeout=10)))
    done = frames[-1]
    assert done["finish_reason"] == "tool_calls"
    assert done["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    deltas = [frame for frame in frames if frame["type"] == "delta"]
    assert "".join(delta["text"] for delta in deltas) == "I look. "
    pieces = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(pieces) == '{"city": "Oslo"}'
    assert sum(delta["tokens"] for delta in deltas) == done["usage"]["completion_tokens"]


@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")
def test_calls_in_responses(speaker: Any) -> None:
    tool: Any = {"type": "function", **WEATHER["function"], "strict": None}
    with openai.OpenAI(base_url=speaker.url + "/v1", api_key="x") as client:
        with client.responses.stream(model="toy", input=SAID, tools=[tool]) as stream:
            kinds = [event.type for event in stream]
            final: Any = stream.get_final_response()
        assert "response.function_call_arguments.delta" in kinds
        assert [item.type for item in final.output] == ["message", "function_call"]
        call = final.output[1]
        assert (call.name, call.arguments, call.status) == ("weather", '{"city": "Oslo"}', "completed")
        output: Any = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
            {"role": "user", "content": "ok"},
        ]
        after: Any = client.responses.create(model="toy", input=output, previous_response_id=final.id, tools=[tool])
        assert after.output_text == "ok"
        with client.responses.connect() as connection:
            connection.response.create(model="toy", input=SAID, tools=[tool])
            last = next(event for event in connection if event.type == "response.completed")
            assert last.response.output[1].name == "weather"


def test_forced_calls_reach_the_engine_as_a_grammar(speaker: Any) -> None:
    refused = speaker.http.post(
        "/v1/chat/completions", json=BODY | {"tool_choice": "required", "response_format": {"type": "json_object"}}
    )
    assert refused.json()["error"]["param"] == "response_format"
    assert speaker.http.post("/v1/chat/completions", json=BODY | {"tool_choice": "required"}).status_code == 200


# ---- marks that are control tokens


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> TextTools:
    """A vocabulary whose token 256 is the control token [TOOL_CALLS]."""
    folder = tmp_path_factory.mktemp("marked")
    toy_text(folder)
    for path in folder.glob("*.json"):
        path.write_text(path.read_text().replace("<|endoftext|>", "[TOOL_CALLS]"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"chat_template": TEMPLATE.replace("<tool_call>", "[TOOL_CALLS]"), "eos_token": "<|im_end|>", "bos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(folder, None)
    return TextTools.of(tokenizer, ChatTemplate(tokenizer))


def test_a_mark_that_is_a_control_token_is_read_and_never_shown(marked: TextTools) -> None:
    assert (marked.tool_format, marked.tool_marks) == ("mistral", {"[TOOL_CALLS]": 256})
    options = ServeOptions(factory="toy_engine:build_echo", factory_paths=(str(SUPPORT),))
    said = [{"role": "user", "content": '\x01[{"name": "weather", "arguments": {"city": "Oslo"}}]'}]
    with running(toy_settings(), marked, options) as run:
        body = {"messages": said, "tools": [WEATHER], "max_tokens": 200}
        [choice] = run.http.post("/v1/chat/completions", json=body).json()["choices"]
        without = run.http.post("/v1/chat/completions", json=body | {"tools": None}).json()["choices"][0]["message"]
        [call] = choice["message"]["tool_calls"]
        again = {"messages": [*said, choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "rain"}]}
        after = run.http.post("/v1/chat/completions", json=body | again).json()["choices"][0]["message"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert without["content"] == said[0]["content"][1:]
    assert after["content"] == "rain"


def test_a_forced_call_begins_with_the_control_token(marked: TextTools) -> None:
    made = tools(declared=[TIME], choice="required", format="mistral")
    grammar = made.grammar(marked.tool_marks) if made is not None else None
    assert grammar is not None
    compiler = GrammarCompiler(marked.tokenizer.tokenizer_json(), (258,), 512)
    call = marked.tokenizer.encode('[{"name": "time", "arguments": {}}]')
    state = compiler.compile(grammar)
    state.advance([256, *call])
    assert state.is_complete
    with pytest.raises(RequestError):
        compiler.compile(grammar).advance(marked.tokenizer.encode("[TOOL_CALLS]") + call)
