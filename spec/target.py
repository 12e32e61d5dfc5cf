"""The target model as the engine sees it: one pass over one ragged batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.batch import KVTensors, PackedInputs, StepInputs
from kernels.decoder import Decoder


@dataclass(frozen=True, slots=True)
class TargetScores:
    """Scores of the R nodes asked for, and the hidden states of all N. Valid until the target's next pass, hidden states a few longer (`TargetModel.held`)."""

    argmax: torch.Tensor | list[int]  # [R] int32
    logits: torch.Tensor | None  # [R, V] float32 when asked for
    hidden: torch.Tensor  # [N, hidden] float32, after the final norm
    finite: bool | None = None  # of all hidden states, where the pass has looked


class TargetModel:
    """A decoder and the store it writes to."""

    def __init__(self, decoder: Decoder, store: KVTensors) -> None:
        self.decoder = decoder
        self.store = store
        over = getattr(decoder, "over", None)  # kernels.decoder.PackedDecoder: it reads plain buffers
        self._pass = None if over is None else over(store)
        self.held: int = getattr(self._pass, "held", 1)  # passes for which a pass's hidden states are valid, its own included

    @property
    def vocab_size(self) -> int:
        return self.decoder.shape.vocab_size

    @property
    def shares_keys(self) -> bool:
        """Whether it pays to tell the decoder which rows share keys."""
        return self.store.k.device.type != "cpu"

    def run(self, inputs: StepInputs, need_logits: bool) -> TargetScores:
        out = self.decoder.forward(inputs, self.store, need_logits)
        return TargetScores(argmax=out.argmax, logits=out.logits, hidden=out.hidden)

    def run_packed(self, inputs: PackedInputs, need_logits: bool) -> TargetScores:
        """The same from plain buffers, without making tensors where the decoder needs none."""
        if self._pass is None:
            return self.run(inputs.tensors(self.store.k.device), need_logits)
        return TargetScores(*self._pass(inputs, need_logits))
