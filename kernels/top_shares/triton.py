"""top_shares on the device, without a host round trip. Knows logits; refuses to know who drafts.

Every chunk of a row gives its k best, its largest logit and its sum of exponentials; a second kernel merges the chunks of a row,
sums by their log-sum-exp. Ties go to the lower id.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels.decoder import DecoderOutput, Drafted
from kernels.top_shares import reference

CHUNK = 4096  # logits of one program


@triton.jit
def _best_chunk_kernel(
    logits_ptr,  # [R, V]
    temperature_ptr,  # [R] or None
    value_ptr,  # [R, chunks, K] the best logits, descending; -inf where the chunk has fewer
    id_ptr,  # [R, chunks, K] int32 their ids; V where there is none
    top_ptr,  # [R, chunks] largest finite logit, or -inf
    sum_ptr,  # [R, chunks] sum of exp((logit - top) / temperature); NaN where a logit is NaN or infinite
    vocab,
    chunks,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = index < vocab
    logit = tl.load(logits_ptr + row * vocab + index, mask=inside, other=float("-inf"))
    odd = (logit != logit) | (logit == float("inf"))
    number = tl.where(odd, float("-inf"), logit)  # never among the best
    top = tl.max(number, axis=0)
    finite = number > float("-inf")
    ratio = tl.where(finite, number, 0.0) - tl.where(top > float("-inf"), top, 0.0)
    if temperature_ptr is not None:
        ratio = ratio / tl.load(temperature_ptr + row)
    total = tl.sum(tl.where(finite, tl.exp(tl.minimum(ratio, 0.0)), 0.0), axis=0)
    at = row * chunks + chunk
    tl.store(top_ptr + at, top)
    tl.store(sum_ptr + at, tl.where(tl.max(odd.to(tl.int32), axis=0) != 0, float("nan"), total))
    free = inside
    for place in range(K):
        best = tl.max(tl.where(free, number, float("-inf")), axis=0)
        winner = tl.min(tl.where(free & (number == best), index, vocab), axis=0)
        tl.store(value_ptr + at * K + place, best)
        tl.store(id_ptr + at * K + place, winner)
        free = free & (index != winner)


@triton.jit
def _best_merge_kernel(
    temperature_ptr,  # [R] or None
    value_ptr,  # [R, chunks, K]
    id_ptr,  # [R, chunks, K]
    top_ptr,  # [R, chunks]
    sum_ptr,  # [R, chunks]
    best_ids_ptr,  # [R, K] int32
    shares_ptr,  # [R, K]
    vocab,
    chunks,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,  # at least `chunks`
    BLOCK: tl.constexpr,  # at least chunks * K
):
    row = tl.program_id(0).to(tl.int64)
    temperature = 1.0
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row)
    chunk = tl.arange(0, CHUNKS)
    here = chunk < chunks
    tops = tl.load(top_ptr + row * chunks + chunk, mask=here, other=float("-inf"))
    sums = tl.load(sum_ptr + row * chunks + chunk, mask=here, other=0.0)
    top = tl.max(tops, axis=0)
    finite = tops > float("-inf")
    origin = tl.where(top > float("-inf"), top, 0.0)
    fade = tl.exp((tl.where(finite, tops, origin) - origin) / temperature)
    total = tl.sum(sums * fade, axis=0)
    total = tl.where(top > float("-inf"), total, float("nan"))
    index = tl.arange(0, BLOCK)
    value = tl.load(value_ptr + row * chunks * K + index, mask=index < chunks * K, other=float("-inf"))
    ids = tl.load(id_ptr + row * chunks * K + index, mask=index < chunks * K, other=vocab)
    free = ids < vocab
    for place in range(K):
        best = tl.max(tl.where(free, value, float("-inf")), axis=0)
        winner = tl.min(tl.where(free & (value == best), ids, vocab), axis=0)
        tl.store(best_ids_ptr + row * K + place, winner)
        tl.store(shares_ptr + row * K + place, tl.exp((best - origin) / temperature) / total)
        free = free & (ids != winner)


def top_shares(
    logits: torch.Tensor, k: int, temperature: torch.Tensor | None = None, chunk: int = CHUNK
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids [R, k] int32, shares [R, k] float32). Raises ValueError on sizes that do not fit. `chunk` is a power of two."""
    rows, vocab = logits.shape
    if not 1 <= k <= vocab:
        raise ValueError(f"the {k} best of {vocab} tokens were asked for")
    if temperature is not None and temperature.shape[0] != rows:
        raise ValueError(f"temperature has {temperature.shape[0]} values for {rows} rows")
    ids = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    shares = logits.new_empty(rows, k)
    if rows == 0:
        return ids, shares
    chunk = min(chunk, triton.next_power_of_2(vocab))
    chunks = triton.cdiv(vocab, chunk)
    value, top, total = (logits.new_empty(rows, chunks * n) for n in (k, 1, 1))
    found = torch.empty(rows, chunks * k, dtype=torch.int32, device=logits.device)
    _best_chunk_kernel[(rows, chunks)](
        logits.contiguous(), temperature, value, found, top, total, vocab, chunks, K=k, BLOCK=chunk, enable_fp_fusion=False
    )
    _best_merge_kernel[(rows,)](
        temperature, value, found, top, total, ids, shares, vocab, chunks, K=k, CHUNKS=triton.next_power_of_2(chunks),
        BLOCK=triton.next_power_of_2(chunks * k), enable_fp_fusion=False,
    )  # fmt: skip
    return ids, shares


def best_tokens(out: DecoderOutput, k: int, temperature: Sequence[float] | None) -> Drafted:
    """What a decoder's `draft` gives, from what its `forward` gave; the k best of every node are all that leaves the device."""
    return reference.best_tokens(out, k, temperature, top_shares)
