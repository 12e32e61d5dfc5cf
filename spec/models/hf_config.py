"""config.json and generation_config.json of a safetensors folder -> ModelConfig. Knows their field names, no tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spec.models import quant_config
from spec.models.config import MAX_CONTEXT, ROPE_KINDS, Fields, ModelConfig, RopeConfig, check_sizes, fail, shown
from spec.models.families import FAMILIES, Family, supported
from spec.models.rope import yarn_attention_factor

CONFIG_BYTES = 1 << 22


def read_json(path: Path, limit: int) -> dict[str, Any]:
    """One JSON object from a file of at most `limit` bytes; a key that appears twice is refused."""
    try:
        size = path.stat().st_size
        if size > limit:
            fail(path, "size", f"{size} bytes; at most {limit} are read")
        data = path.read_bytes()
    except OSError as error:
        fail(path, "file", f"cannot be read: {error.strerror or error}")
    return parse_json_object(path, "file", data)


def parse_json_object(path: Path, field: str, data: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) != len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"the key {shown(next(name for name in names if names.count(name) > 1))} appears twice")
        return mapping

    try:
        value = json.loads(data.decode(), object_pairs_hook=unique)
    except RecursionError:
        fail(path, field, "not usable JSON: nested too deeply")
    except ValueError as error:
        fail(path, field, f"not usable JSON: {str(error)[:120]}")
    if not isinstance(value, dict):
        fail(path, field, f"a JSON {type(value).__name__}; an object was expected")
    return value


def read_hf_config(folder: Path) -> ModelConfig:
    path = folder / "config.json"
    fields = Fields(path, read_json(path, CONFIG_BYTES))
    model_type = fields.text("model_type")
    if model_type not in FAMILIES:
        fields.fail("model_type", f"{shown(model_type)} is not supported; supported: {supported()}")
    family = FAMILIES[model_type]
    quant_config.read_quantisation(fields)  # before anything is read from large files
    _refuse_variants(fields)
    q_heads = fields.integer("num_attention_heads", high=1024)
    hidden = fields.integer("hidden_size", high=1 << 17)
    head_dim = _head_dim(fields, family, hidden, q_heads)
    kv_heads = fields.integer("num_key_value_heads", q_heads, high=1024)
    check_sizes(fields, "num_key_value_heads", q_heads, kv_heads, head_dim)
    layers = fields.integer("num_hidden_layers", high=1024)
    declared = fields.integer("max_position_embeddings", 2048, low=2, high=MAX_CONTEXT)
    rope = _rope(fields, declared)
    attention_bias = fields.flag("attention_bias", False) if family.qkv_bias is None else False
    return ModelConfig(
        architecture=family.name,
        layers=layers,
        hidden=hidden,
        intermediate=fields.integer("intermediate_size", high=1 << 20),
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps", 1e-6, low=0.0, high=1.0),
        attention_scale=head_dim**-0.5,
        max_position=max(declared, int(rope.factor * rope.original_context)) if rope.kind == "yarn" else declared,
        sliding_window=_window(fields, family, layers),
        rope=rope,
        qkv_bias=attention_bias or bool(family.qkv_bias),
        o_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False) if family.mlp_bias_field else False,
        qk_norm=family.qk_norm,
        tied=fields.flag("tie_word_embeddings", family.tied_default),
        eos_ids=_eos_ids(folder, fields),
    )


def read_quantisation(folder: Path) -> quant_config.Quantisation | None:
    """How the matrices of a folder are stored; None: as plain numbers."""
    path = folder / "config.json"
    return quant_config.read_quantisation(Fields(path, read_json(path, CONFIG_BYTES)))


def _refuse_variants(fields: Fields) -> None:
    activation = fields.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        fields.fail("hidden_act", f"{shown(activation)} is not supported; supported: silu")


def _head_dim(fields: Fields, family: Family, hidden: int, q_heads: int) -> int:
    """Explicit, or hidden / heads when null; a family's own default when the field is not there at all."""
    if "head_dim" not in fields.values and family.default_head_dim is not None:
        return family.default_head_dim
    if not fields.has("head_dim") and hidden % q_heads:
        fields.fail("head_dim", f"missing, and hidden_size {hidden} is not a multiple of {q_heads} heads")
    return fields.integer("head_dim", hidden // q_heads, high=1024)


def _window(fields: Fields, family: Family, layers: int) -> int | None:
    """One window for all layers or none. Models that mix windowed and full layers are refused."""
    if family.window == "none" or (family.window == "switched" and not fields.flag("use_sliding_window", False)):
        return None
    # null is a statement (Mistral 0.2 and later: no window), absence is the family's default
    if "sliding_window" in fields.values and not fields.has("sliding_window"):
        return None
    window = fields.integer("sliding_window", family.default_window, high=1 << 31)
    if family.window == "field":
        return window
    kinds = fields.get("layer_types", None)
    if kinds is None:
        full = min(fields.integer("max_window_layers", 28, low=0, high=1 << 31), layers)
        kinds = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    distinct = set(kinds) if isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds) else set()
    if distinct not in ({"full_attention"}, {"sliding_attention"}):
        name = "layer_types" if fields.has("layer_types") else "max_window_layers"
        fields.fail(name, "layers with and without a sliding window in one model are not supported")
    return window if distinct == {"sliding_attention"} else None


def _rope(fields: Fields, declared: int) -> RopeConfig:
    """Both spellings: rope_parameters (transformers 5) and rope_theta with rope_scaling (before)."""
    name = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    raw = fields.get(name, {})
    if not isinstance(raw, dict):
        fields.fail(name, f"{shown(raw)}; it must be an object")
    rope = Fields(fields.path, raw | {"rope_type": raw.get("rope_type") or raw.get("type") or "default"})
    outer = Fields(fields.path, fields.values)
    theta = (rope if rope.has("rope_theta") else outer).number("rope_theta", 10000.0, low=1.0)
    partial = (rope if rope.has("partial_rotary_factor") else outer).number("partial_rotary_factor", 1.0, low=0.0)
    if partial != 1.0:
        fields.fail("partial_rotary_factor", f"{partial:g} is not supported; supported: 1 (all channels rotate)")
    kind = rope.text("rope_type")
    if kind == "default":
        return RopeConfig(theta)
    if kind not in ROPE_KINDS:
        why = ": its frequencies change with the length of each text" if kind == "dynamic" else ""
        fields.fail(f"{name}.rope_type", f"{shown(kind)} is not supported{why}; supported: {', '.join(ROPE_KINDS)}")
    if kind == "linear":
        return RopeConfig(theta, kind, rope.number("factor", low=1.0))
    original = (rope if rope.has("original_max_position_embeddings") else outer).integer(
        "original_max_position_embeddings", declared, high=MAX_CONTEXT
    )
    if kind == "llama3":
        low, high = rope.number("low_freq_factor", low=0.0), rope.number("high_freq_factor", low=0.0)
        if high <= low:
            rope.fail("high_freq_factor", f"{high:g}; it must be above low_freq_factor {low:g}")
        return RopeConfig(theta, "llama3", rope.number("factor", low=1.0), original, low, high)
    factor = rope.number("factor", declared / original, low=1.0)
    default = yarn_attention_factor(factor, rope.number("mscale", 0.0, low=0.0), rope.number("mscale_all_dim", 0.0, low=0.0))
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original,
        beta_fast=rope.number("beta_fast", 32.0, low=1e-6),
        beta_slow=rope.number("beta_slow", 1.0, low=1e-6),
        truncate=rope.flag("truncate", True),
        attention_factor=rope.number("attention_factor", default, low=0.0, high=100.0),
    )


def _eos_ids(folder: Path, fields: Fields) -> tuple[int, ...]:
    """End tokens of config.json joined with those of generation_config.json; the tokenizer's own are joined elsewhere."""
    ids = set(fields.token_ids("eos_token_id"))
    path = folder / "generation_config.json"
    if path.is_file():
        ids |= set(Fields(path, read_json(path, CONFIG_BYTES)).token_ids("eos_token_id"))
    return tuple(sorted(ids))
