"""From logits to the children a node may get: the most probable tokens, or one draw with the distribution it came from.
Knows logits and sampling options; refuses to know trees, stores and prices.

Drawn proposals (rejection rule, temperature above 0) carry q exactly as it was used: the request's temperature and
filters over the SUPPORT most probable tokens, in float32. Their score is a function of q, never of the token drawn, so
that choosing nodes by score leaves q what it is. All other proposals are the top of the distribution.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kernels.top_shares.reference import top_shares
from spec.drafter import SequenceView
from spec.keyed_random import DRAFT, uniform
from spec.request import SamplingParams
from spec.tree import DraftProbs

SUPPORT = 64
TopShares = Callable[[torch.Tensor, int, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]  # see kernels.top_shares
Best = tuple[list[list[int]], list[list[float]]]  # columns and shares of the best tokens of each row, best first
_COLDEST = 1e-3  # below this temperature the distribution is a point for any purpose of drafting


@dataclass(frozen=True, slots=True)
class Scores:
    """Children of one node, best first."""

    token_ids: list[int]
    confidence: list[float]
    probs: DraftProbs | None = None


def is_drawn(view: SequenceView) -> bool:
    """Whether this request's drafts are drawn at random: only the rejection rule gains by it."""
    return view.policy.rule == "rejection" and view.sampling.temperature > 0.0


def temperature_of(view: SequenceView) -> float:
    """At which a draft's shares are taken."""
    return max(view.sampling.temperature or 1.0, _COLDEST)


def wanted(views: Sequence[SequenceView], fan: int, columns: int, *, draw: bool = True) -> tuple[int, list[float] | None]:
    """What a pass must tell of each row: how many of the best tokens, and at which temperature (None = 1 everywhere)."""
    count = SUPPORT if draw and any(is_drawn(view) for view in views) else fan
    temperatures = [temperature_of(view) for view in views]
    return min(count, columns), temperatures if any(t != 1.0 for t in temperatures) else None


def best_of(logits: torch.Tensor, k: int, temperatures: Sequence[float] | None, top: TopShares = top_shares) -> Best:
    """The k best of each row of `logits` [R, columns] float32."""
    divisor = None if temperatures is None else torch.tensor(temperatures, dtype=torch.float32, device=logits.device)
    ids, shares = top(logits, k, divisor)
    return ids.tolist(), shares.tolist()


def choices(
    best: Best,
    views: Sequence[SequenceView],
    depths: Sequence[int],
    fan: int,
    drafter: str,
    *,
    draw: bool = True,
    names: Sequence[int] | None = None,
) -> list[Scores | None]:
    """Per row of `best` the children of its node; None where the row is not made of numbers.

    `depths[r]`: depth of the node, 0 = the root. Tokens without a share (-inf logits) are not proposed. `draw` False: only
    the most probable tokens, for everybody. `names`: the token of each column; None = its own number.
    """
    found: list[Scores | None] = []
    for own, mass, view, depth in zip(*best, views, depths, strict=True):
        if not all(map(math.isfinite, mass)) or not mass[0] > 0.0:
            found.append(None)
            continue
        drawn = draw and is_drawn(view)
        if not drawn:
            own, mass = own[:fan], [min(1.0, share) for share in mass[:fan] if share > 0.0]
        tokens = own if names is None else [names[column] for column in own]
        found.append(_draw(view, depth, tokens, mass, drafter) if drawn else Scores(tokens[: len(mass)], mass))
    return found


def _draw(view: SequenceView, depth: int, tokens: list[int], masses: list[float], drafter: str) -> Scores:
    count = _kept(masses, view.sampling)
    weights = torch.tensor(masses[:count], dtype=torch.float64)
    q = (weights / weights.sum()).float()
    probs = DraftProbs(token_ids=torch.tensor(tokens[:count], dtype=torch.int64), probs=q)
    length = len(view.token_ids)
    noise = uniform(view.sampling.seed, length + depth, DRAFT, zlib.crc32(drafter.encode()), length)
    cumulative = q.double().cumsum(0)
    at = int(torch.searchsorted(cumulative, noise * float(cumulative[-1]), right=True))
    return Scores([tokens[min(at, count - 1)]], [min(1.0, float(q[0]))], probs)


def _kept(masses: list[float], sampling: SamplingParams) -> int:
    """How many of the most probable tokens stay under the request's min_p, top_k and top_p."""
    count = len(masses)
    while count > 1 and (masses[count - 1] < sampling.min_p * masses[0] or masses[count - 1] <= 0.0):
        count -= 1
    if sampling.top_k > 0:
        count = min(count, sampling.top_k)
    if sampling.top_p < 1.0:
        total, running = sum(masses[:count]), 0.0
        for i in range(count):
            running += masses[i]
            if running >= sampling.top_p * total:
                return i + 1
    return count
