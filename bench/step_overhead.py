"""What a step costs outside the model: microseconds of engine code per step over a decoder that computes nothing.

    python -m bench.step_overhead [--context 500] [--steps 300]

Prints a table for people and, last, one JSON line. Medians of all steps; the phases are the engine's own clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence

import torch

from kernels.batch import KVTensors, StepInputs
from kernels.decoder import DecoderOutput, DecoderShape
from spec.config import EngineConfig
from spec.drafter import Budget, Outcome, SequenceView
from spec.engine import Engine
from spec.request import Request, SamplingParams
from spec.speculator import Limit, Load, StepRecord
from spec.target import TargetModel
from spec.tree import ROOT, DraftTree, Proposal

HIDDEN = 576
SHAPE = DecoderShape(
    layers=1,
    hidden=HIDDEN,
    intermediate=32,
    q_heads=1,
    kv_heads=1,
    head_dim=32,
    vocab_size=512,
    norm_eps=1e-5,
    attention_scale=1.0,
    max_position=8192,
)


class IdleDecoder:
    """Says token 1 at every node without looking."""

    shape = SHAPE

    def __init__(self) -> None:
        self._hidden = torch.zeros(8192, HIDDEN)
        self._argmax = torch.ones(8192, dtype=torch.int32)

    def forward(self, inputs: StepInputs, store: KVTensors, need_logits: bool) -> DecoderOutput:
        return DecoderOutput(self._hidden[: inputs.num_nodes], self._argmax[: inputs.score_rows.shape[0]], None)


class FixedChain:
    """Drafts `depth` times token 1, of which the idle decoder accepts all."""

    name = "chain"
    watches = True

    def __init__(self, depth: int) -> None:
        ones, floats = (1,) * depth, (0.5,) * depth
        self._proposal = Proposal(ones, tuple(range(ROOT, depth - 1)), floats, (0,) * depth)
        self._tree = DraftTree(ones, self._proposal.parents, floats, ((self.name,),) * depth, (((0, 0),),) * depth)

    def open(self, view: SequenceView) -> None: ...
    def close(self, seq_id: int) -> None: ...
    def rests(self, views: Sequence[SequenceView]) -> bool:
        return False

    def observe(self, outcomes: Sequence[Outcome], hidden: torch.Tensor) -> None: ...
    def record(self, step: StepRecord) -> None: ...
    def passed(self, steps: int, sequences: int, load: Load, target_ms: float, total_ms: float) -> None: ...

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Proposal]:
        return [self._proposal] * len(views)

    def budgets(self, views: Sequence[SequenceView], limits: Sequence[Limit], load: Load) -> list[Budget]:
        depth = len(self._tree)
        full = Budget(depth, depth, 0.0, lambda ms: 0.0, lambda *key: 0.5)
        return [full if limit.max_depth >= depth else Budget(0, 0, 0.0, full.pass_price, full.chance) for limit in limits]

    def admit(
        self, views: Sequence[SequenceView], budgets: Sequence[Budget], proposals: Mapping[str, Sequence[Proposal]]
    ) -> list[DraftTree]:
        return [self._tree if budget.max_nodes else DraftTree() for budget in budgets]


def measure(streams: int, depth: int, context: int, steps: int) -> dict[str, float]:
    """Median microseconds of a step with `streams` decoding sequences, each with a drafted chain of `depth` nodes."""
    page_size, room = 16, context + (steps + 20) * (depth + 1)
    pages = streams * (room // page_size + 2)
    store = KVTensors.allocate(SHAPE.layers, pages, SHAPE.kv_heads, SHAPE.head_dim, page_size, torch.float32)
    config = EngineConfig(num_pages=pages, page_size=page_size, context=8192, chunk_tokens=8192)
    chain = FixedChain(depth)
    engine = Engine(config, TargetModel(IdleDecoder(), store), [chain] if depth else [], chain, ())
    sampling = SamplingParams(max_tokens=room, temperature=0.0)
    for number in range(streams):
        engine.add(Request(id=number, prompt_ids=(number + 2,) * context, sampling=sampling))
    while engine.stats()["emitted_tokens"] < 5 * streams:
        engine.step()
    before = engine.stats()["phase_seconds"]
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    after = engine.stats()["phase_seconds"]
    result = {"step_us": statistics.median(times) * 1e6}
    return result | {f"{phase}_us": (after[phase] - before[phase]) / steps * 1e6 for phase in after}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=500, help="prompt tokens of each stream")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = {}
    print(f"{'streams':>8}{'drafted':>8}{'step us':>10}   by phase (mean us)")
    for streams, depth in ((1, 0), (1, 4), (16, 0), (16, 4), (64, 0)):
        found = measure(streams, depth, arguments.context, arguments.steps)
        rows[f"{streams}x{depth}"] = {key: round(value, 1) for key, value in found.items()}
        phases = "  ".join(f"{key[:-3]} {value:.0f}" for key, value in found.items() if key != "step_us")
        print(f"{streams:>8}{depth:>8}{found['step_us']:>10.0f}   {phases}")
    print(json.dumps({"bench": "step_overhead", "context": arguments.context, "steps": arguments.steps, "results": rows}))


if __name__ == "__main__":
    main()
