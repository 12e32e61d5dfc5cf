"""Tiny checkpoints on disk, for tests that need a real model path. Everything is deterministic and takes milliseconds.

write_rand_checkpoint(path, seed=0, **overrides) -> Path     folder; random weights where attention, positions and KV matter
write_rand_gguf(path, seed=0, **overrides) -> Path           the same model as one F32 GGUF file
write_table_checkpoint(path, table, *, context=512, eos_ids=(IM_END,), model_type="llama") -> Path
                                                             folder; logits after token t are exactly table[t] (attention is off)
write_table_gguf(path, table, ...) -> Path                   the same as one F32 GGUF file
scripted_table(*texts, strength=20.0) -> [512, 512]          a table that continues each token sequence along the text
gguf_from_folder(folder, path, kind="F32", **extra) -> Path  any safetensors folder as a GGUF twin, in gguf_twin.py

Overrides of RAND are the fields of `Rand`: layers=2, hidden=96, intermediate=160, q_heads=4, kv_heads=2, head_dim=32,
model_type="llama" ("qwen2", "qwen3", "mistral"), tied=False, context=512, rope_scaling=None, sliding_window=None,
padding_rows=0 (vocabulary rows past the tokenizer's, with huge output weights), noise=0.0 (how far the weights move
from those of the same seed: a drafter that agrees often), lm_head_gain=4.0, shards=1, eos_ids=(IM_END,), dtype="float32".

The tokenizer (512 entries, see checkpoint_tokenizer.py): ids 0..255 are the bytes of that value, 256 <|endoftext|>,
257 <|im_start|>, 258 <|im_end|>, the rest merges, some of them cut in the middle of a UTF-8 character. The chat template is ChatML.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from checkpoint_tokenizer import ENDOFTEXT, IM_END, VOCABULARY, write_tokenizer
from gguf_twin import gguf_from_folder
from safetensors.torch import save_file

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Rand:
    layers: int = 2
    hidden: int = 96
    intermediate: int = 160
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32  # on purpose not hidden / heads
    model_type: str = "llama"
    tied: bool = False
    context: int = 512
    rope_scaling: dict[str, Any] | None = None
    sliding_window: int | None = None
    padding_rows: int = 0
    noise: float = 0.0
    lm_head_gain: float = 4.0
    shards: int = 1
    eos_ids: tuple[int, ...] = (IM_END,)
    dtype: str = "float32"

    @property
    def rows(self) -> int:
        return VOCABULARY + self.padding_rows

    def config(self) -> dict[str, Any]:
        """config.json in the spelling of released checkpoints."""
        window = {} if self.sliding_window is None else {"use_sliding_window": True, "max_window_layers": 0}
        return {
            "architectures": [
                {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[self.model_type] + "ForCausalLM"
            ],
            "model_type": self.model_type,
            "hidden_act": "silu",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.q_heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.rows,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "rope_scaling": self.rope_scaling,
            "sliding_window": self.sliding_window,
            "tie_word_embeddings": self.tied,
            "bos_token_id": None,
            "eos_token_id": self.eos_ids[0] if len(self.eos_ids) == 1 else list(self.eos_ids),
            "torch_dtype": self.dtype,
        } | window


def write_rand_checkpoint(path: Path, seed: int = 0, **overrides: Any) -> Path:
    spec = Rand(**overrides)
    tensors = {name: tensor.to(DTYPES[spec.dtype]) for name, tensor in rand_tensors(spec, seed).items()}
    return write_folder(path, spec.config(), tensors, eos_ids=spec.eos_ids, shards=spec.shards)


def write_rand_gguf(path: Path, seed: int = 0, **overrides: Any) -> Path:
    folder = write_rand_checkpoint(path.with_suffix(".folder"), seed, **overrides)
    return gguf_from_folder(folder, path)


def write_table_checkpoint(
    path: Path, table: torch.Tensor, *, context: int = 512, eos_ids: tuple[int, ...] = (IM_END,), model_type: str = "llama"
) -> Path:
    """`table` [512, 512] float32: row t holds the logits after token t."""
    if tuple(table.shape) != (VOCABULARY, VOCABULARY):
        raise ValueError(f"a table of shape {tuple(table.shape)}; [{VOCABULARY}, {VOCABULARY}] was expected")
    spec = Rand(layers=1, hidden=VOCABULARY, intermediate=32, model_type=model_type, context=context, eos_ids=eos_ids)
    tensors = rand_tensors(spec, 0)
    for name in tensors:
        if name.endswith("norm.weight"):
            tensors[name] = torch.ones_like(tensors[name])
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = torch.zeros_like(tensors[name])
    tensors["model.embed_tokens.weight"] = torch.eye(VOCABULARY)
    gain = (1 / VOCABULARY + spec.config()["rms_norm_eps"]) ** -0.5  # what the final norm makes of a one-hot vector
    tensors["lm_head.weight"] = (table.double().T / gain).float().contiguous()
    return write_folder(path, spec.config(), tensors, eos_ids=eos_ids)


def write_table_gguf(path: Path, table: torch.Tensor, **options: Any) -> Path:
    return gguf_from_folder(write_table_checkpoint(path.with_suffix(".folder"), table, **options), path)


def scripted_table(*texts: Sequence[int], strength: float = 20.0, seed: int = 0) -> torch.Tensor:
    """[512, 512] logits: token a of a text is followed by the next one of that text with near certainty (a token may have one
    successor only, over all texts), everything else is small noise."""
    table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 0.1
    successor: dict[int, int] = {}
    for text in texts:
        for current, following in itertools.pairwise(text):
            if successor.setdefault(current, following) != following:
                raise ValueError(f"token {current} would need two successors, {successor[current]} and {following}")
            table[current, following] = strength
    return table


def rand_tensors(spec: Rand, seed: int) -> dict[str, torch.Tensor]:
    """Float32 tensors by their names in a safetensors folder. Each depends on (seed, its name) only, so twins share weights."""

    def draw(name: str, *shape: int, gain: float = 1.0) -> torch.Tensor:
        value = torch.randn(*shape, generator=_generator(seed, name))
        if spec.noise:
            value = value + spec.noise * torch.randn(*shape, generator=_generator(seed, f"noise {name}"))
        return value * gain

    def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return draw(name, rows, columns, gain=gain * columns**-0.5)

    q_rows, kv_rows = spec.q_heads * spec.head_dim, spec.kv_heads * spec.head_dim
    tensors = {"model.embed_tokens.weight": draw("embedding", VOCABULARY, spec.hidden)}
    for index in range(spec.layers):
        layer = f"model.layers.{index}"
        for name, rows, columns, gain in (
            ("self_attn.q_proj", q_rows, spec.hidden, 2.0),  # sharp attention: a wrong mask or position shows
            ("self_attn.k_proj", kv_rows, spec.hidden, 2.0),
            ("self_attn.v_proj", kv_rows, spec.hidden, 1.0),
            ("self_attn.o_proj", spec.hidden, q_rows, 1.0),
            ("mlp.gate_proj", spec.intermediate, spec.hidden, 1.0),
            ("mlp.up_proj", spec.intermediate, spec.hidden, 1.0),
            ("mlp.down_proj", spec.hidden, spec.intermediate, 1.0),
        ):
            tensors[f"{layer}.{name}.weight"] = matrix(f"{layer}.{name}", rows, columns, gain)
            if spec.model_type == "qwen2" and name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
                tensors[f"{layer}.{name}.bias"] = draw(f"{layer}.{name}.bias", rows, gain=0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = 1 + draw(f"{layer}.{name}", spec.hidden, gain=0.2)
        if spec.model_type == "qwen3":
            for name in ("q_norm", "k_norm"):
                tensors[f"{layer}.self_attn.{name}.weight"] = 1 + draw(f"{layer}.{name}", spec.head_dim, gain=0.2)
    tensors["model.norm.weight"] = 1 + draw("norm", spec.hidden, gain=0.2)
    if not spec.tied:
        tensors["lm_head.weight"] = matrix("lm_head", VOCABULARY, spec.hidden, spec.lm_head_gain)
    if spec.padding_rows:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in tensors:
                padding = torch.randn(spec.padding_rows, spec.hidden, generator=_generator(seed, f"padding {name}"))
                tensors[name] = torch.cat((tensors[name], 100 * padding))
    return tensors


def write_folder(
    path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], *, eos_ids: tuple[int, ...], shards: int = 1
) -> Path:
    """config.json, generation_config.json, tokenizer files, and the tensors in one file or `shards` of them with an index."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [*eos_ids, ENDOFTEXT]}))
    write_tokenizer(path)
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in part}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return path


def rand(**overrides: Any) -> Rand:
    """The shape of a RAND checkpoint, for tests that edit its config or tensors before writing."""
    return replace(Rand(), **overrides)


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
