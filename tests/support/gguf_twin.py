"""A safetensors folder as a GGUF file, written with the gguf library: the twin that the loader must read to equal weights.

gguf_from_folder(folder, path, kind="F32", extra=None, tensors=None) -> Path
    kind: the ggml type of matrices (vectors stay F32; K types hold random blocks instead of the folder's values). extra: more metadata, full keys. tensors: more tensors (float32).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from checkpoint_tokenizer import CHAT_TEMPLATE, ENDOFTEXT, SPECIALS, vocabulary
from safetensors.torch import load_file

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# byte offsets of the float16 fields of a block
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def gguf_from_folder(
    folder: Path,
    path: Path,
    kind: str = "F32",
    extra: dict[str, Any] | None = None,
    tensors: dict[str, torch.Tensor] | None = None,
) -> Path:
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    _write_sizes(writer, config)
    _write_tokenizer(writer, config)
    for key, value in (extra or {}).items():
        _write_value(writer, key, value)
    stored: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= load_file(file)
    for name, tensor in stored.items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        values = tensor.float()
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if architecture == "llama" and heads:
            values = interleave(values, config[heads])
        _write_tensor(writer, _rename(name), values, kind)
    for name, tensor in (tensors or {}).items():
        _write_tensor(writer, name, tensor, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_blocks(kind: str, rows: int, width: int) -> np.ndarray:
    """uint8 [rows, bytes of a row] of a block type: all bytes random, but the float16 fields sane and of both signs."""
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(sum(kind.encode()) + rows)
    blocks = rng.integers(0, 256, (rows, width // values, size), dtype=np.uint8)
    for offset in HALVES[kind]:
        halves = (rng.standard_normal((rows, width // values, 1)) * 0.02).astype(np.float16)
        blocks[..., offset : offset + 2] = halves.view(np.uint8)
    return blocks.reshape(rows, -1)


def interleave(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Row i of the first half of a head goes next to row i of its second half, as Llama GGUF files have it."""
    result = torch.empty_like(rows)
    size = rows.shape[0] // heads
    for head in range(heads):
        for channel in range(size // 2):
            result[head * size + 2 * channel] = rows[head * size + channel]
            result[head * size + 2 * channel + 1] = rows[head * size + size // 2 + channel]
    return result


def _rename(name: str) -> str:
    stem, suffix = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, index, part = stem.split(".", 3)
        return f"blk.{index}.{NAMES[part]}.{suffix}"
    return f"{NAMES[stem]}.{suffix}"


def _write_tensor(writer: gguf.GGUFWriter, name: str, values: torch.Tensor, kind: str) -> None:
    quant = gguf.GGMLQuantizationType[kind if values.dim() == 2 else "F32"]
    if values.shape[-1] % gguf.GGML_QUANT_SIZES[quant][0]:
        quant = gguf.GGMLQuantizationType.F32
    data = np.ascontiguousarray(values.numpy())
    if quant.name.endswith("_K"):  # the library reads these and cannot write them
        data = random_blocks(quant.name, *values.shape)
    elif quant != gguf.GGMLQuantizationType.F32:
        data = gguf.quants.quantize(data, quant)
    writer.add_tensor(name, data, raw_dtype=quant)


def _write_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])


def _write_tokenizer(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    words, merges = vocabulary()
    names = list(words) + [f"[PAD{index}]" for index in range(len(words), config["vocab_size"])]
    types = [
        gguf.TokenType.CONTROL if name in SPECIALS else gguf.TokenType.UNUSED if index >= len(words) else gguf.TokenType.NORMAL
        for index, name in enumerate(names)
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types(types)
    writer.add_token_merges([f"{left} {right}" for left, right in merges])
    eos = config["eos_token_id"]
    writer.add_eos_token_id(eos if isinstance(eos, int) else eos[0])
    if isinstance(eos, list) and len(eos) > 1:
        writer.add_uint32("tokenizer.ggml.eom_token_id", eos[1])
    writer.add_eot_token_id(ENDOFTEXT)
    writer.add_pad_token_id(ENDOFTEXT)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _write_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
