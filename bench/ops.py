"""Time, bytes and operations of every native op over what this machine can do at most. Knows shapes; needs no model file.

    python -m bench.ops [--threads N] [--isa NAME] [--quick]

The decoder has SmolLM2-135M's shape with random 4-bit weights and an 8-bit vocabulary. Limits are measured first and again
beside every step: bytes per second streamed from a buffer as large as the weights, and multiply-adds per second from registers.
Prints tables for people and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.batch import KVTensors, StepInputs
from kernels.decoder import DecoderShape, DecoderWeights, LayerWeights
from kernels.decoder.native import NativeDecoder
from kernels.kv_slots.native import move
from kernels.linear import BlockWeight
from kernels.native import NativeLibrary, require
from kernels.norm.native import rms_norm
from kernels.rope.native import rope
from kernels.sample.native import NativeSample
from kernels.tree_accept.native import tree_accept

SHAPE = DecoderShape(
    layers=30,
    hidden=576,
    intermediate=1536,
    q_heads=9,
    kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    norm_eps=1e-5,
    attention_scale=0.125,
    max_position=8448,
)
LINEAR = ("q k v", "output", "gate up", "down", "vocabulary")
PAGE = 16


@dataclass(frozen=True)
class Limits:
    """What the team can do at most, measured now."""

    bytes_per_second: float
    dots_per_second: float  # int8 multiply-adds of the vector unit
    fmas_per_second: float  # float32 multiply-adds


class Machine:
    """The library, a team of threads and a buffer to stream from."""

    def __init__(self, library: NativeLibrary, threads: int, isa: str | None, stream_bytes: int) -> None:
        self.library = library
        self.threads = threads
        self.isa = isa or library.isas[0]
        self._team = library.team(threads)
        self._buffer = torch.ones(stream_bytes // 4)

    def stream_seconds(self) -> float:
        """Seconds to read the buffer once."""
        return self._buffer.numel() * 4 / self._limit(0)

    def limits(self) -> Limits:
        best = [max(self._limit(which) for _ in range(5)) for which in range(3)]
        return Limits(*best)

    def _limit(self, which: int) -> float:
        size = self._buffer.numel() * 4
        handle = self.library.isa(self.isa)
        return float(self.library.c.fs_limit(handle, self._team.handle, which, self._buffer.data_ptr(), size, 100_000))


def random_blocks(out: int, into: int, bits: int, seed: int) -> BlockWeight:
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (out, into // 32, bits * 4), dtype=torch.uint8, generator=g)
    scale = torch.full((out, into // 32), 2.0 / (2**bits * into**0.5)).half()
    minimum = scale.float() * (-7.5 if bits == 4 else -128.0)
    return BlockWeight(bits, codes, scale, minimum.half() if bits == 4 else minimum)


def random_weights(shape: DecoderShape) -> DecoderWeights:
    q_width, kv_width = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def layer(i: int) -> LayerWeights:
        return LayerWeights(
            attention_norm=torch.ones(shape.hidden),
            q=random_blocks(q_width, shape.hidden, 4, 7 * i),
            k=random_blocks(kv_width, shape.hidden, 4, 7 * i + 1),
            v=random_blocks(kv_width, shape.hidden, 4, 7 * i + 2),
            o=random_blocks(shape.hidden, q_width, 4, 7 * i + 3),
            mlp_norm=torch.ones(shape.hidden),
            gate=random_blocks(shape.intermediate, shape.hidden, 4, 7 * i + 4),
            up=random_blocks(shape.intermediate, shape.hidden, 4, 7 * i + 5),
            down=random_blocks(shape.hidden, shape.intermediate, 4, 7 * i + 6),
        )

    head = random_blocks(shape.vocab_size, shape.hidden, 8, 999)
    angles = torch.arange(shape.max_position).unsqueeze(1) * 10_000.0 ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
    layers = tuple(layer(i) for i in range(shape.layers))
    return DecoderWeights(head, layers, torch.ones(shape.hidden), head, angles.cos().float(), angles.sin().float())


def step(nodes: int, context: int) -> StepInputs:
    """One row of `nodes` nodes after `context` keys: a binary tree up to 64 nodes, a prefill chunk beyond."""
    chain = nodes > 64
    words, depths = [1], [0]
    for i in range(1, nodes):
        parent = (i - 1) // 2
        words.append(0 if chain else words[parent] | 1 << i)
        depths.append(i if chain else depths[parent] + 1)
    i32 = torch.int32
    last = [nodes - 1] if chain else list(range(nodes))
    return StepInputs(
        input_ids=torch.arange(nodes, dtype=i32) * 37 % SHAPE.vocab_size,
        positions=torch.tensor(depths, dtype=i32) + context,
        slots=torch.arange(context, context + nodes, dtype=i32),
        words=torch.tensor([w - (1 << 64) if w >> 63 else w for w in words], dtype=torch.int64),
        causal=torch.tensor([chain], dtype=torch.uint8),
        row_ptr=torch.tensor([0, nodes], dtype=i32),
        page_table=torch.arange(-(-(context + nodes) // PAGE), dtype=i32).unsqueeze(0),
        kv_lens=torch.tensor([context], dtype=i32),
        score_rows=torch.tensor(last, dtype=i32),
    )


@dataclass(frozen=True)
class StepTime:
    """Medians of one kind of step, in seconds; `over_stream` is the median of step time / stream time, pair by pair."""

    rows: int
    context: int
    total: float
    by_phase: dict[str, float]
    over_stream: float

    @property
    def linear(self) -> float:
        return sum(self.by_phase[name] for name in LINEAR)


def measure_step(decoder: NativeDecoder, store: KVTensors, machine: Machine, rows: int, context: int, runs: int) -> StepTime:
    inputs = step(rows, context)
    decoder.profile(inputs, store)
    totals, ratios, profiles = [], [], []
    for _ in range(runs):
        stream = machine.stream_seconds()
        begun = time.perf_counter()
        profiles.append(decoder.profile(inputs, store))
        totals.append(time.perf_counter() - begun)
        ratios.append(totals[-1] / stream)
    by_phase = {name: statistics.median(p[name] for p in profiles) for name in profiles[0]}
    return StepTime(rows, context, statistics.median(totals), by_phase, statistics.median(ratios))


def multiply_adds(name: str, rows: int) -> int:
    """Multiply-adds of one kind of linear layer in one pass."""
    q_width, kv_width = SHAPE.q_heads * SHAPE.head_dim, SHAPE.kv_heads * SHAPE.head_dim
    per_layer = {
        "q k v": (q_width + 2 * kv_width) * SHAPE.hidden,
        "output": SHAPE.hidden * q_width,
        "gate up": 2 * SHAPE.intermediate * SHAPE.hidden,
        "down": SHAPE.hidden * SHAPE.intermediate,
    }
    if name == "vocabulary":
        return SHAPE.vocab_size * SHAPE.hidden * (1 if rows > 64 else rows)
    return SHAPE.layers * per_layer[name] * rows


def packed_bytes(name: str) -> float:
    """Bytes one kind of linear layer reads: 5 bits a weight (codes, scales, minimums), 8.5 in the vocabulary."""
    return multiply_adds(name, 1) * (8.5 if name == "vocabulary" else 5.0) / 8


def attention_work(rows: int, context: int, itemsize: int) -> tuple[float, float]:
    """(bytes, multiply-adds) of attention in one pass: every key once per key head, every query against its keys."""
    keys = context + (rows / 2 if rows > 64 else min(rows, 6))
    size = 2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim * itemsize * (context + rows)
    return size, 2.0 * SHAPE.layers * SHAPE.q_heads * SHAPE.head_dim * keys * rows


def print_steps(times: list[StepTime], limits: Limits, itemsize: int) -> None:
    print(f"{'rows':>5}{'context':>9}  {'phase':<18}{'ms':>8}{'MB':>8}{'GB/s':>8}{'of limit':>9}{'Gmac/s':>9}{'of limit':>9}")
    for t in times:
        for name, seconds in t.by_phase.items():
            if seconds < 2e-6:
                continue
            size, macs, peak = 0.0, 0.0, limits.dots_per_second
            if name in LINEAR:
                size, macs = packed_bytes(name), float(multiply_adds(name, t.rows))
            elif name == "attention":
                size, macs = attention_work(t.rows, t.context, itemsize)
                peak = limits.fmas_per_second
            rate = (
                f"{size / 1e6:8.1f}{size / seconds / 1e9:8.1f}{size / seconds / limits.bytes_per_second:9.2f}"
                if size
                else " " * 25
            )
            work = f"{macs / seconds / 1e9:9.0f}{macs / seconds / peak:9.2f}" if macs else ""
            print(f"{t.rows:>5}{t.context:>9}  {name:<18}{seconds * 1e3:8.3f}{rate}{work}")
        print(
            f"{t.rows:>5}{t.context:>9}  {'whole step':<18}{t.total * 1e3:8.3f}   {t.over_stream:.2f} x streaming the weights once"
        )


def median_seconds(call: Callable[[], object], runs: int) -> float:
    call()
    times = []
    for _ in range(runs):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def single_ops(store: KVTensors, threads: int, runs: int) -> dict[str, float]:
    """Seconds of the ops beside the decoder, wrapper included."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(8, SHAPE.vocab_size, generator=g) * 3
    x = torch.randn(64, SHAPE.hidden, generator=g)
    heads = x.reshape(64, SHAPE.q_heads, SHAPE.head_dim)
    tables = (torch.ones(128, 32), torch.zeros(128, 32))
    nodes = torch.arange(64, dtype=torch.int32)
    parents = torch.tensor([-1, *((i - 1) // 2 for i in range(1, 64))], dtype=torch.int32)
    ptr = torch.tensor([0, 64], dtype=torch.int32)
    sampler = NativeSample(threads)

    def sample(rows: int, top_k: int, top_p: float) -> Callable[[], object]:
        temperature, p = torch.full((rows,), 0.8), torch.full((rows,), top_p)
        k, zero = torch.full((rows,), top_k, dtype=torch.int32), torch.zeros(rows)
        uniforms = torch.full((rows,), 0.5, dtype=torch.float64)
        return lambda: sampler.sample(logits[:rows], temperature, k, p, zero, uniforms)

    calls: dict[str, Callable[[], object]] = {
        "rms_norm, 64 rows of 576": lambda: rms_norm(x, torch.ones(SHAPE.hidden), 1e-5),
        "rope, 64 rows of 9 heads": lambda: rope(heads, nodes, *tables),
        "kv move, 8 slots, 30 layers": lambda: move(nodes[:8] + 20, nodes[:8], store, threads),
        "tree_accept, 64 nodes": lambda: tree_accept(nodes, nodes, parents, ptr, 8),
        "sample, 1 row of 49152": sample(1, 0, 1.0),
        "sample top_p 0.9, 1 row": sample(1, 0, 0.9),
        "sample top_k 40 top_p 0.9, 8 rows": sample(8, 40, 0.9),
    }
    return {name: median_seconds(call, runs) for name, call in calls.items()}


def ratios(times: list[StepTime]) -> dict[str, float]:
    """The figures the goals are set in."""
    found = {(t.rows, t.context): t for t in times}
    one, long = found[1, 16], found[1, 512]
    out = {
        "one_row_over_stream": one.over_stream,
        "one_row_512_over_stream": long.over_stream,
        "outside_linear_share_512": 1 - long.linear / sum(long.by_phase.values()),
        "rows_4_over_1": found[4, 16].over_stream / one.over_stream,
        "rows_8_over_1": found[8, 16].over_stream / one.over_stream,
    }
    out |= {f"prefill_{t.rows}_tokens_per_second": t.rows / t.total for t in times if t.rows > 64}
    return out


def commit() -> str:
    root = Path(__file__).parent
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=root, check=False)
    return found.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.ops", description="native ops over the machine's limits")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--isa", help="an instruction set by name; the best one by default")
    parser.add_argument("--kv", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--quick", action="store_true", help="fewer row counts and contexts")
    parser.add_argument("--runs", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    library = require()
    dtype = torch.bfloat16 if options.kv == "bfloat16" else torch.float32
    weights = random_weights(SHAPE)
    decoder = NativeDecoder(SHAPE, weights, options.threads, isa=options.isa)
    del weights
    weight_bytes = int(sum(packed_bytes(name) for name in LINEAR))
    machine = Machine(library, options.threads, options.isa, weight_bytes)
    store = KVTensors.allocate(SHAPE.layers, SHAPE.max_position // PAGE, SHAPE.kv_heads, SHAPE.head_dim, PAGE, dtype)
    limits = machine.limits()
    print(
        f"{machine.isa}, {options.threads} threads, limits: {limits.bytes_per_second / 1e9:.1f} GB/s streamed, "
        f"{limits.dots_per_second / 1e9:.0f} G int8 and {limits.fmas_per_second / 1e9:.0f} G float32 multiply-adds a second; "
        f"weights {weight_bytes / 1e6:.0f} MB, KV {options.kv}"
    )
    cases = [(1, 16), (4, 16), (8, 16), (1, 512), (8, 512), (256, 0)]
    if not options.quick:
        cases += [(2, 16), (16, 16), (32, 16), (64, 16), (1, 2048), (1, 8192), (8, 2048), (32, 512), (512, 0), (512, 2048)]
    times = [measure_step(decoder, store, machine, rows, context, options.runs) for rows, context in sorted(cases)]
    print_steps(times, limits, dtype.itemsize)
    ops = single_ops(store, options.threads, options.runs)
    for name, seconds in ops.items():
        print(f"{name:<40}{seconds * 1e6:10.1f} us")
    summary = ratios(times)
    for name, value in summary.items():
        print(f"{name:<40}{value:10.3f}")
    result = {
        "bench": "ops",
        "commit": commit(),
        "argv": sys.argv[1:],
        "torch": torch.__version__,
        "isa": machine.isa,
        "threads": options.threads,
        "limits": {"GB_per_second": limits.bytes_per_second / 1e9, "int8_Gmac": limits.dots_per_second / 1e9},
        "steps": [
            {
                "rows": t.rows,
                "context": t.context,
                "ms": t.total * 1e3,
                "linear_ms": t.linear * 1e3,
                "over_stream": t.over_stream,
            }
            for t in times
        ],
        "ops_us": {name: seconds * 1e6 for name, seconds in ops.items()},
        **summary,
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
