"""Function tools as clients declare them: checks, what the template gets, and the grammar that forces a call.

Knows declarations and choices; refuses to know how a call is read out of the answer's text (tool_parser).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from server.api_error import invalid
from server.limits import Limits
from spec.request import GrammarSpec

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")

# How a model writes calls: Hermes and Qwen put JSON between tags, Llama 3 answers with nothing but the JSON, Mistral's models write
# a list of calls behind a mark, and the newer ones of them a mark, the name, another mark and the arguments.
Format = Literal["tags", "json", "mistral", "mistral_args"]
OPEN_TAG, CLOSE_TAG = "<tool_call>", "</tool_call>"
CALLS_MARK, ARGUMENTS_MARK, CALL_ID_MARK = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
MARKS = (CALLS_MARK, ARGUMENTS_MARK, CALL_ID_MARK)  # control tokens where the vocabulary has them: to be shown to the reader


@dataclass(frozen=True, slots=True)
class Tools:
    """Tools of one request. `declared` is in chat completions' nested form, which templates know."""

    declared: tuple[dict[str, Any], ...]
    format: Format
    forced: tuple[str, ...] = ()  # names one of which must be called; empty: the model decides
    parallel: bool = True

    def grammar(self, marks: Mapping[str, int] = MappingProxyType({})) -> GrammarSpec | None:
        """The constraint of tool_choice required or named; arguments follow the function's own schema.

        `marks` are the ids of those MARKS that are control tokens; the others are text.
        """
        if not self.forced:
            return None
        functions = {tool["function"]["name"]: tool["function"] for tool in self.declared}
        rules, names = [], []
        for index, name in enumerate(self.forced):
            schema = functions[name].get("parameters") or {"type": "object"}
            rules.append(f"call{index}: {self._call(name, index, marks)}\nargs{index}: %json {json.dumps(schema)}")
            names.append(f"call{index}")
        call = f"call: {' | '.join(names)}"
        return GrammarSpec("grammar", "\n".join([self._start(marks), call, *rules]))

    def _start(self, marks: Mapping[str, int]) -> str:
        match self.format:
            case "tags":
                return f'start: "{OPEN_TAG}\\n" call "\\n{CLOSE_TAG}"'
            case "json":
                return "start: call"
            case "mistral":
                return f'start: {_symbol(CALLS_MARK, marks)} "[" call "]"'
            case "mistral_args":
                return f"start: {_symbol(CALLS_MARK, marks)} call"

    def _call(self, name: str, index: int, marks: Mapping[str, int]) -> str:
        if self.format == "mistral_args":
            return f"{json.dumps(name)} {_symbol(ARGUMENTS_MARK, marks)} args{index}"
        key = "parameters" if self.format == "json" else "arguments"
        head = f'{{"name": {json.dumps(name)}, "{key}": '
        return f'{json.dumps(head)} args{index} "}}"'


def _symbol(mark: str, marks: Mapping[str, int]) -> str:
    """A mark in the grammar: one token by its id, or its characters."""
    return f"<[{marks[mark]}]>" if mark in marks else json.dumps(mark)


def detect_format(template: str | None) -> Format:
    """How a model with this chat template writes its calls."""
    if template is None or OPEN_TAG in template:
        return "tags"
    if CALLS_MARK in template:
        return "mistral_args" if ARGUMENTS_MARK in template else "mistral"
    return "json" if "<|python_tag|>" in template else "tags"


def read_tools(
    declared: Sequence[Mapping[str, Any]] | None,
    choice: str | Mapping[str, Any] | None,
    parallel: bool | None,
    format: Format | None,
    limits: Limits,
) -> Tools | None:
    """The tools of a request, None when it has none or wants none. Raises ApiError naming the field.

    `format` is None for a model whose chat template knows no tools.
    """
    if not declared:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "tool_choice needs tools to choose from")
        return None
    if len(declared) > limits.tools:
        raise invalid("tools", f"tools has {len(declared)} entries; at most {limits.tools} are allowed")
    tools = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(declared))
    names = [tool["function"]["name"] for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise invalid("tools", f"tools declares {twice!r} twice")
    forced = _forced(choice, names)
    if choice == "none":
        return None
    if format is None:
        raise invalid("tools", "this model's chat template knows no tools", code="unsupported_parameter")
    return Tools(tools, format, forced, parallel is not False)


def _tool(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    """One declaration in nested form; the Responses API writes the same fields flat."""
    if tool.get("type") != "function":
        raise invalid(f"{path}.type", f"{path}.type must be function; this server has no tools of its own")
    nested = "function" in tool
    function = tool["function"] if nested else {key: value for key, value in tool.items() if key != "type"}
    where = f"{path}.function" if nested else path
    if not isinstance(function, Mapping):
        raise invalid(where, f"{where} must be an object")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.match(name):
        raise invalid(f"{where}.name", f"{where}.name must be 1 to 64 letters, digits, dots, dashes or underscores")
    if not isinstance(function.get("description"), str | None):
        raise invalid(f"{where}.description", f"{where}.description must be a string")
    if not isinstance(parameters, dict | None):
        raise invalid(f"{where}.parameters", f"{where}.parameters must be a JSON schema object")
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": function.get("description") or "",
            "parameters": parameters or {"type": "object", "properties": {}},
        },
    }


def _forced(choice: str | Mapping[str, Any] | None, names: Sequence[str]) -> tuple[str, ...]:
    if choice is None or choice in ("auto", "none"):
        return ()
    if choice == "required":
        return tuple(names)
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else choice.get("name")
        if name not in names:
            raise invalid("tool_choice", "tool_choice names a function that tools does not declare")
        return (str(name),)
    raise invalid(
        "tool_choice", "tool_choice must be none, auto, required, or {type: function} with the name of a declared function"
    )
