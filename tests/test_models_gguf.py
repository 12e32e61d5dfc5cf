"""GGUF files: twins of safetensors folders give equal logits; row order, rope keys, tied output, metadata access."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoint_tokenizer import vocabulary
from checkpoints import write_rand_checkpoint, write_rand_gguf
from gguf_twin import gguf_from_folder, interleave
from loaded import TOLERANCE, error, logits, oracle, text

from kernels.linear import BlockWeight, DenseWeight
from spec.errors import ModelFileError
from spec.models import LoadedModel, load_model
from spec.models.gguf_file import GGUFFile
from spec.models.hf_config import read_hf_config
from spec.models.rope import inverse_frequencies

TOKENS = text(60)


def matrices(model: LoadedModel) -> dict[str, torch.Tensor]:
    found = {"embedding": model.weights.embedding, "lm_head": model.weights.lm_head}
    for index, layer in enumerate(model.weights.layers):
        for role in ("q", "k", "v", "o", "gate", "up", "down"):
            found[f"{index}.{role}"] = getattr(layer, role)
            if found[f"{index}.{role}"].bias is not None:
                found[f"{index}.{role}.bias"] = DenseWeight(found[f"{index}.{role}"].bias[None])
    assert all(isinstance(weight, DenseWeight) for weight in found.values())
    return {name: weight.values for name, weight in found.items()}  # type: ignore[union-attr]


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_float_twin_equals_its_folder(model_type: str, tied: bool, tmp_path: Path) -> None:
    """LD-04: query and key rows of Llama files are reordered back, with fewer key heads than query heads; those of Qwen are not."""
    folder = write_rand_checkpoint(tmp_path / "m", model_type=model_type, tied=tied)
    twin = gguf_from_folder(folder, tmp_path / "m.gguf")
    ours, theirs = load_model(twin), load_model(folder)
    expected = matrices(theirs)
    assert matrices(ours).keys() == expected.keys()
    for name, values in matrices(ours).items():
        assert torch.equal(values, expected[name]), name
    assert torch.equal(logits(ours, TOKENS), logits(theirs, TOKENS))
    assert error(logits(ours, TOKENS), oracle(folder, TOKENS)) < TOLERANCE
    assert (ours.weights.lm_head is ours.weights.embedding) == tied
    assert ours.eos_ids == theirs.eos_ids == (256, 258)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_a_quantised_twin_equals_the_librarys_values(kind: str, tmp_path: Path) -> None:
    """float32 mode against transformers on weights that the gguf library dequantised; native mode keeps blocks."""
    folder = write_rand_checkpoint(tmp_path / "m", seed=2)
    twin = gguf_from_folder(folder, tmp_path / "m.gguf", kind)
    reference = dequantised_folder(folder, twin, tmp_path / "d")
    assert error(logits(load_model(twin, weights="float32"), TOKENS), oracle(reference, TOKENS)) < TOLERANCE
    native = load_model(twin)
    weight = native.weights.layers[1].k
    assert isinstance(weight, DenseWeight if kind.endswith("16") else BlockWeight)
    assert isinstance(native.weights.layers[1].attention_norm, torch.Tensor)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_k_types_are_read_with_their_rows_in_order(kind: str, model_type: str, tmp_path: Path) -> None:
    sizes = {"layers": 1, "hidden": 256, "intermediate": 256, "head_dim": 64, "model_type": model_type}
    twin = gguf_from_folder(write_rand_checkpoint(tmp_path / "m", **sizes), tmp_path / "m.gguf", kind)
    stored = {tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(twin).tensors}
    layer = load_model(twin, weights="float32").weights.layers[0]
    for weight, name, heads in (
        (layer.q, "attn_q", 4),
        (layer.k, "attn_k", 2),
        (layer.v, "attn_v", 0),
        (layer.down, "ffn_down", 0),
    ):
        expected = torch.from_numpy(stored[f"blk.0.{name}.weight"].copy())
        values = weight.values  # type: ignore[union-attr]
        assert torch.equal(interleave(values, heads) if heads and model_type == "llama" else values, expected), name
    native = load_model(twin).weights.layers[0]
    assert native.q.bits == (4 if kind == "Q4_K" else 8)  # type: ignore[union-attr]


def dequantised_folder(folder: Path, twin: Path, target: Path) -> Path:
    """A float32 folder whose matrices are what quantising made of them."""
    from safetensors.torch import load_file, save_file

    kinds = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(twin).tensors}
    kind = kinds["blk.0.attn_q.weight"]
    tensors = load_file(folder / "model.safetensors")
    for name, values in tensors.items():
        if values.dim() == 2:
            tensors[name] = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(values.numpy(), kind), kind).copy())
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_biases_of_llama_files_are_reordered_with_their_rows(tmp_path: Path) -> None:
    folder = write_rand_checkpoint(tmp_path / "m")
    import json

    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    for name in [
        name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"))
    ]:
        tensors[name.replace("weight", "bias")] = torch.randn(
            tensors[name].shape[0], generator=torch.Generator().manual_seed(5)
        )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"attention_bias": True}
    (folder / "config.json").write_text(json.dumps(config))
    twin = load_model(gguf_from_folder(folder, tmp_path / "m.gguf"))
    assert torch.equal(logits(twin, TOKENS), logits(load_model(folder), TOKENS))


def test_rope_freqs_stand_for_the_llama3_bands(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    folder = write_rand_checkpoint(tmp_path / "m", rope_scaling=scaling)
    rope = read_hf_config(folder).rope
    plain = 1.0 / (rope.theta ** (torch.arange(0, 32, 2) / 32))
    factors = plain / inverse_frequencies(rope, 32)
    assert factors.max() == pytest.approx(8.0)
    assert factors.min() == pytest.approx(1.0)
    twin = gguf_from_folder(folder, tmp_path / "m.gguf", tensors={"rope_freqs.weight": factors})
    assert error(logits(load_model(twin), TOKENS), oracle(folder, TOKENS)) < TOLERANCE


SCALINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": ({"type": "linear", "factor": 4.0}, {"type": "linear", "factor": 4.0}),
    "yarn": (
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {"type": "yarn", "factor": 4.0, "original_context_length": 128},
    ),
    "yarn with all constants": (
        {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.2 * (0.1 * 0.6931471805599453 + 1)},
        {"type": "yarn", "factor": 2.0, "original_context_length": 64, "yarn_beta_fast": 8.0, "yarn_beta_slow": 2.0, "attn_factor": 1.2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALINGS)
def test_rope_scaling_keys(name: str, tmp_path: Path) -> None:
    scaling, keys = SCALINGS[name]
    folder = write_rand_checkpoint(tmp_path / "m", rope_scaling=scaling)
    twin = gguf_from_folder(
        folder, tmp_path / "m.gguf", extra={f"llama.rope.scaling.{key}": value for key, value in keys.items()}
    )
    assert error(logits(load_model(twin), TOKENS), oracle(folder, TOKENS)) < TOLERANCE


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "experts": ({"llama.expert_count": 8}, "llama.expert_count: 8; mixtures of experts"),
    "longrope": ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type: 'longrope' is not supported; supported: none, linear, yarn"),
    "split files": ({"split.count": 2}, "split.count: the model is split"),
    "not causal": ({"llama.attention.causal": False}, "llama.attention.causal: false"),
    "scaling factor of text": ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": "4"}, "rope.scaling.factor: '4'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_metadata_is_refused(name: str, tmp_path: Path) -> None:
    extra, message = REFUSED[name]
    folder = write_rand_checkpoint(tmp_path / "m")
    twin = gguf_from_folder(folder, tmp_path / "m.gguf", extra=extra)
    with pytest.raises(ModelFileError) as caught:
        load_model(twin)
    assert message in str(caught.value)
    assert str(twin) in str(caught.value)


def test_an_unsupported_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        ModelFileError, match=r"general\.architecture: 'gemma3' is not supported; supported: llama, mistral, qwen2"
    ):
        load_model(tmp_path / "m.gguf")


def test_an_unsupported_tensor_type_is_refused(tmp_path: Path) -> None:
    folder = write_rand_checkpoint(tmp_path / "m", hidden=256, head_dim=64, intermediate=256)
    twin = gguf_from_folder(folder, tmp_path / "m.gguf", "TQ2_0")
    with pytest.raises(
        ModelFileError, match=r"tensor 'token_embd.weight': type TQ2_0 is not supported; supported: F32, F16, BF16, Q4_0"
    ):
        load_model(twin)


def test_tensors_that_nothing_needs_are_ignored(tmp_path: Path) -> None:
    folder = write_rand_checkpoint(tmp_path / "m")
    twin = gguf_from_folder(folder, tmp_path / "m.gguf", tensors={"blk.0.attn_rot_embd.weight": torch.ones(16)})
    assert torch.equal(logits(load_model(twin), TOKENS), logits(load_model(folder), TOKENS))


def test_metadata_is_read_like_the_library_reads_it(tmp_path: Path) -> None:
    extra = {
        "x.flag": True,
        "x.float": 1.5,
        "x.text": "é😀",
        "x.words": ["a", "", "ö"],
        "x.numbers": [3, -4, 5],
        "x.reals": [0.5, -1.0],
    }
    twin = gguf_from_folder(write_rand_checkpoint(tmp_path / "m"), tmp_path / "m.gguf", extra=extra)
    file = GGUFFile(twin)
    reader = gguf.GGUFReader(twin)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            value = file.metadata[key]
            assert (value if isinstance(value, str | int | float) else list(value)) == field.contents(), key
    for tensor in reader.tensors:
        info = file.tensors[tensor.name]
        assert (info.type, info.shape, info.nbytes) == (
            tensor.tensor_type.name,
            tuple(tensor.shape[::-1].tolist()),
            tensor.n_bytes,
        )
        assert file.tensor_data(tensor.name).tobytes() == tensor.data.tobytes()
    assert list(file.metadata["tokenizer.ggml.tokens"]) == list(vocabulary()[0])
    assert file.metadata["x.numbers"].numpy().dtype == np.int32
    assert file.metadata["tokenizer.ggml.tokens"][257] == "<|im_start|>"
    assert file.metadata["tokenizer.ggml.tokens"].is_text


def test_writing_to_a_loaded_tensor_never_reaches_the_file(tmp_path: Path) -> None:
    twin = write_rand_gguf(tmp_path / "m.gguf")
    before = twin.read_bytes()
    load_model(twin).weights.embedding.values.zero_()  # type: ignore[union-attr]
    assert twin.read_bytes() == before
