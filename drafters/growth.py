"""A draft tree that grows pass by pass, best first. Knows candidates, chances and prices; refuses to know what scores them.

Shared by drafters that score the children of a node with a pass (draft model, heads): each pass expands the nodes whose
children promise most, and stops when what it would add is not worth its time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spec.drafter import UNKNOWN, Budget
from spec.tree import NOTHING, ROOT, DraftProbs, Proposal


class Node:
    """One candidate. `path`: calibrated path chance f."""

    __slots__ = ("confidence", "depth", "expanded", "index", "parent", "path", "probs", "rank", "token")

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


class Growth:
    """The candidates of one sequence in one step."""

    __slots__ = ("_budget", "_fan", "_name", "nodes")

    def __init__(self, name: str, budget: Budget, fan: int) -> None:
        """`fan`: children a pass scores per node."""
        self._name = name
        self._budget = budget
        self._fan = fan
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
        for rank, (token, confidence) in enumerate(zip(token_ids, confidences, strict=True)):
            path = above * min(1.0, budget.chance(self._name, depth, rank, confidence))
            if path > 0.0 and path >= budget.price:
                self.nodes.append(Node(len(self.nodes), token, parent, rank, confidence, path, probs))

    def best(self) -> list[Node]:
        """The nodes that would be offered now: the best max_nodes by path chance, parents first among equals."""
        return sorted(self.nodes, key=lambda node: (-node.path, node.index))[: self._budget.max_nodes]

    def promise(self, parent: Node | None) -> float:
        """Expected tokens, net of their price, that scoring the children of `parent` would add."""
        budget = self._budget
        depth = 1 if parent is None else parent.depth + 1
        if depth > budget.max_depth:
            return 0.0
        above = 1.0 if parent is None else parent.path
        gain = 0.0
        for rank in range(self._fan):
            worth = above * budget.chance(self._name, depth, rank, UNKNOWN)
            price = budget.price
            if budget.prices:  # it would come after the nodes that are better
                better = sum([1 for node in self.nodes if node.path >= worth]) + rank
                price = max(price, budget.prices[min(better, len(budget.prices) - 1)])
            if worth <= price:
                break
            gain += worth - price
        return gain

    def next_to_expand(self, limit: int) -> list[tuple[float, Node]]:
        """Up to `limit` offered nodes without children, most promising first, with their promise (> 0)."""
        found = [(self.promise(node), node) for node in self.best() if not node.expanded]
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


def worthwhile(promises: Sequence[float], cost: Callable[[int], float]) -> int:
    """How many of the nodes, most promising first, one pass should expand: the best sum less `cost(count)`; 0 = no pass.

    `cost`: expected tokens that the pass's time would bring otherwise.
    """
    best, best_count, total = 0.0, 0, 0.0
    for count, promise in enumerate(promises, 1):
        total += promise
        if total - cost(count) > best:
            best, best_count = total - cost(count), count
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
        if not self._mean:
            return 0.0
        key = (rows - 1).bit_length()
        return self._mean[min(self._mean, key=lambda known: (abs(known - key), -known))]
