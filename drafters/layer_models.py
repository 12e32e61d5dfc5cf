"""A trained attention head: what its file holds, as the weights of a decoder. Knows names and sizes; refuses to know trees, stores and
prices. Runtime only; nothing here trains.

A safetensors file with floats in float32, float16 or bfloat16. H is the target's hidden size, K the size of a trimmed vocabulary;
matrices are [out, in]; rotation pairs channel i of a head with i + head_dim / 2. Token rows come from the target's own embedding.
Metadata: "format": "forespeak.heads/2", "q_heads", "kv_heads", "head_dim", optional "norm_eps" (1e-5), "target" (a name) and "rope_theta"
(without it the target's own rotary tables are used, and then head_dim must be the target's).

    feature_norm [H]   token_norm [H]   fc [H, 2H]
    attn_norm [H]      q [q_heads * head_dim, H]   k, v [kv_heads * head_dim, H]   o [H, q_heads * head_dim]
    mlp_norm [H]       gate, up [W, H]   down [H, W]
    output_norm [H]    output [K, H]     token_ids [K] int32 or int64, distinct

Position j consumes its token x and the feature f of the position before: the target's hidden state there (after the target's final
norm), the head's own g where the position before is drafted, zeros where it is not known (EAGLE, Li et al. 2024).

    x = fc [ rms(f) * feature_norm ; rms(embedding of the token) * token_norm ]      rms(v) = v / sqrt(mean(v^2) + eps)
    x = x + o attention(rms(x) * attn_norm), over the head's own keys of positions 0 .. j
    x = x + down (silu(gate h) * (up h)),  h = rms(x) * mlp_norm
    g = rms(x) * output_norm               scores of the tokens token_ids at position j + 1 = output g
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol

import torch

from drafters.tensor_file import TensorFile
from kernels.decoder import DecoderShape, DecoderWeights, Fusion, LayerWeights
from kernels.linear import BLOCK, BlockWeight, DenseWeight, LayerWeight, Weight
from kernels.linear.formats import PublishedWeight
from spec.models.blocks import quantise

HEADS_FORMAT = "forespeak.heads/2"
DEFAULT_EPS = 1e-5


class Target(Protocol):
    """What is asked of the target that a drafter was trained for."""

    @property
    def shape(self) -> DecoderShape: ...
    @property
    def weights(self) -> DecoderWeights: ...


@dataclass(frozen=True, slots=True)
class LayerModel:
    """A trained drafter ready for a decoder. `shape.vocab_size` counts the score columns."""

    shape: DecoderShape
    weights: DecoderWeights
    token_ids: tuple[int, ...] | None  # the target's token of each score column; None = column i is token i


def load_attention_head(file: TensorFile, target: Target) -> LayerModel:
    """Raises ModelFileError naming the file, the tensor and both sizes where one does not fit the target."""
    hidden = target.shape.hidden
    token_ids = file.token_ids(target.shape.vocab_size)
    shape = _shape(file, target, file.rows("gate"), len(token_ids))
    fusion = Fusion(
        feature_norm=file.vector("feature_norm", hidden),
        token_norm=file.vector("token_norm", hidden),
        weight=DenseWeight(file.take("fc", (hidden, 2 * hidden))),
    )
    cos, sin = _rotary(file, target, shape)
    weights = DecoderWeights(
        embedding=target.weights.embedding,
        layers=(layer_of(file, "", shape),),
        final_norm=file.vector("output_norm", hidden),
        lm_head=DenseWeight(file.take("output", (len(token_ids), hidden))),
        rope_cos=cos,
        rope_sin=sin,
        fusion=fusion,
    )
    return LayerModel(shape, weights, tuple(token_ids))


def layer_of(file: TensorFile, prefix: str, shape: DecoderShape) -> LayerWeights:
    """One decoder layer; biases (`q_bias`, ...) and norms of heads (`q_norm`, `k_norm`) where the file has them."""
    hidden, width = shape.hidden, shape.intermediate
    q_rows, kv_rows = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def optional(name: str, size: int) -> torch.Tensor | None:
        return file.vector(prefix + name, size) if prefix + name in file.tensors else None

    def matrix(name: str, rows: int, columns: int) -> Weight:
        return DenseWeight(file.take(prefix + name, (rows, columns)), optional(f"{name}_bias", rows))

    return LayerWeights(
        attention_norm=file.vector(f"{prefix}attn_norm", hidden),
        q=matrix("q", q_rows, hidden),
        k=matrix("k", kv_rows, hidden),
        v=matrix("v", kv_rows, hidden),
        o=matrix("o", hidden, q_rows),
        mlp_norm=file.vector(f"{prefix}mlp_norm", hidden),
        gate=matrix("gate", width, hidden),
        up=matrix("up", width, hidden),
        down=matrix("down", hidden, width),
        q_norm=optional("q_norm", shape.head_dim),
        k_norm=optional("k_norm", shape.head_dim),
    )


def quantised(weights: DecoderWeights, bits: int, head_bits: int) -> DecoderWeights:
    """Dense matrices as blocks of `bits` (the vocabulary matrix `head_bits`); those whose width does not divide stay as they are."""

    def blocks(weight: Weight, bits: int = bits) -> Weight:
        if isinstance(weight, BlockWeight) or weight.in_features % BLOCK:
            return weight
        return quantise(weight.values.float(), bits, weight.bias)

    def inner(weight: LayerWeight) -> LayerWeight:
        return weight if isinstance(weight, PublishedWeight) else blocks(weight)

    def layer(own: LayerWeights) -> LayerWeights:
        q, k, v, o = inner(own.q), inner(own.k), inner(own.v), inner(own.o)
        return dataclasses.replace(own, q=q, k=k, v=v, o=o, gate=inner(own.gate), up=inner(own.up), down=inner(own.down))

    fusion = weights.fusion
    return dataclasses.replace(
        weights,
        layers=tuple(layer(own) for own in weights.layers),
        lm_head=blocks(weights.lm_head, head_bits),
        fusion=None if fusion is None else dataclasses.replace(fusion, weight=blocks(fusion.weight)),
    )


def _shape(file: TensorFile, target: Target, intermediate: int, columns: int) -> DecoderShape:
    head_dim, theirs = file.count("head_dim"), target.shape
    q_heads, kv_heads = file.count("q_heads"), file.count("kv_heads")
    if q_heads % kv_heads or head_dim % 2:
        file.refuse(f"{q_heads} query heads over {kv_heads} key heads of {head_dim} channels; heads must divide evenly")
    if "rope_theta" not in file.metadata and head_dim != theirs.head_dim:
        file.refuse(f"metadata rope_theta is missing, and head_dim is {head_dim} where the target's is {theirs.head_dim}")
    return DecoderShape(
        layers=1,
        hidden=theirs.hidden,
        intermediate=intermediate,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=columns,
        norm_eps=file.number("norm_eps", DEFAULT_EPS),
        attention_scale=head_dim**-0.5,
        max_position=theirs.max_position,
    )


def _rotary(file: TensorFile, target: Target, shape: DecoderShape) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each [max_position, head_dim / 2] float32 (Su et al. 2021)."""
    if "rope_theta" not in file.metadata:
        return target.weights.rope_cos, target.weights.rope_sin
    device = target.weights.rope_cos.device
    powers = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=device) / shape.head_dim
    frequencies = 1.0 / file.number("rope_theta") ** powers
    angles = torch.arange(shape.max_position, dtype=torch.float32, device=device)[:, None] * frequencies
    return angles.cos(), angles.sin()
