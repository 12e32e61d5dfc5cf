"""The price rule around its engine: what is measured at the start, and what is kept for the next start."""

from __future__ import annotations

import pytest
import torch
import toy
from engine_kit import quick

from kernels.batch import KVTensors, StepInputs
from server.speculation import measure_costs, pass_ms
from spec.config import EngineConfig
from spec.cost_table import CostTable
from spec.target import TargetModel, TargetScores

CONFIG = EngineConfig(num_pages=32, page_size=4, context=48)


class Watched(TargetModel):
    """A target that remembers how large its passes were: (rows, keys, sequences)."""

    def __init__(self, max_position: int) -> None:
        shape, weights = toy.rand_weights(layers=1, max_position=max_position)
        pages = (CONFIG.num_pages, shape.kv_heads, shape.head_dim, CONFIG.page_size)
        super().__init__(quick(shape, weights), KVTensors.allocate(1, *pages, torch.float32))
        self.passes: list[tuple[int, int, int]] = []

    def run(self, inputs: StepInputs, need_logits: bool) -> TargetScores:
        self.passes.append((len(inputs.input_ids), int(inputs.kv_lens.sum()), len(inputs.kv_lens)))
        assert int(inputs.positions.max()) < self.decoder.shape.max_position
        return super().run(inputs, need_logits)


@pytest.mark.parametrize("max_position", [48, 300, 5])
def test_start_up_runs_the_passes_that_it_charges_for(max_position: int) -> None:
    """Neither a short context nor a small store may make the probe of context shorter than what its time is divided by."""
    asked: list[tuple[int, int, int]] = []

    class Asked(CostTable):
        def _fit(self, taken: dict[tuple[int, int, int], float]) -> None:
            asked.extend(taken)
            super()._fit(taken)

    target = Watched(max_position)
    measure_costs(Asked(), target, CONFIG, 0.5)
    assert set(asked) == set(target.passes)
    assert max(keys for _, keys, _ in asked) == min(128, max_position) - 1
    with pytest.raises(ValueError, match="does not fit"):
        pass_ms(target, CONFIG, 1, 4096, 1)
