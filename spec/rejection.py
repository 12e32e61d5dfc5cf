"""The rejection rule: keeps the target's distribution, not the text it would have drawn alone. Knows trees and distributions.

At a node with target distribution p, children are tried in order. A child x drawn from q is accepted with probability
min(1, p(x) / q(x)), and on rejection p becomes normalise(max(p - q, 0)) (Leviathan et al. 2023, Chen et al. 2023); further
children are tried against what is left (recursive rejection: SpecInfer, Miao et al. 2024; without replacement: Jeon et al.
2024, Yang et al. 2024). A child that was not drawn at random is a point mass: accepted with p(x), else p(x) becomes 0.

Chains of drawn nodes use block verification (Sun et al. 2024), which accepts at least as many tokens for the same text law.

Siblings are distinct tokens (drafts are merged by prefix). A sibling that is there says the draw before it was another
token, so every earlier sibling is removed from q. The order of siblings, which nodes are there, and whether the tree is a
chain must not depend on the drawn tokens: order by draw, prune by what is known at the parent. A caller that cannot promise
this leaves `draft_probs` empty: testing a node as a point mass is right for any token chosen without the noise that tests it. An
answer that this rule gave before is such noise to a request with the same seed, so no drafter may keep it for other requests.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np

from spec.keyed_random import RESIDUAL, TEST, uniform
from spec.sampling import Distribution
from spec.tree import ROOT, DraftProbs, DraftTree


@dataclass(frozen=True, slots=True)
class Walked:
    """Where a walk ended. `next_id` None: the target had no answer at the last node of `path`."""

    path: tuple[int, ...]
    next_id: int | None


DistributionWalk = Generator[int, Distribution | None, Walked]


def walk(tree: DraftTree, seed: int, length: int) -> DistributionWalk:
    """The rule as a generator: yields nodes, is sent each node's target distribution, returns where it ended.

    `length` is the number of committed tokens; with the seed it keys all noise of this step.
    """
    if is_drawn_chain(tree):
        return block(tree, seed, length)
    return recursive(tree, seed, length)


def is_drawn_chain(tree: DraftTree) -> bool:
    """A chain with at least one drawn node. A chain of point masses gains nothing from block verification."""
    chain = all(parent == i - 1 for i, parent in enumerate(tree.parents))
    return chain and tree.draft_probs is not None and any(probs is not None for probs in tree.draft_probs)


def recursive(tree: DraftTree, seed: int, length: int) -> DistributionWalk:
    """Any tree, any mix of drawn and point-mass nodes."""
    below = tree.children()
    path: list[int] = []
    node = ROOT
    while True:
        p = yield node
        if p is None:
            return Walked(tuple(path), None)
        position = length + len(path)
        tried: list[int] = []
        for index, child in enumerate(below[node + 1]):
            x = tree.token_ids[child]
            if x >= p.shape[0]:
                continue  # a padding id of a larger draft vocabulary: the target cannot say it
            q = proposal(tree, child, tried, p.shape[0])
            mass = q[x] if q is not None else 1.0
            if uniform(seed, position, TEST, index, length) * mass < p[x]:
                path.append(child)
                node = child
                break
            p = residual(p, q, x)
            tried.append(x)
        else:
            return Walked(tuple(path), draw(p, uniform(seed, position, RESIDUAL, 0, length)))


def block(tree: DraftTree, seed: int, length: int) -> DistributionWalk:
    """Block verification of a chain X_1 .. X_n (Sun, Mendlovic, Leviathan, Aharoni, Ro, Beirami, Suresh 2024, algorithm 2).

    w_0 = 1, w_i = min(1, w_{i-1} p(X_i) / q(X_i)); at i < n the leftover is r_i = max(w_i p - q, 0) over the next token, and
    i tokens are good with probability sum(r_i) / (sum(r_i) + 1 - w_i), at n with w_n. The longest good i wins; the next token is
    drawn from r_i, after all n from p.
    """
    count = len(tree)
    weight, good = 1.0, 0
    remains: Distribution | None = None
    for i in range(count + 1):
        p = yield i - 1
        if p is None:
            if i == 0 or uniform(seed, length + i - 1, TEST, 0, length) < weight:
                good, remains = i, None
            break
        if i == count:
            chance, rest = weight, p
        else:
            q = proposal(tree, i, [], p.shape[0])
            point = q if q is not None else _point_mass(tree.token_ids[i], p.shape[0])
            rest = leftover(weight * p, point)
            total = float(rest.sum())
            chance = total / (total + 1.0 - weight) if weight < 1.0 else 1.0
            rest = rest if total > 0.0 else p
        if i == 0 or uniform(seed, length + i - 1, TEST, 0, length) < chance:
            good, remains = i, rest
        if i < count:
            x = tree.token_ids[i]
            weight = min(1.0, weight * float(p[x]) / float(point[x])) if x < p.shape[0] else 0.0
            if weight == 0.0:
                break
    path = tuple(range(good))
    if remains is None:
        return Walked(path, None)
    return Walked(path, draw(remains, uniform(seed, length + good, RESIDUAL, 0, length)))


def proposal(tree: DraftTree, node: int, tried: list[int], vocab_size: int) -> Distribution | None:
    """q of a drawn node, float64 [V], with its earlier siblings removed; None for a point mass.

    A q that cannot be what the node was drawn from (not finite, negative, ids out of range, no mass on the node) is a
    drafter's fault, and the node is then tested as a point mass, which is right whatever it was drawn from.
    """
    probs = tree.draft_probs[node] if tree.draft_probs is not None else None
    return None if probs is None else _dense(probs, tree.token_ids[node], tried, vocab_size)


def _dense(probs: DraftProbs, token: int, tried: list[int], vocab_size: int) -> Distribution | None:
    ids, values = probs.token_ids.cpu().numpy(), probs.probs.double().cpu().numpy()
    usable = ids.size > 0 and ids.shape == values.shape and ids.min() >= 0 and ids.max() < vocab_size
    if not usable or not np.isfinite(values).all() or values.min() < 0.0:
        return None
    q = np.zeros(vocab_size)
    q[ids] = values
    q[tried] = 0.0
    total = float(q.sum())
    if token >= vocab_size or q[token] <= 0.0:
        return None
    return q / total


def residual(p: Distribution, q: Distribution | None, token: int) -> Distribution:
    """What is left of p after `token`, drawn from q (None: a point mass), was rejected; normalised.

    Where rounding leaves nothing (p equal to q, or p a point mass on the token) p itself stays: that rejection had no chance.
    """
    rest = leftover(p, q if q is not None else _point_mass(token, p.shape[0]))
    total = float(rest.sum())
    return rest / total if total > 0.0 else p


def leftover(p: Distribution, q: Distribution) -> Distribution:
    """max(p - q, 0), not normalised."""
    return np.maximum(p - q, 0.0)


def draw(p: Distribution, noise: float) -> int:
    """The first token in id order whose cumulative mass exceeds noise * total; p need not be normalised."""
    cumulative = np.cumsum(p)
    index = int(np.searchsorted(cumulative, noise * cumulative[-1], side="right"))
    return index if index < p.shape[0] and p[index] > 0.0 else int(np.flatnonzero(p)[-1])


def _point_mass(token: int, vocab_size: int) -> Distribution:
    q = np.zeros(vocab_size)
    if token < vocab_size:
        q[token] = 1.0
    return q
