"""Heads of others, students, shipped files: tiny random checkpoints under their usual names load and score as published."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from engine_kit import greedy_request, has_native, make_engine, prompts_of, quick, run
from safetensors.torch import save_file

from drafters import registry
from drafters.layer_models import LayerModel, quantised
from drafters.published import load_eagle
from drafters.student_file import STUDENT_FORMAT, load_student
from drafters.tensor_file import TensorFile
from kernels.decoder import DecoderShape, DecoderWeights, FusedDecoder
from kernels.decoder.reference import ReferenceDecoder
from kernels.linear import BlockWeight, DenseWeight
from server.speculation import starting_calibration
from spec.calibration import Calibration, confidence_bin
from spec.config import EngineConfig
from spec.errors import ConfigError, ModelFileError
from spec.pages import PagePool
from spec.shapes import ShapeSpeculator

SHAPE, WEIGHTS = toy.rand_weights(layers=2)
HIDDEN, VOCAB = SHAPE.hidden, SHAPE.vocab_size
PAGES, PAGE_SIZE = 96, 4


class Target:
    shape: DecoderShape = SHAPE
    weights: DecoderWeights = WEIGHTS


def fused(model: LayerModel) -> FusedDecoder:
    decoder: Any = quick(model.shape, model.weights)
    return decoder  # type: ignore[no-any-return]


def target() -> registry.Target:
    def refuse(path: Any) -> Any:
        raise AssertionError("no draft model was asked for")

    return registry.Target("toy", SHAPE, WEIGHTS, refuse, refuse, fused)


def drafted_and_right(drafters: str) -> int:
    """Greedy text of three prompts with these drafters is the text without them; returns the nodes drafted."""
    config = EngineConfig(num_pages=PAGES, page_size=PAGE_SIZE, context=256)
    pool = PagePool(PAGES)
    built = registry.build(registry.plan(drafters, target()), pool, config, torch.float32, "cpu")
    decoder = quick(SHAPE, WEIGHTS)
    engine = make_engine(decoder, built, speculator=ShapeSpeculator("4x3"), pool=pool)
    prompts = prompts_of([1, 6, 18], seed=1)
    answers = run(engine, [greedy_request(i, p, 12) for i, p in enumerate(prompts)])
    assert [answers[i].token_ids for i in range(3)] == [toy.greedy(decoder, p, 12) for p in prompts]
    assert not any(engine.stats()["drafter_faults"].values())
    return sum(answer.drafted for answer in answers.values())


# --- EAGLE-1 ---------------------------------------------------------------------------------------------------------


def eagle(bias: bool = True) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(4)
    q, kv = SHAPE.q_heads * SHAPE.head_dim, SHAPE.kv_heads * SHAPE.head_dim
    sizes = {"q_proj": (q, HIDDEN), "k_proj": (kv, HIDDEN), "v_proj": (kv, HIDDEN), "o_proj": (HIDDEN, q)}
    found = {f"layers.0.self_attn.{name}.weight": torch.randn(size, generator=g) / 8 for name, size in sizes.items()}
    for name, size in {"gate_proj": (64, HIDDEN), "up_proj": (64, HIDDEN), "down_proj": (HIDDEN, 64)}.items():
        found[f"layers.0.mlp.{name}.weight"] = torch.randn(size, generator=g) / 8
    found["layers.0.post_attention_layernorm.weight"] = 1 + 0.1 * torch.randn(HIDDEN, generator=g)
    found["fc.weight"] = torch.randn(HIDDEN, 2 * HIDDEN, generator=g) / 8
    found["embed_tokens.weight"] = torch.zeros(VOCAB, HIDDEN)
    return found | ({"fc.bias": torch.randn(HIDDEN, generator=g)} if bias else {})


def published_arithmetic(tensors: dict[str, torch.Tensor], ids: list[int], states: torch.Tensor) -> torch.Tensor:
    """The layer as its authors run it, one chain: no norm before attention, none at the end. Returns its states [N, H]."""
    assert isinstance(WEIGHTS.embedding, DenseWeight)
    count, d = len(ids), SHAPE.head_dim
    x = torch.cat((WEIGHTS.embedding.values[ids], states), dim=1) @ tensors["fc.weight"].T
    x = x + tensors.get("fc.bias", torch.zeros(HIDDEN))

    def heads(name: str) -> torch.Tensor:
        return (x @ tensors[f"layers.0.self_attn.{name}.weight"].T).view(count, -1, d)

    def rotated(v: torch.Tensor) -> torch.Tensor:
        cos, sin = WEIGHTS.rope_cos[:count, None], WEIGHTS.rope_sin[:count, None]
        a, b = v[..., : d // 2], v[..., d // 2 :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    group = SHAPE.q_heads // SHAPE.kv_heads
    q, k, v = rotated(heads("q_proj")), rotated(heads("k_proj")), heads("v_proj")
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * d**-0.5
    scores = scores.masked_fill(torch.triu(torch.ones(count, count, dtype=torch.bool), 1), -torch.inf)
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(count, -1)
    x = x + mixed @ tensors["layers.0.self_attn.o_proj.weight"].T
    h = x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5) * tensors["layers.0.post_attention_layernorm.weight"]
    gate, up = h @ tensors["layers.0.mlp.gate_proj.weight"].T, h @ tensors["layers.0.mlp.up_proj.weight"].T
    return x + (gate * torch.sigmoid(gate) * up) @ tensors["layers.0.mlp.down_proj.weight"].T


@pytest.mark.parametrize("bias", [True, False])
def test_eagle_1_computes_what_was_published(tmp_path: Path, bias: bool) -> None:
    save_file(eagle(bias), tmp_path / "eagle.safetensors")
    model = load_eagle(TensorFile.open(tmp_path / "eagle.safetensors"), Target())
    ids = [3, 77, 210, 5, 9, 400, 3, 77]
    states = torch.randn(len(ids), HIDDEN, generator=torch.Generator().manual_seed(1))
    want = published_arithmetic(eagle(bias), ids, states)
    kinds = [ReferenceDecoder(model.shape, model.weights), *([fused(model)] if has_native() else [])]
    for decoder in kinds:
        out = decoder.forward(toy.step_inputs([toy.Row(ids, [0])], 16), toy.new_store(model.shape, 1), True, states)
        torch.testing.assert_close(out.hidden, want, rtol=1e-3, atol=1e-3)
        assert isinstance(WEIGHTS.lm_head, DenseWeight)
        torch.testing.assert_close(out.logits, want @ WEIGHTS.lm_head.values.T, rtol=1e-2, atol=1e-2)


def test_eagle_1_drafts(tmp_path: Path) -> None:
    save_file(eagle(), tmp_path / "eagle.safetensors")
    assert drafted_and_right(f"heads:{tmp_path / 'eagle.safetensors'}") > 0


def test_what_is_no_eagle_1_head_is_refused_by_name(tmp_path: Path) -> None:
    third = {"fc.weight": torch.zeros(HIDDEN, 3 * HIDDEN), "midlayer.hidden_norm.weight": torch.zeros(HIDDEN)}
    strange = eagle() | {"layers2.weight": torch.zeros(1)}
    narrow = eagle() | {"fc.weight": torch.zeros(HIDDEN, HIDDEN)}
    lacking = {name: tensor for name, tensor in eagle().items() if "k_proj" not in name}
    cases = (
        (third, "EAGLE-3"),
        (strange, "layers2.weight"),
        (narrow, rf"fc.weight has shape \[{HIDDEN}, {HIDDEN}\]; \[{HIDDEN}, {2 * HIDDEN}\]"),
        (lacking, "k_proj.weight is missing"),
    )
    for i, (tensors, says) in enumerate(cases):
        save_file(tensors, tmp_path / f"{i}.safetensors")
        with pytest.raises(ModelFileError, match=rf"{i}\.safetensors: .*{says}"):
            registry.plan(f"heads:{tmp_path / f'{i}.safetensors'}", target())


# --- students --------------------------------------------------------------------------------------------------------


def student(layers: int = 2) -> dict[str, torch.Tensor]:
    """The target's own layers, under a student's names."""
    found = {"final_norm": WEIGHTS.final_norm.clone()}
    for i, layer in enumerate(WEIGHTS.layers[:layers]):
        found[f"layers.{i}.attn_norm"], found[f"layers.{i}.mlp_norm"] = layer.attention_norm.clone(), layer.mlp_norm.clone()
        for name in ("q", "k", "v", "o", "gate", "up", "down"):
            weight = getattr(layer, name)
            found[f"layers.{i}.{name}"] = weight.values.clone()
    return found


def write_student(path: Path, tensors: dict[str, torch.Tensor], layers: str = "2") -> TensorFile:
    save_file(tensors, path, metadata={"format": STUDENT_FORMAT, "layers": layers})
    return TensorFile.open(path)


IDS = torch.tensor([t for t in range(VOCAB) if t % 3], dtype=torch.int32)


@pytest.mark.parametrize("kind", ["whole", "shared rows", "own rows"])
def test_a_student_made_of_the_target_scores_as_the_target(tmp_path: Path, kind: str) -> None:
    assert isinstance(WEIGHTS.lm_head, DenseWeight)
    tensors = student()
    if kind != "whole":
        tensors["token_ids"] = IDS
    if kind == "own rows":
        tensors["output"] = WEIGHTS.lm_head.values[IDS.long()].clone()
    model = load_student(write_student(tmp_path / "student.safetensors", tensors), Target())
    assert model.token_ids == (None if kind == "whole" else tuple(IDS.tolist()))
    inputs = toy.step_inputs([toy.Row([5, 6, 7], [0])], 16)
    ours = ReferenceDecoder(model.shape, model.weights).forward(inputs, toy.new_store(SHAPE, 1), True)
    theirs = ReferenceDecoder(SHAPE, WEIGHTS).forward(inputs, toy.new_store(SHAPE, 1), True)
    assert theirs.logits is not None
    torch.testing.assert_close(ours.logits, theirs.logits if kind == "whole" else theirs.logits[:, IDS.long()])
    assert drafted_and_right(f"student:{tmp_path / 'student.safetensors'}") > 0


def test_students_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    save_file(student(), tmp_path / "bare.safetensors")
    with pytest.raises(ModelFileError, match="metadata format is ''"):
        load_student(TensorFile.open(tmp_path / "bare.safetensors"), Target())
    with pytest.raises(ModelFileError, match=r"layers\.2\.attn_norm is missing"):
        load_student(write_student(tmp_path / "a.safetensors", student(), layers="3"), Target())
    wide = student() | {"layers.1.q": torch.zeros(SHAPE.q_heads * SHAPE.head_dim, HIDDEN + 32)}
    with pytest.raises(ModelFileError, match=rf"layers.1.q has shape \[128, {HIDDEN + 32}\]; \[128, {HIDDEN}\]"):
        load_student(write_student(tmp_path / "b.safetensors", wide), Target())


def test_matrices_go_into_blocks_where_they_can(tmp_path: Path) -> None:
    model = load_student(write_student(tmp_path / "s.safetensors", student() | {"token_ids": IDS}), Target())
    weights = quantised(model.weights, bits=8, head_bits=4)
    assert isinstance(weights.layers[1].down, BlockWeight)
    assert isinstance(weights.lm_head, BlockWeight)
    assert (weights.layers[1].down.bits, weights.lm_head.bits) == (8, 4)
    odd = replace(model.weights, lm_head=DenseWeight(torch.zeros(4, 40)))
    assert isinstance(quantised(odd, bits=8, head_bits=4).lm_head, DenseWeight)


# --- what ships ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("SmolLM2-135M-Instruct.Q4_1", "smollm2-135m-instruct"),
        ("HuggingFaceTB--SmolLM2-135M-Instruct", "smollm2-135m-instruct"),
        ("Llama-3.2-1B-Instruct-Q4_K_M", "llama-3.2-1b-instruct"),
        ("qwen3-0.6b-bf16", "qwen3-0.6b"),
        ("model.Q8_0.gguf", "model"),
        ("model-f16", "model"),
        ("phi-4", "phi-4"),
    ],
)
def test_a_model_s_folder_is_named_for_the_model(name: str, folder: str) -> None:
    assert registry.folder_of(name) == folder


def test_shipped_drafters_are_found_whatever_the_quantisation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "SHIPPED", tmp_path)
    folder = tmp_path / "toy"
    folder.mkdir()
    with pytest.raises(ConfigError, match="no trained heads ship"):
        registry.parse("heads", "toy.Q4_1")
    save_file(eagle(), folder / "heads.safetensors")
    assert registry.parse("heads,suffix", "toy.Q4_1") == [("heads", folder / "heads.safetensors"), ("suffix", None)]
    assert registry.parse("auto", "toy.Q4_1") == [("suffix", None)]  # until heads save more time than they cost
    assert registry.parse("heads", "Toy-f16") == [("heads", folder / "heads.safetensors")]
    assert registry.shipped_calibration("toy") is None
    (folder / "calibration.json").write_text("{}")
    assert registry.shipped_calibration("TOY") == folder / "calibration.json"
    assert drafted_and_right("heads") > 0


def test_what_was_learnt_here_comes_before_what_shipped(tmp_path: Path) -> None:
    def learnt(**accepted: bool) -> Calibration:
        found = Calibration()
        for name, hit in accepted.items():
            for _ in range(200):
                found.observe(name, 1, 0, confidence_bin(0.5), greedy=True, accepted=hit)
        return found

    learnt(heads=True, suffix=True).save(tmp_path / "shipped.json")
    learnt(suffix=False).save(tmp_path / "kept.json")

    def chances(kept: str, shipped: str | None) -> list[float]:
        found = starting_calibration(tmp_path / kept, None if shipped is None else tmp_path / shipped)
        return [found.chance(name, 1, 0, 0.5, greedy=True) for name in ("heads", "suffix")]

    assert min(chances("none.json", "shipped.json")) > 0.9
    heads, suffix = chances("kept.json", "shipped.json")
    assert heads > 0.9
    assert suffix < 0.1
    assert chances("none.json", None) == [0.5, 0.5]
    (tmp_path / "broken.json").write_text(json.dumps({"format": 99}))
    assert chances("kept.json", "broken.json")[0] == 0.5
