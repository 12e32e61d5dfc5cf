"""Quantised checkpoints through the Triton decoder and the engine, in their published form."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import torch
from device import DEVICE, to_device
from engine_kit import greedy_request
from loaded import text
from quantised_checkpoints import GPTQ, gptq, write
from toy import Row, new_store, step_inputs

from kernels import native
from kernels.decoder.placement import placed
from kernels.decoder.reference import ReferenceDecoder
from kernels.decoder.triton import TritonDecoder
from kernels.linear import BlockWeight
from kernels.linear.formats import GroupWeight
from server.compose import Parts, load_parts, make_engine
from server.settings import Settings
from spec.engine import Engine
from spec.errors import ConfigError
from spec.models import load_model

# Relative to the largest logit. Interpreted products are float32; a device rounds rows to 8 significant bits. A code of a row
# quantised to 8 bits may tip over on a last-bit difference before it.
TOLERANCE = 1e-4 if DEVICE == "cpu" else 3e-2
TIPPED = 2e-2


@pytest.mark.parametrize("form", ["gptq, act order", "awq", "fp8, blocks", "int8 rows", "compressed mxfp4"])
def test_the_decoder_reads_the_published_form(form: str, tmp_path: Path) -> None:
    model = load_model(write(tmp_path / "model", form)[0], published=True)
    prompt = step_inputs([Row(text(5), [0])], 16)
    tree = step_inputs([Row(text(4, seed=1), [0], 5, [-1, 0, 0, 1])], 16)
    scores = []
    for device in ("cpu", DEVICE):
        store = new_store(model.shape, 1, 16, device=device)
        weights = placed(model.weights, device)
        kind = ReferenceDecoder if not scores else TritonDecoder
        decoder = kind(model.shape, weights)
        passes = [decoder.forward(to_device(inputs, device), store, True).logits for inputs in (prompt, tree)]
        scores.append(torch.cat([logits.cpu() for logits in passes if logits is not None]))
    want, got = scores
    assert ((got - want).abs().max() / want.abs().max()).item() < (TIPPED if form == "int8 rows" else TOLERANCE)


def test_placed_moves_every_tensor_once(tmp_path: Path) -> None:
    weights = load_model(write(tmp_path / "model", "gptq, act order", tied=True)[0], published=True).weights
    moved = placed(weights, "meta")
    layer = moved.layers[0]
    assert isinstance(layer.q, GroupWeight)
    assert layer.q.order is not None
    parts = (layer.q.codes, layer.q.scale, layer.q.zero, layer.q.order, layer.attention_norm, moved.rope_cos, moved.final_norm)
    assert {t.device.type for t in parts} == {"meta"}
    assert moved.lm_head is not weights.lm_head
    assert moved.lm_head.values is moved.embedding.values  # type: ignore[union-attr]
    assert placed(weights, "cpu").embedding.values is weights.embedding.values  # type: ignore[union-attr]


def served(
    backend: Literal["reference", "triton"], folder: Path, drafters: str, tokens: int, **more: Any
) -> tuple[Engine, Parts, list[int]]:
    """An engine on that backend, its parts, and what it says to one greedy request."""
    settings = Settings(
        model=str(folder),
        backend=backend,
        device="cpu" if backend == "reference" else DEVICE,  # type: ignore[arg-type]
        tree_shape="chain:3",
        cache_dir=str(folder.parent / "cache"),
        **more,
    )
    parts = load_parts(settings)
    engine = make_engine(parts, drafters)
    engine.add(greedy_request(1, text(4) * 3, tokens))
    return engine, parts, [token for _ in range(12) for event in engine.step() for token in event.token_ids]


@pytest.mark.parametrize("drafters", ["none", "suffix"])
def test_serving_on_triton_says_what_the_reference_says(drafters: str, tmp_path: Path) -> None:
    folder, _ = write(tmp_path / "model", "awq")
    sizes = {"kv_type": "float32", "kv_memory": 2**19}
    _, host, wanted = served("reference", folder, drafters, 6, **sizes)
    _, device, said = served("triton", folder, drafters, 6, **sizes)
    assert type(host.model.weights.layers[0].q) is BlockWeight
    assert type(device.model.weights.layers[0].q) is GroupWeight
    assert len(said) == 6
    assert said == wanted


def test_groups_too_narrow_for_the_kernels_are_served(tmp_path: Path) -> None:
    folder, _ = write(tmp_path / "model", (GPTQ | {"group_size": 24}, gptq(4, 24)))
    sizes = {"kv_type": "float32", "kv_memory": 2**19}
    assert served("triton", folder, "none", 4, **sizes)[2] == served("reference", folder, "none", 4, **sizes)[2]


def test_keys_in_8_bits_are_served_and_refused_by_the_native_kernels(tmp_path: Path) -> None:
    folder, _ = write(tmp_path / "model", "fp8, one scale")
    said = {}
    for backend in ("reference", "triton"):
        engine, parts, said[backend] = served(backend, folder, "suffix", 5, kv_type="float8", kv_memory=2**17)
        assert engine.config.num_pages == 2**17 // (2 * 2 * 32 * 16)  # a byte each: keys and values of 2 heads of 32
    assert said["triton"] == said["reference"]
    if native.load() is not None:
        with pytest.raises(
            ConfigError, match="--kv-type float8 is not for the native kernels; they keep bfloat16 or float32 or int8"
        ):
            load_parts(msgspec.structs.replace(parts.settings, backend="native", device="cpu"))
