"""Quantised safetensors as published: recognised from the checkpoint's own config, read to the very numbers of the format's definition."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_rand_checkpoint
from loaded import error, logits, text
from quantised_checkpoints import FORMS, GPTQ, INT8, TOKEN_ROWS, Writer, awq, compressed, float8, gptq, ints, packed, write
from safetensors.torch import load_file, save_file

from kernels.linear import BlockWeight, DenseWeight, LayerWeight
from kernels.linear.formats import Float8Weight, GroupWeight, Int8Weight, MxWeight, PublishedWeight
from kernels.linear.reference import dequantize
from spec.errors import ModelFileError
from spec.models import LoadedModel, load_model

PUBLISHED: dict[str, type[PublishedWeight]] = {
    "gptq": GroupWeight,
    "gptq, act order": GroupWeight,
    "gptq, 8 bits, one group": GroupWeight,
    "gptq v2": GroupWeight,
    "awq": GroupWeight,
    "packed int4": GroupWeight,
    "packed int4, zero points": GroupWeight,
    "packed int4, act order": GroupWeight,
    "packed int8, one group": GroupWeight,
    "fp8, one scale": Float8Weight,
    "fp8, blocks": Float8Weight,
    "compressed fp8, a scale a row": Float8Weight,
    "int8 rows": Int8Weight,
    "int8 weights": GroupWeight,
    "mxfp4": MxWeight,
    "compressed mxfp4": MxWeight,
}
ROLES = {role: f"self_attn.{role}_proj" for role in "qkvo"} | {role: f"mlp.{role}_proj" for role in ("gate", "up", "down")}

# Largest error of a value over the largest of its matrix once it is in a form that every kernel reads: float16 scales and minimums
# (2^-11 of scale * 15), bfloat16 values (2^-9), blocks of 8 bits (1/254). mxfp4 is exact.
HOST_ERROR = {"mxfp4": 0.0, "compressed mxfp4": 0.0}
# Rows are quantised too, to 16 bits or, into gate and up, to 8.
HOST_LOGITS = 0.05


Made = Callable[[str], tuple[Path, dict[str, torch.Tensor]]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Every form written once; for tests that do not change it."""
    return functools.cache(lambda form: write(tmp_path_factory.mktemp("made") / "model", form))


def matrices(model: LoadedModel) -> dict[str, LayerWeight]:
    return {
        f"model.layers.{index}.{name}": getattr(layer, role)
        for index, layer in enumerate(model.weights.layers)
        for role, name in ROLES.items()
    }


def values(weight: LayerWeight) -> torch.Tensor:
    return weight.values.float() if isinstance(weight, DenseWeight) else dequantize(weight)


@pytest.mark.parametrize("form", FORMS)
def test_the_values_are_those_of_the_definition(form: str, made: Made) -> None:
    folder, wanted = made(form)
    model = load_model(folder, published=True)
    found = matrices(model)
    assert found.keys() == wanted.keys()
    for name, weight in found.items():
        assert not isinstance(weight, DenseWeight | BlockWeight), name
        assert torch.equal(dequantize(weight), wanted[name]), name
    assert isinstance(model.weights.lm_head, DenseWeight)
    in_float = matrices(load_model(folder, weights="float32"))
    assert all(torch.equal(values(in_float[name]), wanted[name]) for name in wanted)


def test_each_form_keeps_its_published_kind(made: Made) -> None:
    assert PUBLISHED.keys() == FORMS.keys()
    for form, kind in PUBLISHED.items():
        assert {type(w) for w in matrices(load_model(made(form)[0], published=True)).values()} == {kind}, form
    ordered = matrices(load_model(made("gptq, act order")[0], published=True)).values()
    assert all(isinstance(w, GroupWeight) and w.order is not None for w in ordered)


NARROW: dict[str, tuple[dict[str, Any], Writer]] = {
    "gptq, groups of 24": (GPTQ | {"group_size": 24}, gptq(4, 24)),
    "awq, groups of 8": (FORMS["awq"][0] | {"group_size": 8}, awq(8)),
    "fp8, blocks of 8 columns": (FORMS["fp8, blocks"][0] | {"weight_block_size": [64, 8]}, float8(64, 8, "weight_scale_inv")),
}


@pytest.mark.parametrize("name", NARROW)
def test_groups_too_narrow_for_a_device_come_in_a_form_every_kernel_reads(name: str, tmp_path: Path) -> None:
    folder, wanted = write(tmp_path, NARROW[name])
    for stem, weight in matrices(load_model(folder, published=True)).items():
        assert isinstance(weight, BlockWeight | DenseWeight), stem
        assert (values(weight) - wanted[stem]).abs().max() <= wanted[stem].abs().max() / 250, stem


def test_one_group_needs_no_order(tmp_path: Path) -> None:
    """desc_act, but every column shares the scale: there is nothing to tell apart, and no tensor that would."""
    folder, wanted = write(tmp_path, (GPTQ | {"group_size": -1, "desc_act": True}, gptq(4, 10**6)))
    change(folder, lambda t: [t.pop(name) for name in list(t) if name.endswith("g_idx")])
    found = matrices(load_model(folder, published=True))
    assert all(torch.equal(values(found[name]), wanted[name]) for name in wanted)


@pytest.mark.parametrize("form", FORMS)
def test_on_the_cpu_they_become_blocks_or_bfloat16(form: str, made: Made) -> None:
    folder, wanted = made(form)
    model = load_model(folder)
    for name, weight in matrices(model).items():
        assert isinstance(weight, DenseWeight if "fp8" in form else BlockWeight)
        worst = (values(weight) - wanted[name]).abs().max() / wanted[name].abs().max()
        assert worst <= HOST_ERROR.get(form, 1 / 250), (name, worst)
    exact = logits(load_model(folder, weights="float32"), text(12))
    assert error(logits(model, text(12)), exact) < HOST_LOGITS
    assert error(logits(load_model(folder, published=True), text(12)), exact) < HOST_LOGITS


def test_four_bits_stay_four_bits(made: Made) -> None:
    for form, bits in (("gptq", 4), ("awq", 4), ("packed int4", 4), ("gptq, 8 bits, one group", 8), ("gptq, act order", 8)):
        loaded = matrices(load_model(made(form)[0])).values()
        assert {w.bits for w in loaded if isinstance(w, BlockWeight)} == {bits}, form


def test_the_native_decoder_serves_them(made: Made) -> None:
    from kernels import native

    if native.load() is None:
        pytest.skip("no native library")
    folder, _ = made("awq")
    model = load_model(folder)
    assert error(logits(model, text(12), native=True), logits(model, text(12))) < 1e-3  # a code of a row may tip over


def test_exponents_that_float16_cannot_hold_become_bfloat16(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, "mxfp4")
    change(folder, lambda t: t["model.layers.0.mlp.up_proj.weight_scales"].fill_(60))
    found = matrices(load_model(folder))
    assert isinstance(found["model.layers.0.mlp.up_proj"], DenseWeight)
    assert isinstance(found["model.layers.0.mlp.gate_proj"], BlockWeight)
    assert values(found["model.layers.0.mlp.up_proj"]).abs().max() == 6 * 2.0**-67


def test_a_module_left_in_float_is_read_as_float(tmp_path: Path) -> None:
    folder, wanted = write(tmp_path, "gptq")
    name = "model.layers.0.self_attn.o_proj"

    def replace(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            del tensors[f"{name}.{part}"]
        tensors[f"{name}.weight"] = wanted[name]

    change(folder, replace)
    found = matrices(load_model(folder, published=True))
    assert isinstance(found[name], DenseWeight)
    assert torch.equal(values(found[name]), wanted[name])


def test_a_quantised_output_matrix_comes_in_a_form_every_kernel_reads(tmp_path: Path) -> None:
    """lm_head quantised too: `has` answers for it, and the vocabulary is trimmed like any other."""
    folder, _ = write(tmp_path, "packed int4")
    source = load_file(folder / "model.safetensors")
    parts, wanted = packed(4, 32, symmetric=True)(source["lm_head.weight"], torch.Generator())

    def replace(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["lm_head.weight"]
        tensors.update({f"lm_head.{part}": value for part, value in parts.items()})

    change(folder, replace)
    head = load_model(folder, published=True).trimmed(500).weights.lm_head
    assert isinstance(head, BlockWeight)
    assert (dequantize(head) - wanted[:500]).abs().max() < wanted.abs().max() / 250


# --- what is refused ---------------------------------------------------------------------------------------------------


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(tensors)
    path.unlink()
    save_file(tensors, path)


def message(folder: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


FP8_ROWS = TOKEN_ROWS | {"type": "float"}
REFUSED: dict[str, tuple[Any, str]] = {
    "another method": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes' weights are not supported"),
    "no method": ({"bits": 4}, "None weights are not supported; supported: gptq (4 and 8 bits), awq"),
    "not an object": ("gptq", "'gptq'; it must be an object"),
    "gptq, 3 bits": (GPTQ | {"bits": 3}, "gptq weights of 3 bits are not supported; supported: gptq (4 and 8 bits)"),
    "gptq, bits of text": (GPTQ | {"bits": "4"}, "quantization_config.bits: '4'"),
    "gptq, groups of zero": (GPTQ | {"group_size": 0}, "quantization_config.group_size: 0"),
    "gptq, marlin": (GPTQ | {"checkpoint_format": "marlin"}, "gptq weights in checkpoint_format 'marlin'"),
    "gptq, dynamic": (GPTQ | {"dynamic": {"-:mlp": {}}}, "other settings for some modules"),
    "awq, gemv": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}, "awq weights of version 'gemv'"),
    "fp8, e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 weights of format 'e5m2'"),
    "fp8, odd blocks": ({"quant_method": "fp8", "weight_block_size": [128]}, "quantization_config.weight_block_size: [128]"),
    "compressed, no groups": ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups: missing"),
    "compressed, nvfp4": (
        compressed("nvfp4-pack-quantized", {"num_bits": 4, "type": "float"}),
        "compressed-tensors nvfp4-pack-quantized weights of type float and 4 bits are not supported",
    ),
    "compressed, int4 with int8 rows": (compressed("pack-quantized", ints(4, 32, True), TOKEN_ROWS), "with quantised activations"),
    "compressed, static rows": (
        compressed("int-quantized", INT8, TOKEN_ROWS | {"dynamic": False, "strategy": "tensor"}),
        "activations that are not integers of 8 bits, symmetric and scaled row by row",
    ),
    "compressed, float rows": (
        compressed("int-quantized", INT8, TOKEN_ROWS | {"type": "float"}),
        "activations that are not integers of 8 bits, symmetric and scaled row by row",
    ),
    "compressed, int8 with zero points": (compressed("int-quantized", INT8 | {"symmetric": False}), "with zero points or an order"),
    "compressed, int8 in another order": (compressed("int-quantized", INT8 | {"actorder": "group"}), "with zero points or an order"),
    "compressed, rotated": (
        compressed("pack-quantized", ints(4, 32, True))
        | {"transform_config": {"config_groups": {"R4": {"type": "hadamard", "apply": [{"targets": ["down_proj"]}]}}}},
        "weights that need their rows rotated (transform_config) are not supported",
    ),
    "compressed, two kinds": (
        compressed("pack-quantized", ints(4, 32, True))
        | {"config_groups": {"a": {"weights": ints(4, 32, True)}, "b": {"weights": ints(8, 32, True)}}},
        "config_groups differ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_named_beside_what_can(name: str, tmp_path: Path) -> None:
    config, wanted = REFUSED[name]
    write_rand_checkpoint(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    found = message(tmp_path)
    assert str(path) in found
    assert wanted in found


Q = "model.layers.0.self_attn.q_proj"
DAMAGE: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "no zero points": ("gptq", lambda t: t.pop(f"{Q}.qzeros"), "qzeros': missing, and gptq needs it"),
    "no order, act order": ("gptq, act order", lambda t: t.pop(f"{Q}.g_idx"), "g_idx': missing, and gptq needs it"),
    "packed: no order, act order": ("packed int4, act order", lambda t: t.pop(f"{Q}.weight_g_idx"), "weight_g_idx': missing, and"),
    "packed: no zero points": ("packed int4, zero points", lambda t: t.pop(f"{Q}.weight_zero_point"), "zero_point': missing, and"),
    "no weight at all": ("gptq", lambda t: t.pop(f"{Q}.qweight"), f"{Q}.weight': missing"),
    "another group size": (
        "awq",
        lambda t: t.update({f"{Q}.scales": t[f"{Q}.scales"][:1].clone()}),
        "scales': shape [1, 128]; awq asks for [2, 128] here",
    ),
    "scales of integers": ("awq", lambda t: t.update({f"{Q}.scales": t[f"{Q}.scales"].int()}), "dtype int32; awq asks for float32"),
    "scales that are not numbers": ("gptq", lambda t: t[f"{Q}.scales"][0].fill_(float("nan")), "not finite numbers"),
    "uneven groups": ("gptq", lambda t: t[f"{Q}.g_idx"].fill_(0), "g_idx': does not name groups of 32 columns"),
    "groups out of range": ("gptq", lambda t: t[f"{Q}.g_idx"].fill_(-7), "does not name groups of 32 columns"),
    "another shape": ("packed int4", lambda t: t[f"{Q}.weight_shape"].fill_(9), "weight_shape': [9, 9]; the config asks for [128, 64]"),
    "fp8 that is not a number": (
        "fp8, one scale",
        lambda t: t[f"{Q}.weight"].view(torch.uint8)[0, 0].fill_(0x7F),
        "q_proj.weight': has weights that are not finite numbers (NaN)",
    ),
    "an exponent that is not a number": ("mxfp4", lambda t: t[f"{Q}.weight_scales"][0, 0].fill_(255), "not finite numbers (NaN)"),
    "too many scales": (
        "int8 rows",
        lambda t: t.update({f"{Q}.weight_scale": t[f"{Q}.weight_scale"].expand(-1, 2).clone()}),
        "weight_scale': shape [128, 2]; one scale or one for each of 128 outputs was expected",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused_with_the_tensor_and_what_was_expected(name: str, tmp_path: Path) -> None:
    form, edit, wanted = DAMAGE[name]
    folder, _ = write(tmp_path, form)
    change(folder, edit)
    assert wanted in message(folder)


@pytest.mark.parametrize("layout", ["packed", "awq"])
def test_an_odd_width_of_four_bits_is_refused(layout: str, tmp_path: Path) -> None:
    if layout == "packed":
        folder, _ = write(tmp_path, "packed int4", intermediate=97)
        assert "down_proj.weight_packed': 97 columns of 4 bits; only even widths are supported" in message(folder)
    else:
        folder, _ = write(tmp_path, "awq", hidden=65)
        assert "proj.qweight': 65 columns of 4 bits; only even widths are supported" in message(folder)
