"""The JSON objects that every endpoint shares: usage, speculation, timings, log probabilities. Knows names and rounding only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from server.generation import Figures
from server.ports import Tokenizer
from spec.request import PHASES, TokenLogprob

LOWEST_LOGPROB = -9999.0  # what stands for minus infinity, which JSON cannot carry


def usage(figures: Sequence[Figures], n: int = 1) -> dict[str, Any]:
    """Sums over the choices of one request; a prompt counts once for the `n` choices that share it."""
    prompts = figures[::n]
    prompt = sum(f.prompt_tokens for f in prompts)
    completion = sum(f.completion_tokens for f in figures)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(f.cached_tokens for f in prompts)},
        "completion_tokens_details": {"reasoning_tokens": sum(f.reasoning_tokens for f in figures)},
    }


def speculation(figures: Sequence[Figures]) -> dict[str, Any]:
    """What drafting did for these choices. `acceptance_length`: mean tokens per target pass, the prompt's own pass left out."""
    steps = sum(f.steps for f in figures)
    passes = sum(max(0, f.steps - 1) for f in figures)
    tokens = sum(f.completion_tokens - f.first_step_tokens for f in figures)
    names = sorted({name for f in figures for name in f.by_drafter})
    return {
        "drafted": sum(f.drafted for f in figures),
        "accepted": sum(f.accepted for f in figures),
        "steps": steps,
        "acceptance_length": round(tokens / passes, 4) if passes else 0.0,
        "drafts": sum(f.drafts for f in figures),
        "accepted_per_position": _sums([f.accepted_per_position for f in figures]),
        "judged_per_position": _sums([f.judged_per_position for f in figures]),
        "by_drafter": {
            name: dict(
                zip(
                    ("drafted", "accepted"),
                    (sum(f.by_drafter.get(name, (0, 0))[k] for f in figures) for k in (0, 1)),
                    strict=True,
                )
            )
            for name in names
        },
    }


def _sums(lists: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*lists, fillvalue=0)]


def timings(figures: Sequence[Figures]) -> dict[str, Any]:
    """Milliseconds from the request's arrival; the rate is of tokens after the first, over the slowest choice. `phases_ms` are those
    of the choice whose steps took longest: choices share steps, so their sum would count time twice."""
    phases = max((f.phase_seconds for f in figures), key=sum)
    decode = max(f.decode_seconds for f in figures)
    tokens = sum(max(0, f.completion_tokens - 1) for f in figures)
    return {
        "queue_ms": round(figures[0].queue_seconds * 1e3, 3),
        "ttft_ms": round(figures[0].ttft_seconds * 1e3, 3),
        "decode_ms": round(decode * 1e3, 3),
        "tokens_per_second": round(tokens / decode, 2) if decode > 0 else 0.0,
        "phases_ms": {name: round(seconds * 1e3, 3) for name, seconds in zip(PHASES, phases, strict=True)},
    }


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {"token": data.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(data)}


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], top: int
) -> list[dict[str, Any]]:
    """OpenAI's `content` list: one entry per generated token with its bytes and the `top` best alternatives."""
    return [
        {
            **_entry(tokenizer, token_id, logprob.chosen),
            "top_logprobs": [_entry(tokenizer, other, value) for other, value in logprob.top[:top]],
        }
        for token_id, logprob in zip(token_ids, logprobs, strict=False)
    ]


def completion_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], top: int, offset: int
) -> dict[str, Any]:
    """The older shape of /v1/completions. `offset` is where the first token's text starts in the choice's text. A token
    that nothing comes before (the first one of a prompt) has no log probability: None, which becomes null."""
    result: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [] if top else None, "text_offset": []}
    for token_id, logprob in zip(token_ids, logprobs, strict=False):
        if logprob is None:
            text = tokenizer.token_bytes(token_id).decode("utf-8", "replace")
            for name, value in (("tokens", text), ("token_logprobs", None), ("text_offset", offset)):
                result[name].append(value)
            if top:
                result["top_logprobs"].append(None)
            offset += len(text)
            continue
        entry = _entry(tokenizer, token_id, logprob.chosen)
        result["tokens"].append(entry["token"])
        result["token_logprobs"].append(entry["logprob"])
        result["text_offset"].append(offset)
        if top:
            best = {_entry(tokenizer, other, value)["token"]: finite(value) for other, value in logprob.top[:top]}
            result["top_logprobs"].append(best)
        offset += len(entry["token"])
    return result
