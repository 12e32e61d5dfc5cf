"""Tiny quantised safetensors folders, written from each format's definition and sharing no code with the loader.

Numbers are packed one at a time with Python integers. Every writer gives the folder and, by module, the float32 matrix that the
format's own definition makes of what was written.

write(path, form, **overrides) -> (folder, {module: matrix})     `form` is a key of FORMS, or a config and a writer of its own
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checkpoints import rand, rand_tensors, write_folder

Tensors = dict[str, torch.Tensor]
Writer = Callable[[torch.Tensor, torch.Generator], tuple[Tensors, torch.Tensor]]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output held by the i-th nibble of a word, counted from the lowest bits
E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def word(numbers: list[int], bits: int) -> int:
    """A signed 32-bit word with `numbers` from the lowest bits up."""
    value = 0
    for place, number in enumerate(numbers):
        assert 0 <= number < 1 << bits
        value |= number << (place * bits)
    return value - (1 << 32) if value >> 31 else value


def pack(table: list[list[int]], bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Rows of numbers -> int32 words along the row, padded with zeros."""
    size = 32 // bits
    rows = []
    for row in table:
        padded = row + [0] * (-len(row) % size)
        chunks = [padded[i : i + size] for i in range(0, len(padded), size)]
        rows.append([word([c[i] for i in order] if order else c, bits) for c in chunks])
    return torch.tensor(rows, dtype=torch.int32)


def integers(
    weight: torch.Tensor, bits: int, group_of: list[int], zero_top: int
) -> tuple[list[list[int]], torch.Tensor, list[list[int]]]:
    """Round to nearest: codes [out][in], float16 scales [out, groups], zero points [out][groups] up to `zero_top`."""
    out, into = weight.shape
    groups = max(group_of) + 1
    largest = (1 << bits) - 1
    scales = torch.zeros(out, groups, dtype=torch.float16)
    zeros = [[0] * groups for _ in range(out)]
    for o in range(out):
        for g in range(groups):
            part = [float(weight[o, i]) for i in range(into) if group_of[i] == g]
            low, high = min(*part, 0.0), max(*part, 0.0)
            scales[o, g] = max((high - low) / largest, 1e-4)
            zeros[o][g] = min(max(round(-low / float(scales[o, g])), 1), zero_top)
            if o == g == 0:
                zeros[o][g] = zero_top  # the widest one, whatever the numbers want
    codes = [
        [
            min(max(round(float(weight[o, i]) / float(scales[o, group_of[i]])) + zeros[o][group_of[i]], 0), largest)
            for i in range(into)
        ]
        for o in range(out)
    ]
    return codes, scales, zeros


def values(codes: list[list[int]], scales: torch.Tensor, zeros: list[list[int]], group_of: list[int]) -> torch.Tensor:
    """scale * (code - zero), float32 [out, in]"""
    out, into = len(codes), len(codes[0])
    table = [[float(scales[o, group_of[i]]) * (codes[o][i] - zeros[o][group_of[i]]) for i in range(into)] for o in range(out)]
    return torch.tensor(table, dtype=torch.float64).float()


def transposed(table: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*table, strict=True)]


def groups_in_order(into: int, size: int) -> list[int]:
    return [i // size for i in range(into)]


def gptq(bits: int, size: int, *, shift: int = 1, act_order: bool = False) -> Writer:
    def write(weight: torch.Tensor, g: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        into = weight.shape[1]
        group_of = groups_in_order(into, size)
        if act_order:
            group_of = [group_of[int(i)] for i in torch.randperm(into, generator=g)]
        # the widest zero point that a word can hold: one more than the largest code where one is taken off
        codes, scales, zeros = integers(weight, bits, group_of, (1 << bits) - 1 + shift)
        return {
            "qweight": pack(codes, bits).T.contiguous(),
            "qzeros": pack([[z - shift for z in row] for row in transposed(zeros)], bits),
            "scales": scales.T.contiguous(),
            "g_idx": torch.tensor(group_of, dtype=torch.int32),
        }, values(codes, scales, zeros, group_of)

    return write


def awq(size: int) -> Writer:
    def write(weight: torch.Tensor, g: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        group_of = groups_in_order(weight.shape[1], size)
        codes, scales, zeros = integers(weight, 4, group_of, 15)
        return {
            "qweight": pack(transposed(codes), 4, AWQ_ORDER),
            "qzeros": pack(transposed(zeros), 4, AWQ_ORDER),
            "scales": scales.T.contiguous(),
        }, values(codes, scales, zeros, group_of)

    return write


def packed(bits: int, size: int, *, symmetric: bool, act_order: bool = False) -> Writer:
    """compressed-tensors: signed codes and zero points, both stored plus half the range."""

    def write(weight: torch.Tensor, g: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        out, into = weight.shape
        half = 1 << (bits - 1)
        group_of = groups_in_order(into, size or into)
        if act_order:
            group_of = [group_of[int(i)] for i in torch.randperm(into, generator=g)]
        codes, scales, zeros = integers(weight, bits, group_of, 2 * half - 1)
        if symmetric:
            zeros = [[half] * len(row) for row in zeros]
            scales = scales.to(torch.bfloat16)
        tensors = {
            "weight_packed": pack(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([out, into]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = pack(transposed(zeros), bits).T.contiguous()
        if act_order:
            tensors["weight_g_idx"] = torch.tensor(group_of, dtype=torch.int32)
        return tensors, values(codes, scales, zeros, group_of)

    return write


def float8(rows: int, columns: int, name: str) -> Writer:
    """rows, columns: outputs and columns of a scale; 0 is all of them. One scale for everything is stored as [1]."""

    def write(weight: torch.Tensor, g: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        out, into = weight.shape
        high, wide = rows or out, columns or into
        scale = torch.zeros(math.ceil(out / high), math.ceil(into / wide))
        stored = torch.zeros(out, into).to(torch.float8_e4m3fn)
        matrix = torch.zeros(out, into)
        for a in range(scale.shape[0]):
            for b in range(scale.shape[1]):
                at = (slice(a * high, (a + 1) * high), slice(b * wide, (b + 1) * wide))
                scale[a, b] = weight[at].abs().max() / 448
                stored[at] = (weight[at] / scale[a, b]).to(torch.float8_e4m3fn)
                matrix[at] = stored[at].float() * scale[a, b]
        return {"weight": stored, name: scale if rows or columns else scale.reshape(1)}, matrix

    return write


def int8(weight: torch.Tensor, g: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    scale = (weight.abs().amax(1, keepdim=True) / 127).to(torch.bfloat16)
    codes = (weight / scale.float()).round().clamp(-127, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()


def mxfp4(blocks: bool) -> Writer:
    """blocks: gpt-oss's tensors; otherwise compressed-tensors'. The low nibble comes first in both."""

    def write(weight: torch.Tensor, g: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        out, into = weight.shape
        exponent = [[0] * (into // 32) for _ in range(out)]
        nibbles = [[0] * into for _ in range(out)]
        matrix = torch.zeros(out, into)
        for o in range(out):
            for b in range(into // 32):
                power = math.floor(math.log2(float(weight[o, 32 * b : 32 * b + 32].abs().max()))) - 2
                exponent[o][b] = power + 127
                for i in range(32 * b, 32 * b + 32):
                    wanted = float(weight[o, i]) / 2.0**power
                    nibbles[o][i] = min(range(16), key=lambda c: abs(E2M1_VALUES[c] - wanted))
                    matrix[o, i] = E2M1_VALUES[nibbles[o][i]] * 2.0**power
        codes = torch.tensor([[row[i] | row[i + 1] << 4 for i in range(0, into, 2)] for row in nibbles], dtype=torch.uint8)
        scale = torch.tensor(exponent, dtype=torch.uint8)
        if blocks:
            return {"weight_blocks": codes.reshape(out, into // 32, 16), "weight_scales": scale}, matrix
        return {"weight_packed": codes, "weight_scale": scale}, matrix

    return write


def compressed(form: str, weights: dict[str, Any], rows: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": rows, "output_activations": None}},
    }  # fmt: skip


TOKEN_ROWS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}


def ints(bits: int, size: int, symmetric: bool, **more: Any) -> dict[str, Any]:
    strategy = "group" if size else "channel"
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": size or None} | more


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}

# form -> (quantization_config, writer of one matrix)
FORMS: dict[str, tuple[dict[str, Any], Writer]] = {
    "gptq": (GPTQ, gptq(4, 32)),
    "gptq, act order": (GPTQ | {"desc_act": True}, gptq(4, 32, act_order=True)),
    "gptq, 8 bits, one group": (GPTQ | {"bits": 8, "group_size": -1}, gptq(8, 10**6)),
    "gptq v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(4, 32, shift=0)),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm", "modules_to_not_convert": None},
        awq(32),
    ),
    "packed int4": (compressed("pack-quantized", ints(4, 32, True)), packed(4, 32, symmetric=True)),
    "packed int4, zero points": (compressed("pack-quantized", ints(4, 32, False)), packed(4, 32, symmetric=False)),
    "packed int4, act order": (
        compressed("pack-quantized", ints(4, 32, True, actorder="group")),
        packed(4, 32, symmetric=True, act_order=True),
    ),
    "packed int8, one group": (compressed("pack-quantized", ints(8, 0, True)), packed(8, 0, symmetric=True)),
    "fp8, one scale": ({"quant_method": "fp8", "activation_scheme": "static"}, float8(0, 0, "weight_scale")),
    "fp8, blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [64, 32]},
        float8(64, 32, "weight_scale_inv"),
    ),
    "compressed fp8, a scale a row": (
        compressed(
            "float-quantized",
            {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
            TOKEN_ROWS | {"type": "float"},
        ),
        float8(1, 0, "weight_scale"),
    ),
    "int8 rows": (compressed("int-quantized", INT8, TOKEN_ROWS), int8),
    "int8 weights": (compressed("int-quantized", INT8), int8),
    "mxfp4": ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, mxfp4(True)),
    "compressed mxfp4": (
        compressed(
            "mxfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32},
        ),
        mxfp4(False),
    ),
}  # fmt: skip


def write(
    path: Path, form: str | tuple[dict[str, Any], Writer], seed: int = 0, **overrides: Any
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A one-layer RAND checkpoint with every projection quantised; the vocabulary's matrices stay float."""
    config, writer = FORMS[form] if isinstance(form, str) else form
    spec = rand(**({"layers": 1, "hidden": 64, "intermediate": 96} | overrides))
    g = torch.Generator().manual_seed(seed)
    tensors, matrices = {}, {}
    for name, tensor in rand_tensors(spec, seed).items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            tensors[name] = tensor
            continue
        parts, matrices[module] = writer(tensor, g)
        tensors |= {f"{module}.{part}": value for part, value in parts.items()}
    folder = write_folder(path, spec.config() | {"quantization_config": config}, tensors, eos_ids=spec.eos_ids)
    return folder, matrices
