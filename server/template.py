"""Messages to prompt tokens through a model's chat template.

Knows roles, message shapes and which part of a rendered prompt the template wrote. Refuses to know sampling and sockets.

A control token such as `<|im_end|>` counts only where the template itself writes it. The technique: before compiling, every
control token in the template's own strings is swapped for a mark (see `server.vocabulary`), and so are `bos_token` and the
like. Messages stay as they are, so the template may trim, split or look into them as it likes; after rendering, marks become
control tokens and everything else is plain text. A user's `<|im_end|>` is never a mark, whatever was done to it.

Some templates put a control token together from pieces (`'<|' + role + '|>'`), where no literal can be swapped. They are found
by a trial rendering. For them the characters that control tokens are made of are swapped out of the messages before rendering
and put back afterwards, so a control token's name in the rendered text can only be the template's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from server.template_limits import TemplateError, TemplateStopped
from server.template_sandbox import BoundedTemplate
from server.vocabulary import Marked, Tokenizer
from spec.errors import ModelFileError, RequestError

__all__ = ["ROLES", "ChatTemplate", "TemplateError", "end_of_turn"]

ROLES = ("system", "developer", "user", "assistant", "tool")
Message = Mapping[str, Any]
_STAND_INS = range(0xF0000, 0xFFFFE)  # private use plane 15
_TEXT_PARTS = ("text", "input_text", "output_text")
_PLAIN_ROLE = re.compile(r"[A-Za-z_]{1,32}\Z")
_TOOL = {"type": "function", "function": {"name": "f", "description": "x", "parameters": {"type": "object", "properties": {}}}}
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"x": "x"}}}
_TRIALS: tuple[tuple[list[dict[str, Any]], list[dict[str, Any]] | None], ...] = (
    ([{"role": "user", "content": "x"}], None),
    ([{"role": "system", "content": "x"}, {"role": "user", "content": "x"}], None),
    ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}], None),
    (
        [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "content": "x", "name": "f", "tool_call_id": "abcdefghi"},
        ],
        [_TOOL],
    ),
)


class ChatTemplate:
    """The chat template of one tokenizer. Safe to share between threads.

    A rendering is bounded (see `template_limits`), yet it may take milliseconds for long chats: call it off the event loop.
    Raises ModelFileError for a template that does not compile or reaches for what it may not have.
    """

    def __init__(self, tokenizer: Tokenizer, now: Callable[[], datetime] = datetime.now) -> None:
        self._tokenizer, self._now = tokenizer, now
        self._compiled: dict[tuple[str, str], BoundedTemplate] = {}
        self._dynamic: dict[str, re.Pattern[str] | None] = {}
        for name in tokenizer.facts.chat_templates:
            if name in ("default", "tool_use"):
                self._dynamic[name] = self._try_out(name)

    @property
    def supports_tools(self) -> bool:
        """Whether the template does anything with `tools`."""
        templates = self._tokenizer.facts.chat_templates
        return "tool_use" in templates or (
            "default" in templates and "tools" in self._template("default", self._tokenizer.marked("")).names
        )

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt's token ids, complete as the template wrote them: nothing is added, not even a beginning-of-text token.

        `extra` are further variables of the template (`enable_thinking`, ...). Raises TemplateError, a RequestError, with the
        template's own message when it refuses the messages.
        """
        text, marked = self._render(messages, tools, add_generation_prompt, extra or {})
        return marked.encode(text)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text, control tokens spelled out: for people to read. It cannot be encoded safely."""
        text, marked = self._render(messages, tools, add_generation_prompt, extra or {})
        return text.translate({ord(mark): token for token, mark in marked.marks.items()})

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, generate: bool, extra: Mapping[str, Any]
    ) -> tuple[str, Marked]:
        templates = self._tokenizer.facts.chat_templates
        name = "tool_use" if tools and "tool_use" in templates else "default"
        if name not in templates:
            raise TemplateError("this model has no chat template; use /v1/completions")
        plain, odd = self._plain_messages(messages)
        given = {**extra, "messages": plain, "tools": list(tools) if tools else None, "add_generation_prompt": generate}
        strings: list[str] = []
        _mapped(given, strings.append)
        everything = "\n".join(strings)
        marked = self._tokenizer.marked(everything)
        dynamic = self._dynamic[name]
        restore: dict[int, str] = {}
        if dynamic is not None:
            away = _stand_ins(dynamic.pattern, everything)
            restore = {ord(stand_in): character for character, stand_in in away.items()}
            table = str.maketrans(away)
            given = _mapped(given, lambda text: text.translate(table))
            for message, original in zip(given["messages"], plain, strict=True):
                message["role"] = original["role"]
        variables = {token: marked.marks.get(value, value) for token, value in self._tokenizer.facts.named_tokens().items()}
        template = self._template(name, marked)
        text = template.render({**given, **variables})
        if odd is not None:
            raise TemplateError(odd)
        if dynamic is not None:
            text = dynamic.sub(lambda found: marked.marks[found.group()], text).translate(restore)
        return text, marked

    def _template(self, name: str, marked: Marked) -> BoundedTemplate:
        """The compiled template for these marks. Only text with private-use characters needs other marks than the usual."""
        key = (name, next(iter(marked.marks.values()), ""))
        found = self._compiled.get(key)
        if found is None:
            source = self._tokenizer.facts.chat_templates[name]
            found = BoundedTemplate(source, marked.marks, self._tokenizer.name, self._now)
            if len(self._compiled) >= 4:
                self._compiled.pop(list(self._compiled)[-1], None)
            self._compiled[key] = found
        return found

    def _try_out(self, name: str) -> re.Pattern[str] | None:
        """Render harmless chats; the pattern of control tokens that appear in them without being marks."""
        marked = self._tokenizer.marked("")
        variables = {token: marked.marks.get(value, value) for token, value in self._tokenizer.facts.named_tokens().items()}
        found: set[str] = set()
        template = self._template(name, marked)
        for messages, tools in _TRIALS:
            given = {**variables, "messages": messages, "tools": tools, "add_generation_prompt": True}
            try:
                text = template.render(given)
            except TemplateStopped as error:
                raise ModelFileError(f"{self._tokenizer.name}: {error}") from None
            except TemplateError:
                continue  # it refuses such chats
            found |= {
                token for token in self._tokenizer.special_tokens if token in text and not token.replace("_", "").isalnum()
            }
        return re.compile("|".join(re.escape(token) for token in sorted(found, key=len, reverse=True))) if found else None

    def _plain_messages(self, messages: Sequence[Message]) -> tuple[list[dict[str, Any]], str | None]:
        """Messages as templates expect them, and what is wrong with the roles, which the template may say better itself."""
        if not messages:
            raise TemplateError("messages is empty; at least one message is needed")
        odd = None
        plain = []
        for index, message in enumerate(messages):
            where = f"messages[{index}]"
            if not isinstance(message, Mapping):
                raise TemplateError(f"{where} is a {type(message).__name__}; an object was expected")
            role = message.get("role")
            if not isinstance(role, str) or role not in ROLES:
                problem = f"{where}.role is {str(role)[:40]!r}; it must be one of {', '.join(ROLES)}"
                if not isinstance(role, str) or not _PLAIN_ROLE.match(role):
                    raise TemplateError(problem)
                odd = odd or problem
            plain.append(_plain(message, where) | {"role": self._role(role)})
        return plain, odd

    def _role(self, role: str) -> str:
        """`developer` is OpenAI's newer name of the system role; few templates know it."""
        if role != "developer":
            return role
        template = self._template("default", self._tokenizer.marked("")) if self._tokenizer.chat_template else None
        return role if template and any("developer" in text for text in template.strings) else "system"


def end_of_turn(tokenizer: Tokenizer) -> int | None:
    """The control token the template writes right behind an assistant's answer, if any.

    Some models declare their end token nowhere else. Templates whose answers consist of several channels (gpt-oss) end each
    part with a token that does not end the answer; they declare their end tokens.
    """
    if tokenizer.chat_template is None or "<|channel|>" in tokenizer.special_tokens:
        return None
    template = BoundedTemplate(tokenizer.chat_template, {}, tokenizer.name)
    answer = "forespeak-answer"
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": answer}]
    try:
        text = template.render({**tokenizer.facts.named_tokens(), "messages": messages, "add_generation_prompt": False})
    except TemplateStopped as error:
        raise ModelFileError(f"{tokenizer.name}: {error}") from None
    except TemplateError:
        return None
    behind = text.rpartition(answer)[2].lstrip() if answer in text else ""
    return next((index for token, index in tokenizer.special_tokens.items() if token and behind.startswith(token)), None)


def _plain(message: Message, where: str) -> dict[str, Any]:
    plain = {key: _copied(value) for key, value in message.items()}
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list | tuple):
        plain["content"] = "".join(_part_text(part, f"{where}.content[{k}]") for k, part in enumerate(content))
    elif content is None and not calls:
        plain["content"] = ""
    elif content is not None and not isinstance(content, str):
        raise TemplateError(f"{where}.content is a {type(content).__name__}; text or a list of text parts was expected")
    if calls:
        plain["tool_calls"] = [_plain_call(call) for call in plain["tool_calls"]]
    return plain


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise TemplateError(f"{where} is of type {str(kind)[:40]!r}; this model takes text only")


def _plain_call(call: Any) -> Any:
    """OpenAI sends a call's arguments as a JSON string; templates expect the object."""
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        try:
            arguments = json.loads(function["arguments"])
        except (ValueError, RecursionError):
            return call
        if isinstance(arguments, dict):
            return call | {"function": function | {"arguments": arguments}}
    return call


def _copied(value: Any) -> Any:
    """Plain dicts and lists, whatever mapping and sequence types came in."""
    return _mapped(value, lambda text: text)


def _mapped(value: Any, change: Callable[[str], Any]) -> Any:
    """`value` in plain dicts and lists, with `change` applied to every string and key in it."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(key)): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value


def _stand_ins(tokens: str, text: str) -> dict[str, str]:
    """A private-use character, absent from `text`, for each character that only control tokens are made of.

    Letters, digits, spaces and underscores stay: names of fields and roles consist of them, and no token of them alone.
    """
    wanted = sorted({character for character in tokens if not character.isalnum() and not character.isspace()} - {"_"})
    used = set(text)
    free = (chr(code) for code in _STAND_INS if chr(code) not in used)
    try:
        return {character: next(free) for character in wanted}
    except StopIteration:
        raise RequestError("the text holds too many private-use characters", code="invalid_value", param="messages") from None
