"""Compiles every Triton kernel for a named GPU without having one. Run as a script; prints one line per kernel.

The interpreter accepts programs that the compiler refuses (changing types in loops, unsupported operations), so this is
the half of the check that a machine without a GPU can still make.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.kv_slots import triton as kv_slots
from kernels.linear import triton as linear
from kernels.linear.formats import triton as formats
from kernels.norm import triton as norm
from kernels.rope import triton as rope
from kernels.sample import triton as sample
from kernels.silu_mul import triton as silu_mul
from kernels.top_shares import triton as top_shares
from kernels.tree_accept import triton as tree_accept
from kernels.tree_attention import triton as tree_attention
from kernels.tree_attention.ordered import triton as ordered
from kernels.tree_attention.shared import triton as shared

F32, BF16, F16, I32, I64, F64, U8, I16, I8 = "*fp32", "*bf16", "*fp16", "*i32", "*i64", "*fp64", "*u8", "*i16", "*i8"
ATTENTION = {"GROUPS": 4, "PAGE": 16, "BLOCK_Q": 4, "BLOCK_M": 16, "BLOCK_N": 64, "FLOAT8": False, "WIDEN": False}
ATTENTION_BATCH = [I32, I64, U8, I32, I32, I32, "fp32", *["i32"] * 9]
SAMPLE = [F32, F32, I32, F32, F32]
# keys and values, and their steps where they are bytes with steps
STORES = {"bfloat16": [BF16, BF16, None, None], "float8": [U8, U8, None, None], "int8": [U8, U8, F32, F32]}
STEPPED = STORES["int8"]

# kernel, types of its run-time arguments in order (None = argument is None), constants
CASES: list[tuple[Any, list[str | None], dict[str, Any]]] = [
    (norm._rms_norm_kernel, [F32, None, F32, BF16, None, "fp32", "i32"], {"BLOCK": 1024}),
    (norm._rms_norm_kernel, [F32, F32, F32, F32, F32, "fp32", "i32"], {"BLOCK": 4096}),
    (silu_mul._silu_mul_kernel, [F32, F32, BF16, "i32", "i32", "i32"], {"BLOCK": 1024}),
    (rope._rope_kernel, [F32, I32, F32, F32, F32, "i32"], {"HALF": 64, "BLOCK": 64}),
    (
        rope._rope_write_kernel,
        [F32, F32, F32, "i32", "i32", "i32", None, F32, I32, I32, F32, F32, F32, BF16, BF16, None, None, "fp32", "i32", "i32"],
        {"HALF": 40, "PAGE": 16, "BLOCK": 64},
    ),
    (
        kv_slots._copy_kernel,
        [F32, F32, I32, BF16, BF16, "i32", "i32", "i64"],
        {"DIM": 64, "PAGE": 16, "BLOCK": 64, "TO_STORE": True},
    ),
    (
        kv_slots._copy_kernel,
        [F32, F32, I32, F32, F32, "i32", "i32", "i64"],
        {"DIM": 64, "PAGE": 32, "BLOCK": 64, "TO_STORE": False},
    ),
    (
        kv_slots._copy_kernel,
        [F32, F32, I32, U8, U8, "i32", "i32", "i64"],
        {"DIM": 64, "PAGE": 16, "BLOCK": 64, "TO_STORE": True},
    ),
    (
        rope._rope_write_kernel,
        [F32, F32, F32, "i32", "i32", "i32", None, None, I32, I32, F32, F32, F32, U8, U8, None, None, "fp32", "i32", "i32"],
        {"HALF": 64, "PAGE": 16, "BLOCK": 64},
    ),
    (
        rope._rope_write_kernel,
        [F32, F32, F32, "i32", "i32", "i32", None, None, I32, I32, F32, F32, F32, *STEPPED, "fp32", "i32", "i32"],
        {"HALF": 64, "PAGE": 16, "BLOCK": 64},
    ),
    (kv_slots._write_whole_kernel, [F32, F32, I32, *STEPPED, "i32"], {"DIM": 128, "PAGE": 16, "BLOCK": 64}),
    *(
        (
            kv_slots._copy_whole_kernel,
            [U8, F32, I32, *STEPPED, "i32", "i32", "i64"],
            {"DIM": 128, "PAGE": 16, "BLOCK": 128, "TO_STORE": to_store},
        )
        for to_store in (False, True)
    ),
    (tree_accept._tree_accept_kernel, [I32, I32, I32, I32, I32, I32, I32, "i32"], {"BLOCK": 64}),
    (
        tree_attention._attention_kernel,
        [F32, *STORES["bfloat16"], F32, None, None, None, *ATTENTION_BATCH],
        dict(**ATTENTION, DIM=128, BLOCK_D=128, WINDOWED=False),
    ),
    (
        tree_attention._attention_kernel,
        [F32, F32, F32, None, None, F32, F32, F32, F32, *ATTENTION_BATCH],
        dict(**ATTENTION, DIM=30, BLOCK_D=32, WINDOWED=True),
    ),
    (
        tree_attention._attention_kernel,
        [F32, *STORES["float8"], F32, F32, F32, F32, *ATTENTION_BATCH],
        dict(ATTENTION | {"FLOAT8": True}, DIM=128, BLOCK_D=128, WINDOWED=True),
    ),
    (
        tree_attention._attention_kernel,
        [F32, *STEPPED, F32, F32, F32, F32, *ATTENTION_BATCH],
        dict(ATTENTION, DIM=128, BLOCK_D=128, WINDOWED=True),
    ),
    *(
        (
            ordered._ordered_kernel,
            [F32, *STORES[kind], F32, F32, F32, sinks, I32, I64, U8, I32, I32, I32, "fp32", *["i32"] * 5],
            {"GROUPS": 4, "DIM": 128, "PAGE": 16, "BLOCK_Q": 4, "BLOCK_M": 16, "BLOCK_D": 128, "SPLIT": 256}
            | {"WINDOWED": kind != "bfloat16", "FLOAT8": kind == "float8"},
        )
        for kind, sinks in (("bfloat16", None), ("float8", F32), ("int8", F32))
    ),
    *(
        (
            shared._shared_kernel,
            [F32, *STORES[kind], F32, F32, F32, I32, I32, "fp32", *["i32"] * 10],
            {"GROUPS": 4, "DIM": 128, "PAGE": 16, "BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_D": 128}
            | {"WINDOWED": kind != "bfloat16", "FLOAT8": kind == "float8", "WIDEN": False},
        )
        for kind in STORES
    ),
    (tree_attention._merge_kernel, [F32, F32, F32, F32, "i32", "i32"], {"DIM": 128, "BLOCK_D": 128}),
    (
        linear._dense_kernel,
        [F32, BF16, F32, F32, "i32", "i32", "i32"],
        {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64, "WIDEN": False},
    ),
    (
        linear._dense_kernel,
        [F32, F32, None, F32, "i32", "i32", "i32"],
        {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64, "WIDEN": False},
    ),
    (linear._quantize_kernel, [F32, I8, F32, "i32"], {"LARGEST": 32639, "LEAST": 2.0**-100, "BLOCK_K": 1024}),
    (
        linear._block_kernel,
        [I8, F32, U8, F16, F16, F32, None, F32, "i32", "i32", "i32"],
        {"BITS": 4, "BLOCK_M": 16, "BLOCK_N": 64},
    ),
    (
        linear._block_kernel,
        [I8, F32, U8, F16, F32, F32, F32, F32, "i32", "i32", "i32"],
        {"BITS": 8, "BLOCK_M": 64, "BLOCK_N": 64},
    ),
    (sample._sample_kernel, [*SAMPLE, F64, I32, "i32"], {"BLOCK": 1024}),
    (sample._sample_kernel, [*SAMPLE, None, F32, "i32"], {"BLOCK": 1024}),
    (sample._argmax_chunk_kernel, [F32, F32, I32, "i32", "i32"], {"CHUNK": 8192, "BLOCK": 2048}),
    (sample._argmax_merge_kernel, [F32, I32, I32, "i32"], {"BLOCK": 16}),
    (top_shares._best_chunk_kernel, [F32, F32, F32, I32, F32, F32, "i32", "i32"], {"K": 8, "BLOCK": 4096}),
    (top_shares._best_merge_kernel, [None, F32, I32, F32, F32, I32, F32, "i32", "i32"], {"K": 8, "CHUNKS": 16, "BLOCK": 128}),
    *(
        (
            formats._weight_only_kernel,
            [F32, U8, scale, zero, order, None, F32, *["i32"] * 7],
            {"KIND": kind, "BLOCK_M": tile, "BLOCK_N": 64, "BLOCK_K": 32 if kind == formats.E2M1 else 64, "WIDEN": False},
        )
        for kind, scale, zero, order, tile in (
            (formats.INT4, F16, I16, None, 16),
            (formats.INT4, BF16, I16, I32, 64),
            (formats.INT8, F32, I16, None, 32),
            (formats.E4M3, F32, None, None, 64),
            (formats.E2M1, U8, None, None, 16),
        )
    ),
    (formats._quantize_rows_kernel, [F32, I8, F32, "i32"], {"LARGEST": 127.0, "BLOCK": 2048}),
    (
        formats._int8_kernel,
        [I8, F32, I8, F32, F32, F32, "i32", "i32", "i32"],
        {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64},
    ),
]

EXACT = (
    linear._quantize_kernel,
    linear._block_kernel,
    formats._quantize_rows_kernel,
    formats._int8_kernel,
)  # the reference's bits, so no fused multiply-add


def main() -> None:
    for kernel, types, constants in CASES:
        names = kernel.arg_names
        signature = {n: t or "constexpr" for n, t in zip(names, types, strict=False)} | dict.fromkeys(constants, "constexpr")
        constexprs = {n: None for n, t in zip(names, types, strict=False) if t is None} | constants
        if signature.keys() != set(names):
            raise SystemExit(f"{kernel.__name__}: the case lists {list(signature)}, the kernel has {names}")
        source = ASTSource(fn=kernel, signature={n: signature[n] for n in names}, constexprs=constexprs)
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
        if kernel in EXACT and "fma.rn.f32" in built.asm["ptx"]:
            raise SystemExit(f"{kernel.__name__} multiplies and adds in one rounding; the contract rounds twice")
        print(kernel.__name__, len(built.asm["cubin"]), "bytes")


if __name__ == "__main__":
    main()
