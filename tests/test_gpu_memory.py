"""Sizing the KV cache from a GPU's free memory: plain arithmetic, checked without one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import toy
from checkpoints import write_rand_checkpoint

from server.compose import load_parts, make_engine
from server.gpu_memory import LargestStep, kv_bytes, largest_step, step_bytes
from server.settings import Settings, load_settings
from spec.errors import ConfigError

GIB = 2**30
LLAMA_8B = dataclasses.replace(
    toy.rand_weights(layers=1, hidden=32, vocab=40)[0],
    layers=32, hidden=4096, intermediate=14336, q_heads=32, kv_heads=8, head_dim=128, vocab_size=128256,
)  # fmt: skip


def test_what_is_left_of_the_share_is_for_keys_and_values() -> None:
    assert kv_bytes(0.9, 4 * GIB, lambda: (60 * GIB, 80 * GIB)) == int(0.9 * 80 * GIB) - 20 * GIB - 4 * GIB
    assert kv_bytes(1.0, 0, lambda: (7, 10)) == 7


@pytest.mark.parametrize(("free", "step"), [(10, 4), (8, 0), (0, 0)])
def test_nothing_left_says_every_figure(free: int, step: int) -> None:
    with pytest.raises(
        ConfigError, match=r"--gpu-memory 0.9 of 80.00 GiB leaves nothing .* are taken .* a step needs .* GiB; raise"
    ):
        kv_bytes(0.9, step * GIB, lambda: (free * GIB, 80 * GIB))


def test_the_largest_step_carries_every_tree_and_a_chunk() -> None:
    assert largest_step(256, 64, 16) == LargestStep(256 + 64 * 17, 64 * 17 + 1)


def test_a_steps_tensors_bound_what_the_decoder_makes() -> None:
    """gate, up and their product of all rows, and two copies of the logits, at least; not more than a few times that."""
    step = largest_step(256, 64, 16)
    least = 4 * (step.nodes * 3 * LLAMA_8B.intermediate + 2 * step.scored * LLAMA_8B.vocab_size)
    assert least < step_bytes(LLAMA_8B, step) < 3 * least


def test_the_setting_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory is 1\.5; it must be between 0 and 1"):
        load_settings(None, {"gpu_memory": 1.5})
    model = write_rand_checkpoint(tmp_path / "rand", layers=1)
    parts = load_parts(Settings(model=str(model), backend="reference", gpu_memory=0.9, cache_dir=str(tmp_path)))
    with pytest.raises(ConfigError, match="--gpu-memory is for --device cuda; on cpu give --kv-memory"):
        make_engine(parts, "none")
