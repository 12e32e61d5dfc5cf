"""The processed distribution and its draw on the device, one program a row. Knows logits; refuses to know penalties.

No sort: a filter keeps all tokens above some mass and, of the tokens equal to it, the first few by id. That mass is found by
bisection over the bit patterns of float32, which order like integers when the numbers are not negative; each bisection
step is one pass over the row's logits, which stay in the second-level cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096
_ARGMAX_CHUNK = 8192  # logits one program looks at


@triton.jit
def _best(logits_ptr, begin, end, BLOCK: tl.constexpr):
    """(largest logit, its lowest index) of logits[begin:end]."""
    best = float("-inf")
    at = begin
    for start in range(begin, end, BLOCK):
        index = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + index, mask=index < end, other=float("-inf"))
        top = tl.max(x, axis=0)
        first = tl.min(tl.where(x == top, index, end), axis=0)
        at = tl.where(top > best, first, at)
        best = tl.maximum(top, best)
    return best, at


@triton.jit
def _mass(logits_ptr, start, vocab, best, temperature, min_p, BLOCK: tl.constexpr):
    """Unnormalised mass of tokens start .. start+BLOCK as float32, the best token's is 1; min_p already applied."""
    index = start + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + index, mask=index < vocab, other=float("-inf"))
    mass = tl.exp(tl.div_rn(x - best, temperature))
    return tl.where(mass >= min_p, mass, 0.0)


@triton.jit
def _count_from(logits_ptr, vocab, best, temperature, min_p, key, BLOCK: tl.constexpr):
    """Number of tokens whose mass has a bit pattern of at least `key`."""
    count = tl.zeros([], tl.int32)
    for start in range(0, vocab, BLOCK):
        mass = _mass(logits_ptr, start, vocab, best, temperature, min_p, BLOCK)
        count += tl.sum((mass.to(tl.int32, bitcast=True) >= key).to(tl.int32), axis=0)
    return count


@triton.jit
def _sum_from(logits_ptr, vocab, best, temperature, min_p, key, BLOCK: tl.constexpr):
    """Sum, in float64, of the masses whose bit pattern is at least `key`."""
    total = tl.zeros([], tl.float64)
    for start in range(0, vocab, BLOCK):
        mass = _mass(logits_ptr, start, vocab, best, temperature, min_p, BLOCK)
        total += tl.sum(tl.where(mass.to(tl.int32, bitcast=True) >= key, mass, 0.0).to(tl.float64), axis=0)
    return total


@triton.jit
def _value_of(key):
    """The float32 with this bit pattern, as float64."""
    return tl.sum(tl.full([1], key, tl.int32).to(tl.float32, bitcast=True).to(tl.float64), axis=0)


@triton.jit
def _threshold(logits_ptr, vocab, best, temperature, min_p, top_k, top_p, BLOCK: tl.constexpr):
    """(key, ties): kept are the masses whose bits exceed `key`, and the first `ties` tokens (by id) that equal it.

    Both searches keep key satisfied and high not: a mass of 1 has the bits 0x3F800000, and none is larger.
    """
    key = tl.full([], 1, tl.int32)  # masses of zero are never kept
    ties = vocab
    if (top_k > 0) & (top_k < vocab):
        high = tl.full([], 0x3F800001, tl.int32)
        while high - key > 1:
            middle = key + (high - key) // 2
            if _count_from(logits_ptr, vocab, best, temperature, min_p, middle, BLOCK) >= top_k:
                key = middle
            else:
                high = middle
        ties = top_k - _count_from(logits_ptr, vocab, best, temperature, min_p, key + 1, BLOCK)
    if top_p < 1.0:
        floor = key
        above = _sum_from(logits_ptr, vocab, best, temperature, min_p, floor + 1, BLOCK)
        equal = _count_from(logits_ptr, vocab, best, temperature, min_p, floor, BLOCK)
        equal -= _count_from(logits_ptr, vocab, best, temperature, min_p, floor + 1, BLOCK)
        ties = tl.minimum(ties, equal)
        goal = top_p.to(tl.float64) * (above + _value_of(floor) * ties)
        high = tl.full([], 0x3F800001, tl.int32)
        while high - key > 1:
            middle = key + (high - key) // 2
            if _sum_from(logits_ptr, vocab, best, temperature, min_p, middle, BLOCK) >= goal:
                key = middle
            else:
                high = middle
        if key > floor:
            above = _sum_from(logits_ptr, vocab, best, temperature, min_p, key + 1, BLOCK)
            ties = vocab
        needed = tl.ceil((goal - above) / _value_of(key)).to(tl.int32)
        ties = tl.minimum(tl.maximum(needed, 1), ties)
    return key, ties


@triton.jit
def _kept(mass, key, ties, seen):
    """(mass with removed tokens at 0, ties seen so far) of one block, `seen` counting those of earlier blocks."""
    bits = mass.to(tl.int32, bitcast=True)
    equal = bits == key
    rank = seen + tl.cumsum(equal.to(tl.int32), axis=0)
    return tl.where((bits > key) | (equal & (rank <= ties)), mass, 0.0), seen + tl.sum(equal.to(tl.int32), axis=0)


@triton.jit
def _sample_kernel(
    logits_ptr,  # [R, V] float32
    temperature_ptr,  # [R] float32
    top_k_ptr,  # [R] int32
    top_p_ptr,  # [R] float32
    min_p_ptr,  # [R] float32
    uniforms_ptr,  # [R] float64, or None: write probabilities
    out_ptr,  # [R] int32, or [R, V] float32 zeros
    vocab,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocab
    best, best_at = _best(logits_ptr, 0, vocab, BLOCK)
    temperature = tl.load(temperature_ptr + row)
    # 1 / temperature is infinite in float32 up to 2^-128; compared by bits, since devices may flush such numbers to zero
    if temperature.to(tl.int32, bitcast=True) <= 0x00200000:
        if uniforms_ptr is not None:
            tl.store(out_ptr + row, best_at)
        else:
            tl.store(out_ptr + row * vocab + best_at, 1.0)
    else:
        temperature = tl.maximum(temperature, 1.1754944e-38)
        min_p = tl.load(min_p_ptr + row)
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        key, ties = _threshold(logits_ptr, vocab, best, temperature, min_p, top_k, top_p, BLOCK)
        total = tl.zeros([], tl.float64)
        seen = 0
        for start in range(0, vocab, BLOCK):
            mass = _mass(logits_ptr, start, vocab, best, temperature, min_p, BLOCK)
            mass, seen = _kept(mass, key, ties, seen)
            total += tl.sum(mass.to(tl.float64), axis=0)
        seen = 0
        if uniforms_ptr is not None:
            goal = tl.load(uniforms_ptr + row) * total
            before = tl.zeros([], tl.float64)
            drawn = vocab
            last = best_at  # the last token kept: where rounding of the sums leaves the goal unreached
            for start in range(0, vocab, BLOCK):
                index = start + tl.arange(0, BLOCK)
                mass = _mass(logits_ptr, start, vocab, best, temperature, min_p, BLOCK)
                mass, seen = _kept(mass, key, ties, seen)
                cumulative = before + tl.cumsum(mass.to(tl.float64), axis=0)
                over = (mass > 0) & (cumulative > goal)
                drawn = tl.minimum(drawn, tl.min(tl.where(over, index, vocab), axis=0))
                here = tl.max(tl.where(mass > 0, index, -1), axis=0)
                last = tl.where(here >= 0, here, last)
                before += tl.sum(mass.to(tl.float64), axis=0)
            tl.store(out_ptr + row, tl.where(drawn < vocab, drawn, last))
        else:
            for start in range(0, vocab, BLOCK):
                index = start + tl.arange(0, BLOCK)
                mass = _mass(logits_ptr, start, vocab, best, temperature, min_p, BLOCK)
                mass, seen = _kept(mass, key, ties, seen)
                share = (mass.to(tl.float64) / total).to(tl.float32)
                tl.store(out_ptr + row * vocab + index, share, mask=index < vocab)


@triton.jit
def _argmax_chunk_kernel(logits_ptr, best_ptr, at_ptr, vocab, chunks, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """best, at [R, chunks]: the largest logit of every chunk of a row and where it is."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best, at = _best(logits_ptr + row * vocab, chunk * CHUNK, tl.minimum(vocab, (chunk + 1) * CHUNK), BLOCK)
    tl.store(best_ptr + row * chunks + chunk, best)
    tl.store(at_ptr + row * chunks + chunk, at)


@triton.jit
def _argmax_merge_kernel(best_ptr, at_ptr, out_ptr, chunks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    best = tl.load(best_ptr + row * chunks + index, mask=index < chunks, other=float("-inf"))
    winner = tl.min(tl.where(best == tl.max(best, axis=0), index, BLOCK), axis=0)
    tl.store(out_ptr + row, tl.load(at_ptr + row * chunks + winner))


def argmax(logits: torch.Tensor, chunk: int = _ARGMAX_CHUNK) -> torch.Tensor:
    """Highest logit of each row, lowest id on ties: [R, V] float32 -> [R] int32."""
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        chunks = triton.cdiv(vocab, chunk)
        best = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
        at = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
        block = min(2048, triton.next_power_of_2(chunk))
        logits = logits.contiguous()
        _argmax_chunk_kernel[(rows, chunks)](logits, best, at, vocab, chunks, CHUNK=chunk, BLOCK=block, enable_fp_fusion=False)
        _argmax_merge_kernel[(rows,)](best, at, out, chunks, BLOCK=triton.next_power_of_2(chunks), enable_fp_fusion=False)
    return out


def probabilities(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    block: int = _BLOCK,
) -> torch.Tensor:
    """The processed distribution [R, V] float32; the contract is the package's."""
    out = torch.zeros_like(logits)
    _launch(logits, temperature, top_k, top_p, min_p, None, out, block)
    return out


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniforms: torch.Tensor,
    block: int = _BLOCK,
) -> torch.Tensor:
    """Token ids [R] int32; the contract is the package's."""
    out = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    _launch(logits, temperature, top_k, top_p, min_p, uniforms, out, block)
    return out


def _launch(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniforms: torch.Tensor | None,
    out: torch.Tensor,
    block: int,
) -> None:
    rows, vocab = logits.shape
    if rows:
        block = min(block, triton.next_power_of_2(vocab))
        _sample_kernel[(rows,)](
            logits.contiguous(), temperature, top_k, top_p, min_p, uniforms, out, vocab, BLOCK=block, num_warps=8,
            enable_fp_fusion=False,
        )  # fmt: skip
