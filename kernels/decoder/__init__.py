"""decoder: a whole Llama-family decoder stack over the paged store in one call.

Composed of the ops beside it; a native version runs all layers inside one thread team, so that a step pays no Python
between layers. Promise: the logits of a node depend on its own token path only, bit for bit, never on the row count, the
tree's shape, the chunking, the slots its keys lie in or the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.batch import KVTensors, PackedInputs, StepInputs
from kernels.draft_tree import GrowthRules, TreeGrower
from kernels.linear import LayerWeight, Weight


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Plain sizes and constants of one decoder. `vocab_size` counts real tokens only (padding rows are cut at load)."""

    layers: int
    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    attention_scale: float  # usually head_dim ** -0.5
    max_position: int  # rows of the rotary tables
    sliding_window: int | None = None  # keys seen back from a node, itself included; None = all


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_norm: torch.Tensor  # [hidden] float32; empty = the input as it is
    q: LayerWeight  # [q_heads * head_dim, hidden]
    k: LayerWeight  # [kv_heads * head_dim, hidden]
    v: LayerWeight  # [kv_heads * head_dim, hidden]
    o: LayerWeight  # [hidden, q_heads * head_dim]
    mlp_norm: torch.Tensor  # [hidden] float32
    gate: LayerWeight  # [intermediate, hidden]
    up: LayerWeight  # [intermediate, hidden]
    down: LayerWeight  # [hidden, intermediate]
    q_norm: torch.Tensor | None = None  # [head_dim] float32, per-head RMSNorm before rotation (Qwen3)
    k_norm: torch.Tensor | None = None  # [head_dim] float32


@dataclass(frozen=True, slots=True)
class Fusion:
    """The first layer's input made of a token and features that came with it (EAGLE, Li et al. 2024):

    x = weight [ rms(features) * feature_norm ; rms(embedding of the token) * token_norm ]
    """

    feature_norm: torch.Tensor  # [features] float32; empty = as they are
    token_norm: torch.Tensor  # [hidden] float32; empty = as it is
    weight: Weight  # [hidden, features + hidden]


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: Weight  # [rows >= vocab_size, hidden]; row lookups only
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor  # [hidden] float32; empty = the last layer's output as it is
    lm_head: Weight  # [vocab_size, hidden]; may share tensors with `embedding`
    rope_cos: torch.Tensor  # [max_position, head_dim / 2] float32, attention factor of yarn included
    rope_sin: torch.Tensor  # [max_position, head_dim / 2] float32; rotation pairs channel i with i + head_dim / 2
    fusion: Fusion | None = None  # None: a token's embedding alone is the first layer's input


@dataclass(frozen=True, slots=True)
class DecoderOutput:
    """What one pass gives. Tensors are owned by the caller and stay valid."""

    hidden: torch.Tensor  # [N, hidden] float32, after the final norm, every node
    argmax: torch.Tensor  # [R] int32, most probable token of each scored node; ties go to the lowest id
    logits: torch.Tensor | None  # [R, vocab_size] float32 when asked for


class Decoder(Protocol):
    """One loaded model on one device. Writes K and V of every node to `store` and nothing else."""

    shape: DecoderShape

    def forward(self, inputs: StepInputs, store: KVTensors, need_logits: bool) -> DecoderOutput: ...


PackedOutput = tuple[list[int], torch.Tensor | None, torch.Tensor, bool]
PackedPass = Callable[[PackedInputs, bool], PackedOutput]


class PackedDecoder(Decoder, Protocol):
    """A decoder that reads plain buffers: a short pass takes about as long as ten tensors to make."""

    def over(self, store: KVTensors) -> PackedPass:
        """`forward` over one store as a function of (inputs, need_logits): argmax [R], logits [R, vocab_size] when asked for, hidden
        [N, hidden], and whether all of hidden is finite. What it returns is valid until its next call; hidden, where the function has a number
        `held`, until as many calls later."""


Drafted = tuple[torch.Tensor, Sequence[int], Sequence[float]]


class FusedDecoder(Protocol):
    """A decoder that may have a fusion, and then every node comes with `features` [N, width] float32; without one they are None."""

    shape: DecoderShape

    def forward(
        self, inputs: StepInputs, store: KVTensors, need_logits: bool, features: torch.Tensor | None = None
    ) -> DecoderOutput: ...

    def draft(
        self,
        inputs: PackedInputs,
        store: KVTensors,
        features: torch.Tensor | None,
        k: int,
        temperature: Sequence[float] | None = None,
    ) -> Drafted:
        """`forward` and `top_shares` at once: hidden [N, hidden], and for every scored node its k best tokens and their shares, one
        node after the other. `temperature`: one number a scored node, None = 1."""


class GrowingDecoder(FusedDecoder, Protocol):
    """A decoder that drafts whole trees at once."""

    def grower(self, store: KVTensors, rules: GrowthRules) -> TreeGrower | None:
        """Over one store; None where this decoder's trees cannot be grown so."""


class HostDecoder(FusedDecoder, Protocol):
    """A decoder that others can sit beside."""

    def beside(self, shape: DecoderShape, weights: DecoderWeights) -> FusedDecoder:
        """A decoder of the same kind on the same device that reads token rows from this one's embedding, whatever its own weights
        say: they are not held twice."""
