"""What a way of computing costs in quality: perplexity of a text under two decoders of one model, and how alike their answers are.

Knows token ids and logits; refuses to know text, files and which decoder is which. The text is cut into windows that know
nothing of each other; the first token of a window is only read. Chunks go through both decoders in turn, so that two sets of
logits exist at a time and no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch

from spec.inputs import build_inputs
from spec.plan import PlanRow
from spec.target import TargetModel
from spec.tree import EMPTY_TREE

PAGE = 16


@dataclass(slots=True)
class Loss:
    """Negative log likelihood in nats, summed over `tokens` predictions that took `seconds`."""

    nats: float = 0.0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats / self.tokens) if self.tokens else float("nan")


@dataclass(slots=True)
class Comparison:
    """`same`: predictions whose most likely token is the same; `divergence`: KL(reference || tested) in nats, summed."""

    tested: Loss = field(default_factory=Loss)
    reference: Loss = field(default_factory=Loss)
    same: int = 0
    divergence: float = 0.0

    @property
    def change(self) -> float:
        """Relative change of perplexity; negative is better than the reference."""
        return self.tested.perplexity / self.reference.perplexity - 1.0


def compare(
    tested: TargetModel,
    reference: TargetModel | None,
    token_ids: Sequence[int],
    *,
    window: int = 1024,
    chunk: int = 256,
    on_chunk: Callable[[int], None] = lambda tokens: None,
) -> Comparison:
    """Read all tokens through `tested`, and through `reference` when there is one. Stores must have pages of PAGE tokens and hold a window."""
    result = Comparison()
    for start, ids, wanted in _chunks(token_ids, window, chunk):
        mine = _log_shares(tested, start, ids, result.tested)
        _add(result.tested, mine, wanted)
        if reference is not None:
            theirs = _log_shares(reference, start, ids, result.reference)
            _add(result.reference, theirs, wanted)
            count = len(wanted)
            result.same += int((mine[:count].argmax(-1) == theirs[:count].argmax(-1)).sum())
            result.divergence += float((theirs[:count].exp() * (theirs[:count] - mine[:count])).sum(dtype=torch.float64))
        on_chunk(len(ids))
    return result


def _chunks(token_ids: Sequence[int], window: int, chunk: int) -> Iterator[tuple[int, list[int], list[int]]]:
    """(keys of the window before it, tokens read, the tokens that come after each: one fewer at a window's end)."""
    for first in range(0, len(token_ids), window):
        text = list(token_ids[first : first + window])
        for start in range(0, len(text), chunk):
            yield start, text[start : start + chunk], text[start + 1 : start + 1 + chunk]


def _log_shares(target: TargetModel, start: int, ids: list[int], loss: Loss) -> torch.Tensor:
    """[len(ids), V] float32 log probabilities of what follows each token."""
    begun = perf_counter()
    pages = list(range(-(-(start + len(ids)) // PAGE)))
    row = PlanRow(seq_id=0, num_kv=start, token_ids=ids, page_ids=pages, scored=True, decoding=False)
    inputs = build_inputs([row], [EMPTY_TREE], PAGE, target.store.k.device)
    every = torch.arange(len(ids), dtype=torch.int32, device=target.store.k.device)
    logits = target.run(replace(inputs, score_rows=every), need_logits=True).logits
    assert logits is not None
    shares = torch.log_softmax(logits, dim=-1)
    loss.seconds += perf_counter() - begun
    return shares


def _add(loss: Loss, shares: torch.Tensor, wanted: list[int]) -> None:
    if wanted:
        rows = torch.arange(len(wanted), device=shares.device)
        chosen = shares[rows, torch.tensor(wanted, device=shares.device)]
        loss.nats -= float(chosen.sum(dtype=torch.float64))
        loss.tokens += len(wanted)
