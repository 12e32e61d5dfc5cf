"""The decoder stack composed of the Triton ops. Knows the Llama family's order of operations; refuses to know how weights
were loaded and what a row is for.

The residual stream is float32. q, k and v are one matrix product, gate and up another; rotation and the write of K and V are
one kernel; each norm takes the residual addition before it along. Nothing is read back to the host inside a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kernels.batch import KVTensors, PackedInputs, StepInputs
from kernels.decoder import DecoderOutput, DecoderShape, DecoderWeights, Drafted, LayerWeights
from kernels.linear import BlockWeight, DenseWeight, LayerWeight
from kernels.linear.formats import PublishedWeight
from kernels.linear.formats.stacking import stacked
from kernels.linear.reference import lookup
from kernels.linear.triton import linear
from kernels.norm.triton import add_rms_norm, rms_norm
from kernels.rope.triton import rope_write
from kernels.sample.triton import argmax
from kernels.silu_mul.triton import silu_mul
from kernels.top_shares.triton import best_tokens
from kernels.tree_attention.ordered import triton as ordered
from kernels.tree_attention.triton import tree_attention


@dataclass(frozen=True, slots=True)
class _Fused:
    qkv: tuple[LayerWeight, ...]  # one stacked matrix, or q, k and v where their forms differ
    gate_up: tuple[LayerWeight, ...]


def stack(weights: Sequence[LayerWeight]) -> tuple[LayerWeight, ...]:
    """The matrices on top of each other as one weight, or unchanged where their forms differ."""
    bias = None
    given = [w.bias for w in weights if w.bias is not None]
    if given:
        bias = torch.cat([given[0].new_zeros(w.out_features) if w.bias is None else w.bias for w in weights])
    published = [w for w in weights if isinstance(w, PublishedWeight)]
    if len(published) == len(weights):
        joined = stacked(published, bias)
        return tuple(weights) if joined is None else (joined,)
    dense = [w for w in weights if isinstance(w, DenseWeight)]
    if len(dense) == len(weights) and len({w.values.dtype for w in dense}) == 1:
        return (DenseWeight(torch.cat([w.values for w in dense]), bias),)
    blocks = [w for w in weights if isinstance(w, BlockWeight)]
    if len(blocks) == len(weights) and len({(w.bits, w.minimum.dtype) for w in blocks}) == 1:
        codes, scale = torch.cat([w.codes for w in blocks]), torch.cat([w.scale for w in blocks])
        minimum = torch.cat([w.minimum for w in blocks])
        return (replace(blocks[0], codes=codes, scale=scale, minimum=minimum, bias=bias),)
    return tuple(weights)


class TritonDecoder:
    """The `Decoder` protocol on a device. `invariant` gives up the vendor library and the fast attention for kernels whose bits depend
    on a node's own path only, as the contract asks; otherwise near-ties may fall differently with the batch."""

    def __init__(self, shape: DecoderShape, weights: DecoderWeights, invariant: bool = False) -> None:
        self.shape = shape
        self.weights = weights
        self.invariant = invariant
        self._attend = ordered.tree_attention if invariant else tree_attention
        self._fused = [_Fused(stack((w.q, w.k, w.v)), stack((w.gate, w.up))) for w in weights.layers]

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

    def beside(self, shape: DecoderShape, weights: DecoderWeights) -> TritonDecoder:
        return TritonDecoder(shape, replace(weights, embedding=self.weights.embedding), self.invariant)

    def forward(
        self, inputs: StepInputs, store: KVTensors, need_logits: bool, features: torch.Tensor | None = None
    ) -> DecoderOutput:
        shape, weights = self.shape, self.weights
        norms = [layer.attention_norm for layer in weights.layers[1:]] + [weights.final_norm]
        x = self._input(lookup(weights.embedding, inputs.input_ids), features)  # [N, hidden]
        normed = _norm(x, weights.layers[0].attention_norm, shape.norm_eps)
        for index, layer in enumerate(weights.layers):
            mixed = self._attention(normed, index, layer, inputs, store)
            normed, x = add_rms_norm(mixed, x, layer.mlp_norm, shape.norm_eps)
            gate, up = self._split(normed, self._fused[index].gate_up, [shape.intermediate, shape.intermediate])
            down = linear(silu_mul(gate, up), layer.down, self.invariant)
            normed, x = _add_norm(down, x, norms[index], shape.norm_eps)
        logits = linear(normed[inputs.score_rows.long()], weights.lm_head, self.invariant)  # [R, vocab]
        return DecoderOutput(hidden=normed, argmax=argmax(logits), logits=logits if need_logits else None)

    def _input(self, tokens: torch.Tensor, features: torch.Tensor | None) -> torch.Tensor:
        fusion, eps = self.weights.fusion, self.shape.norm_eps
        if fusion is None or features is None:
            if fusion is not None or features is not None:
                raise ValueError("features were given to a decoder that takes none, or none to one that needs them")
            return tokens
        parts = (_norm(features, fusion.feature_norm, eps), _norm(tokens, fusion.token_norm, eps))
        return linear(torch.cat(parts, dim=1), fusion.weight, self.invariant)

    def _attention(
        self, normed: torch.Tensor, index: int, layer: LayerWeights, inputs: StepInputs, store: KVTensors
    ) -> torch.Tensor:
        shape, weights = self.shape, self.weights
        kv = shape.kv_heads * shape.head_dim
        q, k, v = self._split(normed, self._fused[index].qkv, [shape.q_heads * shape.head_dim, kv, kv])
        rotated = rope_write(
            q, k, v, inputs.positions, inputs.slots, weights.rope_cos, weights.rope_sin, store.k[index], store.v[index],
            layer.q_norm, layer.k_norm, shape.norm_eps,
        )  # fmt: skip
        mixed = self._attend(rotated, store.k[index], store.v[index], inputs, shape.attention_scale, shape.sliding_window)
        return linear(mixed.reshape(normed.shape[0], -1), layer.o, self.invariant)

    def _split(self, x: torch.Tensor, weights: tuple[LayerWeight, ...], sizes: list[int]) -> Sequence[torch.Tensor]:
        """The products of x with each matrix, as column ranges of one product where they were stacked."""
        if len(weights) == 1:
            return list(torch.split(linear(x, weights[0], self.invariant), sizes, dim=1))
        return [linear(x, w, self.invariant) for w in weights]


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return rms_norm(x, weight, eps) if weight.numel() else x


def _add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(the norm of the sum, the sum)"""
    if weight.numel():
        return add_rms_norm(x, residual, weight, eps)
    total = x + residual
    return total, total
