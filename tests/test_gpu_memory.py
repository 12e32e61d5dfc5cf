"""Sizing the KV cache from a GPU's free memory: plain arithmetic, checked without one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from checkpoints import write_rand_checkpoint
from device import DEVICE, to_device
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.tree_attention.ordered.triton import tree_attention as ordered_attention
from kernels.tree_attention.triton import splits_of_shared
from server.compose import load_parts, make_engine
from server.gpu_memory import MOST_PARTS, LargestStep, kv_bytes, largest_step, step_bytes
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
    assert largest_step(256, 64, 16) == LargestStep(256 + 64 * 17, 64 * 17 + 64)  # as many prompt tokens are scored
    assert largest_step(16, 1, 4) == LargestStep(16 + 5, 5 + 16)


def test_a_steps_tensors_bound_what_the_decoder_makes() -> None:
    """gate, up and their product of all rows, and two copies of the logits, at least; not more than a few times that."""
    step = largest_step(256, 64, 16)
    least = 4 * (step.nodes * 3 * LLAMA_8B.intermediate + 2 * step.scored * LLAMA_8B.vocab_size)
    assert least < step_bytes(LLAMA_8B, step) < 3 * least


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_many_rows_on_one_long_prompt_stay_within_the_parts_that_were_counted(kv_heads: int) -> None:
    """Their nodes fill the device by themselves; few of them leave room for splits, but no more than were counted."""
    for lanes in (2, 128, 64 * 17 * 4):
        assert 1 + splits_of_shared(lanes, kv_heads, keys=100_000) <= MOST_PARTS
    assert splits_of_shared(128 * 264, kv_heads, keys=100_000) == 1
    assert splits_of_shared(128 * (132 // kv_heads), kv_heads, keys=100_000) == 2
    assert splits_of_shared(2, kv_heads, keys=1000) == 4  # keys enough for four


class Made(TorchDispatchMode):
    """Bytes of new tensors, views not counted."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.new_empty, torch.ops.aten.empty_like, torch.ops.aten.empty):
            self.size += made.nbytes
        return made


def test_ordered_attention_is_counted_at_the_longest_context() -> None:
    """What it makes for one node before a full page table; the fast one's count, which does not grow with the context, is less."""
    context, page = 40 * 256, 256
    shape = toy.rand_weights(layers=1, hidden=32, q_heads=2, kv_heads=1, head_dim=16, intermediate=32, vocab=40)[0]
    shape = dataclasses.replace(shape, max_position=context)
    inputs = to_device(toy.step_inputs([toy.Row([1], [0] * (context // page))], page))
    q, keys = torch.randn(1, 2, 16, device=DEVICE), torch.zeros(1, 1, 16, page, device=DEVICE)
    with Made() as made:
        ordered_attention(q, keys, keys.mT.contiguous(), inputs, 0.25, None)
    assert step_bytes(shape, LargestStep(1, 1)) < made.size
    assert made.size <= step_bytes(shape, LargestStep(1, 1), deterministic=True) < 2 * made.size


def test_the_setting_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory is 1\.5; it must be between 0 and 1"):
        load_settings(None, {"gpu_memory": 1.5})
    model = write_rand_checkpoint(tmp_path / "rand", layers=1)
    parts = load_parts(Settings(model=str(model), backend="reference", gpu_memory=0.9, cache_dir=str(tmp_path)))
    with pytest.raises(ConfigError, match="--gpu-memory is for --device cuda; on cpu give --kv-memory"):
        make_engine(parts, "none")
