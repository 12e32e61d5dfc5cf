"""A safetensors folder of quantised matrices as a `TensorSource`. Knows which tensors a published matrix is made of.

A matrix is quantised when its packed tensors are there; one with a float `weight` is read as in any other folder. The vocabulary's
matrices and, unless `Form.published` asks for the published form and devices can read its groups, all others come in the forms that
every kernel reads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.linear import LayerWeight
from kernels.linear.formats import (
    MX_BLOCK,
    Float8Weight,
    GroupWeight,
    Int8Weight,
    MxWeight,
    PublishedWeight,
    step_columns,
)
from kernels.linear.formats.reference import dequantize
from spec.models.host_form import host_form
from spec.models.quant_config import Layout, Quantisation
from spec.models.quant_layouts import from_awq, from_gptq, from_packed
from spec.models.safetensors_file import SafetensorsFolder
from spec.models.source import DTYPES, Form, SafetensorsSource

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_WORDS = (torch.int32,)
_BYTES = (torch.uint8,)

# The tensor whose presence, with one of these types, says that a matrix is quantised.
_MARKS: dict[Layout, tuple[str, tuple[str, ...]]] = {
    "gptq": ("qweight", ("I32",)),
    "awq": ("qweight", ("I32",)),
    "packed": ("weight_packed", ("I32",)),
    "int8": ("weight", ("I8",)),
    "float8": ("weight", ("F8_E4M3",)),
    "mx packed": ("weight_packed", ("U8",)),
    "mx blocks": ("weight_blocks", ("U8",)),
}


class QuantisedSource(SafetensorsSource):
    def __init__(self, folder: SafetensorsFolder, form: Form, quantisation: Quantisation) -> None:
        super().__init__(folder, form)
        self.quantisation = quantisation
        self._readers: dict[Layout, Callable[[str, int, int, torch.Tensor | None], PublishedWeight]] = {
            "gptq": self._gptq,
            "awq": self._awq,
            "packed": self._packed,
            "int8": self._int8,
            "float8": self._float8,
            "mx packed": self._mx,
            "mx blocks": self._mx,
        }

    def has(self, name: str) -> bool:
        """A quantised matrix has a weight, under whatever names."""
        return super().has(name) or (name.endswith(".weight") and self._quantised(name.removesuffix(".weight")))

    def matrix(self, stem: str, shape: tuple[int, int], bias: torch.Tensor | None, heads: int = 0) -> LayerWeight:
        if not self._quantised(stem):
            return super().matrix(stem, shape, bias, heads)
        if self.quantisation.bits == 4 and shape[1] % 2:
            self.refuse(
                f"{stem}.{_MARKS[self.quantisation.layout][0]}", f"{shape[1]} columns of 4 bits; only even widths are supported"
            )
        weight = self._readers[self.quantisation.layout](stem, *shape, bias)
        vocabulary = stem in (self.stem("embedding"), self.stem("lm_head"))
        if self.form.weights != "native":
            return self.form.dense(dequantize(weight).to(DTYPES[self.form.weights]), bias, vocabulary)
        if self.form.published and not vocabulary and step_columns(weight):
            return weight
        return host_form(weight, self.form, vocabulary)

    def _quantised(self, stem: str) -> bool:
        part, kinds = _MARKS[self.quantisation.layout]
        name = f"{stem}.{part}"
        return name in self.folder.place and self.folder.place[name].tensors[name].dtype in kinds

    def _read(self, name: str, shape: tuple[int, ...], kinds: tuple[torch.dtype, ...]) -> torch.Tensor:
        if name not in self.folder.place:
            self.refuse(name, f"missing, and {self.quantisation.name} needs it")
        values = self.folder.place[name].stored(name)
        if tuple(values.shape) != shape:
            self.refuse(name, f"shape {list(values.shape)}; {self.quantisation.name} asks for {list(shape)} here")
        if values.dtype not in kinds:
            wanted = " or ".join(str(k).removeprefix("torch.") for k in kinds)
            self.refuse(
                name, f"dtype {str(values.dtype).removeprefix('torch.')}; {self.quantisation.name} asks for {wanted} here"
            )
        return values

    def _optional(self, name: str, shape: tuple[int, ...], kinds: tuple[torch.dtype, ...]) -> torch.Tensor | None:
        return self._read(name, shape, kinds) if name in self.folder.place else None

    def _scales(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        values = self._read(name, shape, _FLOATS)
        if not bool(torch.isfinite(values).all()):
            self.refuse(name, "has scales that are not finite numbers (NaN or infinity)")
        return values

    def _group_of(self, name: str, into: int, groups: int) -> torch.Tensor | None:
        """int32 [in], the group of each column. None: in order, which the tensor must say itself where the config says otherwise."""
        read = self._read if self.quantisation.ordered and groups > 1 else self._optional
        return read(name, (into,), _WORDS)

    def _divides(self, name: str, size: int, by: int, what: str) -> int:
        if size % by:
            self.refuse(name, f"{size} {what} do not fill words of {by}")
        return size // by

    # --- layouts: stem, outputs, columns, bias -> weight -------------------------------------------------------------

    def _gptq(self, stem: str, out: int, into: int, bias: torch.Tensor | None) -> GroupWeight:
        own, per_word = self.quantisation, 32 // self.quantisation.bits
        group = own.group or into
        groups = -(-into // group)
        name = f"{stem}.qweight"
        qweight = self._read(name, (self._divides(name, into, per_word, "columns"), out), _WORDS)
        qzeros = self._read(f"{stem}.qzeros", (groups, self._divides(name, out, per_word, "outputs")), _WORDS)
        g_idx = self._group_of(f"{stem}.g_idx", into, groups)
        try:
            return from_gptq(
                qweight, qzeros, self._scales(f"{stem}.scales", (groups, out)), g_idx, own.bits, group, own.zero_shift, bias
            )
        except ValueError as error:
            self.refuse(f"{stem}.g_idx", str(error))

    def _awq(self, stem: str, out: int, into: int, bias: torch.Tensor | None) -> GroupWeight:
        group = self.quantisation.group or into
        groups = -(-into // group)
        words = self._divides(f"{stem}.qweight", out, 8, "outputs")
        qweight = self._read(f"{stem}.qweight", (into, words), _WORDS)
        qzeros = self._read(f"{stem}.qzeros", (groups, words), _WORDS)
        return from_awq(qweight, qzeros, self._scales(f"{stem}.scales", (groups, out)), group, bias)

    def _packed(self, stem: str, out: int, into: int, bias: torch.Tensor | None) -> GroupWeight:
        own, per_word = self.quantisation, 32 // self.quantisation.bits
        group = own.group or into
        groups = -(-into // group)
        shape = self._optional(f"{stem}.weight_shape", (2,), (torch.int64, torch.int32))
        if shape is not None and shape.tolist() != [out, into]:
            self.refuse(f"{stem}.weight_shape", f"{shape.tolist()}; the config asks for {[out, into]}")
        packed = self._read(f"{stem}.weight_packed", (out, -(-into // per_word)), _WORDS)
        read = self._read if own.zero_points else self._optional
        zero = read(f"{stem}.weight_zero_point", (-(-out // per_word), groups), _WORDS)
        g_idx = self._group_of(f"{stem}.weight_g_idx", into, groups)
        scale = self._scales(f"{stem}.weight_scale", (out, groups))
        try:
            return from_packed(packed, scale, zero, g_idx, own.bits, group, into, bias)
        except ValueError as error:
            self.refuse(f"{stem}.weight_g_idx", str(error))

    def _int8(self, stem: str, out: int, into: int, bias: torch.Tensor | None) -> Int8Weight | GroupWeight:
        codes = self._read(f"{stem}.weight", (out, into), (torch.int8,))
        name = f"{stem}.weight_scale"
        if f"{stem}.weight_zero_point" in self.folder.place:
            self.refuse(f"{stem}.weight_zero_point", "asymmetric 8-bit weights are not supported; supported: symmetric")
        if self.quantisation.integer_rows:
            scale = self._one_or_a_row(name, out).float()
            return Int8Weight(codes, scale.expand(out).contiguous(), bias)
        group = self.quantisation.group or into
        groups = -(-into // group)
        scale = self._scales(name, (out, groups)) if groups > 1 else self._one_or_a_row(name, out).expand(out)[:, None]
        zero = torch.full((groups, out), 128, dtype=torch.int16)
        unsigned = codes.view(torch.uint8) ^ 0x80  # flipping the sign bit adds 128
        return GroupWeight(8, unsigned, scale.T.contiguous(), zero, group, None, bias)

    def _one_or_a_row(self, name: str, out: int) -> torch.Tensor:
        """[1] or [out]: the scale of the whole matrix or of each output."""
        if name not in self.folder.place:
            self.refuse(name, f"missing, and {self.quantisation.name} needs it")
        shape = self.folder.place[name].tensors[name].shape
        if shape not in ((), (1,), (1, 1), (out,), (out, 1)):
            self.refuse(name, f"shape {list(shape)}; one scale or one for each of {out} outputs was expected")
        return self._scales(name, shape).reshape(-1)

    def _float8(self, stem: str, out: int, into: int, bias: torch.Tensor | None) -> Float8Weight:
        values = self._read(f"{stem}.weight", (out, into), (torch.float8_e4m3fn,))
        if bool((values.view(torch.uint8) & 0x7F == 0x7F).any()):
            self.refuse(f"{stem}.weight", "has weights that are not finite numbers (NaN)")
        name = f"{stem}.weight_scale_inv"  # its name in block-scaled checkpoints; it multiplies like any other scale
        if name not in self.folder.place:
            name = f"{stem}.weight_scale"
        if self.quantisation.block is not None:
            rows, columns = self.quantisation.block
            return Float8Weight(values, self._scales(name, (-(-out // rows), -(-into // columns))).float(), rows, columns, bias)
        scale = self._one_or_a_row(name, out).float()
        return Float8Weight(values, scale[:, None].contiguous(), out if scale.numel() == 1 else 1, into, bias)

    def _mx(self, stem: str, out: int, into: int, bias: torch.Tensor | None) -> MxWeight:
        mark, _ = _MARKS[self.quantisation.layout]
        blocks = self._divides(f"{stem}.{mark}", into, MX_BLOCK, "columns")
        if self.quantisation.layout == "mx blocks":
            codes = self._read(f"{stem}.weight_blocks", (out, blocks, MX_BLOCK // 2), _BYTES).flatten(1)
            exponent = self._read(f"{stem}.weight_scales", (out, blocks), _BYTES)
        else:
            codes = self._read(f"{stem}.weight_packed", (out, into // 2), _BYTES)
            exponent = self._read(f"{stem}.weight_scale", (out, blocks), _BYTES)
        if bool((exponent == 255).any()):
            self.refuse(f"{stem}.{mark}", "has scales that are not finite numbers (NaN)")
        return MxWeight(codes, exponent, bias)
