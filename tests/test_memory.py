"""Memory a started engine holds: keys and values only as they are written, weights only as the decoder packed them."""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

import pytest
import torch
from checkpoints import write_rand_checkpoint

from bench import startup
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


def test_memory_that_the_two_processes_share_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library of 48 MiB, mapped by both: half of it belongs to each while both are there, all of it to one that is alone."""
    size = 48 * MIB
    (tmp_path / "library.bin").write_bytes(bytes(size))
    (tmp_path / "heavy.py").write_text(
        "import mmap, pathlib\n"
        "file = open(pathlib.Path(__file__).parent / 'library.bin', 'rb')\n"
        "held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n"
        "touched = sum(held[::4096])\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(startup, "LIBRARIES", ("heavy", "heavy, json"))
    assert size < startup.library_bytes() < 1.8 * size


def test_the_limit_of_a_server_grows_with_the_keys_and_values_in_use_only() -> None:
    """Ten tokens of 1 MiB each: the limit after the answer is 10 MiB above the one at ready, whatever the server reserves."""
    options = argparse.Namespace(factor=1.5, seconds=5.0)

    def report(ready: int, after: int) -> dict[str, object]:
        life = startup.Life(1.0, {"server": ready * MIB}, {"server": after * MIB}, tokens=10)
        return startup.report([life], weights=100 * MIB, per_token=MIB, bare=20 * MIB, options=options)

    assert report(150, 160)["memory_in_limit"]
    assert not report(151, 160)["memory_in_limit"]
    over = report(150, 161)
    assert not over["memory_in_limit"]
    assert over["limit_bytes"] == {"ready": 150 * MIB, "after_answer": 160 * MIB}
    assert over["memory_over_limit_without_libraries"] == round(141 / 160, 3)
