"""Memory a started engine holds: keys and values only as they are written, weights only as the decoder packed them."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from checkpoints import write_rand_checkpoint

from kernels.batch import KVTensors
from server.compose import build_engine
from server.settings import Settings
from spec.models import LoadedModel

MIB = 2**20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_store_takes_memory_as_it_is_written(dtype: torch.dtype) -> None:
    before = resident()
    store = KVTensors.allocate(4, 256 * MIB // (4 * 2 * 64 * 16 * dtype.itemsize * 2), 2, 64, 16, dtype)
    assert store.k.nbytes + store.v.nbytes == 256 * MIB
    assert resident() - before < 16 * MIB
    assert not store.k[1, 7].any()
    store.k[1, 7].fill_(1)
    assert store.k[1, 7].all()
    assert not store.k[1, 8].any()
    assert not store.v[1, 7].any()


def test_a_store_outlives_the_object_that_made_it() -> None:
    keys = KVTensors.allocate(1, 4, 1, 8, 16, torch.float32).k
    gc.collect()
    keys.fill_(2)
    assert float(keys.sum()) == 2.0 * keys.numel()


def test_the_engine_process_keeps_no_second_copy_of_the_weights(tmp_path: Path) -> None:
    folder = write_rand_checkpoint(tmp_path / "model")
    engine, ready = build_engine(Settings(model=str(folder), cache_dir=str(tmp_path), kv_memory=2**24, threads=1))
    gc.collect()
    assert ready.num_pages == engine.config.num_pages
    assert not [thing for thing in gc.get_objects() if type(thing) is LoadedModel]
