"""Tiny in-memory decoders and ragged batches for tests: no files, no training, made in milliseconds.

RAND: seeded random Llama-shaped weights whose text depends on the whole context (shows KV, position and mask faults).
TABLE: logits are exactly a given table's row of the last token (every distribution known; blind to KV faults).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch

from kernels.batch import KVTensors, StepInputs
from kernels.decoder import Decoder, DecoderOutput, DecoderShape, DecoderWeights, LayerWeights
from kernels.decoder.reference import ReferenceDecoder
from kernels.linear import BLOCK, BlockWeight, DenseWeight, Weight

# --- weights ---------------------------------------------------------------------------------------------------------


def rope_tables(max_position: int, head_dim: int, theta: float = 10_000.0) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each [max_position, head_dim / 2] float32."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(max_position, dtype=torch.float64).unsqueeze(1) * inverse
    return angles.cos().float(), angles.sin().float()


def rand_weights(
    seed: int = 0,
    layers: int = 3,
    hidden: int = 96,
    q_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    intermediate: int = 128,
    vocab: int = 512,
    scale_head: float = 8.0,
    *,
    max_position: int = 1024,
    sliding_window: int | None = None,
    qk_norm: bool = False,
    qkv_bias: bool = False,
) -> tuple[DecoderShape, DecoderWeights]:
    """Random float32 weights, untied. `scale_head` is the standard deviation of the logits: 8 makes top-1 clear, 1 flat."""
    g = torch.Generator().manual_seed(seed)

    def matrix(out: int, into: int, gain: float = 1.0, bias: bool = False) -> DenseWeight:
        values = torch.randn(out, into, generator=g) * (gain / into**0.5)
        return DenseWeight(values, torch.randn(out, generator=g) * 0.1 if bias else None)

    def norm(size: int) -> torch.Tensor:
        return 1.0 + 0.1 * torch.randn(size, generator=g)

    def layer() -> LayerWeights:
        return LayerWeights(
            attention_norm=norm(hidden),
            q=matrix(q_heads * head_dim, hidden, 2.0, qkv_bias),  # gain 2: attention picks out a few keys, so a wrong key shows
            k=matrix(kv_heads * head_dim, hidden, 2.0, qkv_bias),
            v=matrix(kv_heads * head_dim, hidden, 2.0, qkv_bias),
            o=matrix(hidden, q_heads * head_dim, 2.0),
            mlp_norm=norm(hidden),
            gate=matrix(intermediate, hidden, 2.0),
            up=matrix(intermediate, hidden),
            down=matrix(hidden, intermediate),
            q_norm=norm(head_dim) * 2.0 if qk_norm else None,
            k_norm=norm(head_dim) if qk_norm else None,
        )

    cos, sin = rope_tables(max_position, head_dim)
    shape = DecoderShape(
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        norm_eps=1e-5,
        attention_scale=head_dim**-0.5,
        max_position=max_position,
        sliding_window=sliding_window,
    )
    weights = DecoderWeights(
        embedding=DenseWeight(torch.randn(vocab, hidden, generator=g)),
        layers=tuple(layer() for _ in range(layers)),
        final_norm=norm(hidden),
        lm_head=matrix(vocab, hidden, scale_head),
        rope_cos=cos,
        rope_sin=sin,
    )
    return shape, weights


def map_weights(weights: DecoderWeights, change: Callable[[Weight], Weight]) -> DecoderWeights:
    """The same decoder with `change` applied to every matrix (norms and rotary tables stay)."""
    names = ("q", "k", "v", "o", "gate", "up", "down")
    return replace(
        weights,
        embedding=change(weights.embedding),
        layers=tuple(replace(layer, **{n: change(getattr(layer, n)) for n in names}) for layer in weights.layers),
        lm_head=change(weights.lm_head),
    )


def noisy(weights: DecoderWeights, noise: float = 0.025, seed: int = 1) -> DecoderWeights:
    """A twin that agrees with `weights` on about 60 % of greedy tokens (default noise, relative to each matrix's spread)."""
    g = torch.Generator().manual_seed(seed)

    def change(weight: Weight) -> Weight:
        assert isinstance(weight, DenseWeight)
        values = weight.values
        return replace(weight, values=values + torch.randn(values.shape, generator=g) * values.std() * noise)

    return map_weights(weights, change)


def quantize(weight: Weight, bits: int) -> BlockWeight:
    """A dense matrix in blocks of 32: code = round((value - minimum) / scale), asymmetric for 4 bits, symmetric for 8."""
    assert isinstance(weight, DenseWeight)
    out, into = weight.values.shape
    blocks = weight.values.float().reshape(out, into // BLOCK, BLOCK)
    if bits == 8:
        scale = (blocks.abs().amax(-1) / 127).half()
        minimum = -128.0 * scale.float()
    else:
        low = blocks.amin(-1)
        scale = ((blocks.amax(-1) - low) / 15).half()
        minimum = low.half()
    step = scale.float().clamp_min(1e-12)
    codes = ((blocks - minimum.float().unsqueeze(-1)) / step.unsqueeze(-1)).round().clamp(0, 2**bits - 1).to(torch.uint8)
    if bits == 4:
        codes = codes[..., : BLOCK // 2] | (codes[..., BLOCK // 2 :] << 4)
    return BlockWeight(bits, codes.contiguous(), scale, minimum, weight.bias)


def quantized(weights: DecoderWeights, bits: int = 4) -> DecoderWeights:
    """Every matrix in `bits`, the embedding and the output matrix in 8, as the published files have it."""
    coded = map_weights(weights, lambda w: quantize(w, bits))
    return replace(coded, embedding=quantize(weights.embedding, 8), lm_head=quantize(weights.lm_head, 8))


def table_weights(table: torch.Tensor, *, max_position: int = 1024) -> tuple[DecoderShape, DecoderWeights]:
    """A decoder whose logits after token t are exactly `table[t]` (finite float32 [V, V]), whatever came before.

    One-hot embeddings, attention output and MLP output zero. eps is chosen so that 1 / sqrt(mean + eps) is a power of
    two, so nothing is rounded on the way.
    """
    vocab = table.shape[0]
    hidden = -(-vocab // BLOCK) * BLOCK
    mean = float(torch.tensor(1.0) / hidden)
    factor = 1  # what RMSNorm multiplies a one-hot vector with
    while 1.0 / (4 * factor * factor) > mean:
        factor *= 2
    g = torch.Generator().manual_seed(0)
    heads, head_dim, intermediate = 2, 32, 32
    layer = LayerWeights(
        attention_norm=torch.ones(hidden),
        q=DenseWeight(torch.randn(heads * head_dim, hidden, generator=g)),
        k=DenseWeight(torch.randn(head_dim, hidden, generator=g)),
        v=DenseWeight(torch.randn(head_dim, hidden, generator=g)),
        o=DenseWeight(torch.zeros(hidden, heads * head_dim)),
        mlp_norm=torch.ones(hidden),
        gate=DenseWeight(torch.zeros(intermediate, hidden)),
        up=DenseWeight(torch.zeros(intermediate, hidden)),
        down=DenseWeight(torch.zeros(hidden, intermediate)),
    )
    head = torch.zeros(vocab, hidden)
    head[:, :vocab] = table.float().T / factor
    embedding = torch.zeros(vocab, hidden)
    embedding[:, :vocab] = torch.eye(vocab)
    cos, sin = rope_tables(max_position, head_dim)
    shape = DecoderShape(
        layers=1,
        hidden=hidden,
        intermediate=intermediate,
        q_heads=heads,
        kv_heads=1,
        head_dim=head_dim,
        vocab_size=vocab,
        norm_eps=1.0 / factor**2 - mean,
        attention_scale=head_dim**-0.5,
        max_position=max_position,
    )
    weights = DecoderWeights(
        embedding=DenseWeight(embedding),
        layers=(layer,),
        final_norm=torch.ones(hidden),
        lm_head=DenseWeight(head),
        rope_cos=cos,
        rope_sin=sin,
    )
    return shape, weights


def script_table(tokens: Sequence[int], vocab: int = 512, peak: float = 20.0, seed: int = 0) -> torch.Tensor:
    """A table whose greedy text after tokens[i] is tokens[i + 1]; each token may occur once. Other logits in (-1, 1)."""
    if len(set(tokens)) != len(tokens):
        raise ValueError("a token has one successor, so a script may use it once only")
    table = torch.rand(vocab, vocab, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    for now, then in pairwise(tokens):
        table[now, then] = peak
    return table


# --- decoders --------------------------------------------------------------------------------------------------------


def decoder(shape: DecoderShape, weights: DecoderWeights, native: bool = False) -> Decoder:
    """ReferenceDecoder, or with `native` the C++ one (ImportError or its own error where it cannot run)."""
    if native:
        from kernels.decoder.native import NativeDecoder

        return NativeDecoder(shape, weights)
    return ReferenceDecoder(shape, weights)


def rand_decoder(seed: int = 0, native: bool = False, **sizes: object) -> Decoder:
    """RAND in one call; `sizes` as `rand_weights`."""
    return decoder(*rand_weights(seed, **sizes), native=native)  # type: ignore[arg-type]


def table_decoder(table: torch.Tensor, native: bool = False) -> Decoder:
    """TABLE in one call."""
    return decoder(*table_weights(table), native=native)


class SwappedDecoder:
    """`inner` with its two best tokens' logits exchanged at every node: as a drafter, its second choice is the right one."""

    def __init__(self, inner: Decoder) -> None:
        self.inner = inner
        self.shape = inner.shape

    def forward(self, inputs: StepInputs, store: KVTensors, need_logits: bool) -> DecoderOutput:
        out = self.inner.forward(inputs, store, need_logits=True)
        assert out.logits is not None
        logits = out.logits.clone()
        best = torch.topk(logits, 2, dim=-1)
        logits.scatter_(1, best.indices, best.values.flip(-1))
        return DecoderOutput(
            hidden=out.hidden, argmax=logits.argmax(-1).to(torch.int32), logits=logits if need_logits else None
        )


def swapped(inner: Decoder) -> Decoder:
    return SwappedDecoder(inner)


# --- batches ---------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One row of a step. `parents` None = a causal chain; else row-local parents, -1 for the root (node 0)."""

    tokens: Sequence[int]
    pages: Sequence[int]  # page ids of logical positions 0 .. kv_len + len(tokens) - 1
    kv_len: int = 0
    parents: Sequence[int] | None = None
    score: Sequence[int] | None = None  # row-local nodes to score, None = all
    words: list[int] = field(init=False)
    depths: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.words, self.depths = [], []
        for i in range(len(self.tokens)):
            parent = i - 1 if self.parents is None else self.parents[i]
            self.depths.append(0 if parent < 0 else self.depths[parent] + 1)
            if self.parents is None:
                self.words.append(0)
            else:
                self.words.append((0 if parent < 0 else self.words[parent]) | 1 << i)


def step_inputs(rows: Sequence[Row], page_size: int, device: str = "cpu") -> StepInputs:
    """StepInputs of hand-made rows."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    words: list[int] = []
    score: list[int] = []
    row_ptr = [0]
    for row in rows:
        first = row_ptr[-1]
        for i, token in enumerate(row.tokens):
            index = row.kv_len + i
            ids.append(token)
            positions.append(row.kv_len + row.depths[i])
            slots.append(row.pages[index // page_size] * page_size + index % page_size)
            words.append(row.words[i] - (1 << 64) if row.words[i] >> 63 else row.words[i])
        score += [first + i for i in (range(len(row.tokens)) if row.score is None else row.score)]
        row_ptr.append(first + len(row.tokens))
    width = max(len(row.pages) for row in rows)
    table = [[*row.pages, *([0] * (width - len(row.pages)))] for row in rows]

    def ints(values: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return StepInputs(
        input_ids=ints(ids),
        positions=ints(positions),
        slots=ints(slots),
        words=ints(words, torch.int64),
        causal=ints([row.parents is None for row in rows], torch.uint8),
        row_ptr=ints(row_ptr),
        page_table=ints(table),
        kv_lens=ints([row.kv_len for row in rows]),
        score_rows=ints(score),
    )


def new_store(
    shape: DecoderShape,
    pages: int,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    fill: float = 0.0,
    device: str = "cpu",
) -> KVTensors:
    """A store for `shape`; `fill` float("nan") poisons slots that nothing may read."""
    store = KVTensors.allocate(shape.layers, pages, shape.kv_heads, shape.head_dim, page_size, dtype, device)
    raw = 255 if fill != fill else int(fill)  # of bytes: a step of such bytes is NaN
    store.k.fill_(raw if dtype == torch.uint8 else fill)
    store.v.fill_(raw if dtype == torch.uint8 else fill)
    return store


def greedy(target: Decoder, prompt: Sequence[int], count: int, page_size: int = 16) -> list[int]:
    """Plain greedy text of `count` tokens, one token a step: the golden answer of engine tests."""
    total = len(prompt) + count
    pages = list(range(-(-total // page_size)))
    store = new_store(target.shape, len(pages), page_size)
    tokens, kv_len, answer = list(prompt), 0, []
    for _ in range(count):
        inputs = step_inputs([Row(tokens, pages, kv_len, score=[len(tokens) - 1])], page_size)
        kv_len += len(tokens)
        tokens = [int(target.forward(inputs, store, need_logits=False).argmax[0])]
        answer += tokens
    return answer
