"""The price rule around its engine: what is measured at the start, and what is kept for the next start."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import toy
from engine_kit import SHAPES, ScriptDrafter, answers_of, greedy_request, make_engine, quick, run

from drafters import registry
from kernels.batch import KVTensors, StepInputs
from kernels.decoder import Decoder
from server import framing
from server.engine_process import run_engine_process
from server.speculation import SAVE_EVERY_SECONDS, KeptSpeculator, measure_costs, pass_ms, starting_calibration
from server.wire import Events, Ready, Shutdown, Submit
from spec.budget import PriceSpeculator
from spec.calibration import Calibration, confidence_bin
from spec.config import EngineConfig
from spec.cost_table import CostTable
from spec.engine import Engine
from spec.speculator import Load, StepRecord
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
    assert max(keys // sequences for _, keys, sequences in asked) == min(128, max_position) - 1
    with pytest.raises(ValueError, match="does not fit"):
        pass_ms(target, CONFIG, 1, 4096, 1)


# --- the calibration -------------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed(PriceSpeculator):
    """The price rule told made-up times, so that it drafts on every machine."""

    def record(self, step: StepRecord) -> None:
        target_ms = 2.0 + 0.1 * step.nodes
        super().record(replace(step, target_ms=target_ms, draft_ms=dict.fromkeys(step.draft_ms, 0.1), total_ms=target_ms + 0.3))


PROMPT = (5, 6, 7, 8)


@cache
def decoder() -> Decoder:
    return quick(*toy.rand_weights(layers=1))


@cache
def answer() -> list[int]:
    return toy.greedy(decoder(), PROMPT, 200)


def kept_engine(path: Path, clock: Clock) -> tuple[Engine, KeptSpeculator]:
    """An engine that drafts, learns, and would keep it in `path`. It learns from eight steps at once, as a server does."""
    calibration = starting_calibration(path, None)
    speculator = KeptSpeculator(Timed(calibration, batch=8), calibration, path, clock)
    drafter = ScriptDrafter(answers_of({PROMPT: answer()}), SHAPES["chain"])
    return make_engine(decoder(), [drafter], speculator=speculator), speculator


def learnt(calibration: Calibration) -> float:
    """Nodes whose fate is known."""
    return sum(seen for _, seen, _ in calibration.dump()["drafters"].get("script", {"by_rank": []})["by_rank"])


def test_a_server_that_lives_shortly_keeps_what_it_learnt(tmp_path: Path) -> None:
    """The engine process is told to shut down in the middle of an answer, long before anything is kept now and then."""
    path = tmp_path / "sub" / "calibration.json"
    engine, speculator = kept_engine(path, Clock())
    ours, theirs = socket.socketpair()
    with ours, theirs:
        frames = framing.FrameReader()
        ready = Ready("toy", 512, 256, 96, 4, ("script",), "reference", 0.0)
        process = threading.Thread(target=run_engine_process, args=(theirs, lambda: (engine, ready)))
        process.start()
        ours.sendall(framing.encode(Submit(greedy_request(1, PROMPT, 200))))
        tokens = 0
        while tokens < 20:
            for payload in frames.feed(ours.recv(2**16)):
                message = framing.decode_from_engine(payload)
                if isinstance(message, Events):
                    tokens += sum(len(event.token_ids) for event in message.events)
        assert not path.exists()
        ours.sendall(framing.encode(Shutdown()))
        process.join()
    assert learnt(speculator.calibration) > 8
    assert starting_calibration(path, None).dump() == speculator.calibration.dump()


def test_it_is_kept_now_and_then_and_never_without_need(tmp_path: Path) -> None:
    path, clock = tmp_path / "calibration.json", Clock()
    engine, speculator = kept_engine(path, clock)
    run(engine, [greedy_request(1, PROMPT, 25)])
    assert not path.exists()
    clock.now = SAVE_EVERY_SECONDS
    speculator.passed(8, 1, Load(0, 1, 20), 1.0, 1.1)  # steps that rest bring it to the file too
    assert learnt(starting_calibration(path, None)) > 8
    path.unlink()
    clock.now *= 2
    speculator.passed(8, 1, Load(0, 1, 20), 1.0, 1.1)
    engine.close()
    assert not path.exists()  # nothing was learnt since


def test_a_folder_that_takes_no_file_costs_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    engine, _ = kept_engine(tmp_path / "file" / "calibration.json", Clock())
    run(engine, [greedy_request(1, PROMPT, 25)])
    engine.close()
    assert "cannot be kept" in caplog.text


def test_another_draft_model_does_not_inherit(tmp_path: Path) -> None:
    """`model:A` then `model:B`: what A's scores were worth says nothing of B's. The suffix drafter has no weights."""
    files = [tmp_path / name for name in ("a.gguf", "b.gguf")]
    for file in files:
        file.write_bytes(file.name.encode())
    a, b = (registry.weights_of(f"suffix,model:{file}", "toy") for file in files)
    kept, shipped = tmp_path / "kept.json", tmp_path / "shipped.json"

    def teach(weights: dict[str, str], name: str, calibration: Calibration) -> None:
        calibration.claim(weights)
        for _ in range(200):
            calibration.observe(name, 1, 0, confidence_bin(0.5), greedy=True, accepted=True)

    first = Calibration()
    teach(a, "model", first)
    teach(a, "suffix", first)
    first.save(kept)
    prior = Calibration()
    teach({}, "heads", prior)
    prior.save(shipped)

    def chances(found: Calibration) -> list[float]:
        return [round(found.chance(name, 1, 0, 0.5, greedy=True), 1) for name in ("model", "suffix", "heads")]

    assert chances(starting_calibration(kept, shipped, a)) == [1.0, 1.0, 1.0]
    assert chances(starting_calibration(kept, shipped, b)) == [0.5, 1.0, 1.0]
    files[0].write_bytes(b"trained anew")
    anew = registry.weights_of(f"suffix,model:{files[0]}", "toy")
    assert chances(starting_calibration(kept, shipped, anew, ["heads"])) == [0.5, 1.0, 0.5]
    assert chances(starting_calibration(kept, shipped)) == [1.0, 1.0, 1.0]  # the drafter is not in use: its counts wait
    assert registry.weights_of("auto", "toy") == registry.weights_of("none", "toy") == {}
    assert registry.not_shipped(f"suffix,model:{files[0]}", "toy") == {"model"}
