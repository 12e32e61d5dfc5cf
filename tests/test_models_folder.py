"""Safetensors folders: the index is the truth (LD-01), tied embeddings in all forms (LD-02), trimming, blocks, identity."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_tokenizer import ENDOFTEXT, IM_END
from checkpoints import scripted_table, write_rand_checkpoint, write_rand_gguf, write_table_checkpoint, write_table_gguf
from loaded import TOLERANCE, error, logits, oracle, text
from safetensors.torch import load_file, save_file

from kernels.linear import BlockWeight, DenseWeight
from spec.errors import ModelFileError
from spec.models import load_model

TOKENS = text(40)
INDEX = "model.safetensors.index.json"


def sharded(folder: Path) -> Path:
    return write_rand_checkpoint(folder, shards=3)


def shard(folder: Path, number: int) -> Path:
    return folder / f"model-{number:05d}-of-00003.safetensors"


def refused(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        load_model(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- LD-01 -----------------------------------------------------------------------------------------------------------


def test_shards_equal_one_file(tmp_path: Path) -> None:
    whole, parts = write_rand_checkpoint(tmp_path / "whole"), sharded(tmp_path / "parts")
    assert torch.equal(logits(load_model(parts), TOKENS), logits(load_model(whole), TOKENS))


def test_a_missing_shard_is_refused(tmp_path: Path) -> None:
    shard(sharded(tmp_path), 2).unlink()
    assert f"{shard(tmp_path, 2)}: file: missing, but {INDEX} names it" in refused(tmp_path)


@pytest.mark.parametrize("name", ["extra.safetensors", "a.safetensors", "model.safetensors"])
def test_a_stray_file_changes_nothing(name: str, tmp_path: Path) -> None:
    clean = logits(load_model(sharded(tmp_path)), TOKENS)
    tensors = {k: torch.zeros_like(v) for i in (1, 2, 3) for k, v in load_file(shard(tmp_path, i)).items()}
    save_file(tensors, tmp_path / name)
    assert torch.equal(logits(load_model(tmp_path), TOKENS), clean)


def test_a_stale_copy_in_another_shard_changes_nothing(tmp_path: Path) -> None:
    clean = logits(load_model(sharded(tmp_path)), TOKENS)
    files = {number: load_file(shard(tmp_path, number)) for number in (1, 3)}
    for source, target in ((1, 3), (3, 1)):
        name = next(name for name in files[source] if "proj" in name)
        save_file(files[target] | {name: torch.zeros_like(files[source][name])}, shard(tmp_path, target))
    assert torch.equal(logits(load_model(tmp_path), TOKENS), clean)


@pytest.mark.parametrize("cut", [1, 1000, None])
def test_a_truncated_shard_is_refused(cut: int | None, tmp_path: Path) -> None:
    victim = shard(sharded(tmp_path), 3)
    os.truncate(victim, 0 if cut is None else victim.stat().st_size - cut)
    assert refused(tmp_path).startswith(f"{victim}: ")


def test_an_index_without_a_needed_tensor_is_refused(tmp_path: Path) -> None:
    index = json.loads((sharded(tmp_path) / INDEX).read_text())
    name = "model.layers.1.self_attn.k_proj.weight"
    del index["weight_map"][name]
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert refused(tmp_path) == f"{tmp_path / INDEX}: tensor '{name}': missing"


def test_an_index_that_names_the_wrong_shard_is_refused(tmp_path: Path) -> None:
    index = json.loads((sharded(tmp_path) / INDEX).read_text())
    name = "model.norm.weight"
    index["weight_map"][name] = shard(tmp_path, 1).name
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert refused(tmp_path) == f"{shard(tmp_path, 1)}: tensor '{name}': missing, but {INDEX} says it is in this file"


@pytest.mark.parametrize(
    "value", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "x.bin", 7, None, "..\\x.safetensors"]
)
def test_an_index_cannot_point_out_of_its_folder(value: object, tmp_path: Path) -> None:
    index = json.loads((sharded(tmp_path) / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = value
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert "weight_map 'model.norm.weight'" in refused(tmp_path)


def test_shards_without_an_index_are_refused(tmp_path: Path) -> None:
    (sharded(tmp_path) / INDEX).unlink()
    assert f"{tmp_path / INDEX}: file: missing, but the folder has 3" in refused(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.ckpt"])
def test_pickles_are_refused(name: str, tmp_path: Path) -> None:
    (write_rand_checkpoint(tmp_path) / "model.safetensors").rename(tmp_path / name)
    for path in (tmp_path, tmp_path / name):
        assert f"{tmp_path / name}: file: pickle checkpoints can run code and are refused" in refused(path)


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    assert "no such file or folder" in refused(tmp_path / "nothing")
    assert f"{tmp_path}: config.json: missing" in refused(tmp_path)
    lone = write_rand_checkpoint(tmp_path / "m") / "model.safetensors"
    assert "pass the folder that also holds config.json" in refused(lone)
    lone.unlink()
    assert f"{tmp_path / 'm'}: model.safetensors: missing" in refused(tmp_path / "m")


# --- LD-02 -----------------------------------------------------------------------------------------------------------


def test_tied_embeddings_in_all_their_forms(tmp_path: Path) -> None:
    folder = write_rand_checkpoint(tmp_path / "a", tied=True)
    expected = oracle(folder, TOKENS)
    plain = load_model(folder)
    assert error(logits(plain, TOKENS), expected) < TOLERANCE
    assert plain.weights.lm_head is plain.weights.embedding

    both = write_rand_checkpoint(tmp_path / "b", tied=True)
    tensors = load_file(both / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, both / "model.safetensors")
    shared = load_model(both)
    assert shared.weights.lm_head is shared.weights.embedding
    assert torch.equal(logits(shared, TOKENS), logits(plain, TOKENS))

    twin = load_model(write_rand_gguf(tmp_path / "f.gguf", tied=True))
    assert torch.equal(logits(twin, TOKENS), logits(plain, TOKENS))
    assert twin.weights.lm_head is twin.weights.embedding


@pytest.mark.parametrize("flag", ["absent", "false"])
def test_no_output_matrix_and_no_tie_is_refused_never_invented(flag: str, tmp_path: Path) -> None:
    """All four families are untied unless their config says otherwise, as in their reference implementation."""
    for model_type in ("llama", "mistral", "qwen2", "qwen3"):
        folder = write_rand_checkpoint(tmp_path / model_type, tied=True, model_type=model_type)
        config = json.loads((folder / "config.json").read_text())
        del config["tie_word_embeddings"]
        (folder / "config.json").write_text(json.dumps(config if flag == "absent" else config | {"tie_word_embeddings": False}))
        assert "tensor 'lm_head.weight': missing, and the config does not say tie_word_embeddings: true" in refused(folder)


@pytest.mark.parametrize("tie", [False, True])
def test_an_output_matrix_that_differs_is_used(tie: bool, tmp_path: Path) -> None:
    """Also under a flag that says tied: the file is the better witness, and transformers decides the same way."""
    folder = write_rand_checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": tie}
    (folder / "config.json").write_text(json.dumps(config))
    assert error(logits(load_model(folder), TOKENS), oracle(folder, TOKENS)) < TOLERANCE


# --- end tokens, vocabulary, blocks, identity --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (5, None, (5,)),
        ([5, 9], None, (5, 9)),
        (None, [7, 8], (7, 8)),
        (5, [7, 5], (5, 7)),
        (None, None, ()),
        (-1, 6, (6,)),
        (5, 600, (5,)),
    ],
)
def test_end_tokens_of_both_configs_are_joined(
    config: object, generation: object, expected: tuple[int, ...], tmp_path: Path
) -> None:
    folder = write_rand_checkpoint(tmp_path)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"eos_token_id": config}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert load_model(folder).eos_ids == expected


def test_end_tokens_of_gguf_keys_are_joined(tmp_path: Path) -> None:
    assert load_model(write_rand_gguf(tmp_path / "m.gguf", eos_ids=(IM_END, 99))).eos_ids == (99, ENDOFTEXT, IM_END)


@pytest.mark.parametrize("tied", [False, True])
def test_padding_rows_are_cut(tied: bool, tmp_path: Path) -> None:
    plain = load_model(write_rand_checkpoint(tmp_path / "plain", tied=tied))
    for name, path in (
        ("folder", write_rand_checkpoint(tmp_path / "padded", tied=tied, padding_rows=128)),
        ("gguf", write_rand_gguf(tmp_path / "padded.gguf", tied=tied, padding_rows=128)),
    ):
        padded = load_model(path)
        assert padded.shape.vocab_size == 640, name
        cut = padded.trimmed(512)
        assert cut.shape.vocab_size == cut.weights.lm_head.out_features == 512
        assert torch.equal(logits(cut, TOKENS), logits(plain, TOKENS))
        assert cut.digest != padded.digest
        assert int(logits(padded, TOKENS).argmax(-1).max()) >= 512, "a blind test: padding rows do not win"


def test_trimming_keeps_biasless_blocks_and_refuses_a_larger_tokenizer(tmp_path: Path) -> None:
    model = load_model(write_rand_checkpoint(tmp_path), quantise="q8")
    cut = model.trimmed(300)
    assert isinstance(cut.weights.lm_head, BlockWeight)
    assert torch.equal(logits(cut, text(20, 300)), logits(model, text(20, 300))[:, :300])
    assert cut.eos_ids == (ENDOFTEXT, IM_END)
    assert model.trimmed(257).eos_ids == (ENDOFTEXT,)
    assert model.trimmed(512) is model
    with pytest.raises(ModelFileError, match="the tokenizer has 513 tokens, the checkpoint 512 rows"):
        model.trimmed(513)


def test_dense_checkpoints_become_blocks_on_request(tmp_path: Path) -> None:
    folder = write_rand_checkpoint(tmp_path, dtype="bfloat16", intermediate=160, tied=True)
    exact = logits(load_model(folder, weights="float32"), TOKENS)
    for mode, bits, most in (("q8", 8, 0.05), ("q4", 4, 0.5)):
        model = load_model(folder, quantise=mode)  # type: ignore[arg-type]
        layer = model.weights.layers[0]
        assert all(
            isinstance(w, BlockWeight) and w.bits == bits
            for w in (layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down)
        )
        assert isinstance(model.weights.embedding, BlockWeight)
        assert model.weights.embedding.bits == 8
        assert model.weights.lm_head is model.weights.embedding
        assert error(logits(model, TOKENS), exact) < most
    assert isinstance(load_model(folder).weights.embedding, DenseWeight)


def test_a_width_that_is_no_multiple_of_32_stays_dense(tmp_path: Path) -> None:
    model = load_model(write_rand_checkpoint(tmp_path, hidden=80), quantise="q4")
    assert isinstance(model.weights.layers[0].q, DenseWeight)
    assert isinstance(model.weights.layers[0].down, BlockWeight)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"])
def test_weights_that_are_not_numbers_are_refused(value: float, name: str, tmp_path: Path) -> None:
    folder = write_rand_checkpoint(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[-3] = value
    save_file(tensors, folder / "model.safetensors")
    assert (
        refused(folder)
        == f"{folder / 'model.safetensors'}: tensor '{name}': has weights that are not finite numbers (NaN or infinity)"
    )


def test_the_digest_names_weights_config_and_form(tmp_path: Path) -> None:
    folder = write_rand_checkpoint(tmp_path / "a")
    copy = write_rand_checkpoint(tmp_path / "b")
    first = load_model(folder).digest
    assert load_model(copy).digest == first
    assert load_model(folder, context=64).digest == first
    digests = {first, load_model(folder, weights="bfloat16").digest, load_model(folder, quantise="q8").digest}
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][57, 3] += 1
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    digests.add(load_model(copy).digest)
    config = json.loads((folder / "config.json").read_text()) | {"rope_theta": 20000.0}
    (folder / "config.json").write_text(json.dumps(config))
    digests.add(load_model(folder).digest)
    assert len(digests) == 5


def test_large_files_are_told_apart_by_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spec.models.loader.WHOLE_DIGEST_BYTES", 1000)
    path = write_rand_gguf(tmp_path / "m.gguf")
    first = load_model(path).digest
    assert load_model(path).digest == first
    stat = path.stat()
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    changed = load_model(path).digest
    assert changed != first
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert load_model(path).digest != changed


def test_tables_are_exact(tmp_path: Path) -> None:
    table = scripted_table([10, 20, 30, 20_0], [65, 66])
    for path in (write_table_checkpoint(tmp_path / "t", table), write_table_gguf(tmp_path / "t.gguf", table)):
        assert torch.allclose(logits(load_model(path), TOKENS), table[TOKENS], atol=1e-5)


def test_importing_the_package_brings_no_transformers() -> None:
    code = "import sys, spec.models; print([m for m in ('transformers', 'gguf', 'safetensors') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
