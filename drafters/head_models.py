"""Trained heads: what a file holds, and the arithmetic that turns a hidden state and tokens into scores. Knows weights;
refuses to know trees, sequences and prices. Runtime only; nothing here trains.

Two kinds of file (safetensors, floats in float32, float16 or bfloat16); heads with attention are in layer_models.py:

Recurrent head, our own (metadata "format": "forespeak.heads/1"; optional "norm_eps", default 1e-5, and "target", a name)

    state_norm  [H]        token_norm [H]        output_norm [H]       RMSNorm weights
    gate [W, 2H]   up [W, 2H]   down [H, W]                            the cell, reused at every depth
    output [K, H]                                                      scores of K frequent tokens ...
    token_ids [K]          int32 or int64, distinct                    ... and which tokens of the target those are

    With s the target's last hidden state (after its final norm) and e(x) the target's embedding of token x, for each
    token x chosen after it, the root first:

        z = [ rms(s) * state_norm ; rms(e(x)) * token_norm ]      rms(v) = v / sqrt(mean(v^2) + eps)
        s <- s + down (silu(gate z) * (up z))
        scores of the token after x = output (rms(s) * output_norm)

    So every depth is conditioned on the tokens chosen before it (as Hydra, Ankner et al. 2024, and EAGLE, Li et al. 2024).

Medusa-1 (Cai et al. 2024), as published: head i guesses the token i + 2 places after the hidden state's own, unconditioned

    medusa_head.{i}.{j}.linear.weight [H, H], .bias [H]                x <- x + silu(linear x), blocks j = 0 .. n-1
    medusa_head.{i}.{n}.weight [V, H]                                  scores over the vocabulary
    (the prefix "medusa_head." may be missing)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from drafters.layer_models import HEADS_FORMAT, Target
from drafters.tensor_file import TensorFile
from kernels.linear import DenseWeight, Weight
from kernels.linear.reference import lookup

FORMAT = "forespeak.heads/1"
KNOWN_HEADS = f"{FORMAT}, {HEADS_FORMAT}, Medusa-1"
LinearOp = Callable[[torch.Tensor], torch.Tensor]  # [R, in] float32 -> [R, out] float32
LinearMaker = Callable[[Weight], LinearOp]

_RECURRENT = ("state_norm", "token_norm", "output_norm", "gate", "up", "down", "output", "token_ids")
_MEDUSA = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")


class HeadModel(Protocol):
    """Scores of continuations. States are float32 [R, H]; a state belongs to a token and says what may follow it."""

    token_ids: list[int] | None  # tokens of the score columns; None = column i is token i
    depths: int | None  # how deep it can guess; None = any

    def advance(self, states: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
        """States after one more token each. The state before the root is the target's hidden state."""

    def scores(self, states: torch.Tensor, depths: Sequence[int]) -> torch.Tensor:
        """[R, columns] float32. `depths`: depth of each state's token, 0 = the root."""


def torch_linear(weight: Weight) -> LinearOp:
    """A dense product by the library. Drafts need no bitwise promises."""
    if not isinstance(weight, DenseWeight):
        raise TypeError("torch_linear takes dense weights")
    values, bias = weight.values.float(), weight.bias
    return lambda x: torch.nn.functional.linear(x, values, bias)


class RecurrentHead:
    """The file's first kind."""

    depths: int | None = None

    def __init__(self, tensors: dict[str, torch.Tensor], eps: float, embedding: Weight, make_linear: LinearMaker) -> None:
        self.token_ids: list[int] | None = tensors["token_ids"].tolist()
        self._eps = eps
        self._embedding = embedding
        self._state_norm, self._token_norm, self._output_norm = (
            tensors[name].float() for name in ("state_norm", "token_norm", "output_norm")
        )
        self._gate, self._up, self._down, self._output = (
            make_linear(DenseWeight(tensors[name])) for name in ("gate", "up", "down", "output")
        )

    def advance(self, states: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor(token_ids, dtype=torch.int64, device=states.device)
        tokens = self._rms(lookup(self._embedding, ids)) * self._token_norm
        z = torch.cat((self._rms(states) * self._state_norm, tokens), dim=1)  # [R, 2H]
        return states + self._down(torch.nn.functional.silu(self._gate(z)) * self._up(z))

    def scores(self, states: torch.Tensor, depths: Sequence[int]) -> torch.Tensor:
        return self._output(self._rms(states) * self._output_norm)

    def _rms(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self._eps)


class MedusaHeads:
    """The file's second kind. A state is the target's hidden state itself, whatever tokens follow."""

    token_ids: list[int] | None = None

    def __init__(self, heads: list[tuple[list[LinearOp], LinearOp]], vocab_size: int) -> None:
        """`heads[i]`: its residual blocks and its vocabulary matrix."""
        self.depths: int | None = len(heads)
        self._heads = heads
        self._vocab_size = vocab_size

    def advance(self, states: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
        return states

    def scores(self, states: torch.Tensor, depths: Sequence[int]) -> torch.Tensor:
        out = states.new_empty(states.shape[0], self._vocab_size)
        for depth in set(depths):
            rows = [r for r, d in enumerate(depths) if d == depth]
            blocks, last = self._heads[depth]
            x = states[rows]
            for block in blocks:
                x = x + torch.nn.functional.silu(block(x))
            out[rows] = last(x)[:, : self._vocab_size]
        return out


def load_heads(file: TensorFile, target: Target, *, make_linear: LinearMaker = torch_linear) -> HeadModel:
    """Read either kind. Raises ModelFileError naming the file and what is wrong in it."""
    if file.format != FORMAT and any(name not in file.tensors for name in _RECURRENT):
        return _medusa(file, target.shape.hidden, target.shape.vocab_size, make_linear)
    missing = [name for name in _RECURRENT if name not in file.tensors]
    if missing:
        file.refuse(f"tensors are missing: {', '.join(missing)}")
    hidden, width = target.shape.hidden, file.rows("gate")
    ids = file.token_ids(target.shape.vocab_size)
    shapes = {"gate": (width, 2 * hidden), "up": (width, 2 * hidden), "down": (hidden, width), "output": (len(ids), hidden)}
    tensors = {name: file.take(name, shapes.get(name, (hidden,))) for name in _RECURRENT[:-1]}
    tensors["token_ids"] = file.tensors["token_ids"]
    return RecurrentHead(tensors, file.number("norm_eps", 1e-5), target.weights.embedding, make_linear)


def _medusa(file: TensorFile, hidden: int, vocab_size: int, make_linear: LinearMaker) -> MedusaHeads:
    parts: dict[int, dict[int, dict[str, str]]] = {}  # head, place in it, what -> name in the file
    for name in file.tensors:
        match = _MEDUSA.fullmatch(name)
        if match is None:
            file.refuse(f"tensor {name} belongs to no known kind of heads ({KNOWN_HEADS})")
        parts.setdefault(int(match[1]), {}).setdefault(int(match[2]), {})[match[3]] = name
    if not parts or sorted(parts) != list(range(len(parts))):
        file.refuse(f"heads are numbered {sorted(parts)}; 0, 1, ... without gaps was expected")
    heads = []
    for index in range(len(parts)):
        layers = parts[index]
        last = max(layers)
        if sorted(layers) != list(range(last + 1)) or "weight" not in layers[last]:
            file.refuse(f"head {index} must be residual blocks and then a vocabulary matrix")
        blocks = []
        for place in range(last):
            if "linear.weight" not in layers[place]:
                file.refuse(f"tensor medusa_head.{index}.{place}.linear.weight is missing")
            weight = file.take(layers[place]["linear.weight"], (hidden, hidden))
            bias = file.vector(layers[place]["linear.bias"], hidden) if "linear.bias" in layers[place] else None
            blocks.append(make_linear(DenseWeight(weight, bias)))
        name = layers[last]["weight"]
        rows = file.rows(name)
        if rows < vocab_size:
            file.refuse(f"head {index} scores {rows} tokens, the target has {vocab_size}: another tokenizer's heads")
        heads.append((blocks, make_linear(DenseWeight(file.take(name, (rows, hidden))[:vocab_size].contiguous()))))
    return MedusaHeads(heads, vocab_size)
