"""Sampling and speculation options as clients write them: one struct for every endpoint, and its checks.

Knows names, ranges and OpenAI's precedence; refuses to know messages, transports and how a token is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from server.api_error import invalid
from server.limits import Limits
from server.ports import Tokenizer
from spec.request import GrammarSpec, SamplingParams, SpeculationPolicy

MAX_SEED = 2**63 - 1
MAX_DRAFT_NODES = 63
_MAX_TOKENS = 2**62


class SpeculationOptions(msgspec.Struct, kw_only=True):
    mode: Literal["auto", "off"] = "auto"
    drafters: list[str] | None = None
    max_nodes: int | None = None
    rule: Literal["exact", "rejection"] = "exact"


class SamplingOptions(msgspec.Struct, kw_only=True):
    """Fields every generating request shares. null means the default."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    speculation: SpeculationOptions | None = None
    response_format: dict[str, Any] | None = None


def _number(name: str, value: float | None, low: float, high: float, default: float) -> float:
    """Range check that NaN cannot pass."""
    if value is None:
        return default
    if not (math.isfinite(value) and low <= value <= high):
        shown = value if math.isfinite(value) else "not a finite number"
        raise invalid(name, f"{name} is {shown}; it must be between {low:g} and {high:g}")
    return float(value)


def _integer(name: str, value: int | None, low: int, high: int, default: int) -> int:
    if value is None:
        return default
    if not low <= value <= high:
        bound = f"between {low} and {high}" if high < _MAX_TOKENS else f"at least {low}"
        raise invalid(name, f"{name} is {value}; it must be {bound}")
    return value


def token_limit(options: SamplingOptions, room: int, default: int | None = None, least: int = 1) -> int:
    """Tokens the answer may have: the newer of OpenAI's two fields wins, a huge value is cut to the free context.

    `least` is 0 where a request may be about its prompt alone.
    """
    name = "max_tokens" if options.max_completion_tokens is None else "max_completion_tokens"
    asked = options.max_tokens if options.max_completion_tokens is None else options.max_completion_tokens
    if asked is None:
        return room if default is None else min(room, default)
    if asked < least:
        raise invalid(name, f"{name} is {asked}; it must be at least {least}")
    return min(asked, room)


def stop_strings(stop: str | list[str] | None, limits: Limits) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    if len(stops) > limits.stops:
        raise invalid("stop", f"stop holds {len(stops)} strings; at most {limits.stops} are allowed")
    for text in stops:
        if not text:
            raise invalid("stop", "stop holds an empty string; every stop string needs at least one character")
        if len(text.encode()) > limits.stop_bytes:
            raise invalid("stop", f"a stop string may have at most {limits.stop_bytes} bytes")
    return tuple(dict.fromkeys(stops))


def choices(n: int | None, limits: Limits) -> int:
    return _integer("n", n, 1, limits.n, 1)


def _token_ids(name: str, ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    result = tuple(ids)
    for token in result:
        if not 0 <= token < vocab_size:
            raise invalid(name, f"{name} holds {token}; token ids run from 0 to {vocab_size - 1}")
    return result


def _logit_bias(bias: dict[str, float] | None, vocab_size: int, limits: Limits) -> dict[int, float]:
    if not bias:
        return {}
    if len(bias) > limits.logit_bias:
        raise invalid("logit_bias", f"logit_bias has {len(bias)} entries; at most {limits.logit_bias} are allowed")
    result = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab_size):
            shown = key if len(key) <= 24 else key[:24] + "..."
            raise invalid("logit_bias", f"logit_bias has the key {shown!r}; keys are token ids from 0 to {vocab_size - 1}")
        result[int(key)] = _number("logit_bias", value, -100.0, 100.0, 0.0)
    return result


def grammar_spec(response_format: dict[str, Any] | None, name: str = "response_format") -> GrammarSpec | None:
    """The constraint a response_format asks for. Compiling it, and refusing what cannot be compiled, is the engine's."""
    if response_format is None:
        return None
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return GrammarSpec("json_object")
    if kind == "json_schema":
        inner = response_format.get("json_schema", response_format if "schema" in response_format else None)
        if not isinstance(inner, dict):
            raise invalid(f"{name}.json_schema", f"{name}.json_schema must be an object with name and schema")
        schema = inner.get("schema")
        if not isinstance(schema, dict):
            raise invalid(f"{name}.json_schema.schema", f"{name}.json_schema.schema must be an object")
        return GrammarSpec("json_schema", msgspec.json.encode(schema).decode())
    if kind in ("regex", "grammar"):
        source = response_format.get(kind)
        if not isinstance(source, str) or not source:
            raise invalid(f"{name}.{kind}", f"{name}.{kind} must be a non-empty string")
        return GrammarSpec(kind, source)
    known = "text, json_object, json_schema, regex, grammar"
    raise invalid(f"{name}.type", f"{name}.type must be one of {known}")


def speculation_policy(options: SpeculationOptions | None, drafters: tuple[str, ...]) -> SpeculationPolicy:
    if options is None:
        return SpeculationPolicy()
    chosen = tuple(options.drafters) if options.drafters is not None else None
    for name in chosen or ():
        if name not in drafters:
            known = ", ".join(drafters) or "none"
            raise invalid("speculation.drafters", f"there is no drafter {name[:64]!r}; loaded here: {known}")
    nodes = options.max_nodes
    if nodes is not None:
        nodes = _integer("speculation.max_nodes", nodes, 0, MAX_DRAFT_NODES, 0)
    return SpeculationPolicy(mode=options.mode, drafters=chosen, max_nodes=nodes, rule=options.rule)


def sampling_params(
    options: SamplingOptions, *, max_tokens: int, logprobs: int | None, tokenizer: Tokenizer, limits: Limits, drawn_seed: int
) -> SamplingParams:
    """Range-checked options. `max_tokens` comes from token_limit; `drawn_seed` is used when the client gave none."""
    vocab_size = tokenizer.vocab_size
    stop_ids = options.stop_token_ids or []
    if len(stop_ids) > limits.stop_token_ids:
        raise invalid(
            "stop_token_ids", f"stop_token_ids has {len(stop_ids)} entries; at most {limits.stop_token_ids} are allowed"
        )
    top_k = _integer("top_k", options.top_k, -1, MAX_SEED, 0)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_number("temperature", options.temperature, 0.0, 2.0, 1.0),
        top_p=_number("top_p", options.top_p, 0.0, 1.0, 1.0),
        top_k=0 if top_k == -1 or top_k >= vocab_size else top_k,
        min_p=_number("min_p", options.min_p, 0.0, 1.0, 0.0),
        seed=_integer("seed", options.seed, 0, MAX_SEED, drawn_seed),
        repetition_penalty=_repetition(options.repetition_penalty),
        presence_penalty=_number("presence_penalty", options.presence_penalty, -2.0, 2.0, 0.0),
        frequency_penalty=_number("frequency_penalty", options.frequency_penalty, -2.0, 2.0, 0.0),
        logit_bias=_logit_bias(options.logit_bias, vocab_size, limits),
        bad_words=_bad_words(options.bad_words, tokenizer, limits),
        min_tokens=min(_integer("min_tokens", options.min_tokens, 0, MAX_SEED, 0), max_tokens),
        stop_token_ids=_token_ids("stop_token_ids", stop_ids, vocab_size),
        ignore_eos=bool(options.ignore_eos),
        logprobs=logprobs,
        grammar=grammar_spec(options.response_format),
    )


def _repetition(value: float | None) -> float:
    if value is not None and value <= 0:
        raise invalid("repetition_penalty", f"repetition_penalty is {value}; it must be above 0 and at most 10")
    return _number("repetition_penalty", value, 0.0, 10.0, 1.0)


def _bad_words(words: list[str] | None, tokenizer: Tokenizer, limits: Limits) -> tuple[tuple[int, ...], ...]:
    if not words:
        return ()
    if len(words) > limits.bad_words:
        raise invalid("bad_words", f"bad_words has {len(words)} entries; at most {limits.bad_words} are allowed")
    if any(not word or len(word.encode()) > limits.stop_bytes for word in words):
        raise invalid("bad_words", f"every bad word needs 1 to {limits.stop_bytes} bytes")
    # A word is written with and without the space before it, which are different tokens.
    spellings = dict.fromkeys(spelling for word in words for spelling in (word, " " + word))
    return tuple(dict.fromkeys(tuple(tokenizer.encode(spelling)) for spelling in spellings))
