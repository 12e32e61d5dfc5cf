"""A student: what its file holds, as the weights of a decoder. Knows names and sizes; refuses to know trees, stores and prices.

A small language model made of layers like the target's (same sizes, norm_eps, rotary tables and window), over the target's own embedding.
A safetensors file with floats in float32, float16 or bfloat16; metadata "format": "forespeak.student/1" and "layers"; matrices are
[out, in], H is the target's hidden size:

    layers.{i}.attn_norm, .q, .k, .v, .o, .mlp_norm, .gate, .up, .down         i = 0 .. layers - 1
    layers.{i}.q_bias and the like, .q_norm, .k_norm                            where the target has them
    final_norm [H]
    token_ids [K]      int32 or int64, distinct; optional: without it the whole vocabulary is scored
    output [K, H]      optional: without it the rows token_ids of the target's own vocabulary matrix
"""

from __future__ import annotations

import dataclasses

import torch

from drafters.layer_models import LayerModel, Target, layer_of
from drafters.tensor_file import TensorFile
from kernels.decoder import DecoderWeights
from kernels.linear import DenseWeight, Weight

STUDENT_FORMAT = "forespeak.student/1"


def load_student(file: TensorFile, target: Target) -> LayerModel:
    """Raises ModelFileError naming the file, the tensor and both sizes where one does not fit the target."""
    if file.format != STUDENT_FORMAT:
        file.refuse(f"metadata format is {file.format!r}; {STUDENT_FORMAT!r} was expected")
    layers = file.count("layers")
    token_ids = tuple(file.token_ids(target.shape.vocab_size)) if "token_ids" in file.tensors else None
    columns = target.shape.vocab_size if token_ids is None else len(token_ids)
    shape = dataclasses.replace(target.shape, layers=layers, intermediate=file.rows("layers.0.gate"), vocab_size=columns)
    weights = DecoderWeights(
        embedding=target.weights.embedding,
        layers=tuple(layer_of(file, f"layers.{i}.", shape) for i in range(layers)),
        final_norm=file.vector("final_norm", shape.hidden),
        lm_head=_head(file, target, token_ids, columns),
        rope_cos=target.weights.rope_cos,
        rope_sin=target.weights.rope_sin,
    )
    return LayerModel(shape, weights, token_ids)


def _head(file: TensorFile, target: Target, token_ids: tuple[int, ...] | None, columns: int) -> Weight:
    own = target.weights.lm_head
    if "output" in file.tensors:
        return DenseWeight(file.take("output", (columns, target.shape.hidden)))
    return own if token_ids is None else _rows(own, torch.tensor(token_ids, dtype=torch.int64))


def _rows(weight: Weight, at: torch.Tensor) -> Weight:
    """Those outputs of a matrix, in its own form (a copy)."""
    bias = None if weight.bias is None else weight.bias[at]
    if isinstance(weight, DenseWeight):
        return DenseWeight(weight.values[at], bias)
    return dataclasses.replace(weight, codes=weight.codes[at], scale=weight.scale[at], minimum=weight.minimum[at], bias=bias)
