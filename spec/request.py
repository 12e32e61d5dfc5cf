"""What a caller asks of the engine and what the engine tells back. Frozen wire types; token ids only, no text.

They are msgspec structs, so the same objects cross the engine process's socket.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Rule = Literal["exact", "rejection"]
FinishReason = Literal["stop", "length", "cancelled", "error"]
PHASES = ("draft", "verify", "accept", "commit", "other")  # of a step, in the order in which its seconds are told


class GrammarSpec(msgspec.Struct, frozen=True):
    """A constraint on the answer's text. `source` is a JSON schema, a regular expression or a Lark grammar."""

    kind: Literal["json_object", "json_schema", "regex", "grammar"]
    source: str = ""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Every option that changes which token is chosen, already range-checked by the server.

    Order of application: penalties, bias, bad words, min_tokens and grammar masks; temperature; min_p; top_k; top_p.
    """

    max_tokens: int  # 0 = only compute the prompt
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    seed: int = 0  # always set by the server (drawn when the client gave none), so that any answer can be resumed
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own end tokens
    ignore_eos: bool = False
    logprobs: int | None = None  # None = off, k = the chosen token's and the k best raw log probabilities
    grammar: GrammarSpec | None = None
    prompt_logprobs: int | None = None  # the same of every prompt token but the first, which nothing comes before


class SpeculationPolicy(msgspec.Struct, frozen=True, omit_defaults=True):
    mode: Literal["auto", "off"] = "auto"
    drafters: tuple[str, ...] | None = None  # None = all that are loaded
    max_nodes: int | None = None  # drafted nodes a step, root not counted
    rule: Rule = "exact"


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sequence to continue. `generated_ids` are tokens already delivered (a resumed answer); they count as output."""

    id: int  # unique for the engine's life
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    speculation: SpeculationPolicy = SpeculationPolicy()
    tenant: str = ""  # salts the prefix cache, keys fair sharing
    generated_ids: tuple[int, ...] = ()
    arrival: float = 0.0  # seconds, time.time() at the server


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Raw log probabilities (natural log) at one position: a generated token's, or a prompt token's."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log probability), best first


class StepCounts(msgspec.Struct, frozen=True, array_like=True):
    """One sequence's share of one step. Delivered tokens only."""

    drafted: int = 0
    accepted: int = 0
    drafted_by: dict[str, int] = {}
    accepted_by: dict[str, int] = {}
    judged: int = 0  # positions at which the target's token was held against drafts: the accepted, and the refused one if any


class TokenEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """New tokens of one request from one step; the last one carries `finish_reason`.

    `sources[i]` names the drafter whose node became token i, "" when the target added it itself. A stop or end token that
    ends the answer is counted in `token_ids` (it was generated) and marked by `stop_token`.
    """

    request_id: int
    token_ids: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    counts: StepCounts = StepCounts()
    started: bool = False  # first event of the request; `cached_tokens` and `queue_seconds` are set
    cached_tokens: int = 0
    queue_seconds: float = 0.0
    finish_reason: FinishReason | None = None
    stop_token: int | None = None  # the end or stop token that ended the answer; it is the last of token_ids
    error: str | None = None  # with finish_reason "error"
    error_code: str | None = None
    error_param: str | None = None  # the request's field at fault, when there is one
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # with the first event, of the prompt tokens 1, 2, ...
