"""The target while it teaches: hidden states and next-token distributions of whole conversations, by the engine's own decoder.

So a drafter learns from the very states it will be given when it drafts. Nothing is stored: one pass over a batch, like a
prefill, gives them again whenever they are needed. Knows decoders and weights; refuses to know losses.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from drafters.training.batches import Batch
from kernels.batch import KVTensors, StepInputs
from kernels.decoder import Decoder, DecoderShape, DecoderWeights
from kernels.linear import DenseWeight, LayerWeight, Weight
from kernels.linear.reference import dequantize, lookup

PAGE = 16
_PASS_TOKENS = 4096  # tokens of one pass of the target


def dense(weight: LayerWeight) -> torch.Tensor:
    """float32 [out, in], a copy of its own."""
    return weight.values.float().clone() if isinstance(weight, DenseWeight) else dequantize(weight)


def moved(weight: Weight, device: str) -> Weight:
    """The same matrix on a device."""
    if isinstance(weight, DenseWeight):
        return DenseWeight(weight.values.to(device))
    parts = {name: getattr(weight, name).to(device) for name in ("codes", "scale", "minimum")}
    return dataclasses.replace(weight, **parts)


@dataclass(frozen=True, slots=True)
class Lesson:
    """A batch and what the target makes of it. W wanted positions, in row-major order; K tokens the drafter can say."""

    token_ids: torch.Tensor  # [B, T] int64
    wanted: torch.Tensor  # [B, T] bool: this position's guess is the next token of an answer
    hidden: torch.Tensor  # [B, T, H], after the final norm; 0 where padded
    embedded: torch.Tensor  # [B, T, H] the target's embedding of each token
    place: torch.Tensor  # [B, T] int64: which of the W rows a wanted position is, -1 elsewhere
    aim: torch.Tensor  # [W, K] the target's next-token distribution, restricted to the drafter's tokens
    best: torch.Tensor | None  # [W] int64 the target's own choice among all tokens, when asked for


class Teacher:
    """One target on one device. `dtype` is that of the tensors handed out."""

    def __init__(
        self,
        decoder: Decoder,
        weights: DecoderWeights,
        token_ids: torch.Tensor,
        *,
        kv_dtype: torch.dtype,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`token_ids` [K]: what the drafter can say."""
        self.decoder = decoder
        self.shape: DecoderShape = decoder.shape
        self.weights = weights
        self.device = device
        self.dtype = dtype
        self.token_ids = token_ids.to(device)
        self.output = lookup(weights.lm_head, token_ids)  # [K, H] float32, where the weights are
        self._low = self.output.to(device, dtype)
        self._embedding = moved(weights.embedding, device)
        self._kv_dtype = kv_dtype
        self._store: KVTensors | None = None

    def teach(self, batch: Batch, *, choices: bool = False) -> Lesson:
        """`choices`: also the target's own choice at every wanted position, which costs its whole vocabulary matrix."""
        with torch.inference_mode():
            hidden, best = self._hidden(batch, choices)
        # Tensors made under inference mode cannot be saved for a gradient; the copies can.
        hidden = hidden.to(self.dtype).clone()
        wanted, ids = batch.wanted.to(self.device), batch.token_ids.to(self.device)
        with torch.no_grad():
            place = torch.full(wanted.shape, -1, dtype=torch.int64, device=self.device)
            place[wanted] = torch.arange(batch.answer_tokens, device=self.device)
            embedded = lookup(self._embedding, ids.flatten()).to(self.dtype).view(*ids.shape, -1)
            aim = torch.softmax((hidden[wanted] @ self._low.T).float(), dim=-1).to(self.dtype)
        return Lesson(ids, wanted, hidden, embedded, place, aim, None if best is None else best.clone().long())

    def _hidden(self, batch: Batch, choices: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[B, T, H] float32 and the choices [W], some rows a pass."""
        rows, longest = batch.token_ids.shape
        hidden = torch.zeros(rows, longest, self.shape.hidden, device=self.device)
        best: list[torch.Tensor] = []
        some = max(1, _PASS_TOKENS // longest)
        for start in range(0, rows, some):
            block = range(start, min(start + some, rows))
            out = self.decoder.forward(self._inputs(batch, block, choices), self._room(len(block), longest), False)
            at = 0
            for row in block:
                n = batch.lengths[row]
                hidden[row, :n] = out.hidden[at : at + n]
                at += n
            best.append(out.argmax)
        return hidden, torch.cat(best) if choices else None

    def _room(self, rows: int, longest: int) -> KVTensors:
        """A store for so many rows; kept for the next pass."""
        pages = rows * -(-longest // PAGE)
        if self._store is None or self._store.num_pages < pages:
            s = self.shape
            self._store = KVTensors.allocate(s.layers, pages, s.kv_heads, s.head_dim, PAGE, self._kv_dtype, self.device)
        return self._store

    def _inputs(self, batch: Batch, block: range, scored: bool) -> StepInputs:
        """Each row a causal chain from position 0 on pages of its own."""
        longest = batch.token_ids.shape[1]
        per_row = -(-longest // PAGE)
        lengths = [batch.lengths[row] for row in block]
        row_ptr = torch.tensor([0, *lengths]).cumsum(0)
        positions = torch.cat([torch.arange(n) for n in lengths])
        first = torch.repeat_interleave(torch.arange(len(lengths)) * (per_row * PAGE), torch.tensor(lengths))
        inside = torch.cat([batch.wanted[row, : batch.lengths[row]] for row in block])
        score_rows = inside.nonzero()[:, 0] if scored else torch.zeros(0, dtype=torch.int64)
        ids = torch.cat([batch.token_ids[row, : batch.lengths[row]] for row in block])
        table = torch.arange(len(lengths) * per_row).view(len(lengths), per_row)

        def there(x: torch.Tensor, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return x.to(dtype).contiguous().to(self.device)

        return StepInputs(
            input_ids=there(ids),
            positions=there(positions),
            slots=there(first + positions),
            words=there(torch.zeros_like(ids), torch.int64),
            causal=there(torch.ones(len(lengths)), torch.uint8),
            row_ptr=there(row_ptr),
            page_table=there(table),
            kv_lens=there(torch.zeros(len(lengths))),
            score_rows=there(score_rows),
        )
