"""Moving keys and values inside one model's store. Knows slots; refuses to know sequences. Writing is the forward pass's work."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kernels.batch import KVTensors
from kernels.kv_slots import reference

Move = Callable[[torch.Tensor, torch.Tensor, KVTensors], None]
REFERENCE_MOVE: Move = reference.move


class KVStore:
    """One model's store with the move op that the composition root chose for it. All moves of a step go in one call."""

    def __init__(self, tensors: KVTensors, move: Move = REFERENCE_MOVE) -> None:
        self.tensors = tensors
        self._move = move
        self._device = tensors.k.device

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots `sources` to `targets` in all layers, as if every source was read before any write."""
        if sources:
            src, dst = torch.tensor([sources, targets], dtype=torch.int32).to(self._device)
            self._move(src, dst, self.tensors)
