"""Attention heads as others publish them, read as ours. Knows their tensors' names; refuses to know trees, stores and prices.

EAGLE-1 (Li et al. 2024) for a Llama-like target: one decoder layer without a norm before its attention and none at its end, over

    fc.weight [H, 2H], fc.bias [H] (optional)           x = fc [ embedding of the token ; the target's state of the position before ]
    layers.0.self_attn.{q,k,v,o}_proj.weight, .bias     heads and rotary tables are the target's
    layers.0.post_attention_layernorm.weight [H]
    layers.0.mlp.{gate,up,down}_proj.weight

and scored by the target's own vocabulary matrix. Its training began at the target's second token; here the first one has a key too, of a
state of zeros. EAGLE-3 heads (midlayer.*) read three inner layers of the target and are refused by name: nothing here taps those.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from drafters.layer_models import LayerModel, Target
from drafters.tensor_file import TensorFile
from kernels.decoder import DecoderWeights, Fusion, LayerWeights
from kernels.linear import DenseWeight, Weight

_LAYER = "layers.0."
_ELSEWHERE = ("embed_tokens.weight", "lm_head.weight")  # copies of the target's own


def is_eagle(file: TensorFile) -> bool:
    return "fc.weight" in file.tensors


def load_eagle(file: TensorFile, target: Target) -> LayerModel:
    """Raises ModelFileError naming the file, the tensor and both sizes where one does not fit the target."""
    if any(name.startswith("midlayer.") for name in file.tensors):
        file.refuse("EAGLE-3 heads (midlayer.*) read inner layers of the target and are not supported; EAGLE-1 heads are")
    foreign = [name for name in file.tensors if not name.startswith(("fc.", _LAYER)) and name not in _ELSEWHERE]
    if foreign:
        file.refuse(f"tensor {min(foreign)} belongs to no EAGLE-1 head")
    shape = target.shape
    hidden, intermediate = shape.hidden, file.rows(f"{_LAYER}mlp.gate_proj.weight")
    q_rows, kv_rows = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def matrix(name: str, rows: int, columns: int) -> Weight:
        bias = file.vector(f"{name}.bias", rows) if f"{name}.bias" in file.tensors else None
        return DenseWeight(file.take(f"{name}.weight", (rows, columns)), bias)

    joint = matrix("fc", hidden, 2 * hidden)
    assert isinstance(joint, DenseWeight)
    states_first = torch.cat((joint.values[:, hidden:], joint.values[:, :hidden]), dim=1).contiguous()
    nothing = torch.empty(0, device=joint.values.device)
    layer = LayerWeights(
        attention_norm=nothing,
        q=matrix(f"{_LAYER}self_attn.q_proj", q_rows, hidden),
        k=matrix(f"{_LAYER}self_attn.k_proj", kv_rows, hidden),
        v=matrix(f"{_LAYER}self_attn.v_proj", kv_rows, hidden),
        o=matrix(f"{_LAYER}self_attn.o_proj", hidden, q_rows),
        mlp_norm=file.vector(f"{_LAYER}post_attention_layernorm.weight", hidden),
        gate=matrix(f"{_LAYER}mlp.gate_proj", intermediate, hidden),
        up=matrix(f"{_LAYER}mlp.up_proj", intermediate, hidden),
        down=matrix(f"{_LAYER}mlp.down_proj", hidden, intermediate),
    )
    weights = DecoderWeights(
        embedding=target.weights.embedding,
        layers=(layer,),
        final_norm=nothing,
        lm_head=target.weights.lm_head,
        rope_cos=target.weights.rope_cos,
        rope_sin=target.weights.rope_sin,
        fusion=Fusion(nothing, nothing, DenseWeight(states_first, joint.bias)),
    )
    return LayerModel(replace(shape, layers=1, intermediate=intermediate, sliding_window=None), weights, None)
