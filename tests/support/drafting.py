"""What a drafter meets in an engine, without one: views, budgets, page lists, and a greedy verifier for trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from spec.drafter import Budget, Drafter, Outcome
from spec.merge import merge
from spec.request import SamplingParams, SpeculationPolicy
from spec.tree import DraftTree, Proposal

GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)
AUTO = SpeculationPolicy()


@dataclass
class View:
    """A SequenceView of plain lists."""

    seq_id: int
    token_ids: list[int]
    prompt_len: int = 0
    page_ids: list[int] = field(default_factory=list)
    tenant: str = ""
    sampling: SamplingParams = GREEDY
    policy: SpeculationPolicy = AUTO
    grammar: object | None = None

    @property
    def num_kv(self) -> int:
        return len(self.token_ids) - 1


class Pool:
    """A page pool as drafters see it: generations; plus handing out and taking back whole lists."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.generations = [0] * pages
        self.free = list(range(pages - 1, -1, -1))

    def reserve(self, view: View, tokens: int) -> None:
        """Give the view pages for `tokens` positions, or take back the surplus."""
        want = -(-tokens // self.page_size)
        while len(view.page_ids) < want:
            page = self.free.pop()
            self.generations[page] += 1
            view.page_ids.append(page)
        while len(view.page_ids) > want:
            self.free.append(view.page_ids.pop())


def raw_chance(drafter: str, depth: int, rank: int, confidence: float) -> float:
    return 0.5 if confidence < 0 else confidence


def budget(
    nodes: int = 8,
    depth: int = 8,
    price: float = 0.0,
    pass_price: Callable[[float], float] = lambda ms: 0.0,
    chance: Callable[[str, int, int, float], float] = raw_chance,
) -> Budget:
    return Budget(max_nodes=nodes, max_depth=depth, price=price, pass_price=pass_price, chance=chance)


def paths(proposal: Proposal | DraftTree) -> list[tuple[int, ...]]:
    """The token path from the root to every node."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(proposal.token_ids, proposal.parents, strict=True):
        found.append((found[parent] if parent >= 0 else ()) + (token,))
    return found


def accept_along(tree: DraftTree, truth: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Greedy acceptance when the target's text goes on with `truth`: (path, next token)."""
    path: list[int] = []
    node = -1
    while True:
        wanted = truth[len(path)]
        child = next((i for i, p in enumerate(tree.parents) if p == node and tree.token_ids[i] == wanted), None)
        if child is None:
            return tuple(path), wanted
        path.append(child)
        node = child


def drive(
    drafter: Drafter,
    views: Sequence[View],
    texts: Sequence[Sequence[int]],
    pool: Pool,
    *,
    nodes: int = 8,
    hidden: Callable[[View], torch.Tensor] | None = None,
    check: Callable[[View, Proposal], None] | None = None,
) -> list[int]:
    """Decode every view along its scripted text, one drafter, until the texts end. Returns target passes per view.

    texts[i] holds view i's whole token sequence, prompt included.
    """
    passes = [0] * len(views)
    for view in views:
        pool.reserve(view, len(view.token_ids) - 1)
        drafter.open(view)
    while True:
        live = [i for i, view in enumerate(views) if len(view.token_ids) < len(texts[i])]
        if not live:
            return passes
        budgets = []
        for i in live:
            room = min(nodes, len(texts[i]) - len(views[i].token_ids) - 1)
            pool.reserve(views[i], len(views[i].token_ids) + room)
            budgets.append(budget(nodes=room, depth=room))
        proposals = drafter.propose([views[i] for i in live], budgets)
        outcomes = []
        for i, allowed, proposal in zip(live, budgets, proposals, strict=True):
            view = views[i]
            if check is not None:
                check(view, proposal)
            tree = merge(
                [(drafter.name, proposal)], raw_chance, price=0.0, max_nodes=allowed.max_nodes, max_depth=allowed.max_depth
            )
            path, next_id = accept_along(tree, texts[i][len(view.token_ids) :])
            view.token_ids += [tree.token_ids[node] for node in path] + [next_id]
            passes[i] += 1
            done = len(view.token_ids) == len(texts[i])
            outcomes.append(Outcome(view, tree, path, next_id, 0, 1 + len(tree), done))
        rows = [torch.zeros(0, 1) if hidden is None else hidden(outcome.view) for outcome in outcomes]
        drafter.observe(outcomes, torch.cat(rows) if rows else torch.zeros(0, 1))
        for i in live:
            pool.reserve(views[i], len(views[i].token_ids) - 1)
