"""GGUF metadata -> ModelConfig. Knows the key names, no tensors but the shape of the embedding."""

from __future__ import annotations

from typing import Any

from spec.models.config import MAX_CONTEXT, Fields, ModelConfig, RopeConfig, check_sizes, shown
from spec.models.families import FAMILIES, supported
from spec.models.gguf_file import GGUFFile, LazyArray
from spec.models.rope import yarn_attention_factor

EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def read_gguf_config(file: GGUFFile) -> ModelConfig:
    general = Fields(file.path, file.metadata)
    architecture = general.text("general.architecture")
    if architecture not in FAMILIES:
        general.fail("general.architecture", f"{shown(architecture)} is not supported; supported: {supported()}")
    if general.integer("split.count", 1, low=0, high=1 << 16) > 1:
        general.fail("split.count", "the model is split over several GGUF files; merge them into one")
    family = FAMILIES[architecture]
    fields = Fields(file.path, _scalars(file, architecture), f"{architecture}.")
    if fields.integer("expert_count", 0, low=0, high=1 << 16):
        fields.fail("expert_count", f"{fields.get('expert_count')}; mixtures of experts are not supported")
    if not fields.flag("attention.causal", True):
        fields.fail("attention.causal", "false; only causal models generate text")
    hidden = fields.integer("embedding_length", high=1 << 17)
    q_heads = fields.integer("attention.head_count", high=1024)
    kv_heads = fields.integer("attention.head_count_kv", q_heads, high=1024)
    if not fields.has("attention.key_length") and hidden % q_heads:
        fields.fail("attention.key_length", f"missing, and embedding_length {hidden} is not a multiple of {q_heads} heads")
    head_dim = fields.integer("attention.key_length", hidden // q_heads, high=1024)
    for name, meaning in (
        ("attention.value_length", "values as wide as keys"),
        ("rope.dimension_count", "all channels rotated"),
    ):
        if fields.integer(name, head_dim, high=1024) != head_dim:
            fields.fail(name, f"{fields.get(name)}; only models with {meaning} ({head_dim}) are supported")
    check_sizes(fields, "attention.head_count_kv", q_heads, kv_heads, head_dim)
    window = fields.integer("attention.sliding_window", 0, low=0, high=(1 << 32) - 1)
    declared = fields.integer("context_length", low=2, high=MAX_CONTEXT)
    rope = _rope(fields)
    return ModelConfig(
        architecture=architecture,
        layers=fields.integer("block_count", high=1024),
        hidden=hidden,
        intermediate=fields.integer("feed_forward_length", high=1 << 20),
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=fields.number("attention.layer_norm_rms_epsilon", low=0.0, high=1.0),
        attention_scale=fields.number("attention.scale", head_dim**-0.5, low=1e-6, high=1e3),
        max_position=max(declared, int(rope.factor * rope.original_context)) if rope.kind == "yarn" else declared,
        sliding_window=window or None,
        rope=rope,
        qkv_bias=family.qkv_bias or None,
        o_bias=None,
        mlp_bias=None,
        qk_norm=family.qk_norm,
        tied=True,  # a file without output.weight shares the embedding
        eos_ids=tuple(sorted({i for key in EOS_KEYS for i in general.token_ids(key)})),
    )


def _scalars(file: GGUFFile, architecture: str) -> dict[str, Any]:
    """The architecture's keys; a per-layer array whose entries are all equal stands for that one value."""
    values: dict[str, Any] = {}
    for key, value in file.metadata.items():
        if not key.startswith(f"{architecture}."):
            continue
        if isinstance(value, LazyArray) and not value.is_text and 0 < len(value) <= 1024 and len(set(value)) == 1:
            value = value[0]
        values[key] = value
    return values


def _rope(fields: Fields) -> RopeConfig:
    theta = fields.number("rope.freq_base", 10000.0, low=1.0)
    kind = fields.text("rope.scaling.type", "linear" if fields.has("rope.scale_linear") else "none")
    if kind == "none":
        return RopeConfig(theta)
    if kind == "linear":
        name = "rope.scaling.factor" if fields.has("rope.scaling.factor") else "rope.scale_linear"
        return RopeConfig(theta, "linear", fields.number(name, 1.0, low=1.0))
    if kind != "yarn":
        fields.fail("rope.scaling.type", f"{shown(kind)} is not supported; supported: none, linear, yarn")
    for name, only in (("rope.scaling.yarn_ext_factor", 1.0), ("rope.scaling.yarn_log_multiplier", 0.0)):
        if fields.has(name) and fields.number(name, low=-1e6) not in (only, -1.0):
            fields.fail(name, f"{shown(fields.get(name))} is not supported; supported: {only:g}")
    factor = fields.number("rope.scaling.factor", low=1.0)
    extra = fields.number("rope.scaling.attn_factor", 1.0, low=0.0, high=100.0)
    extra *= fields.number("rope.scaling.yarn_attn_factor", 1.0, low=0.0, high=100.0)
    return RopeConfig(
        theta,
        "yarn",
        factor,
        fields.integer("rope.scaling.original_context_length", high=MAX_CONTEXT),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0, low=1e-6),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0, low=1e-6),
        attention_factor=extra * yarn_attention_factor(factor),
    )
