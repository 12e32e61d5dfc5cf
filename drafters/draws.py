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


def choices(
    logits: torch.Tensor,
    views: Sequence[SequenceView],
    depths: Sequence[int],
    fan: int,
    drafter: str,
    *,
    draw: bool = True,
    top: TopShares = top_shares,
    names: Sequence[int] | None = None,
) -> list[Scores | None]:
    """Per row of `logits` [R, V] float32 the children of its node; None where the row is not made of numbers.

    `depths[r]`: depth of the node, 0 = the root. -inf logits are allowed, those tokens are not proposed. `draw` False: only
    the most probable tokens, for everybody. `names`: the token of each column; None = its own number.
    """
    drawn = [draw and is_drawn(view) for view in views]
    temperatures = [view.sampling.temperature or 1.0 for view in views]
    divisor = None
    if any(t != 1.0 for t in temperatures):
        divisor = torch.tensor([max(t, _COLDEST) for t in temperatures], dtype=torch.float32, device=logits.device)
    count = min(SUPPORT if any(drawn) else fan, logits.shape[1])
    ids, shares = top(logits, count, divisor)
    tokens, masses = ids.tolist(), shares.tolist()
    found: list[Scores | None] = []
    for r, view in enumerate(views):
        own, mass = tokens[r], masses[r]
        if not all(map(math.isfinite, mass)) or not mass[0] > 0.0:
            found.append(None)
            continue
        if names is not None:
            own = [names[column] for column in (own if drawn[r] else own[:fan])]
        if drawn[r]:
            found.append(_draw(view, depths[r], own, mass, drafter))
        else:
            kept = [(token, min(1.0, share)) for token, share in zip(own[:fan], mass, strict=False) if share > 0.0]
            found.append(Scores([token for token, _ in kept], [share for _, share in kept]))
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
