"""Known faults of sampled speculation, each a real bug of some engine, and the cases in which the distribution shows it."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.chi_square import Case, Fault
from spec import rejection
from spec.keyed_random import DRAFT, uniform


def _softmax_leftover(p: Any, q: Any) -> Any:
    """max(p - q, 0) pushed through softmax instead of being normalised."""
    return np.exp(np.maximum(p - q, 0.0))


def _unchanged_leftover(p: Any, q: Any) -> Any:
    """The replacement token drawn from p itself."""
    return p


def _argmax(p: Any, noise: float) -> int:
    return int(np.argmax(p))


def _shared(seed: int, position: int, stream: int, index: int = 0, step: int = 0) -> float:
    """The very numbers the drafter drew with."""
    return uniform(seed, position, DRAFT, index, step)


_proposal = rejection.proposal


def _keep_siblings(tree: Any, node: int, tried: list[int], vocab_size: int) -> Any:
    """Earlier siblings stay in q although they could not be drawn again."""
    return _proposal(tree, node, [], vocab_size)


def _case(kind: str, shape: str, options: str = "none") -> Case:
    return Case("rejection", kind, options, shape)


MUTANTS: tuple[tuple[Fault, tuple[Case, ...]], ...] = (
    (Fault("raw q", declared_heat=2.0), (_case("drawn", "chain"), _case("drawn", "star"), _case("drawn + points", "mixed"))),
    (
        Fault("softmax residual", replaced={"leftover": _softmax_leftover}),
        (_case("drawn", "chain"), _case("drawn", "star"), _case("point mass", "mixed")),
    ),
    (
        Fault("residual is p", replaced={"leftover": _unchanged_leftover}),
        (_case("drawn", "chain"), _case("point mass", "star"), _case("two models", "mixed", "top_k 3")),
    ),
    (
        Fault("argmax instead of a draw", replaced={"draw": _argmax}),
        (_case("drawn", "chain"), _case("point mass", "mixed"), _case("drawn", "star", "temperature 0.7")),
    ),
    (
        Fault("shared noise", replaced={"uniform": _shared}),
        (_case("drawn", "chain"), _case("drawn", "star"), _case("drawn", "mixed")),
    ),
    (
        Fault("pruned by own probability", prune_below=0.2),
        (_case("drawn", "chain"), _case("drawn", "star"), _case("drawn", "mixed")),
    ),
    (
        Fault("siblings not removed", replaced={"proposal": _keep_siblings}),
        (_case("drawn", "star"), _case("point + drawn", "star")),
    ),
)
