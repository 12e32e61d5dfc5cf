"""Copying as a drafter: the last tokens occurred before, so what followed them may follow again. Knows token lists and
tenants; refuses to know tensors, text and the target.

It looks in the request's own prompt and answer, and in a bounded store of recent finished answers of the same tenant, never
of another (a draft's acceptance shows in timing, so a shared store would leak). Answers drawn under the rejection rule are not
kept: were the request repeated with its seed, drafts made of them would be tested with the very noise they were drawn with.
All occurrences found vote on the continuation with a weight that grows with the length of their match; where history branches, so
does the proposal.
Related: prompt lookup (Saxena 2023), SuffixDecoding (Oliaro et al. 2024).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import torch

from drafters.suffix_index import RecentTexts
from kernels.suffix_index import HEAVIEST, LONGEST, Index, LookRow, SuffixOps, Texts, reference
from spec.calibration import BINS, EDGES
from spec.drafter import Budget, Outcome, SequenceView
from spec.sampling import is_greedy
from spec.tree import NOTHING, ROOT, Proposal

# How often what followed a match of this length followed again, before calibration has a say (index = length).
_BASE = (0.0, 0.22, 0.45, 0.62, 0.75, 0.8, 0.83, 0.86, 0.88, 0.89, 0.9, 0.91, 0.92, 0.925, 0.93, 0.935, 0.94)
_SURE = 0.97
_SCORES = (*_BASE, *[_SURE] * (LONGEST + 1 - len(_BASE)))
_ELSEWHERE = 0.5  # what an occurrence in another text weighs
_CHILDREN = 4  # branches of one node at most
_LOOK_ANEW = 64  # tokens for which a floor holds at most
_FLOOR_HOLDS = 24  # tokens for which it is not worked out again
_TOGETHER = 8  # tokens that a sequence may be looked at anew too early, with another one

Branch = tuple[list[int], int, int, float]  # tokens of a text, next position in it, match length, weight


class _Floor(NamedTuple):
    """What a continuation has to show for asking about it to pay: the shortest match, and the least score in millionths."""

    shortest: int
    least: int


_ANYTHING, _NEVER = _Floor(1, 0), _Floor(LONGEST + 1, 0)


def _floor(name: str, budget: Budget) -> _Floor:
    """What this budget lets through as a first node."""
    chance, entry = budget.chance, budget.entry
    if not budget.wants(name) or chance(name, 1, 0, 1.0) < entry:
        return _NEVER
    lowest = BINS - 1
    while lowest and chance(name, 1, 0, EDGES[lowest - 2] if lowest > 1 else 0.0) >= entry:
        lowest -= 1
    score = EDGES[lowest - 1] if lowest else 0.0
    return _Floor(next((n for n, most in enumerate(_SCORES) if n and most >= score), LONGEST), int(score * 1e6))


class _Tracked:
    """What is remembered of one open sequence."""

    __slots__ = ("due", "floor", "index", "known", "prompt_len", "size", "tenant")

    def __init__(self, view: SequenceView, index: Index) -> None:
        self.index = index
        self.prompt_len = view.prompt_len
        self.tenant = view.tenant
        self.floor = _ANYTHING
        self.size = -1  # power of two of sequences beside which it holds
        self.due = 0  # tokens of the sequence until which it holds
        self.known = False  # it was worked out for this sequence


class SuffixDrafter:
    """Costs a few microseconds a step and about one microsecond a token of history, paid when it first drafts."""

    watches = False
    sure = True

    def __init__(
        self,
        name: str = "suffix",
        *,
        candidates: int = 6,
        tenant_tokens: int = 32_768,
        max_tenants: int = 16,
        ops: SuffixOps = reference,
    ) -> None:
        """`candidates`: occurrences that vote, per text store. The answer stores hold at most tenant_tokens * max_tenants."""
        self.name = name
        self._looker = ops.looker(candidates, _ELSEWHERE, _SCORES)
        self._tenant_tokens = tenant_tokens
        self._max_tenants = max_tenants
        self._open: dict[int, _Tracked] = {}
        self._answers: OrderedDict[str, RecentTexts] = OrderedDict()
        self._ops = ops
        # The latest floor of a sequence of which nothing was known yet, by power of two of sequences: a newcomer's until it has its
        # own. (One that drafts were wrong on has a floor that newcomers must not start from.)
        self._usual: dict[int, _Floor] = {}
        self._looked: list[int] = []  # sequences of the latest look at all of them
        self._awake: list[int] = []  # places of those that something could be found for until the first has so many tokens:
        self._until = 0

    def open(self, view: SequenceView) -> None:
        self._open[view.seq_id] = _Tracked(view, self._ops.index())
        self._until = 0

    def hopes(self, views: Sequence[SequenceView]) -> list[int]:
        """Whether the sequence's last tokens occurred before, and what followed may be worth its price. One call for all of them;
        now and then anything that matches is hope enough, so that the price is asked for again. Those for which nothing could be
        worth it are left out until then: under a load that is nearly all of them."""
        if [view.seq_id for view in views] != self._looked or len(views[0].token_ids) >= self._until:
            return self._look_at_all(views)
        awake = self._awake
        if not awake:
            return []
        found = self._looker.look([views[at].token_ids for at in awake])
        return found if len(awake) == len(views) else [awake[i] for i in found]

    def _look_at_all(self, views: Sequence[SequenceView]) -> list[int]:
        size = len(views).bit_length()
        rows: list[LookRow] = []
        floors: list[_Floor] = []
        soonest = _LOOK_ANEW
        for view in views:
            tracked, now = self._track(view), len(view.token_ids)
            floor = tracked.floor
            if tracked.size != size:  # the price of a node goes with the load
                tracked.size, tracked.due = size, now + _LOOK_ANEW
                floor = tracked.floor = self._usual.get(size, _ANYTHING)
            elif tracked.due < now + _TOGETHER:
                floor, tracked.due = _ANYTHING, now + _LOOK_ANEW - _FLOOR_HOLDS
            soonest = min(soonest, tracked.due - now)
            texts = self._answers.get(tracked.tenant)
            newer, older = (None, None) if texts is None else (texts.newer, texts.older)
            rows.append((tracked.index, newer, older, floor.shortest, floor.least))
            floors.append(tracked.floor)
        self._looker.watch(rows)
        found = self._looker.look([view.token_ids for view in views])
        self._looked = [view.seq_id for view in views]
        self._awake = [at for at, floor in enumerate(floors) if floor is not _NEVER]
        self._until = len(views[0].token_ids) + soonest
        self._looker.watch([(*rows[at][:3], floors[at].shortest, floors[at].least) for at in self._awake])
        return found

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Proposal]:
        for view, budget in zip(views, budgets, strict=True):
            tracked = self._track(view)
            now = len(view.token_ids)
            if tracked.floor is not _ANYTHING and tracked.due > now + _LOOK_ANEW - _FLOOR_HOLDS:
                continue
            tracked.due = now + _LOOK_ANEW
            tracked.floor = _floor(self.name, budget)
            self._until = 0  # who is awake may have changed
            if not tracked.known:
                tracked.known, self._usual[tracked.size] = True, tracked.floor
        return [self._draft(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def observe(self, outcomes: Sequence[Outcome], hidden: torch.Tensor) -> None:
        for outcome in outcomes:
            if outcome.finished:
                self._store(outcome.view)

    def close(self, seq_id: int) -> None:
        self._open.pop(seq_id, None)

    def _store(self, view: SequenceView) -> None:
        answer = view.token_ids[view.prompt_len :]
        drawn_by_rejection = view.policy.rule == "rejection" and not is_greedy(view.sampling)
        if self._tenant_tokens <= 0 or not answer or drawn_by_rejection:
            return
        texts = self._answers.get(view.tenant)
        if texts is None:
            if len(self._answers) >= self._max_tenants:
                self._answers.popitem(last=False)
            texts = self._answers[view.tenant] = RecentTexts(self._tenant_tokens, self._ops.index)
        self._answers.move_to_end(view.tenant)
        texts.add(answer)
        self._until = 0  # looks go on in what it is kept in now

    def _draft(self, view: SequenceView, budget: Budget) -> Proposal:
        if not budget.wants(self.name):
            return NOTHING
        shortest = _shortest(self.name, budget)
        if shortest is None:
            return NOTHING
        tracked = self._track(view)
        index, tokens = tracked.index, view.token_ids
        if len(index.tokens) < len(tokens):
            index.extend(tokens[len(index.tokens) :])
        branches = self._branches(index, tracked.tenant, shortest)
        return _expand(self.name, branches, budget) if branches else NOTHING

    def _track(self, view: SequenceView) -> _Tracked:
        tracked = self._open.get(view.seq_id)
        if tracked is None:
            tracked = self._open[view.seq_id] = _Tracked(view, self._ops.index())
        if len(tracked.index.tokens) > len(view.token_ids):  # the text was cut: what is known of it is of no use
            tracked.index, tracked.due = self._ops.index(), 0
            self._until = 0
        return tracked

    def _branches(self, index: Index, tenant: str, shortest: int) -> list[Branch]:
        texts = self._answers.get(tenant)
        lists: Texts = (index, None, None) if texts is None else (index, texts.newer, texts.older)
        found: list[Branch] = []
        for which, at, length in self._looker.find(lists, shortest):
            text = lists[which]
            if text is not None:
                found.append((text.tokens, at, length, (_ELSEWHERE if which else 1.0) * _weight(length)))
        return found


def _shortest(name: str, budget: Budget) -> int | None:
    """The shortest match whose continuation could be worth a node; shorter ones are not looked for. None: no match could."""
    for length in (1, 2, 3, 4, 6, 8, 12, LONGEST):
        if budget.chance(name, 1, 0, _confidence(length, 1.0)) >= budget.price:
            return length
    return None


def _weight(length: int) -> float:
    return 4.0 ** min(length, HEAVIEST)


def _confidence(length: int, share: float) -> float:
    return (_BASE[length] if length < len(_BASE) else _SURE) * share


def _expand(name: str, branches: list[Branch], budget: Budget) -> Proposal:
    """Best first by path chance until the budget or the price ends it. A node's match is its text's plus its own depth.

    As far as all occurrences agree that is a chain, copied without further ado."""
    tokens: list[int] = []
    confidences: list[float] = []
    chance, price = budget.chance, budget.price
    path, depth, most = 1.0, 0, min(budget.max_nodes, budget.max_depth)
    text, at, longest, _ = branches[0]
    alone = len(branches) == 1
    while depth < most:
        if alone:
            token = text[at + depth] if at + depth < len(text) else -1
        else:
            branches = [b for b in branches if b[1] + depth < len(b[0]) and b[0][b[1] + depth] >= 0]
            said = {b[0][b[1] + depth] for b in branches}
            if len(said) > 1:
                return _branch(name, branches, budget, tokens, confidences, path)
            token = said.pop() if said else -1
            longest = max([b[2] for b in branches], default=0)
        if token < 0:
            break
        confidence = _SCORES[min(longest + depth, LONGEST)]
        path *= chance(name, depth + 1, 0, confidence)
        if not path > 0.0 or path < price:
            break
        depth += 1
        tokens.append(token)
        confidences.append(confidence)
    if not depth:
        return NOTHING
    return Proposal(tuple(tokens), tuple(range(ROOT, depth - 1)), tuple(confidences), (0,) * depth)


def _branch(
    name: str, branches: list[Branch], budget: Budget, tokens: list[int], confidences: list[float], path: float
) -> Proposal:
    """The rest of a tree whose trunk is `tokens`, of chance `path`: what may follow has more than one opinion."""
    trunk = len(tokens)
    parents = list(range(ROOT, trunk - 1))
    ranks = [0] * trunk
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

    push([(text, at + trunk, length, weight) for text, at, length, weight in branches], trunk - 1, trunk + 1, path)
    max_nodes = budget.max_nodes
    while heap and len(tokens) < max_nodes:
        worth, _, token, parent, rank, confidence, depth, group = heappop(heap)
        place = len(tokens)
        tokens.append(token)
        parents.append(parent)
        confidences.append(confidence)
        ranks.append(rank)
        if depth < max_depth:
            push([(text, at + 1, length, weight) for text, at, length, weight in group], place, depth + 1, -worth)
    if not tokens:
        return NOTHING
    return Proposal(tuple(tokens), tuple(parents), tuple(confidences), tuple(ranks))
