"""Logits of every supported family equal those of transformers, on tiny random checkpoints that transformers itself wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import rand, write_rand_checkpoint
from loaded import TOLERANCE, error, logits, oracle, text

from spec.errors import ConfigError, ModelFileError
from spec.models import load_model

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2, no grouping": ("llama", {"num_key_value_heads": 4}),
    "llama, explicit head_dim": ("llama", {"hidden_size": 96, "head_dim": 32}),
    "llama, three query heads a key head": ("llama", {"num_attention_heads": 6, "head_dim": 16, "hidden_size": 96}),
    "llama with all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3 bands": ("llama", {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}, "head_dim": 32}),
    "linear scaling": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "yarn": ("llama", {"rope_parameters": YARN | {"rope_theta": 10000.0}, "head_dim": 32}),
    "yarn, stated attention factor": ("llama", {"rope_parameters": YARN | {"rope_theta": 1e6, "attention_factor": 1.5, "beta_fast": 16.0}}),
    "yarn, mscale and exact bounds": (
        "llama",
        {"rope_parameters": YARN | {"rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 1.1, "truncate": False}, "head_dim": 32},
    ),
    "smollm2, tied": ("llama", {"tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48}),
    "mistral, window": ("mistral", {"sliding_window": 9}),
    "mistral, no window": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, window in all layers": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}),
    "qwen2, window in no layer": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3 with biases": ("qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
}  # fmt: skip


def make(folder: Path, model_type: str, **fields: Any) -> Path:
    """A transformers checkpoint whose every parameter is random: biases and norms too, so that none can be skipped."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **(SIZES | fields))
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config).float()
        for name, parameter in model.named_parameters():
            gain = 0.3 if parameter.dim() == 1 else 1.5 * parameter.shape[1] ** -0.5
            torch.nn.init.normal_(parameter, float("norm" in name), gain)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model_type, fields = FAMILIES[name]
    make(tmp_path, model_type, **fields)
    tokens = text(70, 256)  # beyond every window and every original context above
    assert error(logits(load_model(tmp_path), tokens), oracle(tmp_path, tokens)) < TOLERANCE


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "scaling", [None, LLAMA3, {"type": "linear", "factor": 2.0}, YARN], ids=["plain", "llama3", "linear", "yarn"]
)
def test_the_older_spelling_of_rope_is_read(model_type: str, scaling: dict[str, Any] | None, tmp_path: Path) -> None:
    write_rand_checkpoint(tmp_path, model_type=model_type, rope_scaling=scaling, context=128)
    tokens = text(64)
    assert error(logits(load_model(tmp_path), tokens), oracle(tmp_path, tokens)) < TOLERANCE


def test_head_dim_null_is_hidden_over_heads(tmp_path: Path) -> None:
    write_rand_checkpoint(tmp_path, hidden=128, head_dim=32)
    change_config(tmp_path, head_dim=None)
    model = load_model(tmp_path)
    assert model.shape.head_dim == 32
    assert model.shape.attention_scale == 32**-0.5
    assert error(logits(model, text(20)), oracle(tmp_path, text(20))) < TOLERANCE


def test_an_absent_head_dim_is_the_familys_default(tmp_path: Path) -> None:
    write_rand_checkpoint(tmp_path, model_type="qwen3", head_dim=128)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model(tmp_path).shape.head_dim == 128


def test_half_precision_files_load_as_stored_and_as_float32(tmp_path: Path) -> None:
    for dtype in ("bfloat16", "float16"):
        folder = write_rand_checkpoint(tmp_path / dtype, dtype=dtype)
        assert str(load_model(folder).weights.layers[0].q.values.dtype) == f"torch.{dtype}"  # type: ignore[union-attr]
        exact = load_model(folder, weights="float32")
        assert exact.weights.lm_head.values.dtype == torch.float32  # type: ignore[union-attr]
        assert error(logits(exact, text(20)), oracle(folder, text(20))) < TOLERANCE


def change_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown architecture": ({"model_type": "gpt_oss"}, "model_type: 'gpt_oss' is not supported; supported: llama, mistral"),
    "no architecture": ({"model_type": None}, "model_type: missing"),
    "other quantised safetensors": ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config: 'bitsandbytes' weights are not"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
    "dynamic rope": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type: 'dynamic'"),
    "longrope": ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "supported: default, linear, llama3, yarn"),
    "rope factor of text": ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor: '2'"),
    "rope factor of NaN": ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor: nan"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
    "layers of a flag": ({"num_hidden_layers": True}, "num_hidden_layers: True"),
    "a billion layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers: 1000000000"),
    "one layer too many": ({"num_hidden_layers": 3}, "tensor 'model.layers.2.input_layernorm.weight': missing"),
    "negative heads": ({"num_attention_heads": -4}, "num_attention_heads: -4"),
    "kv heads that do not divide": ({"num_key_value_heads": 3}, "num_key_value_heads: 3 key/value heads do not divide 4"),
    "odd head_dim": ({"head_dim": 33}, "head dimension 33 is odd"),
    "another head_dim than the tensors'": ({"head_dim": 16}, "q_proj.weight': shape [128, 96]; the config asks for [64, 96]"),
    "an end token of text": ({"eos_token_id": "</s>"}, "eos_token_id: '</s>'"),
    "a tie flag of text": ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: 'yes'"),
    "biases the file does not have": ({"attention_bias": True}, "q_proj.bias': missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_with_field_and_value(name: str, tmp_path: Path) -> None:
    fields, message = REFUSED[name]
    write_rand_checkpoint(tmp_path)
    change_config(tmp_path, **fields)
    with pytest.raises(ModelFileError) as caught:
        load_model(tmp_path)
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_mixed_windows_are_refused(tmp_path: Path) -> None:
    write_rand_checkpoint(tmp_path, model_type="qwen2", sliding_window=8)
    change_config(tmp_path, max_window_layers=1)
    with pytest.raises(ModelFileError, match=r"max_window_layers: layers with and without a sliding window"):
        load_model(tmp_path)


def test_the_context_is_what_was_asked_and_never_more_than_declared(tmp_path: Path) -> None:
    write_rand_checkpoint(tmp_path, context=rand().context)
    assert load_model(tmp_path).context == 512
    small = load_model(tmp_path, context=100)
    assert (small.context, small.shape.max_position, small.weights.rope_cos.shape[0]) == (100, 100, 100)
    with pytest.raises(ConfigError, match="context is 513; this model takes 2 to 512"):
        load_model(tmp_path, context=513)


def test_yarn_declares_its_stretched_context(tmp_path: Path) -> None:
    write_rand_checkpoint(
        tmp_path, context=64, rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    )
    assert load_model(tmp_path).context == 256
