"""What every endpoint does with a request: admit, tokenise off the event loop, check against the context, hand to the engine.

Knows prompts, limits and running answers; refuses to know HTTP, sockets and JSON shapes.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import HTTPConnection

from server.api_error import ApiError, from_request_error, invalid
from server.decoding import check_depth
from server.engine_client import EngineClient
from server.engine_watch import EngineState
from server.generation import Generation
from server.limits import Admission, Limits
from server.logs import event
from server.messages import byte_size
from server.metrics import Metrics
from server.options import SamplingOptions, choices, sampling_params, speculation_policy, stop_strings, token_limit
from server.ports import TextTools
from server.text import StopMatcher, TextStream
from server.tools import Tools, read_tools
from server.tracing import NoTracing, Tracing
from server.wire import Ready
from spec.errors import RequestError
from spec.request import Request, SamplingParams, SpeculationPolicy

log = logging.getLogger("forespeak.server")

T = TypeVar("T")
TOKENISER_THREADS = 2


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, since when, and within which trace of theirs."""

    tenant: str
    arrival: float  # seconds of time.perf_counter()
    traceparent: str = ""  # W3C trace context, "" when none came

    @classmethod
    def of(cls, connection: HTTPConnection) -> Caller:
        """Of a request or a socket that has passed the guard, arriving now."""
        return cls(connection.state.tenant, time.perf_counter(), connection.headers.get("traceparent", ""))


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that passed every check; `n` choices of it can be begun."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    policy: SpeculationPolicy
    stops: tuple[str, ...]
    caller: Caller
    n: int
    continuation: bool = False  # the answer's text goes on after a raw prompt
    shown: frozenset[int] = frozenset()  # control tokens that are not hidden: the marks of tool calls


class Service:
    """One model behind one engine."""

    def __init__(
        self,
        model: str,
        engine: EngineClient,
        text: TextTools,
        limits: Limits,
        metrics: Metrics,
        seed: int = 0,
        log_prompts: bool = False,
        tracing: Tracing | None = None,
    ) -> None:
        self.model = model
        self.created = int(time.time())
        self.engine = engine
        self.text = text
        self.limits = limits
        self.metrics = metrics
        self.admission = Admission(limits)
        self.draining = False
        self._log_prompts = log_prompts
        self._tracing = tracing or NoTracing()
        self._ids = itertools.count(1)
        self._seeds: random.Random = random.Random(seed) if seed else secrets.SystemRandom()
        self._pool = ThreadPoolExecutor(TOKENISER_THREADS, thread_name_prefix="tokeniser")
        self._running: dict[int, Generation] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    # ---- before tokenising

    def check_open(self) -> Ready:
        """Raise ApiError 503 when no new work is taken; else what the engine said of itself."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="server_draining", retry_after=5.0)
        ready = self.engine.ready
        if ready is None or self.engine.state is EngineState.FAILED:
            failed = self.engine.state is EngineState.FAILED
            message = "the engine is not running" if failed else "the model is still loading"
            raise ApiError(503, message, code="engine_not_ready", retry_after=2.0)
        return ready

    def check_model(self, model: str | None) -> None:
        """An absent model is the one served here; any other name is 404."""
        if model is not None and model != self.model:
            message = f"the model {model[:128]!r} is not served here; this server has {self.model!r}"
            raise ApiError(404, message, code="model_not_found", param="model")

    # ---- prompts

    async def chat_prompt(self, messages: Sequence[Mapping[str, Any]], tools: Tools | None = None) -> list[int]:
        """Token ids of a conversation through the model's template. Raises ApiError with the template's message."""
        self._check_bytes(byte_size(messages), "messages")
        declared = tools.declared if tools is not None else None
        return await self._in_pool(lambda: self.text.template.encode_chat(messages, declared))

    def tools(
        self, declared: Sequence[Mapping[str, Any]] | None, choice: str | Mapping[str, Any] | None, parallel: bool | None
    ) -> Tools | None:
        """The checked tools of a request, None when it uses none."""
        for name, value in (("tools", declared), ("tool_choice", choice)):
            check_depth(name, value, self.limits.depth)
        return read_tools(declared, choice, parallel, self.text.tool_format, self.limits)

    async def text_prompt(self, prompt: str, special: bool = True) -> list[int]:
        """`special`: with what the model's texts begin with."""
        self._check_bytes(len(prompt.encode()), "prompt")
        # A raw prompt begins as the model's texts do; an empty one stays empty and is refused.
        return await self._in_pool(lambda: self.text.tokenizer.encode(prompt, add_special=bool(prompt) and special))

    async def text_of(self, ids: Sequence[int]) -> str:
        """The text of checked token ids, control tokens left out."""
        return await self._in_pool(lambda: self.text.tokenizer.decode(ids))

    def check_prompt_ids(self, ids: Sequence[int], param: str = "prompt") -> None:
        size = self.text.tokenizer.vocab_size
        for token in ids:
            if not 0 <= token < size:
                raise invalid(param, f"{param} holds the token id {token}; ids run from 0 to {size - 1}")

    def _check_bytes(self, size: int, param: str) -> None:
        """Refuse text that cannot fit before spending time on it: no token is longer than the longest token."""
        context = self.check_open().context
        least = size // self.text.tokenizer.longest_token_bytes
        if least >= context:
            raise self._too_long(f"at least {least}", context, param)

    def _too_long(self, tokens: str, context: int, param: str) -> ApiError:
        message = f"the prompt has {tokens} tokens; this model's context is {context} tokens, one of them for the answer"
        return ApiError(400, message, code="context_length_exceeded", param=param)

    async def _in_pool(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except RequestError as error:
            raise from_request_error(error) from None

    # ---- from a prompt to running answers

    def prepare(
        self,
        prompt_ids: Sequence[int],
        options: SamplingOptions,
        caller: Caller,
        *,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        param: str = "messages",
        continuation: bool = False,
        tools: Tools | None = None,
    ) -> Prepared:
        """Check the prompt's length and every option. Raises ApiError naming the field."""
        ready = self.check_open()
        check_depth("response_format", options.response_format, self.limits.depth)
        if not prompt_ids:
            raise invalid(param, f"{param} is empty; at least one token is needed")
        room = ready.context - len(prompt_ids)
        if room < 1:
            raise self._too_long(str(len(prompt_ids)), ready.context, param)
        sampling = sampling_params(
            options,
            max_tokens=token_limit(options, room, least=1 if prompt_logprobs is None else 0),
            logprobs=logprobs,
            tokenizer=self.text.tokenizer,
            limits=self.limits,
            drawn_seed=self._seeds.getrandbits(63),
        )
        if prompt_logprobs is not None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=prompt_logprobs)
        forced = tools.grammar(self.text.tool_marks) if tools is not None else None
        if forced is not None:
            if sampling.grammar is not None:
                raise invalid("response_format", "response_format and a forced tool call cannot be combined")
            sampling = msgspec.structs.replace(sampling, grammar=forced)
        return Prepared(
            prompt_ids=tuple(prompt_ids),
            sampling=sampling,
            policy=speculation_policy(options.speculation, ready.drafters),
            stops=stop_strings(options.stop, self.limits),
            caller=caller,
            n=choices(options.n, self.limits),
            continuation=continuation,
            shown=frozenset(self.text.tool_marks.values()) if tools is not None else frozenset(),
        )

    def begin(self, prepared: Prepared, notify: Callable[[], None]) -> list[Generation]:
        """Hand `n` choices to the engine. Raises ApiError 429 over the key's limit. `notify` may be called before this returns."""
        self.admission.take_requests(prepared.caller.tenant, prepared.n)
        generations = [self._generation(prepared, index, notify) for index in range(prepared.n)]
        self._idle.clear()
        if self._log_prompts:
            event(log, "prompt", request=generations[0].request.id, text=self.text.tokenizer.decode(prepared.prompt_ids))
        for generation in generations:
            self._running[generation.request.id] = generation
        for generation in generations:
            self.engine.submit(generation.request, generation.on_event)
        return generations

    def _generation(self, prepared: Prepared, index: int, notify: Callable[[], None]) -> Generation:
        sampling = prepared.sampling
        if index:  # choices differ by their seeds, in a way that the same request repeats
            sampling = msgspec.structs.replace(sampling, seed=(sampling.seed + index) % 2**63)
        request = Request(
            id=next(self._ids),
            prompt_ids=prepared.prompt_ids,
            sampling=sampling,
            speculation=prepared.policy,
            tenant=prepared.caller.tenant,
            arrival=time.time(),
        )
        hidden = self.text.tokenizer.hidden_ids - prepared.shown
        text = TextStream(self.text.tokenizer, continuation=prepared.continuation, hidden_ids=hidden)
        stops = StopMatcher(prepared.stops) if prepared.stops else None
        on_end = partial(self._on_end, prepared.caller)
        return Generation(request, text, stops, notify, on_end, self.metrics, prepared.caller.arrival)

    def _on_end(self, caller: Caller, generation: Generation) -> None:
        self._running.pop(generation.request.id, None)
        self.engine.cancel(generation.request.id)  # no effect when the engine ended it itself
        self.admission.give_requests(generation.request.tenant)
        figures, now = generation.figures, time.perf_counter()
        self.metrics.on_end(str(generation.finish_reason), figures, now)
        self._tracing.on_end(generation, self.model, caller.traceparent)
        event(
            log, "answer", request=generation.request.id, tenant=generation.request.tenant or "-",
            reason=generation.finish_reason, prompt_tokens=figures.prompt_tokens, cached_tokens=figures.cached_tokens,
            tokens=figures.completion_tokens, accepted=figures.accepted, steps=figures.steps,
            ttft_ms=round(figures.ttft_seconds * 1e3, 1), total_ms=round((now - figures.arrival) * 1e3, 1),
        )  # fmt: skip
        if generation.error is not None and generation.error.status >= 500:
            log.warning("request %d ended with an error: %s", generation.request.id, generation.error.message)
        if not self._running:
            self._idle.set()

    # ---- the end

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def wait_idle(self, timeout: float) -> bool:
        """Wait until no answer is running; False when `timeout` seconds were not enough."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

    def fail_all(self, error: ApiError) -> None:
        for generation in list(self._running.values()):
            generation.fail(error)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._tracing.close()
