"""One pass of a draft decoder, from rows to the best tokens of the nodes that are scored. Knows decoders and their store; refuses to
know trees and sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from drafters.draws import Best, TopShares, best_of
from kernels.batch import KVTensors, PackedInputs
from kernels.decoder import DecoderOutput, DecoderShape, FusedDecoder


class DraftDecoder(Protocol):
    """What is asked of a decoder: `kernels.decoder.Decoder`, or `FusedDecoder` where the node inputs have features."""

    @property
    def shape(self) -> DecoderShape: ...

    @property
    def forward(self) -> Callable[..., DecoderOutput]: ...


@dataclass(frozen=True, slots=True)
class Scored:
    """`best`: tokens (columns) and shares per scored node; `hidden` [N, hidden] of all nodes."""

    best: Best
    hidden: torch.Tensor


class Scorer(Protocol):
    def __call__(
        self, inputs: PackedInputs, features: torch.Tensor | None, k: int, temperatures: Sequence[float] | None
    ) -> Scored: ...


class DecoderScorer:
    """Any decoder, and `top_shares` over its logits. Columns from `columns` on are padding and never best."""

    def __init__(self, decoder: DraftDecoder, store: KVTensors, top: TopShares, columns: int) -> None:
        self._decoder, self._store, self._top, self._columns = decoder, store, top, columns

    def __call__(
        self, inputs: PackedInputs, features: torch.Tensor | None, k: int, temperatures: Sequence[float] | None
    ) -> Scored:
        tensors = inputs.tensors(self._store.k.device)
        if features is None:
            out = self._decoder.forward(tensors, self._store, True)
        else:
            out = self._decoder.forward(tensors, self._store, True, features)
        if out.logits is None:
            raise ValueError("the draft decoder gave no logits")
        return Scored(best_of(out.logits[:, : self._columns], k, temperatures, self._top), out.hidden)


class OneCallScorer:
    """A decoder that picks the best tokens itself. It has no padding columns."""

    def __init__(self, decoder: FusedDecoder, store: KVTensors) -> None:
        self._decoder, self._store = decoder, store

    def __call__(
        self, inputs: PackedInputs, features: torch.Tensor | None, k: int, temperatures: Sequence[float] | None
    ) -> Scored:
        hidden, ids, shares = self._decoder.draft(inputs, self._store, features, k, temperatures)
        starts = range(0, len(ids), k)
        return Scored(([list(ids[i : i + k]) for i in starts], [list(shares[i : i + k]) for i in starts]), hidden)
