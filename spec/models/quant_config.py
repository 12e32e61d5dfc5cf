"""A checkpoint's own `quantization_config` -> how its matrices are stored. Knows field names; refuses to know tensors.

Which modules are quantised is read from the tensors themselves, not from ignore lists: a module with packed tensors is
quantised, one with a float `weight` is not. Patterns from an untrusted file are never run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from spec.models.config import Fields, shown

Layout = Literal["gptq", "awq", "packed", "int8", "float8", "mx packed", "mx blocks"]
SUPPORTED = (
    "gptq (4 and 8 bits), awq (4 bits, gemm), fp8 (one scale, one a row, blocks), fbgemm_fp8, mxfp4, "
    "compressed-tensors (pack-quantized, int-quantized, float-quantized, naive-quantized, mxfp4-pack-quantized)"
)
_GPTQ_FORMATS = {"gptq": 1, "gptq_v2": 0}  # what is added to a stored zero point


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How the quantised matrices of one checkpoint are stored."""

    layout: Layout
    name: str  # the method in the checkpoint's own words, for messages
    bits: int = 8  # gptq, awq, packed
    group: int | None = None  # columns that share a scale; None: all
    zero_shift: int = 0  # gptq: added to stored zero points
    ordered: bool = False  # gptq, packed: only the tensors say which group a column is in
    zero_points: bool = False  # packed: zero points are stored; otherwise they may be
    integer_rows: bool = False  # int8: rows are quantised to 8 bits too
    block: tuple[int, int] | None = None  # float8: outputs and columns that share a scale; None: the scale's shape says


def read_quantisation(fields: Fields) -> Quantisation | None:
    """None for a checkpoint of plain numbers. Raises ModelFileError that says what came and what is supported."""
    name = next((n for n in ("quantization_config", "compression_config") if fields.has(n)), None)
    if name is None:
        return None
    raw = fields.get(name)
    if not isinstance(raw, dict):
        fields.fail(name, f"{shown(raw)}; it must be an object")
    inner = _Named(fields, name, raw)
    method = raw.get("quant_method", "compressed-tensors" if name == "compression_config" else None)
    readers: dict[str, Callable[[_Named], Quantisation]] = {
        "gptq": _gptq,
        "awq": _awq,
        "fp8": _fp8,
        "fbgemm_fp8": _fp8,
        "compressed-tensors": _compressed,
        "mxfp4": _mxfp4,
    }
    if not isinstance(method, str) or method not in readers:
        inner.refuse(f"{shown(method)} weights")
    return readers[method](inner)


class _Named(Fields):
    """The fields of one nested object; messages carry the path to it."""

    def __init__(self, outer: Fields, name: str, values: Mapping[str, Any]) -> None:
        super().__init__(outer.path, values)
        self.name = name

    def fail(self, name: str, problem: str) -> NoReturn:
        super().fail(f"{self.name}.{name}", problem)

    def refuse(self, what: str) -> NoReturn:
        Fields(self.path, {}).fail(self.name, f"{what} are not supported; supported: {SUPPORTED}")

    def nested(self, name: str) -> _Named | None:
        """An object of this one, or None where it is null."""
        if not self.has(name):
            return None
        value = self.get(name)
        if not isinstance(value, dict):
            self.fail(name, f"{shown(value)}; it must be an object")
        return _Named(self, f"{self.name}.{name}", value)

    def group(self, name: str = "group_size") -> int | None:
        """-1 and null: one group."""
        if self.get(name, -1) == -1:
            return None
        return self.integer(name, high=1 << 20)


def _gptq(own: _Named) -> Quantisation:
    bits = own.integer("bits", high=64)
    if bits not in (4, 8):
        own.refuse(f"gptq weights of {bits} bits")
    form = own.get("checkpoint_format", "gptq")
    if not isinstance(form, str) or form not in _GPTQ_FORMATS:
        own.refuse(f"gptq weights in checkpoint_format {shown(form)}")
    if own.get("dynamic", {}):
        own.refuse("gptq weights with other settings for some modules (dynamic)")
    return Quantisation("gptq", "gptq", bits, own.group(), _GPTQ_FORMATS[form], ordered=own.flag("desc_act", False))


def _awq(own: _Named) -> Quantisation:
    bits = own.integer("bits", own.get("w_bit", 4), high=64)
    version = own.get("version", "gemm")
    if bits != 4:
        own.refuse(f"awq weights of {bits} bits")
    if not isinstance(version, str) or version.lower() != "gemm":
        own.refuse(f"awq weights of version {shown(version)}")
    return Quantisation("awq", "awq", 4, own.group("group_size" if own.has("group_size") else "q_group_size"))


def _fp8(own: _Named) -> Quantisation:
    form = own.get("fmt", "e4m3")
    if form not in ("e4m3", "float8_e4m3fn"):
        own.refuse(f"fp8 weights of format {shown(form)}")
    return Quantisation("float8", "fp8", block=_block(own, "weight_block_size"))


def _mxfp4(own: _Named) -> Quantisation:
    return Quantisation("mx blocks", "mxfp4", 4, 32)


def _block(own: _Named, name: str) -> tuple[int, int] | None:
    block = own.get(name, None)
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and 1 <= n <= 1 << 20 for n in block):
        own.fail(name, f"{shown(block)}; two positive sizes were expected")
    return block[0], block[1]


def _compressed(own: _Named) -> Quantisation:
    transform = own.nested("transform_config")
    if transform is not None and any(transform.values.values()):
        own.refuse("compressed-tensors weights that need their rows rotated (transform_config)")
    groups = own.nested("config_groups")
    if groups is None or not groups.values:
        own.fail("config_groups", "missing or empty; an object of groups was expected")
    found: list[Quantisation] = []
    for name in groups.values:
        group = groups.nested(name)
        if group is not None:
            found.append(_compressed_group(own, group))
    if any(other != found[0] for other in found) or not found:
        own.refuse("compressed-tensors weights whose config_groups differ in more than their targets")
    return found[0]


def _compressed_group(own: _Named, group: _Named) -> Quantisation:
    form = group.get("format", own.get("format", None))
    weights, rows = group.nested("weights"), group.nested("input_activations")
    if weights is None:
        own.refuse("compressed-tensors activations without quantised weights")
    kind, bits = weights.get("type", "int"), weights.integer("num_bits", high=64)
    what = f"compressed-tensors {form} weights of type {kind} and {bits} bits"
    if form == "mxfp4-pack-quantized" and (kind, bits) == ("float", 4):
        return Quantisation("mx packed", what, 4, 32)
    if form in ("float-quantized", "naive-quantized") and (kind, bits) == ("float", 8):
        return Quantisation("float8", what, block=_block(weights, "block_structure"))
    if form == "pack-quantized" and kind == "int" and bits in (4, 8) and rows is None:
        zero_points = not weights.flag("symmetric", True)
        return Quantisation("packed", what, bits, weights.group(), ordered=_ordered(weights), zero_points=zero_points)
    if form in ("int-quantized", "naive-quantized") and (kind, bits) == ("int", 8):
        if not weights.flag("symmetric", True) or _ordered(weights):
            own.refuse(f"{what} with zero points or an order of columns")
        if rows is not None and not _dynamic_integers(rows):
            own.refuse(
                f"{what} with activations that are not integers of 8 bits, symmetric and scaled row by row as they come (dynamic)"
            )
        return Quantisation("int8", what, 8, weights.group(), integer_rows=rows is not None)
    return own.refuse(what if rows is None else f"{what} with quantised activations")


def _ordered(weights: _Named) -> bool:
    """Whether groups hold columns in order of importance. "weight" and "static" used that order but left columns where they were."""
    return weights.get("actorder", False) not in (False, "weight", "static")


def _dynamic_integers(rows: _Named) -> bool:
    kind, bits = rows.get("type", "int"), rows.get("num_bits", 8)
    return bool((kind, bits) == ("int", 8) and rows.get("dynamic", False) and rows.get("symmetric", True))
