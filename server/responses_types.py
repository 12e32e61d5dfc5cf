"""Requests of the Responses API as typed structs, and their input items as plain messages. Refuses to know events and sockets."""

from __future__ import annotations

from typing import Any

import msgspec

from server.api_error import ApiError, invalid
from server.limits import Limits
from server.messages import ROLES, text_of
from server.options import SamplingOptions

_MESSAGE_KEYS = ("message", None)
_IGNORED_ITEMS = frozenset({"reasoning"})


class TextConfig(msgspec.Struct, kw_only=True):
    format: dict[str, Any] | None = None


class ResponsesRequest(SamplingOptions, kw_only=True):
    """Body of POST /v1/responses and, with its envelope, of a response.create event."""

    input: str | list[Any] | None = None
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    store: bool | None = None
    stream: bool | None = None
    text: TextConfig | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    metadata: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    generate: bool | None = None


class ResponseCreate(ResponsesRequest, tag="response.create", kw_only=True):
    stream_id: str | None = None


class ResponseSteer(msgspec.Struct, tag="response.steer", kw_only=True):
    previous_response_id: str = ""
    input: Any = None


SocketMessage = ResponseCreate | ResponseSteer


def check_supported(body: ResponsesRequest) -> None:
    """Refuse by name what this server does not do."""
    for name in ("conversation", "prompt"):
        if getattr(body, name) is not None:
            raise invalid(name, f"{name} is not supported by this server", code="unsupported_parameter")
    if body.background:
        raise invalid("background", "background is not supported by this server", code="unsupported_parameter")
    if body.truncation not in (None, "disabled"):
        raise invalid(
            "truncation", "truncation must be disabled: a conversation is never cut unasked", code="unsupported_parameter"
        )
    if body.n not in (None, 1):
        raise invalid("n", f"n is {body.n}; a response has one answer")


def wanted_logprobs(body: ResponsesRequest, limits: Limits) -> int | None:
    """How many alternatives to report per token, None for no log probabilities."""
    asked = "message.output_text.logprobs" in (body.include or ())
    top = body.top_logprobs
    if top is not None and not 0 <= top <= limits.top_logprobs:
        raise invalid("top_logprobs", f"top_logprobs is {top}; it must be between 0 and {limits.top_logprobs}")
    return (top or 0) if asked else None


def sampling_options(body: ResponsesRequest) -> ResponsesRequest:
    """The same request with the Responses API's own names mapped to the common ones."""
    if body.max_output_tokens is not None:
        if body.max_output_tokens < 1:
            raise invalid("max_output_tokens", f"max_output_tokens is {body.max_output_tokens}; it must be at least 1")
        body = msgspec.structs.replace(body, max_completion_tokens=body.max_output_tokens)
    if body.text is not None and body.text.format is not None:
        body = msgspec.structs.replace(body, response_format=body.text.format)
    return body


def input_messages(value: str | list[Any] | None, limits: Limits, *, may_be_empty: bool) -> list[dict[str, Any]]:
    """Plain messages of `input`. Raises ApiError naming the item and field at fault."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not value:
        if may_be_empty:
            return []
        raise invalid("input", "input is missing or empty; at least one message is needed", code="empty_array")
    if len(value) > limits.messages:
        raise invalid("input", f"input has {len(value)} items; at most {limits.messages} are allowed")
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(value):
        message = _message(item, f"input[{index}]", limits)
        previous = messages[-1] if messages else None
        if message is None:
            continue
        if previous is not None and previous["role"] == "assistant" and "tool_calls" in message:
            previous["tool_calls"] = [*previous.get("tool_calls", []), *message["tool_calls"]]
        else:
            messages.append(message)
    return messages


def _message(item: Any, path: str, limits: Limits) -> dict[str, Any] | None:
    if not isinstance(item, dict):
        raise invalid(path, f"{path} must be an object")
    kind = item.get("type")
    if kind in _IGNORED_ITEMS:
        return None
    if kind == "function_call":
        return _function_call(item, path)
    if kind == "function_call_output":
        call_id = item.get("call_id")
        if not isinstance(call_id, str) or not call_id:
            raise invalid(f"{path}.call_id", f"{path}.call_id must be a non-empty string")
        return {"role": "tool", "tool_call_id": call_id, "content": text_of(item.get("output"), f"{path}.output", limits)}
    if kind not in _MESSAGE_KEYS:
        shown = kind[:40] if isinstance(kind, str) else "not a string"
        raise invalid(
            f"{path}.type", f"{path}.type is {shown!r}; this server takes message, function_call and function_call_output"
        )
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES or role == "tool":
        raise invalid(f"{path}.role", f"{path}.role must be one of system, developer, user, assistant")
    content = text_of(item.get("content"), f"{path}.content", limits)
    return {"role": "system" if role == "developer" else role, "content": content}


def _function_call(item: dict[str, Any], path: str) -> dict[str, Any]:
    name, call_id, arguments = item.get("name"), item.get("call_id"), item.get("arguments", "{}")
    if not isinstance(name, str) or not name:
        raise invalid(f"{path}.name", f"{path}.name must be a non-empty string")
    if not isinstance(call_id, str) or not call_id:
        raise invalid(f"{path}.call_id", f"{path}.call_id must be a non-empty string")
    try:
        parsed = msgspec.json.decode(arguments) if isinstance(arguments, str) else None
    except (msgspec.DecodeError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise invalid(f"{path}.arguments", f"{path}.arguments must be a string holding a JSON object")
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": parsed}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def previous_not_found(response_id: str) -> ApiError:
    message = f"Previous response with id '{response_id[:128]}' not found."
    return ApiError(400, message, code="previous_response_not_found", param="previous_response_id")
