"""The target model as the engine sees it: one pass over one ragged batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.batch import KVTensors, StepInputs
from kernels.decoder import Decoder


@dataclass(frozen=True, slots=True)
class TargetScores:
    """Scores of the R nodes asked for, and the hidden states of all N."""

    argmax: torch.Tensor  # [R] int32
    logits: torch.Tensor | None  # [R, V] float32 when asked for
    hidden: torch.Tensor  # [N, hidden] float32, after the final norm


class TargetModel:
    """A decoder and the store it writes to."""

    def __init__(self, decoder: Decoder, store: KVTensors) -> None:
        self.decoder = decoder
        self.store = store

    @property
    def vocab_size(self) -> int:
        return self.decoder.shape.vocab_size

    def run(self, inputs: StepInputs, need_logits: bool) -> TargetScores:
        out = self.decoder.forward(inputs, self.store, need_logits)
        return TargetScores(argmax=out.argmax, logits=out.logits, hidden=out.hidden)
