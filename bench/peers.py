"""Ours beside llama.cpp, OpenVINO GenAI, transformers and vLLM on the same prompts, and the step's own ratios.

    python -m bench.peers --prompts FILE [-n N] [--max-tokens N] [--repeats N] [--peers LIST] [--peers-dir DIR] [--no-ops]

Each peer is installed once into an environment of its own. Everybody gets the same token ids, number of new tokens and threads, and only one
works at a time, turn by turn; the number of tokens is that of our own plain greedy answer. Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from bench import ops
from kernels.batch import KVTensors
from kernels.decoder.native import NativeDecoder
from kernels.native import require
from server.commands import compare
from server.peers.catalog import PEERS
from server.settings import Settings
from spec.errors import ForespeakError

STEPS = ((1, 16), (4, 16), (8, 16), (1, 512))
STEP_GOALS = {"one_row_over_stream": 1.35, "rows_4_over_1": 1.2, "rows_8_over_1": 1.9, "outside_linear_share_512": 0.2}


def step_ratios(threads: int, runs: int) -> dict[str, float]:
    """The machine's ratios of `bench.ops`, at weights of the default model's shape."""
    import torch

    torch.set_num_threads(1)
    decoder = NativeDecoder(ops.SHAPE, ops.random_weights(ops.SHAPE), threads)
    machine = ops.Machine(require(), threads, None, int(sum(ops.packed_bytes(name) for name in ops.LINEAR)))
    store = KVTensors.allocate(ops.SHAPE.layers, 64, ops.SHAPE.kv_heads, ops.SHAPE.head_dim, ops.PAGE, torch.bfloat16)
    found = ops.ratios([ops.measure_step(decoder, store, machine, rows, context, runs) for rows, context in STEPS])
    return {name: round(found[name], 3) for name in STEP_GOALS}


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.peers", description="ours beside other engines")
    parser.add_argument("--prompts", type=Path, required=True, help="prompt file, one JSON object a line")
    parser.add_argument("-n", type=int, default=compare.DEFAULT_PROMPTS, help="number of prompts, spread over the categories")
    parser.add_argument("--max-tokens", type=int, default=compare.DEFAULT_TOKENS)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--streams", type=int, default=compare.DEFAULT_STREAMS)
    parser.add_argument("--peers", default=",".join(PEERS), help=f"comma list of {', '.join(PEERS)}")
    parser.add_argument("--peers-dir", type=Path, help="where the peers' environments are")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--drafters", default="auto")
    parser.add_argument("--no-ops", action="store_true", help="leave out the ratios of single steps")
    o = parser.parse_args()
    try:
        settings = Settings(threads=o.threads, drafters=o.drafters)
        found = compare.figures(settings, o.peers, o.prompts, o.n, o.max_tokens, o.repeats, o.streams, o.peers_dir)
    except ForespeakError as error:
        print(f"bench.peers: {error}", file=sys.stderr)
        return 2
    if not o.no_ops:
        steps = step_ratios(o.threads, runs=15)
        found["ratios"] |= steps
        found["goals"] |= STEP_GOALS
        found["missed"] += [name for name, goal in STEP_GOALS.items() if steps[name] > goal]
        for name, value in steps.items():
            print(f"{name:<40}{value:10.3f}")
    print(json.dumps(found | {"bench": "peers"}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
