"""A draft tree that grows pass by pass, best first. Knows candidates, chances and prices; refuses to know what scores them.

Shared by drafters that score the children of a node with a pass (draft model, heads): each pass expands the nodes whose
children promise most, and stops when what it would add is not worth its time.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from spec.drafter import UNKNOWN, Budget
from spec.tree import NOTHING, ROOT, DraftProbs, Proposal


class Node:
    """One candidate. `path`: calibrated path chance f. `state`: whatever its drafter knows of it once it has been run."""

    __slots__ = ("confidence", "depth", "expanded", "index", "parent", "path", "probs", "rank", "state", "token")

    def __init__(
        self, index: int, token: int, parent: Node | None, rank: int, confidence: float, path: float, probs: DraftProbs | None
    ) -> None:
        self.index = index
        self.token = token
        self.parent = parent
        self.depth: int = 1 if parent is None else parent.depth + 1
        self.rank = rank
        self.confidence = confidence
        self.path = path
        self.probs = probs
        self.expanded = False
        self.state: Any = None


class Growth:
    """The candidates of one sequence in one step."""

    __slots__ = ("_budget", "_deepest", "_fan", "_hopes", "_name", "_paths", "nodes")

    def __init__(self, name: str, budget: Budget, fan: int, deepest: int | None = None) -> None:
        """`fan`: children a pass scores per node. `deepest`: no node below this depth can be expanded; None = any."""
        self._name = name
        self._budget = budget
        self._fan = fan
        self._deepest = budget.max_depth - 1 if deepest is None else min(deepest, budget.max_depth - 1)
        self._hopes: dict[int, list[float]] = {}  # by depth: chances of children by rank, before their scores are known
        self._paths: list[float] = []  # minus the path chances of all nodes, ascending
        self.nodes: list[Node] = []

    def add_children(
        self, parent: Node | None, token_ids: Sequence[int], confidences: Sequence[float], probs: DraftProbs | None = None
    ) -> None:
        """Children of `parent` (None = the root), best first. Those not worth verifying are left out."""
        budget = self._budget
        depth = 1 if parent is None else parent.depth + 1
        if parent is not None:
            parent.expanded = True
        if depth > budget.max_depth:
            return
        above = 1.0 if parent is None else parent.path
        chance, price, name = budget.chance, budget.price, self._name
        for rank, (token, confidence) in enumerate(zip(token_ids, confidences, strict=True)):
            path = above * min(1.0, chance(name, depth, rank, confidence))
            if path > 0.0 and path >= price:
                self.nodes.append(Node(len(self.nodes), token, parent, rank, confidence, path, probs))
                insort(self._paths, -path)

    def best(self) -> list[Node]:
        """The nodes that would be offered now: the best max_nodes by path chance, parents first among equals."""
        return sorted(self.nodes, key=_best_first)[: self._budget.max_nodes]

    def clear(self) -> None:
        self.nodes.clear()
        self._paths.clear()

    def promise(self, parent: Node | None) -> float:
        """Expected tokens, net of their price, that scoring the children of `parent` would add."""
        budget = self._budget
        depth = 1 if parent is None else parent.depth + 1
        if depth > self._deepest + 1:
            return 0.0
        above = 1.0 if parent is None else parent.path
        prices, last, floor = budget.prices, len(budget.prices) - 1, budget.price
        gain = 0.0
        for rank, hope in enumerate(self._hopes_at(depth)):
            worth = above * hope
            price = floor
            if prices:  # it would come after the nodes that are better
                price = max(price, prices[min(bisect_right(self._paths, -worth) + rank, last)])
            if worth <= price:
                break
            gain += worth - price
        return gain

    def _hopes_at(self, depth: int) -> list[float]:
        found = self._hopes.get(depth)
        if found is None:
            chance, name = self._budget.chance, self._name
            found = self._hopes[depth] = [chance(name, depth, rank, UNKNOWN) for rank in range(self._fan)]
        return found

    def next_to_expand(self, limit: int) -> list[tuple[float, Node]]:
        """Up to `limit` offered nodes without children, most promising first, with their promise (> 0)."""
        deepest = self._deepest
        found = [(self.promise(node), node) for node in self.best() if not node.expanded and node.depth <= deepest]
        found = [item for item in found if item[0] > 0.0]
        found.sort(key=lambda item: (-item[0], item[1].index))
        return found[:limit]

    def proposal(self) -> Proposal:
        chosen = self.best()
        if not chosen:
            return NOTHING
        place = {node.index: i for i, node in enumerate(chosen)}
        return Proposal(
            token_ids=tuple([node.token for node in chosen]),
            parents=tuple([ROOT if node.parent is None else place[node.parent.index] for node in chosen]),
            confidence=tuple([node.confidence for node in chosen]),
            ranks=tuple([node.rank for node in chosen]),
            draft_probs=tuple([node.probs for node in chosen]) if any(node.probs is not None for node in chosen) else None,
        )


def _best_first(node: Node) -> tuple[float, int]:
    return (-node.path, node.index)


class Growing(Protocol):
    """A sequence being drafted for."""

    @property
    def growth(self) -> Growth: ...


G = TypeVar("G", bound=Growing)


def grow(
    growing: Sequence[G],
    width: int,
    price: Callable[[float], float],
    passes: PassClock,
    expand: Callable[[Sequence[tuple[G, Node]]], None],
) -> None:
    """Pass after pass over the most promising nodes of all sequences, as long as one more pays. `width`: nodes of one
    sequence per pass. `expand` runs a pass and adds the children; what it adds none for is not asked about again."""
    while True:
        ranked = [(gain, g, node) for g in growing for gain, node in g.growth.next_to_expand(width)]
        if not ranked:
            return
        if len(growing) > 1:
            ranked.sort(key=_most_promising)
        count = worthwhile([gain for gain, _, _ in ranked], lambda rows: price(passes.estimate(rows)))
        if not count:
            return
        expand([(g, node) for _, g, node in ranked[:count]])


def _most_promising(item: tuple[float, Any, Node]) -> float:
    return -item[0]


def worthwhile(promises: Sequence[float], cost: Callable[[int], float]) -> int:
    """How many of the nodes, most promising first, one pass should expand: the best sum less `cost(count)`; 0 = no pass.

    `cost`: expected tokens that the pass's time would bring otherwise.
    """
    best, best_count, total = 0.0, 0, 0.0
    for count, promise in enumerate(promises, 1):
        total += promise
        net = total - cost(count)
        if net > best:
            best, best_count = net, count
    return best_count


class PassClock:
    """Milliseconds of a pass by its number of rows, as measured: a running mean per power of two. Unmeasured = free."""

    __slots__ = ("_mean",)

    def __init__(self) -> None:
        self._mean: dict[int, float] = {}

    def record(self, rows: int, ms: float) -> None:
        key = (rows - 1).bit_length()
        old = self._mean.get(key)
        # The first pass of a size also pays for warming up, so it is soon outweighed; later outliers count little.
        self._mean[key] = ms if old is None else old + 0.15 * (min(ms, 3.0 * old) - old)

    def estimate(self, rows: int) -> float:
        """Of the nearest size measured, the larger one on a tie; 0 before any measurement."""
        key = (rows - 1).bit_length()
        found = self._mean.get(key)
        if found is not None:
            return found
        if not self._mean:
            return 0.0
        return self._mean[min(self._mean, key=lambda known: (abs(known - key), -known))]
