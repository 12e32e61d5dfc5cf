"""Torch tensors as the library's plain data. Checks device, dtype and layout once, at the border.

A structure made here holds bare addresses: the caller keeps the tensors alive until the call is over.
"""

from __future__ import annotations

import torch

from kernels.batch import KVTensors, StepInputs, store_sizes
from kernels.linear import BlockWeight, DenseWeight, LayerWeight
from kernels.linear.formats import PublishedWeight
from kernels.native.library import StepData, StoreData, WeightData

_DENSE_KINDS = {torch.float32: 2, torch.float16: 3, torch.bfloat16: 4}
_STORE_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}


def address(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> int:
    """Address of a contiguous CPU tensor of that dtype. Raises ValueError naming it otherwise."""
    if tensor.dtype is not dtype or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: expected a contiguous CPU tensor of {dtype}, got {tensor.dtype} on {tensor.device}"
            f"{'' if tensor.is_contiguous() else ', not contiguous'}"
        )
    return tensor.data_ptr()


def weight_data(weight: LayerWeight) -> WeightData:
    """The matrix as the packer reads it. Raises ValueError on a wrong dtype or shape."""
    if isinstance(weight, PublishedWeight):
        raise ValueError(f"a {type(weight).__name__} is a form for GPUs; the CPU's kernels read DenseWeight and BlockWeight")
    bias = None if weight.bias is None else address(weight.bias, torch.float32, "bias")
    if isinstance(weight, DenseWeight):
        kind = _DENSE_KINDS.get(weight.values.dtype)
        if kind is None:
            raise ValueError(f"a dense weight is float32, float16 or bfloat16, not {weight.values.dtype}")
        codes = address(weight.values, weight.values.dtype, "values")
        return WeightData(kind, weight.out_features, weight.in_features, codes, None, None, bias)
    return _block_data(weight, bias)


def _block_data(weight: BlockWeight, bias: int | None) -> WeightData:
    if weight.bits not in (4, 8):
        raise ValueError(f"a block weight has 4 or 8 bits, not {weight.bits}")
    blocks = (weight.out_features, weight.in_features // 32)
    if weight.codes.shape[2] != weight.bits * 4 or weight.scale.shape != blocks or weight.minimum.shape != blocks:
        raise ValueError(
            f"block weight of {weight.bits} bits: codes {tuple(weight.codes.shape)}, scale {tuple(weight.scale.shape)} "
            f"and minimum {tuple(weight.minimum.shape)} do not belong together"
        )
    minimum = address(weight.minimum, torch.float16 if weight.bits == 4 else torch.float32, "minimum")
    return WeightData(
        0 if weight.bits == 4 else 1,
        weight.out_features,
        weight.in_features,
        address(weight.codes, torch.uint8, "codes"),
        address(weight.scale, torch.float16, "scale"),
        minimum,
        bias,
    )


def step_data(inputs: StepInputs) -> StepData:
    """The ragged batch. Sizes are taken from the tensors; values are checked on the other side."""
    i32 = torch.int32
    return StepData(
        inputs.num_nodes,
        inputs.num_rows,
        inputs.page_table.shape[1],
        inputs.score_rows.shape[0],
        address(inputs.input_ids, i32, "input_ids"),
        address(inputs.positions, i32, "positions"),
        address(inputs.slots, i32, "slots"),
        address(inputs.words, torch.int64, "words"),
        address(inputs.causal, torch.uint8, "causal"),
        address(inputs.row_ptr, i32, "row_ptr"),
        address(inputs.page_table, i32, "page_table"),
        address(inputs.kv_lens, i32, "kv_lens"),
        address(inputs.score_rows, i32, "score_rows"),
    )


def store_data(store: KVTensors) -> StoreData:
    """All layers of a store. Raises ValueError when it is of no kind that the library knows."""
    return layered_store(store.k, store.v, store.k.shape[0])


def layered_store(k: torch.Tensor, v: torch.Tensor, layers: int) -> StoreData:
    """The same from the tensors; a single layer has no layer axis."""
    kind = _STORE_KINDS.get(k.dtype)
    if kind is None:
        raise ValueError(f"a store is float32, bfloat16 or bytes (uint8), not {k.dtype}")
    pages, heads = k.shape[-4:-2]
    head_dim, page_size = store_sizes(k)
    return StoreData(
        address(k, k.dtype, "store.k"),
        address(v, k.dtype, "store.v"),
        layers,
        pages,
        heads,
        head_dim,
        page_size,
        kind,
    )
