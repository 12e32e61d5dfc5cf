"""`forespeak eval`: its text, its arithmetic against transformers' loss, what quantised weights cost, how it fails."""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_rand_checkpoint
from typer.testing import CliRunner

from kernels import native
from kernels.batch import KVTensors
from server.cli import app
from server.corpus import docstrings
from server.quality import PAGE, compare
from spec.errors import ForespeakError
from spec.models import load_model
from spec.target import TargetModel


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rand_checkpoint(tmp_path_factory.mktemp("model") / "rand")


def target(folder: Path, window: int) -> TargetModel:
    from kernels.decoder.reference import ReferenceDecoder

    loaded = load_model(folder, weights="float32")
    shape, pages = loaded.shape, -(-window // PAGE)
    store = KVTensors.allocate(shape.layers, pages, shape.kv_heads, shape.head_dim, PAGE, torch.float32, "cpu")
    return TargetModel(ReferenceDecoder(shape, loaded.weights), store)


def run(model: Path, tmp_path: Path, *arguments: str) -> Any:
    backend = [] if "--backend" in arguments else ["--backend", "reference", "--threads", "1"]
    sizes = [*backend, "--cache-dir", str(tmp_path / "cache")]
    return CliRunner().invoke(app, ["eval", str(model), *arguments, *sizes])


def test_the_text_is_the_same_every_time_and_grows_by_its_end() -> None:
    text = docstrings(5000)
    assert len(text) == 5000
    assert docstrings(5000) == text
    assert docstrings(2000) == text[:2000]
    assert text.startswith("Command-line parsing library")


def test_the_loss_is_that_of_transformers_for_every_chunk_size(model: Path) -> None:
    from transformers import AutoModelForCausalLM

    ids = [(i * 7 + i // 3) % 64 for i in range(70)]
    window = 30  # the last window has ten tokens
    judge = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    nats = count = 0.0
    with torch.no_grad():
        for first in range(0, len(ids), window):
            part = torch.tensor([ids[first : first + window]])
            tokens = part.shape[1] - 1
            nats += float(judge(part, labels=part).loss) * tokens
            count += tokens
    seen: list[int] = []
    for chunk in (1, 7, 30, 64):
        found = compare(target(model, window), None, ids, window=window, chunk=chunk, on_chunk=seen.append)
        assert found.tested.tokens == count == 67
        assert found.tested.perplexity == pytest.approx(math.exp(nats / count), rel=1e-4)
    assert sum(seen) == 4 * len(ids)


def test_a_decoder_compared_with_itself_is_the_same(model: Path) -> None:
    ids = list(range(50))
    found = compare(target(model, 64), target(model, 64), ids, window=64, chunk=16)
    assert found.change == 0.0
    assert found.divergence == 0.0
    assert found.same == found.tested.tokens == 49


def test_it_prints_a_line_and_an_object_and_judges_what_quantising_costs(model: Path, tmp_path: Path) -> None:
    result = run(model, tmp_path, "--limit", "600", "--window", "64", "--within", "100", "--quantise", "q8")
    assert result.exit_code == 0, result.output
    line, last = result.stdout.strip().splitlines()
    report = json.loads(last)
    assert report["text_sha256"] == hashlib.sha256(docstrings(600).encode()).hexdigest()
    assert report["characters"] == 600
    assert report["quantise"] == "q8"
    assert f"{report['perplexity']:.4f}" in line
    assert abs(report["change_percent"]) < 5.0
    assert report["divergence"] >= 0.0
    alone = run(model, tmp_path, "--limit", "600", "--no-reference")
    assert "reference_perplexity" not in json.loads(alone.stdout.splitlines()[-1])


def test_a_text_file_is_read_and_a_loss_beyond_the_limit_fails(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 40)
    arguments = ("--text", str(text), "--limit", "500", "--window", "64")
    fine = run(model, tmp_path, *arguments, "--within", "1")
    assert fine.exit_code == 0, fine.output
    assert json.loads(fine.stdout.splitlines()[-1])["text"] == str(text)
    # 4-bit weights of a random model are far from the same, whichever way they err
    worse = run(model, tmp_path, *arguments, "--within", "0", "--quantise", "q4")
    change = json.loads(worse.stdout.splitlines()[-1])["change_percent"]
    assert worse.exit_code == (1 if change > 0 else 0)
    assert change != 0.0


@pytest.mark.skipif(native.load() is None, reason="no native kernels here")
def test_torch_has_every_core_although_the_native_kernels_leave_it_one(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    threads = torch.get_num_threads()
    try:
        result = run(model, tmp_path, "--limit", "300", "--no-reference", "--backend", "native")
        assert result.exit_code == 0, result.output
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


def test_a_text_that_cannot_be_used_is_refused_in_one_line(model: Path, tmp_path: Path) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9")
    for path, word in ((tmp_path / "missing.txt", "missing.txt"), (latin, "UTF-8")):
        result = run(model, tmp_path, "--text", str(path))
        assert isinstance(result.exception, ForespeakError)
        assert word in str(result.exception)
