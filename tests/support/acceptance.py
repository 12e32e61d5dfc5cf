"""Rows for acceptance tests: a view of one sequence, scores from a table of rows, one call per tree."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from spec.accept import Acceptance, ScoredRow, accept
from spec.request import SamplingParams, SpeculationPolicy
from spec.sampling import REFERENCE_OPS, SampleOps
from spec.target import TargetScores
from spec.tree import EMPTY_TREE, DraftTree


@dataclass
class View:
    """spec.drafter.SequenceView over plain fields."""

    token_ids: list[int]
    prompt_len: int = 1
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=100))
    policy: SpeculationPolicy = field(default_factory=SpeculationPolicy)
    grammar: Any = None
    seq_id: int = 0
    page_ids: list[int] = field(default_factory=list)
    tenant: str = ""
    num_kv: int = 0


def view(token_ids: Sequence[int], prompt_len: int = 1, rule: str = "exact", grammar: Any = None, **options: Any) -> View:
    sampling = SamplingParams(**{"max_tokens": 100, "temperature": 0.0, **options})
    return View(list(token_ids), prompt_len, sampling, SpeculationPolicy(rule=rule), grammar)  # type: ignore[arg-type]


def tree(token_ids: Sequence[int], parents: Sequence[int] | None = None, **more: Any) -> DraftTree:
    """A tree; without `parents` a chain."""
    chain = tuple(range(-1, len(token_ids) - 1))
    return DraftTree(tuple(token_ids), chain if parents is None else tuple(parents), **more)


def scores_of(logits: torch.Tensor) -> TargetScores:
    return TargetScores(torch.argmax(logits, dim=-1).to(torch.int32), logits, torch.zeros(logits.shape[0], 4))


def rows_of(table: torch.Tensor, pairs: Sequence[tuple[View, DraftTree]]) -> tuple[list[ScoredRow], TargetScores]:
    """Rows and scores of several sequences; `table` [V, V] gives the logits after each token."""
    rows: list[ScoredRow] = []
    nodes: list[int] = []
    for one, drafted in pairs:
        rows.append(ScoredRow(one, drafted, len(nodes), one.grammar))
        nodes += [one.token_ids[-1], *drafted.token_ids]
    return rows, scores_of(table[torch.tensor(nodes)].clone())


def accept_one(
    table: torch.Tensor,
    one: View,
    drafted: DraftTree = EMPTY_TREE,
    eos_ids: Collection[int] = (),
    ops: SampleOps = REFERENCE_OPS,
) -> Acceptance:
    rows, scores = rows_of(table, [(one, drafted)])
    return accept(rows, scores, eos_ids=eos_ids, ops=ops)[0]


def said(drafted: DraftTree, kept: Acceptance) -> list[int]:
    """The tokens of one acceptance: accepted nodes, then next."""
    return [*(drafted.token_ids[node] for node in kept.path), kept.next_id]


def generate(
    table: torch.Tensor,
    one: View,
    count: int,
    drafts: Any = None,
    eos_ids: Collection[int] = (),
    logprobs: list[Any] | None = None,
) -> list[int]:
    """At least `count` new tokens, cut to `count`; `drafts(view)` gives each step's tree, None means none.

    Advances a copy of the view. `logprobs`, when given, collects one entry per token.
    """
    now = View(**{**one.__dict__, "token_ids": list(one.token_ids)})
    start = len(now.token_ids)
    while len(now.token_ids) < start + count:
        drafted = EMPTY_TREE if drafts is None else drafts(now)
        kept = accept_one(table, now, drafted, eos_ids)
        if kept.error is not None:
            raise kept.error
        if now.grammar is not None:
            now.grammar.advance(said(drafted, kept))
        now.token_ids += said(drafted, kept)
        if logprobs is not None:
            logprobs += kept.logprobs
    if logprobs is not None:
        del logprobs[count:]
    return now.token_ids[start : start + count]
