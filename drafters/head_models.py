"""Trained heads: what a file holds, and the arithmetic that turns a hidden state and tokens into scores. Knows weights;
refuses to know trees, sequences and prices. Runtime only; nothing here trains.

Two kinds of file (safetensors, floats in float32, float16 or bfloat16):

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
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from kernels.linear import DenseWeight, Weight
from kernels.linear.reference import lookup
from spec.errors import ModelFileError

FORMAT = "forespeak.heads/1"
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


def load_heads(
    path: Path,
    *,
    hidden: int,
    vocab_size: int,
    embedding: Weight,
    make_linear: LinearMaker = torch_linear,
    device: str = "cpu",
) -> HeadModel:
    """Read either kind for a target of these sizes. Raises ModelFileError naming the file and what is wrong in it."""
    metadata, tensors = _read(path, device)
    if all(name in tensors for name in _RECURRENT):
        _check_recurrent(path, tensors, hidden, vocab_size)
        try:
            eps = float(metadata.get("norm_eps", "1e-5"))
        except ValueError as error:
            raise ModelFileError(f"{path}: metadata norm_eps is {metadata['norm_eps']!r}; a number was expected") from error
        return RecurrentHead(tensors, eps, embedding, make_linear)
    if metadata.get("format") == FORMAT:
        missing = [name for name in _RECURRENT if name not in tensors]
        raise ModelFileError(f"{path}: tensors are missing: {', '.join(missing)}")
    return _medusa(path, tensors, hidden, vocab_size, make_linear)


def _read(path: Path, device: str) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    try:
        with safe_open(path, framework="pt", device=device) as file:
            return dict(file.metadata() or {}), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ModelFileError(f"{path}: not a readable safetensors file: {error}") from error


def _expect(path: Path, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ModelFileError(
            f"{path}: tensor {name} has shape {list(tensor.shape)}; {list(shape)} was expected for this target"
        )
    if not tensor.is_floating_point():
        raise ModelFileError(f"{path}: tensor {name} is {tensor.dtype}; a float type was expected")
    if not bool(torch.isfinite(tensor).all()):
        raise ModelFileError(f"{path}: tensor {name} holds values that are not finite")


def _check_recurrent(path: Path, tensors: dict[str, torch.Tensor], hidden: int, vocab_size: int) -> None:
    ids, width = tensors["token_ids"], tensors["gate"].shape[0]
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64) or ids.numel() == 0:
        raise ModelFileError(
            f"{path}: tensor token_ids is {ids.dtype} {list(ids.shape)}; a list of int32 or int64 was expected"
        )
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(set(ids.tolist())) != ids.numel():
        raise ModelFileError(f"{path}: token_ids must be distinct ids of the target's {vocab_size} tokens")
    shapes = {"gate": (width, 2 * hidden), "up": (width, 2 * hidden), "down": (hidden, width), "output": (ids.numel(), hidden)}
    for name in _RECURRENT[:-1]:
        _expect(path, name, tensors[name], shapes.get(name, (hidden,)))


def _medusa(
    path: Path, tensors: dict[str, torch.Tensor], hidden: int, vocab_size: int, make_linear: LinearMaker
) -> MedusaHeads:
    parts: dict[int, dict[int, dict[str, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        match = _MEDUSA.fullmatch(name)
        if match is None:
            raise ModelFileError(f"{path}: tensor {name} belongs to no known kind of heads (forespeak.heads/1, Medusa-1)")
        parts.setdefault(int(match[1]), {}).setdefault(int(match[2]), {})[match[3]] = tensor
    if not parts or sorted(parts) != list(range(len(parts))):
        raise ModelFileError(f"{path}: heads are numbered {sorted(parts)}; 0, 1, ... without gaps was expected")
    heads = []
    for index in range(len(parts)):
        layers = parts[index]
        last = max(layers)
        if sorted(layers) != list(range(last + 1)) or "weight" not in layers[last]:
            raise ModelFileError(f"{path}: head {index} must be residual blocks and then a vocabulary matrix")
        blocks = []
        for place in range(last):
            weight, bias = layers[place].get("linear.weight"), layers[place].get("linear.bias")
            if weight is None:
                raise ModelFileError(f"{path}: tensor medusa_head.{index}.{place}.linear.weight is missing")
            _expect(path, f"medusa_head.{index}.{place}.linear.weight", weight, (hidden, hidden))
            if bias is not None:
                _expect(path, f"medusa_head.{index}.{place}.linear.bias", bias, (hidden,))
            blocks.append(make_linear(DenseWeight(weight, None if bias is None else bias.float())))
        matrix = layers[last]["weight"]
        if matrix.dim() != 2 or matrix.shape[0] < vocab_size:
            raise ModelFileError(
                f"{path}: head {index} scores {matrix.shape[0]} tokens, the target has {vocab_size}: another tokenizer's heads"
            )
        _expect(path, f"medusa_head.{index}.{last}.weight", matrix, (matrix.shape[0], hidden))
        heads.append((blocks, make_linear(DenseWeight(matrix[:vocab_size].contiguous()))))
    return MedusaHeads(heads, vocab_size)
