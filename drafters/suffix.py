"""Copying as a drafter: the last tokens occurred before, so what followed them may follow again. Knows token lists and
tenants; refuses to know tensors, text and the target.

It looks in the request's own prompt and answer, and in a bounded store of recent finished answers of the same tenant, never
of another (a draft's acceptance shows in timing, so a shared store would leak). All occurrences found vote on the
continuation with a weight that grows with the length of their match; where history branches, so does the proposal.
Related: prompt lookup (Saxena 2023), SuffixDecoding (Oliaro et al. 2024).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from heapq import heappop, heappush

import torch

from drafters.suffix_index import LONGEST, RecentTexts, SuffixIndex
from spec.drafter import Budget, Outcome, SequenceView
from spec.tree import NOTHING, ROOT, Proposal

# How often what followed a match of this length followed again, before calibration has a say (index = length).
_BASE = (0.0, 0.22, 0.45, 0.62, 0.75, 0.8, 0.83, 0.86, 0.88, 0.89, 0.9, 0.91, 0.92, 0.925, 0.93, 0.935, 0.94)
_SURE = 0.97
_CHILDREN = 4  # branches of one node at most

Branch = tuple[list[int], int, int, float]  # tokens of a text, next position in it, match length, weight


class _Tracked:
    """What is remembered of one open sequence."""

    __slots__ = ("index", "prompt_len", "tenant")

    def __init__(self, view: SequenceView) -> None:
        self.index = SuffixIndex()
        self.prompt_len = view.prompt_len
        self.tenant = view.tenant


class SuffixDrafter:
    """Costs a few microseconds a step and about one microsecond a token of history, paid when it first drafts."""

    watches = False

    def __init__(
        self,
        name: str = "suffix",
        *,
        candidates: int = 6,
        tenant_tokens: int = 32_768,
        max_tenants: int = 16,
    ) -> None:
        """`candidates`: occurrences that vote, per text store. The answer stores hold at most tenant_tokens * max_tenants."""
        self.name = name
        self._candidates = candidates
        self._tenant_tokens = tenant_tokens
        self._max_tenants = max_tenants
        self._open: dict[int, _Tracked] = {}
        self._answers: OrderedDict[str, RecentTexts] = OrderedDict()

    def open(self, view: SequenceView) -> None:
        self._open[view.seq_id] = _Tracked(view)

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Proposal]:
        return [self._draft(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def observe(self, outcomes: Sequence[Outcome], hidden: torch.Tensor) -> None:
        for outcome in outcomes:
            if outcome.finished:
                self._store(outcome.view)

    def close(self, seq_id: int) -> None:
        self._open.pop(seq_id, None)

    def _store(self, view: SequenceView) -> None:
        answer = view.token_ids[view.prompt_len :]
        if self._tenant_tokens <= 0 or not answer:
            return
        texts = self._answers.get(view.tenant)
        if texts is None:
            if len(self._answers) >= self._max_tenants:
                self._answers.popitem(last=False)
            texts = self._answers[view.tenant] = RecentTexts(self._tenant_tokens)
        self._answers.move_to_end(view.tenant)
        texts.add(answer)

    def _draft(self, view: SequenceView, budget: Budget) -> Proposal:
        if not budget.wants(self.name):
            return NOTHING
        tracked = self._open.get(view.seq_id)
        if tracked is None:
            tracked = self._open[view.seq_id] = _Tracked(view)
        index, tokens = tracked.index, view.token_ids
        if len(index) > len(tokens):
            index = tracked.index = SuffixIndex()
        if len(index) < len(tokens):
            index.extend(tokens[len(index) :])
        shortest = _shortest(self.name, budget)
        if shortest is None:
            return NOTHING
        branches = self._branches(index, tracked.tenant, shortest)
        return _expand(self.name, branches, budget) if branches else NOTHING

    def _branches(self, index: SuffixIndex, tenant: str, shortest: int) -> list[Branch]:
        tail, limit = index.tokens[-LONGEST:], self._candidates
        found = [(index.tokens, at, length, _weight(length)) for at, length in index.matches(tail, limit, shortest)]
        texts = self._answers.get(tenant)
        if texts is not None:
            for other in (texts.newer, texts.older):
                if len(other):
                    hits = other.matches(tail, limit, shortest)
                    found += [(other.tokens, at, length, 0.5 * _weight(length)) for at, length in hits]
        return found


def _shortest(name: str, budget: Budget) -> int | None:
    """The shortest match whose continuation could be worth a node; shorter ones are not looked for. None: no match could."""
    for length in (1, 2, 3, 4, 6, 8, 12, LONGEST):
        if budget.chance(name, 1, 0, _confidence(length, 1.0)) >= budget.price:
            return length
    return None


def _weight(length: int) -> float:
    return 4.0 ** min(length, 8)


def _confidence(length: int, share: float) -> float:
    return (_BASE[length] if length < len(_BASE) else _SURE) * share


def _expand(name: str, branches: list[Branch], budget: Budget) -> Proposal:
    """Best first by path chance until the budget or the price ends it. A node's match is its text's plus its own depth."""
    tokens: list[int] = []
    parents: list[int] = []
    confidences: list[float] = []
    ranks: list[int] = []
    heap: list[tuple[float, int, int, int, int, float, int, list[Branch]]] = []
    chance, price, max_depth = budget.chance, budget.price, budget.max_depth
    order = 0

    def push(members: list[Branch], parent: int, depth: int, path: float) -> None:
        nonlocal order
        groups: dict[int, list[Branch]] = {}
        for branch in members:
            text, at, _, _ = branch
            if at < len(text) and text[at] >= 0:
                groups.setdefault(text[at], []).append(branch)
        if not groups:
            return
        weighed = [(sum([b[3] for b in group]), token, group) for token, group in groups.items()]
        if len(weighed) > 1:
            weighed.sort(key=lambda item: -item[0])
        total = sum([item[0] for item in weighed])
        for rank, (weight, token, group) in enumerate(weighed[:_CHILDREN]):
            length = max([b[2] for b in group]) + depth - 1
            confidence = _confidence(length, weight / total)
            worth = path * chance(name, depth, rank, confidence)
            if worth > 0.0 and worth >= price:
                order += 1
                heappush(heap, (-worth, order, token, parent, rank, confidence, depth, group))

    push(branches, ROOT, 1, 1.0)
    max_nodes = budget.max_nodes
    while heap and len(tokens) < max_nodes:
        worth, _, token, parent, rank, confidence, depth, group = heappop(heap)
        place = len(tokens)
        tokens.append(token)
        parents.append(parent)
        confidences.append(confidence)
        ranks.append(rank)
        if depth >= max_depth:
            continue
        if len(group) > 1 or heap:
            push([(text, at + 1, length, weight) for text, at, length, weight in group], place, depth + 1, -worth)
            continue
        text, at, length, _ = group[0]  # one occurrence is left and nothing competes: copy on while it is worth it
        path = -worth
        for token in text[at + 1 : at + 1 + min(max_nodes - len(tokens), max_depth - depth)]:
            depth += 1
            confidence = _confidence(length + depth - 1, 1.0)
            path *= chance(name, depth, 0, confidence)
            if token < 0 or not path > 0.0 or path < price:
                break
            parents.append(len(tokens) - 1)
            tokens.append(token)
            confidences.append(confidence)
            ranks.append(0)
    if not tokens:
        return NOTHING
    return Proposal(tuple(tokens), tuple(parents), tuple(confidences), tuple(ranks))
