"""ModelConfig + tensors -> DecoderWeights. Knows which tensors a decoder needs; refuses to know files and number formats."""

from __future__ import annotations

import torch

from kernels.decoder import DecoderShape, DecoderWeights, LayerWeights
from kernels.linear import BlockWeight, LayerWeight, Weight
from kernels.linear.formats import PublishedWeight
from spec.errors import InvariantError
from spec.models.config import ModelConfig
from spec.models.rope import rope_tables
from spec.models.source import TensorSource, check_finite

MAX_VOCABULARY = 1 << 22


def assemble(
    config: ModelConfig, source: TensorSource, context: int, rope_divisors: torch.Tensor | None
) -> tuple[DecoderShape, DecoderWeights]:
    """Every tensor checked for presence, shape and finite values. `vocab_size` is still the number of stored rows."""
    vocabulary = source.rows(source.stem("embedding"), config.hidden)
    if not 1 <= vocabulary <= MAX_VOCABULARY:
        source.refuse(f"{source.stem('embedding')}.weight", f"{vocabulary} rows; 1 to {MAX_VOCABULARY} are supported")
    embedding = _vocabulary(source, source.stem("embedding"), vocabulary, config.hidden)
    lm_head = _lm_head(config, source, embedding, vocabulary)
    layers = tuple(_layer(config, source, index) for index in range(config.layers))
    cos, sin = rope_tables(config.rope, config.head_dim, context, rope_divisors)
    weights = DecoderWeights(
        embedding=embedding,
        layers=layers,
        final_norm=_vector(source, f"{source.stem('final_norm')}.weight", config.hidden),
        lm_head=lm_head,
        rope_cos=cos,
        rope_sin=sin,
    )
    shape = DecoderShape(
        layers=config.layers,
        hidden=config.hidden,
        intermediate=config.intermediate,
        q_heads=config.q_heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab_size=vocabulary,
        norm_eps=config.norm_eps,
        attention_scale=config.attention_scale,
        max_position=context,
        sliding_window=config.sliding_window,
    )
    return shape, weights


def _lm_head(config: ModelConfig, source: TensorSource, embedding: Weight, vocabulary: int) -> Weight:
    """Tied: the embedding itself, unless the file carries an output matrix that differs from it. Untied: the file's own."""
    stem = source.stem("lm_head")
    if source.has(f"{stem}.weight"):
        own = _vocabulary(source, stem, vocabulary, config.hidden)
        return embedding if config.tied and _equal(own, embedding) else own
    if not config.tied:
        source.refuse(f"{stem}.weight", "missing, and the config does not say tie_word_embeddings: true")
    return embedding


def _vocabulary(source: TensorSource, stem: str, rows: int, columns: int) -> Weight:
    weight = _matrix(source, stem, rows, columns)
    if isinstance(weight, PublishedWeight):
        raise InvariantError(f"{stem} came as a {type(weight).__name__}; the vocabulary's matrices never do")
    return weight


def _equal(a: Weight, b: Weight) -> bool:
    if isinstance(a, BlockWeight):
        if not isinstance(b, BlockWeight) or a.bits != b.bits:
            return False
        pairs = ((a.codes, b.codes), (a.scale, b.scale), (a.minimum, b.minimum))
        return all(torch.equal(left, right) for left, right in pairs)
    return not isinstance(b, BlockWeight) and a.values.dtype == b.values.dtype and torch.equal(a.values, b.values)


def _layer(config: ModelConfig, source: TensorSource, index: int) -> LayerWeights:
    q_rows, kv_rows = config.q_heads * config.head_dim, config.kv_heads * config.head_dim

    def matrix(role: str, rows: int, columns: int, bias: bool | None, heads: int = 0) -> LayerWeight:
        return _matrix(source, source.stem(role, index), rows, columns, bias, heads)

    def vector(role: str, size: int) -> torch.Tensor:
        return _vector(source, f"{source.stem(role, index)}.weight", size)

    attention_norm = vector("attention_norm", config.hidden)
    return LayerWeights(
        attention_norm=attention_norm,
        q=matrix("q", q_rows, config.hidden, config.qkv_bias, config.q_heads),
        k=matrix("k", kv_rows, config.hidden, config.qkv_bias, config.kv_heads),
        v=matrix("v", kv_rows, config.hidden, config.qkv_bias),
        o=matrix("o", config.hidden, q_rows, config.o_bias),
        mlp_norm=vector("mlp_norm", config.hidden),
        gate=matrix("gate", config.intermediate, config.hidden, config.mlp_bias),
        up=matrix("up", config.intermediate, config.hidden, config.mlp_bias),
        down=matrix("down", config.hidden, config.intermediate, config.mlp_bias),
        q_norm=vector("q_norm", config.head_dim) if config.qk_norm else None,
        k_norm=vector("k_norm", config.head_dim) if config.qk_norm else None,
    )


def _matrix(source: TensorSource, stem: str, rows: int, columns: int, bias: bool | None = False, heads: int = 0) -> LayerWeight:
    """`bias` None: take it where the file has one."""
    name = f"{stem}.bias"
    values = None
    if bias or (bias is None and source.has(name)):
        values = source.vector(name, rows, heads)
        check_finite(source, name, values)
    weight = source.matrix(stem, (rows, columns), values, heads)
    check_finite(source, f"{stem}.weight", weight)
    return weight


def _vector(source: TensorSource, name: str, size: int) -> torch.Tensor:
    values = source.vector(name, size)
    check_finite(source, name, values)
    return values
