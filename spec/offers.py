"""All that was offered in one step, best first over all requests, and the trees made of the first so many nodes. Knows path chances;
refuses to know what a node costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import merge as merge_sorted

from spec.drafter import Budget
from spec.merge import Candidate, Candidates, Chain, as_chain, build, gather
from spec.tree import EMPTY_TREE, DraftTree, Proposal

Ranked = tuple[float, int, Candidate | None]  # path chance, whose it is, the node; None = the next one of a chain


class Offers:
    """`order`: what may be taken, best first. `drawn`: nodes that are in already: draws, which are taken by the price set before they
    were drawn; anything later would look at them."""

    __slots__ = ("_chosen", "_found", "_lengths", "drawn", "order")

    def __init__(
        self, budgets: Sequence[Budget], proposals: Mapping[str, Sequence[Proposal]], vocab_size: int | None = None
    ) -> None:
        self._found = [_joined(i, budget, proposals, vocab_size) for i, budget in enumerate(budgets)]
        self._chosen: list[list[Candidate]] = [[] for _ in budgets]
        self._lengths = [0] * len(budgets)  # of chains
        self.drawn = 0
        ranked: list[list[Ranked]] = []
        for i, found in enumerate(self._found):
            if found is None:
                continue
            most, price = budgets[i].max_nodes, budgets[i].price
            if isinstance(found, Chain):
                ranked.append([(path, i, None) for path in found.paths[:most]])
                continue
            best = found.best_first()[:most]
            if found.sampled:
                self._chosen[i] = [node for node in best if node.path >= price]
                self.drawn += len(self._chosen[i])
            else:
                ranked.append([(node.path, i, node) for node in best])
        self.order: list[Ranked] = ranked[0] if len(ranked) == 1 else list(merge_sorted(*ranked, key=_falling))

    def take(self, count: int) -> None:
        """The first `count` of `order`."""
        for _, i, node in self.order[:count]:
            if node is None:
                self._lengths[i] += 1
            else:
                self._chosen[i].append(node)

    def shares(self) -> list[tuple[str, float, int]]:
        """Of what was taken: the credited drafter, tokens expected of its nodes, how many they are."""
        found: list[tuple[str, float, int]] = []
        for offer, length, nodes in zip(self._found, self._lengths, self._chosen, strict=True):
            if length and isinstance(offer, Chain):
                found.append((offer.name, sum(offer.paths[:length]), length))
            found += [(node.sources[0], node.path, 1) for node in nodes]
        return found

    def trees(self) -> list[DraftTree]:
        """One a request."""
        trees: list[DraftTree] = []
        for found, nodes, length in zip(self._found, self._chosen, self._lengths, strict=True):
            if isinstance(found, Chain):
                trees.append(found.tree(length) if length else EMPTY_TREE)
            else:
                trees.append(build(found, nodes) if found is not None and nodes else EMPTY_TREE)
        return trees


def _joined(
    i: int, budget: Budget, proposals: Mapping[str, Sequence[Proposal]], vocab_size: int | None
) -> Candidates | Chain | None:
    offers = [(name, per_view[i]) for name, per_view in proposals.items() if per_view[i].token_ids]
    if not offers or budget.max_nodes <= 0:
        return None
    if len(offers) == 1:
        name, proposal = offers[0]
        chain = as_chain(name, proposal, budget.chance, max_depth=budget.max_depth, vocab_size=vocab_size)
        if chain is not None:
            return chain
    return gather(offers, budget.chance, max_depth=budget.max_depth, vocab_size=vocab_size)


def _falling(item: Ranked) -> float:
    return -item[0]
