"""`--kv-type int8` from the settings to the answers: sizes, refusals, and the same tokens with speculation as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from checkpoints import write_rand_checkpoint
from engine_kit import greedy_request
from loaded import text

from kernels import native
from server.compose import Parts, load_parts, make_engine
from server.settings import Settings
from spec.engine import Engine
from spec.errors import ConfigError

BACKENDS = ["reference"] + (["native"] if native.load() is not None else [])


def settings(tmp_path: Path, backend: str, **more: Any) -> Settings:
    folder = tmp_path / "model"
    if not folder.exists():
        write_rand_checkpoint(folder)
    sizes = {"kv_type": "int8", "kv_memory": 2**19, "threads": 2, "cache_dir": str(tmp_path / "cache")}
    return Settings(**({"model": str(folder), "backend": backend} | sizes | more))


def answers(parts: Parts, drafters: str, count: int, tokens: int = 24) -> tuple[Engine, dict[int, list[int]]]:
    """What `count` requests at once are told; each repeats a text, so that a suffix drafter has something to say."""
    engine = make_engine(parts, drafters)
    for i in range(count):
        engine.add(greedy_request(i, text(6, seed=i) * (3 + i), tokens))
    said: dict[int, list[int]] = {i: [] for i in range(count)}
    while engine.has_work():
        for event in engine.step():
            said[event.request_id] += event.token_ids
    return engine, said


@pytest.mark.parametrize("backend", BACKENDS)
def test_speculation_changes_no_token(backend: str, tmp_path: Path) -> None:
    parts = load_parts(settings(tmp_path, backend))
    shape = parts.model.shape
    engine, plain = answers(parts, "none", 1)
    a_token = 2 * shape.layers * shape.kv_heads * (shape.head_dim + 4)
    assert engine.config.num_pages == 2**19 // (16 * a_token)
    assert engine.config.model_salt.split("/")[2] == "int8"
    assert len(plain[0]) == 24
    wanted = answers(parts, "none", 3)[1]
    assert wanted[0] == plain[0]
    for tree_shape in ("chain:4", "4x3", ""):
        for page_size in (16, 32):
            changed = msgspec.structs.replace(parts.settings, tree_shape=tree_shape, page_size=page_size)
            assert answers(load_parts(changed), "suffix", 3)[1] == wanted


def test_the_reference_and_the_kernels_say_the_same(tmp_path: Path) -> None:
    said = [answers(load_parts(settings(tmp_path, backend)), "none", 2)[1] for backend in BACKENDS]
    assert all(each == said[0] for each in said)


def test_what_cannot_be_kept_is_refused_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^--kv-type int8: keys and values of 8 bits need pages of 16, 32, ... tokens, not 8$"
    ):
        load_parts(settings(tmp_path, "reference", page_size=8))
    odd = write_rand_checkpoint(tmp_path / "odd", head_dim=30)
    with pytest.raises(ConfigError, match=r"^--kv-type int8: .* heads of a multiple of 4 and at most 512 channels, not 30$"):
        load_parts(settings(tmp_path, "reference", model=str(odd)))


def test_the_triton_kernels_keep_the_same_bytes(tmp_path: Path) -> None:
    """Speculation changes no token there either; a text of theirs may differ from the CPU's, whose softmax weights are whole numbers."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = load_parts(settings(tmp_path, "triton", device=device, tree_shape="chain:2"))
    engine, said = answers(parts, "suffix", 2, tokens=6)
    assert engine.config.num_pages == answers(load_parts(settings(tmp_path, "reference")), "none", 1, 1)[0].config.num_pages
    assert said == answers(parts, "none", 2, tokens=6)[1]
