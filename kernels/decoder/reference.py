"""The decoder stack composed of the reference ops, layer by layer. Knows the Llama family's order of operations;
refuses to know how weights were loaded and what a row is for.

Slow and obvious: the definition that the faster decoders are tested against. Runs on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kernels.batch import KVTensors, PackedInputs, StepInputs
from kernels.decoder import DecoderOutput, DecoderShape, DecoderWeights, Drafted, LayerWeights
from kernels.kv_slots.reference import write
from kernels.linear.reference import linear, lookup
from kernels.norm.reference import rms_norm
from kernels.rope.reference import rope
from kernels.sample.reference import argmax
from kernels.silu_mul.reference import silu_mul
from kernels.top_shares.reference import best_tokens
from kernels.tree_attention.reference import attend, first_positions, key_slots


class ReferenceDecoder:
    """The `Decoder` protocol in plain torch."""

    def __init__(self, shape: DecoderShape, weights: DecoderWeights) -> None:
        self.shape = shape
        self.weights = weights

    def draft(
        self,
        inputs: PackedInputs,
        store: KVTensors,
        features: torch.Tensor | None,
        k: int,
        temperature: Sequence[float] | None = None,
    ) -> Drafted:
        tensors = inputs.tensors(store.k.device)
        out = self.forward(tensors, store, True, features)
        return best_tokens(out, k, temperature)

    def beside(self, shape: DecoderShape, weights: DecoderWeights) -> ReferenceDecoder:
        return ReferenceDecoder(shape, replace(weights, embedding=self.weights.embedding))

    def forward(
        self, inputs: StepInputs, store: KVTensors, need_logits: bool, features: torch.Tensor | None = None
    ) -> DecoderOutput:
        shape, weights = self.shape, self.weights
        paths = key_slots(inputs, store.page_size, shape.sliding_window)
        firsts = first_positions(inputs, paths)
        x = self._input(lookup(weights.embedding, inputs.input_ids), features)  # [N, hidden]
        for index, layer in enumerate(weights.layers):
            x = x + self._attention(x, layer, inputs, store.k[index], store.v[index], paths, firsts)
            x = x + self._mlp(x, layer)
        hidden = _norm(x, weights.final_norm, shape.norm_eps)
        logits = linear(hidden[inputs.score_rows.long()], weights.lm_head)  # [R, vocab]
        return DecoderOutput(hidden=hidden, argmax=argmax(logits), logits=logits if need_logits else None)

    def _input(self, tokens: torch.Tensor, features: torch.Tensor | None) -> torch.Tensor:
        fusion, eps = self.weights.fusion, self.shape.norm_eps
        if fusion is None or features is None:
            if fusion is not None or features is not None:
                raise ValueError("features were given to a decoder that takes none, or none to one that needs them")
            return tokens
        parts = (_norm(features, fusion.feature_norm, eps), _norm(tokens, fusion.token_norm, eps))
        return linear(torch.cat(parts, dim=1), fusion.weight)

    def _attention(
        self,
        x: torch.Tensor,
        layer: LayerWeights,
        inputs: StepInputs,
        store_k: torch.Tensor,
        store_v: torch.Tensor,
        paths: list[torch.Tensor],
        firsts: list[int],
    ) -> torch.Tensor:
        shape, weights = self.shape, self.weights
        n = x.shape[0]
        normed = _norm(x, layer.attention_norm, shape.norm_eps)
        q = linear(normed, layer.q).reshape(n, shape.q_heads, shape.head_dim)
        k = linear(normed, layer.k).reshape(n, shape.kv_heads, shape.head_dim)
        v = linear(normed, layer.v).reshape(n, shape.kv_heads, shape.head_dim)
        if layer.q_norm is not None:
            q = rms_norm(q, layer.q_norm, shape.norm_eps)
        if layer.k_norm is not None:
            k = rms_norm(k, layer.k_norm, shape.norm_eps)
        q = rope(q, inputs.positions, weights.rope_cos, weights.rope_sin)
        k = rope(k, inputs.positions, weights.rope_cos, weights.rope_sin)
        write(k, v, inputs.slots, store_k, store_v)
        mixed = attend(q, store_k, store_v, paths, shape.attention_scale, firsts=firsts)
        return linear(mixed.reshape(n, -1), layer.o)

    def _mlp(self, x: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        normed = rms_norm(x, layer.mlp_norm, self.shape.norm_eps)
        return linear(silu_mul(linear(normed, layer.gate), linear(normed, layer.up)), layer.down)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return rms_norm(x, weight, eps) if weight.numel() else x
