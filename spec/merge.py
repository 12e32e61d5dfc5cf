"""One tree from the proposals of several drafters. Knows tokens, parents and chances; refuses to know prices over
several requests, tensors, and which drafter is which.

Gathering joins proposals by prefix: the same token under the same parent is one node, its estimate is the largest of its
drafters' calibrated chances, and every drafter that named it is remembered. f(v), the path chance, is the product of the
chances from the root to v, which is the expected number of tokens gained by verifying v. Because f never grows towards
the leaves, the nodes sorted by f form a valid tree at every cut, so selection needs no search.

Drawn nodes (rejection rule) must be chosen without looking at what was drawn, or they are no longer draws from q:
* a drawn node is chosen by its own estimate only, which its drafter computes from the parent; an agreeing deterministic
  proposal never raises it;
* the draws of one tree are one drafter's chain, ahead of their deterministic siblings. A deterministic twin of a draw is
  the same node: after the draw was rejected its token has no mass left, so trying it again could change nothing;
* chains of draws are verified as a block, other trees node by node, and which of the two happens must not depend on the
  draws either: when deterministic nodes are offered too, the tree is never a chain (`_build_drawn`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from spec.calibration import confidence_bin
from spec.tree import EMPTY_TREE, MAX_NODES, ROOT, DraftProbs, DraftTree, Proposal

Chance = Callable[[str, int, int, float], float]
Offer = tuple[str, Proposal]
_STRAIGHT = tuple(range(ROOT, MAX_NODES))  # parents of a chain
_IN_VAIN = 99  # rank of a node that cannot be accepted, so that its rejections are counted apart


class Candidate:
    """One node offered to a request: a token under a parent candidate. `path` is f, product of chances from the root.

    It knows its parent and not its children: links both ways would be cycles, left to the garbage collector in every step.
    """

    __slots__ = ("chance", "depth", "index", "origins", "parent", "path", "probs", "sources", "token")

    def __init__(self, index: int, token: int, parent: Candidate | None, depth: int, probs: DraftProbs | None) -> None:
        self.index = index
        self.token = token
        self.parent = parent
        self.depth = depth
        self.chance = 0.0
        self.path = 0.0
        self.sources: list[str] = []
        self.origins: list[tuple[int, int]] = []
        self.probs = probs


class Candidates:
    """All nodes offered to one request in one step, joined by prefix. `nodes` lists a parent before its children; `at` finds
    one by its parent's index (ROOT for the first) and its key (the token, or -1 - token for a draw)."""

    __slots__ = ("at", "nodes", "sampled")

    def __init__(self) -> None:
        self.nodes: list[Candidate] = []
        self.at: dict[tuple[int, int], Candidate] = {}
        self.sampled = False

    def best_first(self) -> list[Candidate]:
        """Nodes by falling path chance; a parent comes before its children, ties in the order offered."""
        nodes = self.nodes
        if len(nodes) < 2:
            return nodes
        return sorted(nodes, key=_by_path)


def _by_path(node: Candidate) -> tuple[float, int]:
    return (-node.path, node.index)


def _by_chance(node: Candidate) -> tuple[float, int]:
    return (-node.chance, node.index)


def well_formed(proposal: Proposal, vocab_size: int | None = None) -> bool:
    """False for a proposal no tree can be made of; a drafter in trouble costs its nodes, never the step."""
    tokens, parents = proposal.token_ids, proposal.parents
    count = len(tokens)
    if not len(parents) == len(proposal.confidence) == len(proposal.ranks) == count:
        return False
    if proposal.draft_probs is not None and len(proposal.draft_probs) != count:
        return False
    if not count:
        return True
    if min(tokens) < 0 or (vocab_size is not None and max(tokens) >= vocab_size):
        return False
    return all(ROOT <= parent < i for i, parent in enumerate(parents))


def gather(offers: Iterable[Offer], chance: Chance, *, max_depth: int, vocab_size: int | None = None) -> Candidates:
    """Join proposals by prefix. `offers` are (drafter name, proposal) in a fixed order; malformed proposals are left out.

    Nodes deeper than `max_depth` and nodes of chance 0 are left out with everything under them.
    """
    found = Candidates()
    sampler: str | None = None
    for name, proposal in offers:
        if not proposal.token_ids or not well_formed(proposal, vocab_size):
            continue
        if proposal.draft_probs is not None and any(probs is not None for probs in proposal.draft_probs):
            if sampler is not None:
                continue
            sampler = name
            found.sampled = True
        _add(found, name, proposal, chance, max_depth)
    # A chance may have risen after a child was added, so paths are multiplied once, at the end, parents first.
    for node in found.nodes:
        node.path = node.chance if node.parent is None else node.chance * node.parent.path
    return found


class Chain:
    """What one drafter alone offered a request where it is a chain without draws: `gather`, `best_first` and `build` in few steps."""

    __slots__ = ("chances", "name", "paths", "proposal")

    def __init__(self, name: str, proposal: Proposal, chances: list[float], paths: list[float]) -> None:
        self.name = name
        self.proposal = proposal
        self.chances = chances
        self.paths = paths  # never growing, so every cut is a prefix

    def tree(self, count: int) -> DraftTree:
        """The first `count` nodes."""
        proposal, name = self.proposal, self.name
        origins = [
            ((rank, confidence_bin(confidence)),)
            for rank, confidence in zip(proposal.ranks[:count], proposal.confidence[:count], strict=True)
        ]
        return DraftTree(
            proposal.token_ids[:count],
            proposal.parents[:count],
            tuple(self.chances[:count]),
            ((name,),) * count,
            tuple(origins),
        )


def as_chain(name: str, proposal: Proposal, chance: Chance, *, max_depth: int, vocab_size: int | None = None) -> Chain | None:
    """None for anything but a chain without draws."""
    count = len(proposal.token_ids)
    if proposal.draft_probs is not None or proposal.parents != _STRAIGHT[:count] or not well_formed(proposal, vocab_size):
        return None
    chances: list[float] = []
    paths: list[float] = []
    path = 1.0
    for depth, (confidence, rank) in enumerate(zip(proposal.confidence, proposal.ranks, strict=True), 1):
        estimate = chance(name, depth, rank, confidence) if depth <= max_depth else 0.0
        if not estimate > 0.0:
            break
        if estimate > 1.0:
            estimate = 1.0
        path *= estimate
        chances.append(estimate)
        paths.append(path)
    return Chain(name, proposal, chances, paths)


def _add(found: Candidates, name: str, proposal: Proposal, chance: Chance, max_depth: int) -> None:
    nodes = found.nodes
    probs_of = proposal.draft_probs
    placed: list[Candidate | None] = []
    chain_end: int | None = ROOT  # where the next draw may hang; None = the chain of draws is broken
    rows = zip(proposal.token_ids, proposal.parents, proposal.confidence, proposal.ranks, strict=True)
    for i, (token, parent_index, confidence, rank) in enumerate(rows):
        parent = None if parent_index == ROOT else placed[parent_index]
        depth = 1 if parent is None else parent.depth + 1
        estimate = chance(name, depth, rank, confidence) if depth <= max_depth else 0.0
        key = token
        probs = None if probs_of is None else probs_of[i]
        if probs is not None:
            key = -1 - token  # a draw has its own entry; twins are joined when the tree is built
            if parent_index != chain_end or not estimate > 0.0:
                chain_end, estimate = (None, 0.0) if parent_index == chain_end else (chain_end, 0.0)
            else:
                chain_end = i
        if not estimate > 0.0 or (parent is None and parent_index != ROOT):
            placed.append(None)
            continue
        if estimate > 1.0:
            estimate = 1.0
        place = (ROOT if parent is None else parent.index, key)
        node = found.at.get(place)
        if node is None:
            node = found.at[place] = Candidate(len(nodes), token, parent, depth, probs)
            nodes.append(node)
        elif name in node.sources:
            placed.append(node)  # a drafter that repeats itself is heard once
            continue
        at = 0 if estimate > node.chance else len(node.sources)
        node.sources.insert(at, name)
        node.origins.insert(at, (rank, confidence_bin(confidence)))
        if at == 0:
            node.chance = estimate
        placed.append(node)


def build(found: Candidates, chosen: Sequence[Candidate]) -> DraftTree:
    """The tree of the chosen candidates (closed under parents): depth first, the most probable child first."""
    if not chosen:
        return EMPTY_TREE
    if found.sampled:
        return _build_drawn(found, chosen)
    keep: list[list[Candidate]] = [[] for _ in range(len(found.nodes) + 1)]  # children chosen, by parent index + 1
    for node in sorted(chosen, key=_by_chance):
        keep[0 if node.parent is None else node.parent.index + 1].append(node)
    tokens: list[int] = []
    parents: list[int] = []
    chances: list[float] = []
    sources: list[tuple[str, ...]] = []
    origins: list[tuple[tuple[int, int], ...]] = []
    stack = [(node, ROOT) for node in reversed(keep[0])]
    while stack:
        node, parent = stack.pop()
        place = len(tokens)
        tokens.append(node.token)
        parents.append(parent)
        chances.append(node.chance)
        sources.append(tuple(node.sources))
        origins.append(tuple(node.origins))
        below = keep[node.index + 1]
        if below:
            stack.extend([(child, place) for child in reversed(below)])
    return DraftTree(tuple(tokens), tuple(parents), tuple(chances), tuple(sources), tuple(origins))


def _build_drawn(found: Candidates, chosen: Sequence[Candidate]) -> DraftTree:
    """As `build`, but a draw leads its siblings and a deterministic twin joins its draw."""
    certain_roots = [node for node in found.nodes if node.parent is None and node.probs is None]
    if certain_roots and len(chosen) > 1 and all(node.probs is not None for node in chosen):
        # Draws alone would be a chain: the best certain node takes the last one's place.
        chosen = [*sorted(chosen, key=_by_path)[:-1], min(certain_roots, key=_by_path)]
    children: dict[int, list[Candidate]] = {}
    for node in sorted(chosen, key=lambda n: n.index):
        children.setdefault(ROOT if node.parent is None else node.parent.index, []).append(node)
    tokens: list[int] = []
    parents: list[int] = []
    chances: list[float] = []
    sources: list[tuple[str, ...]] = []
    origins: list[tuple[tuple[int, int], ...]] = []
    probs: list[DraftProbs | None] = []
    joined = -1  # a node that is a draw and its twin

    def twins(nodes: Iterable[Candidate]) -> list[list[Candidate]]:
        groups: dict[int, list[Candidate]] = {}
        for node in sorted(nodes, key=lambda n: (n.probs is None, -n.chance, n.index)):
            groups.setdefault(node.token, []).append(node)
        return list(groups.values())

    stack = [(group, ROOT) for group in reversed(twins(children.get(ROOT, ())))]
    while stack:
        group, parent = stack.pop()
        place = len(tokens)
        joined = place if len(group) > 1 else joined
        tokens.append(group[0].token)
        parents.append(parent)
        chances.append(max(node.chance for node in group))
        probs.append(group[0].probs)
        credits = {name: cell for node in group for name, cell in zip(node.sources, node.origins, strict=True)}
        sources.append(tuple(credits))
        origins.append(tuple(credits.values()))
        below = [child for node in group for child in children.get(node.index, ())]
        stack.extend((twin, place) for twin in reversed(twins(below)))
    if joined >= 0 and all(parent == i - 1 for i, parent in enumerate(parents)):
        # Joining made it a chain because of what was drawn. The twin's own place, tested in vain, keeps it a tree.
        tokens.append(tokens[joined])
        parents.append(parents[joined])
        chances.append(0.0)
        sources.append(sources[joined][-1:])
        origins.append(((_IN_VAIN, 0),))
        probs.append(None)
    return DraftTree(tuple(tokens), tuple(parents), tuple(chances), tuple(sources), tuple(origins), tuple(probs))


def merge(
    offers: Iterable[Offer],
    chance: Chance,
    *,
    price: float,
    max_nodes: int,
    max_depth: int,
    vocab_size: int | None = None,
) -> DraftTree:
    """The best tree of at most `max_nodes` nodes with f(v) >= price, from all offers together."""
    if max_nodes <= 0 or max_depth <= 0:
        return EMPTY_TREE
    found = gather(offers, chance, max_depth=max_depth, vocab_size=vocab_size)
    chosen = found.best_first()[:max_nodes]
    while chosen and chosen[-1].path < price:
        chosen = chosen[:-1]
    return build(found, chosen)
