"""Tapes that exercise each op of the native library on odd shapes: the same calls for every machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch
from accept_cases import WALKS, batch
from attention_cases import AttentionCase, Shape, as_bytes, make_case
from sample_cases import TABLES, rows
from tape import Held, Place, Tape
from toy import Row, new_store, quantize, quantized, rand_weights, rope_tables, step_inputs

from kernels.batch import KVTensors, StepInputs
from kernels.decoder import DecoderShape, DecoderWeights, LayerWeights
from kernels.linear import DenseWeight, Weight
from kernels.native.library import ShapeData
from kernels.native.tensors import layered_store, step_data, store_data, weight_data

THREADS = 2
ROW_COUNTS = (1, 2, 3, 8, 17)


def random(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def weight(tape: Tape, matrix: Weight) -> Place:
    pointers: dict[str, Place | None] = {"bias": None if matrix.bias is None else tape.put(matrix.bias)}
    if isinstance(matrix, DenseWeight):
        pointers["codes"] = tape.put(matrix.values)
    else:
        pointers |= {name: tape.put(getattr(matrix, name)) for name in ("codes", "scale", "minimum")}
    return tape.data(weight_data(matrix), **pointers)


def step(tape: Tape, inputs: StepInputs) -> Place:
    tensors = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
    data = step_data(inputs)
    known = {name for name, _ in data._fields_}
    return tape.data(data, **{n: tape.put(t) for n, t in tensors.items() if n in known and isinstance(t, torch.Tensor)})


def store(tape: Tape, name: str, tensors: KVTensors) -> Place:
    """A store that the calls write to."""
    k, v = tape.keep(f"{name} k", tensors.k), tape.keep(f"{name} v", tensors.v)
    return tape.data(store_data(tensors), k=k, v=v)


def linear() -> Tape:
    """Every form of weight, rows of all sizes of step, an odd number of blocks, outputs that fill no tile."""
    tape = Tape()
    team = tape.call("fs_team_create", THREADS)
    for out, into in ((131, 96), (40, 320), (7, 33)):
        dense = DenseWeight(random(out, into), random(out, seed=2))
        x = random(max(ROW_COUNTS), into, seed=3) * torch.logspace(-6, 6, max(ROW_COUNTS)).unsqueeze(1)
        x[0, 32:] = 0.0
        matrices: dict[str, Weight] = {
            str(t): DenseWeight(dense.values.to(t)) for t in (torch.float32, torch.bfloat16, torch.float16)
        }
        if into % 32 == 0:
            matrices |= {"4 bits": quantize(dense, 4), "8 bits": quantize(dense, 8)}
            codes = tape.room(f"codes {into}", *x.shape, dtype=torch.int16)
            tape.call("fs_quantise", tape.isa, tape.put(x), len(x), into, codes, tape.room(f"step {into}", len(x)))
        for form, matrix in matrices.items():
            packed = tape.call("fs_matrix_create", weight(tape, matrix))
            for count in ROW_COUNTS:
                y = tape.room(f"{form} {out} x {into}, {count} rows", count, out)
                tape.call("fs_linear", tape.isa, team, packed, tape.put(x[:count]), count, y)
    return tape


def small_ops() -> Tape:
    """Norms, rotations, slots written and moved, walks."""
    tape = Tape()
    team = tape.call("fs_team_create", THREADS)
    for count, size in ((1, 1), (5, 33), (3, 577), (2, 64)):
        x, residual, gain = (tape.put(random(count, size, seed=seed)) for seed in range(3))
        tape.call("fs_rms_norm", tape.isa, x, None, gain, count, size, 1e-5, tape.room(f"norm {size}", count, size), None)
        out, total = tape.room(f"fused norm {size}", count, size), tape.room(f"sum {size}", count, size)
        tape.call("fs_rms_norm", tape.isa, x, residual, gain, count, size, 1e-5, out, total)
    for count, heads, dim in ((5, 3, 30), (23, 4, 64)):
        positions, tables = (torch.arange(count, dtype=torch.int32) * 7) % 64, [tape.put(t) for t in rope_tables(64, dim)]
        out = tape.room(f"rope {dim}", count, heads, dim)
        tape.call(
            "fs_rope", tape.isa, tape.put(random(count, heads, dim)), tape.put(positions), *tables, count, heads, dim, out
        )
    slots = torch.tensor([3, 17, 0, 40, 22, 9], dtype=torch.int32)
    for dtype, page_size in ((torch.float32, 8), (torch.bfloat16, 8), (torch.uint8, 16)):
        tensors = KVTensors.allocate(3, 6, 2, 40, page_size, dtype)
        tensors.k.zero_()
        tensors.v.zero_()
        k, v = random(5, 2, 40, seed=5), random(5, 2, 40, seed=6)
        k[0, 0, :4] = torch.tensor([float("inf"), -0.0, 1e-40, 3.3e38])
        data = store(tape, str(dtype), tensors)
        tape.call("fs_kv_write", tape.isa, data, 1, tape.put(k), tape.put(v), tape.put(slots[:5]), 5)
        tape.call("fs_kv_move", tape.isa, team, data, tape.put(slots[:5]), tape.put(slots[1:]), 5)
    walks = batch(list(WALKS.values()), 64)
    trees = [tape.put(t) for t in (walks.input_ids, walks.target_ids, walks.parents, walks.row_ptr)]
    results = [
        tape.room(name, len(WALKS), width, dtype=torch.int32) for name, width in (("path", 64), ("accepted", 1), ("next", 1))
    ]
    tape.call("fs_tree_accept", tape.isa, *trees, len(WALKS), 64, *results)
    return tape


def attend(tape: Tape, name: str, case: AttentionCase, store_k: torch.Tensor, store_v: torch.Tensor) -> None:
    held = tape.data(layered_store(store_k, store_v, 1), k=tape.put(store_k), v=tape.put(store_v))
    team = tape.call("fs_team_create", THREADS)
    q, out = tape.put(case.q), tape.room(name, *case.q.shape)
    inputs = step(tape, case.inputs)
    tape.call("fs_tree_attention", tape.isa, team, q, case.q.shape[1], held, 0, inputs, case.scale, case.window or 0, out)


def attention() -> Tape:
    """Trees and chains over chunk borders, pages smaller than a vector, all forms of store, a window."""
    tape = Tape()
    shapes = (Shape(140, 7), Shape(0, 40, "chain"), Shape(129, 20, "deep"), Shape(16, 1))
    for dtype in (torch.float32, torch.bfloat16):
        for page_size, dim, window in ((16, 64, None), (4, 40, 17)):
            case = make_case(shapes, dtype=dtype, page_size=page_size, head_dim=dim, window=window, q_heads=6)
            attend(tape, f"{dtype}, pages of {page_size}", case, case.store_k, case.store_v)
    for dim, window in ((64, None), (40, 17)):
        case = make_case(shapes, head_dim=dim, window=window, q_heads=6)
        kept = as_bytes(case)
        attend(tape, f"bytes, heads of {dim}", case, kept.k[0], kept.v[0])
    return tape


def sampling() -> Tape:
    """The hand tables and random rows: probabilities, tokens and the best tokens' shares."""
    tape = Tape()
    team = tape.call("fs_team_create", THREADS)
    tables = rows(list(TABLES.values()), 37)
    logits = random(6, 3001, seed=7) * 4
    settings = (
        torch.tensor([0.0, 0.7, 1.0, 1.3, 1.0, 2.0]),
        torch.tensor([0, 0, 40, 0, 7, 0], dtype=torch.int32),
        torch.tensor([1.0, 1.0, 1.0, 0.9, 0.8, 1.0]),
        torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.02]),
    )
    for name, arguments in (("tables", tables.args()), ("random", (logits, *settings))):
        count, width = arguments[0].shape
        places = [tape.put(t) for t in arguments]
        shares = tape.room(f"{name}: probabilities", count, width)
        tape.call("fs_sample", tape.isa, team, places[0], count, width, *places[1:], None, None, shares)
        uniforms = tape.put(torch.rand(count, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
        ids = tape.room(f"{name}: tokens", count, dtype=torch.int32)
        tape.call("fs_sample", tape.isa, team, places[0], count, width, *places[1:], uniforms, ids, None)
    best = tape.room("best tokens", 6, 5, dtype=torch.int32), tape.room("their shares", 6, 5)
    tape.call("fs_top_shares", tape.isa, team, tape.put(logits), 6, 3001, 5, tape.put(settings[0] + 0.5), *best)
    return tape


def decoder() -> Tape:
    """A whole small decoder, in 4 and 8 bits and dense: a prompt, then a tree behind it."""
    tape = Tape()
    shape, weights = rand_weights(3, layers=2, qk_norm=True, qkv_bias=True, sliding_window=13)
    text = [(i * 101) % shape.vocab_size for i in range(20)]
    prompt = step_inputs([Row(text, range(4), 0)], 16)
    tree = step_inputs([Row(text[:6], range(4), 20, [-1, 0, 0, 1, 1, 3])], 16)
    for name, coded, kept in (
        ("float32", weights, torch.float32), ("4 bits", quantized(weights, 4), torch.uint8), ("8 bits", quantized(weights, 8), torch.bfloat16),
    ):  # fmt: skip
        handle = load_decoder(tape, shape, coded)
        team = tape.call("fs_team_create", THREADS)
        held = store(tape, f"{name} store", new_store(shape, 4, dtype=kept))
        for kind, inputs in (("prompt", prompt), ("tree", tree)):
            count = inputs.num_nodes
            hidden, logits = (
                tape.room(f"{name} {kind} {what}", count, width)
                for what, width in (("hidden", shape.hidden), ("logits", shape.vocab_size))
            )
            argmax = tape.room(f"{name} {kind} argmax", count, dtype=torch.int32)
            tape.call("fs_decoder_forward", handle, team, step(tape, inputs), held, hidden, argmax, logits, None)
    return tape


def load_decoder(tape: Tape, shape: DecoderShape, weights: DecoderWeights) -> Held:
    """As kernels/decoder/native.py does it."""
    data = ShapeData(
        shape.layers, shape.hidden, shape.intermediate, shape.q_heads, shape.kv_heads, shape.head_dim, shape.vocab_size,
        shape.max_position, shape.sliding_window or 0, 0, shape.norm_eps, shape.attention_scale,
    )  # fmt: skip
    handle = tape.call("fs_decoder_create", tape.isa, tape.data(data))

    def matrices(layer: int, given: list[Weight]) -> None:
        for slot, matrix in enumerate(given):
            tape.call("fs_decoder_set_weight", handle, layer, slot, weight(tape, matrix))

    def vectors(layer: int, first: int, given: list[torch.Tensor | None]) -> None:
        for which, values in enumerate(given, first):
            if values is not None:
                tape.call("fs_decoder_set_vector", handle, layer, which, tape.put(values), values.numel())

    def one(index: int, layer: LayerWeights) -> None:
        matrices(index, [layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down])  # type: ignore[list-item]
        vectors(index, 0, [layer.attention_norm, layer.mlp_norm, layer.q_norm, layer.k_norm])

    for index, layer in enumerate(weights.layers):
        one(index, layer)
    matrices(-1, [weights.embedding, weights.lm_head])  # type: ignore[list-item]
    vectors(-1, 4, [weights.final_norm, weights.rope_cos, weights.rope_sin])
    return handle


TAPES: dict[str, Callable[[], Tape]] = {f.__name__: f for f in (linear, small_ops, attention, sampling, decoder)}
