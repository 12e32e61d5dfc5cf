"""Where the assembler gets tensors from: one face for GGUF files and safetensors folders, in the weight form asked for.

Knows tensor names, row order and forms; refuses to know which tensors a family needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NoReturn, Protocol

import torch

from kernels.linear import BLOCK, BlockWeight, DenseWeight, LayerWeight, Weight
from kernels.linear.formats import PublishedWeight
from spec.models.blocks import BLOCK_TYPES, dequantise, quantise, to_block_weight
from spec.models.config import fail, shown
from spec.models.gguf_file import GGUFFile
from spec.models.safetensors_file import SafetensorsFolder

WeightForm = Literal["native", "float32", "bfloat16"]
Quantise = Literal["q8", "q4"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Form:
    """native keeps what the file has; `quantise` turns its dense matrices into blocks (8 bits always for the vocabulary's).
    `published` keeps the layers' matrices of quantised safetensors as `kernels.linear.formats` has them, for GPUs."""

    weights: WeightForm = "native"
    quantise: Quantise | None = None
    published: bool = False

    def dense(self, values: torch.Tensor, bias: torch.Tensor | None, vocabulary: bool) -> Weight:
        """values [out, in] in the file's float type. A width that is not a multiple of 32 stays dense."""
        if self.weights != "native":
            return DenseWeight(values.to(DTYPES[self.weights]), bias)
        if self.quantise is None or values.shape[1] % BLOCK:
            return DenseWeight(values, bias)
        return quantise(values, 4 if self.quantise == "q4" and not vocabulary else 8, bias)

    def blocks(self, block_type: str, raw: torch.Tensor, bias: torch.Tensor | None) -> Weight:
        """raw uint8 [out, bytes of a row]"""
        if self.weights != "native":
            return DenseWeight(dequantise(block_type, raw, DTYPES[self.weights]), bias)
        return to_block_weight(block_type, raw, bias)


class TensorSource(Protocol):
    """Stems are names without ".weight" or ".bias". Wrong shapes, missing tensors and unsupported types raise."""

    def stem(self, role: str, layer: int | None = None) -> str:
        """The file's own name for a role of the assembler."""

    def has(self, name: str) -> bool: ...

    def matrix(self, stem: str, shape: tuple[int, int], bias: torch.Tensor | None, heads: int = 0) -> LayerWeight:
        """A published form for layers only. `heads` > 0: rows are those of a q or k projection of so many heads, returned in halves order."""

    def vector(self, name: str, size: int, heads: int = 0) -> torch.Tensor:
        """[size] float32"""

    def rows(self, stem: str, width: int) -> int:
        """Rows of a matrix whose width is known."""

    def refuse(self, name: str, problem: str) -> NoReturn:
        """Raise a ModelFileError about one tensor, naming the file it is or should be in."""


_HF_LAYER = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
} | {role: f"self_attn.{role}_proj" for role in "qkvo"}
_HF_MODEL = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "lm_head": "lm_head"}


class SafetensorsSource:
    def __init__(self, folder: SafetensorsFolder, form: Form) -> None:
        self.folder, self.form = folder, form

    def stem(self, role: str, layer: int | None = None) -> str:
        return _HF_MODEL[role] if layer is None else f"model.layers.{layer}.{_HF_LAYER[role]}"

    def has(self, name: str) -> bool:
        return name in self.folder.place

    def matrix(self, stem: str, shape: tuple[int, int], bias: torch.Tensor | None, heads: int = 0) -> LayerWeight:
        vocabulary = stem in (_HF_MODEL["embedding"], _HF_MODEL["lm_head"])
        return self.form.dense(self._tensor(f"{stem}.weight", shape), bias, vocabulary)

    def vector(self, name: str, size: int, heads: int = 0) -> torch.Tensor:
        return self._tensor(name, (size,)).float()

    def rows(self, stem: str, width: int) -> int:
        name = f"{stem}.weight"
        shape = self.folder.place[name].tensors[name].shape if self.has(name) else ()
        if len(shape) != 2 and self.has(name):
            self.refuse(name, f"shape {list(shape)}; [rows, {width}] was expected")
        return shape[0] if shape else self.refuse(name, "missing")

    def refuse(self, name: str, problem: str) -> NoReturn:
        file = self.folder.place.get(name)
        fail(file.path if file else self.folder.truth, f"tensor {shown(name)}", problem)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if not self.has(name):
            self.refuse(name, "missing")
        values = self.folder.place[name].tensor(name)
        if tuple(values.shape) != shape:
            self.refuse(name, f"shape {list(values.shape)}; the config asks for {list(shape)}")
        return values


_GGUF_LAYER = {
    "attention_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
}
_GGUF_MODEL = {"embedding": "token_embd", "final_norm": "output_norm", "lm_head": "output"}
_GGUF_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFSource:
    """`interleaved`: the file stores q and k rows as rotary pairs side by side (rows 0 and D/2 of a head first)."""

    def __init__(self, file: GGUFFile, form: Form, interleaved: bool) -> None:
        self.file, self.form, self.interleaved = file, form, interleaved

    def stem(self, role: str, layer: int | None = None) -> str:
        return _GGUF_MODEL[role] if layer is None else f"blk.{layer}.{_GGUF_LAYER[role]}"

    def has(self, name: str) -> bool:
        return name in self.file.tensors

    def matrix(self, stem: str, shape: tuple[int, int], bias: torch.Tensor | None, heads: int = 0) -> Weight:
        name = f"{stem}.weight"
        raw = self._raw(name, shape)
        if heads and self.interleaved:
            raw = _halves(raw, heads)
        kind = self.file.tensors[name].type
        if kind in BLOCK_TYPES:
            return self.form.blocks(kind, raw, bias)
        vocabulary = stem in (_GGUF_MODEL["embedding"], _GGUF_MODEL["lm_head"])
        return self.form.dense(raw.view(_GGUF_FLOATS[kind]), bias, vocabulary)

    def vector(self, name: str, size: int, heads: int = 0) -> torch.Tensor:
        raw = self._raw(name, (size,))
        kind = self.file.tensors[name].type
        if kind not in _GGUF_FLOATS:
            self.refuse(name, f"type {kind}; a vector must be one of {', '.join(_GGUF_FLOATS)}")
        values = raw.view(_GGUF_FLOATS[kind]).float()
        return _halves(values[:, None], heads)[:, 0] if heads and self.interleaved else values

    def rows(self, stem: str, width: int) -> int:
        name = f"{stem}.weight"
        if not self.has(name):
            self.refuse(name, "missing")
        shape = self.file.tensors[name].shape
        return shape[0] if len(shape) == 2 else self.refuse(name, f"shape {list(shape)}; [rows, {width}] was expected")

    def refuse(self, name: str, problem: str) -> NoReturn:
        fail(self.file.path, f"tensor {shown(name)}", problem)

    def _raw(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """uint8 [out, bytes of a row] or [bytes], a view of the mapped file."""
        if not self.has(name):
            self.refuse(name, "missing")
        info = self.file.tensors[name]
        if info.shape != shape:
            self.refuse(name, f"shape {list(info.shape)}; the metadata asks for {list(shape)}")
        if info.type not in BLOCK_TYPES and info.type not in _GGUF_FLOATS:
            known = ", ".join((*_GGUF_FLOATS, *BLOCK_TYPES))
            self.refuse(name, f"type {info.type} is not supported; supported: {known}")
        return torch.from_numpy(self.file.tensor_data(name))


def _halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """[out, m] with rows of a head as pairs (0, D/2), (1, D/2 + 1), ... -> rows 0 .. D-1 of each head."""
    return rows.reshape(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def check_finite(source: TensorSource, name: str, weight: LayerWeight | torch.Tensor) -> None:
    """One pass over floats or block scales; NaN and infinity are refused, never served. Published forms were checked when read."""
    if isinstance(weight, torch.Tensor):
        parts = [weight]
    elif isinstance(weight, PublishedWeight):
        return
    elif isinstance(weight, BlockWeight):
        parts = [weight.scale, weight.minimum]
    else:
        parts = [weight.values]
    for part in parts:
        low, high = torch.aminmax(part)  # NaN anywhere makes both NaN
        if not torch.isfinite(low + high):
            source.refuse(name, "has weights that are not finite numbers (NaN or infinity)")
