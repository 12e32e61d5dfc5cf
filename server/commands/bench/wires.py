"""How a server is asked: OpenAI's streams over HTTP, and our own WebSocket. Knows their messages; refuses to know traffic.

Both give `Answer`s with the time of every chunk. OpenAI's streams do not say how many tokens a chunk holds, so the tokens'
own gaps are known there only where there was one chunk a token.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx

from server.client import Client, ClientError
from server.commands.bench.records import Answer
from server.commands.bench.remote import Wire
from server.commands.bench.traffic import Turn
from spec.errors import ConfigError
from spec.request import SamplingParams

Api = Literal["chat", "completions"]
REFUSALS = frozenset({400, 401, 403, 404, 413, 422, 429, 503})  # the server would not take it; other failures are errors
FAILURES = frozenset({"internal_error", "disconnected", "unreachable", "refused", "closed"})  # codes that are not refusals
LOCAL = ("localhost", "127.0.0.1", "::1")
PATIENCE = 600.0  # seconds without a byte after which an answer is an error


@dataclass
class _Heard:
    """What has arrived of one answer."""

    times: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    speculation: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    finish_reason: str = ""
    chunk_tokens: list[int] | None = None

    def answer(self, turn: Turn, error: str = "", refused: bool = False) -> Answer:
        spec, usage = self.speculation, self.usage
        tokens = usage.get("completion_tokens") or len(self.times)
        sizes = self.chunk_tokens
        if sizes is None and tokens == len(self.times):
            sizes = [1] * tokens
        first = sizes[0] if sizes else 1
        passes = max(int(spec.get("steps", 0)) - 1, 0)
        drafters: dict[str, dict[str, int]] = spec.get("by_drafter", {})
        return Answer(
            prompt=turn.prompt,
            turn=turn.number,
            category="",
            due=turn.due,
            chunk_times=tuple(self.times),
            chunk_tokens=None if sizes is None else tuple(sizes),
            tokens=tokens,
            prompt_tokens=usage.get("prompt_tokens", 0),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            finish_reason=("rejected" if refused else "error") if error else self.finish_reason or "stop",
            error=error,
            text="".join(self.text),
            queue_seconds=self.timings.get("queue_ms", 0.0) / 1e3,
            passes=passes,
            passed_tokens=round(spec.get("acceptance_length", 0.0) * passes) if spec else max(tokens - first, 0),
            drafted_by={name: row["drafted"] for name, row in drafters.items()},
            accepted_by={name: row["accepted"] for name, row in drafters.items()},
            accepted_per_position=tuple(spec.get("accepted_per_position", ())),
        )


# ---- OpenAI over HTTP


@asynccontextmanager
async def openai_wire(url: str, model: str | None, key: str | None, api: Api, extra: dict[str, Any]) -> AsyncIterator[Wire]:
    """`url` is the server's address with or without /v1. Without a `model` the first of /v1/models is asked for.
    `extra` goes into every request's body."""
    base = url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    trust = urlsplit(url).hostname not in LOCAL
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(PATIENCE, connect=10.0)
    async with httpx.AsyncClient(base_url=base, headers=headers, timeout=timeout, limits=limits, trust_env=trust) as http:
        yield _OpenAI(http, model or await _first_model(http, base), api, extra)


async def _first_model(http: httpx.AsyncClient, base: str) -> str:
    try:
        response = await http.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        raise ConfigError(f"{base}/v1/models answers {error.response.status_code}: {_said(error.response.content)}") from error
    except httpx.HTTPError as error:
        raise ConfigError(f"cannot reach {base}: {error or type(error).__name__}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{base}/v1/models names no model; is it an OpenAI-compatible server?") from error


class _OpenAI:
    def __init__(self, http: httpx.AsyncClient, model: str, api: Api, extra: dict[str, Any]) -> None:
        self._http = http
        self._model = model
        self._api = api
        self._extra = extra

    async def ask(self, turn: Turn, sampling: SamplingParams, clock: Callable[[], float]) -> Answer:
        heard = _Heard()
        path = "/v1/chat/completions" if self._api == "chat" else "/v1/completions"
        try:
            async with self._http.stream("POST", path, json=self._body(turn, sampling)) as response:
                if response.status_code != 200:
                    said = _said(await response.aread())
                    return heard.answer(turn, f"HTTP {response.status_code}: {said}", response.status_code in REFUSALS)
                async for line in response.aiter_lines():
                    if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                        error = self._hear(json.loads(data), heard, clock)
                        if error:
                            return heard.answer(turn, error)
        except (httpx.HTTPError, ValueError) as error:
            return heard.answer(turn, str(error) or type(error).__name__)
        return heard.answer(turn)

    def _body(self, turn: Turn, sampling: SamplingParams) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model, "max_tokens": sampling.max_tokens, "temperature": sampling.temperature, "seed": sampling.seed,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        if self._api == "chat":
            return body | {"messages": list(turn.messages)} | self._extra
        return body | {"prompt": "\n\n".join(message["content"] for message in turn.messages)} | self._extra

    @staticmethod
    def _hear(chunk: dict[str, Any], heard: _Heard, clock: Callable[[], float]) -> str:
        """Take one chunk; returns the error it tells of, if any."""
        if "error" in chunk:
            error = chunk["error"]
            return str(error.get("message", error) if isinstance(error, dict) else error) or "error"
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            text = delta.get("content") or delta.get("reasoning_content") or choice.get("text") or ""
            if text:
                heard.times.append(clock())
                heard.text.append(text)
            heard.finish_reason = choice.get("finish_reason") or heard.finish_reason
        heard.usage = chunk.get("usage") or heard.usage
        heard.speculation = chunk.get("speculation") or heard.speculation
        heard.timings = chunk.get("timings") or heard.timings
        return ""


def _said(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body[:200].decode("utf-8", "replace").strip() or "no body"


# ---- our WebSocket


@asynccontextmanager
async def socket_wire(url: str, key: str | None, extra: dict[str, Any]) -> AsyncIterator[Wire]:
    """One socket carries all answers. `extra` goes into every `chat` message."""
    try:
        async with Client(url, key) as client:
            yield _Socket(client, extra)
    except ClientError as error:
        raise ConfigError(str(error)) from error


class _Socket:
    def __init__(self, client: Client, extra: dict[str, Any]) -> None:
        self._client = client
        self._extra = extra

    async def ask(self, turn: Turn, sampling: SamplingParams, clock: Callable[[], float]) -> Answer:
        heard = _Heard(chunk_tokens=[])
        options = {"max_tokens": sampling.max_tokens, "temperature": sampling.temperature, "seed": sampling.seed}
        try:
            answer = await self._client.chat(turn.messages, resumable=False, **options, **self._extra)
            async for delta in answer:
                if delta["type"] == "delta" and heard.chunk_tokens is not None:
                    heard.times.append(clock())
                    heard.chunk_tokens.append(delta["tokens"])
            done = await answer.result()
        except ClientError as error:
            return heard.answer(turn, str(error), error.code not in FAILURES)
        heard.text.append(answer.text)
        heard.finish_reason = done["finish_reason"]
        heard.usage, heard.speculation, heard.timings = done["usage"], done["speculation"], done["timings"]
        return heard.answer(turn)
