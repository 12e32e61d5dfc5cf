"""Chat messages as clients write them, checked and made plain for the template. Knows OpenAI's shapes; refuses to know tokens.

Every role's content may be null, empty, a string, or a list of text parts. The first thing wrong is reported with its path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from server.api_error import invalid
from server.limits import Limits

ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class FunctionCall(msgspec.Struct, kw_only=True):
    name: str
    arguments: str = "{}"


class ToolCall(msgspec.Struct, kw_only=True):
    function: FunctionCall
    id: str = ""
    type: str = "function"


class Message(msgspec.Struct, kw_only=True):
    """`content` is checked by hand: its union of shapes is wider than a typed decoder can name errors for."""

    role: str
    content: Any = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None


def text_of(content: Any, path: str, limits: Limits) -> str:
    """The text of a content value: null is empty, parts are joined. Raises ApiError naming the path."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(path, f"{path} must be a string, null, or a list of text parts")
    if len(content) > limits.parts:
        raise invalid(path, f"{path} has {len(content)} parts; at most {limits.parts} are allowed")
    return "".join(_part_text(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part_text(part: Any, path: str) -> str:
    if not isinstance(part, dict):
        raise invalid(path, f"{path} must be an object with type and text")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        shown = kind[:40] if isinstance(kind, str) else "no string"
        raise invalid(f"{path}.type", f"{path}.type is {shown!r}; this model reads text parts only")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise invalid(f"{path}.{_TEXT_PARTS[kind]}", f"{path}.{_TEXT_PARTS[kind]} must be a string")
    return text


def plain_messages(messages: Sequence[Message], limits: Limits) -> list[dict[str, Any]]:
    """Messages for the template: role and content strings, tool calls as objects. `developer` speaks as `system`."""
    if not messages:
        raise invalid("messages", "messages is empty; at least one message is needed", code="empty_array")
    if len(messages) > limits.messages:
        raise invalid("messages", f"messages has {len(messages)} entries; at most {limits.messages} are allowed")
    return [_plain(message, f"messages[{index}]", limits) for index, message in enumerate(messages)]


def _plain(message: Message, path: str, limits: Limits) -> dict[str, Any]:
    role = message.role
    if role not in ROLES:
        raise invalid(f"{path}.role", f"{path}.role is {role[:40]!r}; it must be one of {', '.join(ROLES)}")
    text = text_of(message.content, f"{path}.content", limits)
    if role == "assistant" and not text and message.refusal:
        text = message.refusal
    plain: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": text}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_calls:
        if role != "assistant":
            raise invalid(f"{path}.tool_calls", f"{path}.tool_calls is allowed for the role assistant only")
        plain["tool_calls"] = [_plain_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)]
    if role == "tool":
        if not message.tool_call_id:
            raise invalid(f"{path}.tool_call_id", f"{path}.tool_call_id is missing; a tool message answers one call")
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _plain_call(call: ToolCall, path: str) -> dict[str, Any]:
    """Templates want the arguments as an object, OpenAI sends them as a string of JSON."""
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise invalid(f"{path}.function.arguments", f"{path}.function.arguments must be a string holding a JSON object")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def byte_size(messages: Sequence[Mapping[str, Any]]) -> int:
    """UTF-8 bytes of all contents, at least: what the prompt's token count can be bounded by before tokenising."""
    return sum(len(message["content"].encode("utf-8", "surrogatepass")) for message in messages)
