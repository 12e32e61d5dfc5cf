"""A pass of the C++ decoder with as little around it as can be. Knows addresses; refuses to know weights and arithmetic."""

from __future__ import annotations

from array import array

import torch

from kernels.batch import KVTensors, PackedInputs
from kernels.decoder import DecoderShape, PackedOutput
from kernels.native import NativeLibrary
from kernels.native.library import StepData, check
from kernels.native.tensors import store_data


def packed_step(inputs: PackedInputs) -> StepData:
    nodes, rows, scored = inputs.nodes, inputs.rows, inputs.scored
    ints = inputs.ints.buffer_info()[0]
    at = ints + 12 * nodes
    return StepData(
        nodes, rows, inputs.pages, scored,
        ints, ints + 4 * nodes, ints + 8 * nodes, inputs.words.buffer_info()[0], inputs.causal.buffer_info()[0],
        at, at + 8 * rows + 4 + 4 * scored, at + 4 * rows + 4, at + 8 * rows + 4,
    )  # fmt: skip


HELD = 8  # passes for which hidden states stay where they are


class NativePass:
    """A decoder's pass over one store into buffers of its own, in turn. It makes no tensor but the logits: after a pass, which has
    streamed all weights through the caches, every small tensor costs some ten microseconds."""

    def __init__(
        self, decoder: object, library: NativeLibrary, handle: int, team: int, shape: DecoderShape, store: KVTensors
    ) -> None:
        """`handle`: of the decoder, which is kept alive with the store."""
        self._keeps = decoder, store
        self._forward, self._all_finite = library.c.fs_decoder_forward, library.c.fs_all_finite
        self._handle, self._team = handle, team
        self._store = store_data(store)
        self._width, self._vocab = shape.hidden, shape.vocab_size
        self.held = HELD
        self._turn = 0
        self._hidden = [torch.empty(0, self._width)] * HELD
        self._addresses = [0] * HELD
        self._views: list[dict[int, torch.Tensor]] = [{} for _ in range(HELD)]  # the first n rows of each buffer

    def __call__(self, inputs: PackedInputs, need_logits: bool) -> PackedOutput:
        nodes, scored = inputs.nodes, inputs.scored
        turn = self._turn = (self._turn + 1) % HELD
        views = self._views[turn]
        hidden = views.get(nodes)
        if hidden is None:
            hidden = views[nodes] = self._rows(turn, nodes)
        address = self._addresses[turn]
        argmax = array("i", bytes(4 * scored))
        logits = torch.empty(scored, self._vocab) if need_logits else None
        check(
            self._forward(
                self._handle,
                self._team,
                packed_step(inputs),
                self._store,
                address,
                argmax.buffer_info()[0],
                None if logits is None else logits.data_ptr(),
                None,
            )
        )
        return argmax.tolist(), logits, hidden, bool(self._all_finite(address, nodes * self._width))

    def _rows(self, turn: int, nodes: int) -> torch.Tensor:
        if nodes > self._hidden[turn].shape[0]:
            self._hidden[turn] = torch.empty(max(nodes, 64), self._width)
            self._addresses[turn] = self._hidden[turn].data_ptr()
            self._views[turn].clear()
        return self._hidden[turn][:nodes]
