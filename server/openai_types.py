"""OpenAI's request bodies as typed structs, and the checks that need no tokenizer. Unknown fields are ignored, null is default."""

from __future__ import annotations

from typing import Any

import msgspec

from server.api_error import invalid
from server.limits import Limits
from server.messages import Message
from server.options import SamplingOptions


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None


class ChatRequest(SamplingOptions, kw_only=True):
    messages: list[Message]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(SamplingOptions, kw_only=True):
    prompt: Any = None  # a string, a list of strings, token ids, or a list of lists of them: checked by prompts_of
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either `prompt` or `messages`. `add_special_tokens`: a prompt's ids begin as the model's texts do."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None  # None = true


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


def wants_usage(stream: bool | None, options: StreamOptions | None) -> bool:
    """Whether the stream ends with a usage chunk. stream_options without stream is an error, as OpenAI has it."""
    if options is None:
        return False
    if not stream:
        raise invalid("stream_options", "stream_options is only allowed when stream is true")
    return bool(options.include_usage)


def chat_logprobs_wanted(logprobs: bool | None, top: int | None, limits: Limits) -> int | None:
    """How many alternatives the engine must report per position; None for no log probabilities at all."""
    if top is not None:
        if not 0 <= top <= limits.top_logprobs:
            raise invalid("top_logprobs", f"top_logprobs is {top}; it must be between 0 and {limits.top_logprobs}")
        if not logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
    return (top or 0) if logprobs else None


def completion_logprobs_wanted(logprobs: int | None, limits: Limits) -> int | None:
    if logprobs is not None and not 0 <= logprobs <= limits.top_logprobs:
        raise invalid("logprobs", f"logprobs is {logprobs}; it must be between 0 and {limits.top_logprobs}")
    return logprobs


def prompts_of(prompt: Any, limits: Limits) -> list[str | list[int]]:
    """The prompts of a completion, each a text or token ids. Raises ApiError for empty and for mixed ones."""
    if isinstance(prompt, str):
        items: list[Any] = [prompt]
    elif isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt):
        items = [prompt]
    elif isinstance(prompt, list):
        items = prompt
    else:
        raise invalid("prompt", "prompt must be a string, a list of strings, token ids, or a list of lists of token ids")
    if not items:
        raise invalid("prompt", "prompt is empty; at least one prompt is needed", code="empty_array")
    if len(items) > limits.prompts:
        raise invalid("prompt", f"prompt holds {len(items)} prompts; at most {limits.prompts} are allowed")
    for item in items:
        if isinstance(item, list) and not all(type(token) is int for token in item):
            raise invalid("prompt", "a list of token ids must hold integers only")
        if not isinstance(item, str | list):
            raise invalid("prompt", "prompt must hold strings or lists of token ids")
        if not item:
            raise invalid("prompt", "prompt is empty; at least one token is needed")
    return items


def check_completion(request: CompletionRequest) -> None:
    """Refuse what this server does not do, by name."""
    if request.suffix:
        raise invalid("suffix", "suffix is not supported by this model", code="unsupported_parameter")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise invalid("best_of", "best_of must be absent or equal to n", code="unsupported_parameter")


def check_prompt_scores(tokens: int, top: int, limits: Limits) -> None:
    """Refuse an answer that would hold too many log probabilities of prompts. `tokens`: of all prompts, once per choice."""
    asked = tokens * (1 + top)
    if asked > limits.prompt_scores:
        message = f"echo with logprobs asks for {asked} log probabilities of prompt tokens, {top} alternatives each included"
        raise invalid("logprobs", f"{message}; at most {limits.prompt_scores} are allowed in one request")
