"""The one pipeline from a node's raw logits to its token or its distribution. Knows options; refuses to know trees and rules.

Order, the same for every node of every row, drafted or not: penalties, logit_bias, bad words, min_tokens, grammar; then
temperature; then min_p, top_k, top_p. Everything before the temperature is edited per row here; the rest is one call of the
`sample` op for all nodes of a wave. A node's result depends on its own logits and path only.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from kernels.sample import reference
from spec import penalties
from spec.errors import RequestError
from spec.penalties import PathEdits
from spec.request import SamplingParams, SpeculationPolicy

SMALLEST_TEMPERATURE = float(np.nextafter(np.float32(1.0) / np.finfo(np.float32).max, np.float32(1.0)))


class SampleOps(Protocol):
    """The `sample` op of kernels/sample, any implementation (a module or an object)."""

    def sample(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        uniforms: torch.Tensor,
    ) -> torch.Tensor: ...

    def probabilities(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
    ) -> torch.Tensor: ...


REFERENCE_OPS: SampleOps = reference
Distribution = np.ndarray[tuple[int], np.dtype[np.float64]]  # [V], sums to 1


class GrammarCursor(Protocol):
    """A grammar's state at one node, moved down one path; see spec.grammar."""

    def mask(self, vocab_size: int) -> torch.Tensor: ...  # bool [V], True = allowed

    @property
    def must_end(self) -> bool: ...  # nothing but an end token is allowed here

    def extend(self, token: int) -> None: ...


class GrammarSource(Protocol):
    """A sequence's committed grammar state; see spec.grammar.GrammarState."""

    def cursor(self) -> GrammarCursor: ...  # a fork at the root; moving it never moves the state

    def advance(self, token_ids: Sequence[int]) -> None: ...  # committed tokens, once each; RequestError if forbidden


@dataclass(frozen=True, slots=True)
class NodeQuery:
    """One node to be decided: its row of the scores, the options, and the edits that hold at this node."""

    score_row: int
    sampling: SamplingParams
    uniform: float = 0.0
    edits: PathEdits | None = None
    grammar: GrammarCursor | None = None


def is_greedy(sampling: SamplingParams) -> bool:
    """True when the options leave only the most probable token: temperature 0 (or too small for float32), or top_k 1."""
    return sampling.temperature < SMALLEST_TEMPERATURE or sampling.top_k == 1


def need_logits(sampling: SamplingParams, policy: SpeculationPolicy) -> bool:
    """False when the decoder's own argmax decides everything (greedy without edits or logprobs, under either rule)."""
    del policy  # at temperature 0 both rules are the greedy walk; sampled rows need logits under both
    return not is_greedy(sampling) or sampling.logprobs is not None or has_edits(sampling)


def has_edits(sampling: SamplingParams) -> bool:
    return penalties.has_edits(sampling) or sampling.grammar is not None


def end_ids(sampling: SamplingParams, eos_ids: Collection[int]) -> frozenset[int]:
    """The tokens that end this request's answer."""
    return frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else frozenset(eos_ids))


def tokens(logits: torch.Tensor, queries: Sequence[NodeQuery], ops: SampleOps) -> list[int | RequestError]:
    """The target's token at each node of `logits` [R, V], or why there is none. One op call."""
    block, faults = _edited(logits, queries)
    good = [i for i, fault in enumerate(faults) if fault is None]
    answers: list[int | RequestError] = [fault if fault is not None else -1 for fault in faults]
    if good:
        uniforms = torch.tensor([queries[i].uniform for i in good], dtype=torch.float64, device=block.device)
        drawn = ops.sample(_rows(block, good), *_filters([queries[i].sampling for i in good], block.device), uniforms)
        for i, token in zip(good, drawn.tolist(), strict=True):
            answers[i] = token
    return answers


def distributions(logits: torch.Tensor, queries: Sequence[NodeQuery], ops: SampleOps) -> list[Distribution | RequestError]:
    """The processed distribution at each node, float64 [V] summing to 1, or why there is none. One op call."""
    block, faults = _edited(logits, queries)
    good = [i for i, fault in enumerate(faults) if fault is None]
    answers: list[Distribution | RequestError] = [fault if fault is not None else np.empty(0) for fault in faults]
    if good:
        probs = ops.probabilities(_rows(block, good), *_filters([queries[i].sampling for i in good], block.device))
        for i, row in zip(good, probs.double().cpu().numpy(), strict=True):
            answers[i] = row / row.sum()
    return answers


def _edited(logits: torch.Tensor, queries: Sequence[NodeQuery]) -> tuple[torch.Tensor, list[RequestError | None]]:
    """The queried rows with every edit before the temperature made, and what is wrong with each. `logits` stays as it is."""
    edited = [i for i, query in enumerate(queries) if query.edits is not None or query.grammar is not None]
    block = _rows(logits, [query.score_row for query in queries])
    if edited and block is logits:
        block = logits.clone()
    raised: dict[int, RequestError] = {}
    for i in edited:
        try:
            _edit(block[i], queries[i])
        except RequestError as error:  # the grammar ran into a limit
            raised[i] = error
    peaks = block.amax(dim=-1).tolist()  # NaN wins a maximum, so one number a row tells every fault
    return block, [raised.get(i) or _fault(peak) for i, peak in enumerate(peaks)]


def _edit(row: torch.Tensor, query: NodeQuery) -> None:
    if query.edits is not None:
        query.edits.apply(row, may_end=query.grammar is not None and query.grammar.must_end)
    if query.grammar is not None:
        row.masked_fill_(~query.grammar.mask(row.shape[0]).to(row.device), penalties.BANNED)


def _fault(peak: float) -> RequestError | None:
    if math.isfinite(peak):
        return None
    if peak == penalties.BANNED:
        return RequestError(
            "the options leave no token to choose: grammar, bad words, logit_bias and min_tokens together ban the whole vocabulary",
            code="no_token_allowed",
        )
    return not_finite()


def not_finite() -> RequestError:
    """The model gave NaN or infinity. Only the request it happened to is ended."""
    return RequestError("the model's scores are not finite numbers for this request", code="scores_not_finite")


def _rows(values: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """The rows in that order: `values` itself when that is what they are (no drafts, nothing refused), else a copy."""
    if rows == list(range(values.shape[0])):
        return values
    return values.index_select(0, torch.tensor(rows, dtype=torch.int64, device=values.device))


def _filters(
    options: Sequence[SamplingParams], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """temperature, top_k, top_p, min_p as the op takes them, [R] each."""
    heat = [0.0 if is_greedy(o) else o.temperature for o in options]
    return (
        torch.tensor(heat, dtype=torch.float32, device=device),
        torch.tensor([max(o.top_k, 0) for o in options], dtype=torch.int32, device=device),
        torch.tensor([o.top_p for o in options], dtype=torch.float32, device=device),
        torch.tensor([o.min_p for o in options], dtype=torch.float32, device=device),
    )
