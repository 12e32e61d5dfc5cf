"""decoder in C++: packs the weights once, then one library call per step. The arithmetic is in native.cpp beside this file."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import Array, c_double

import torch

from kernels.batch import KVTensors, PackedInputs, StepInputs
from kernels.decoder import DecoderOutput, DecoderShape, DecoderWeights, Drafted, LayerWeights
from kernels.decoder.native_pass import NativePass, packed_step
from kernels.draft_tree import GrowthRules
from kernels.draft_tree.native import NativeTreeGrower
from kernels.linear import BlockWeight, LayerWeight, Weight
from kernels.native import NativeError, NativeLibrary, require
from kernels.native.library import ShapeData, check
from kernels.native.tensors import address, step_data, store_data, weight_data

_ATTENTION_NORM, _MLP_NORM, _Q_NORM, _K_NORM, _FINAL_NORM, _COS, _SIN, _FEATURE_NORM, _TOKEN_NORM = range(9)
_EMBEDDING, _HEAD, _FUSION = range(3)

PHASES = (
    "embed",
    "fusion input",
    "fusion",
    "attention input",
    "q k v",
    "rotate and write",
    "attention",
    "output input",
    "output",
    "mlp input",
    "gate up",
    "down input",
    "down",
    "final norm",
    "vocabulary input",
    "vocabulary",
)


_MAY_BE_EMPTY = ("feature_norm", "token_norm", "attention_norm", "final_norm")


def _storage(weight: Weight) -> int:
    return weight.codes.data_ptr() if isinstance(weight, BlockWeight) else weight.values.data_ptr()


class NativeDecoder:
    """A `Decoder` on the CPU. Holds packed copies: the weights given may be dropped afterwards (then `library.trim()`).

    Packed weights are not kept on disk: packing takes a tenth of a second, and mapping a packed file instead would cost 5 to 10 % of
    every step (see docs/performance-log.md). Not for use by two threads at once. `isa` picks an instruction set by name (tests); the best one otherwise.
    Raises NativeError when the library is missing or the sizes do not fit each other.
    """

    def __init__(
        self,
        shape: DecoderShape,
        weights: DecoderWeights,
        threads: int = 1,
        *,
        isa: str | None = None,
        library: NativeLibrary | None = None,
        embedding_of: NativeDecoder | None = None,
    ) -> None:
        """`embedding_of`: read token rows from that decoder's packed embedding instead of packing `weights.embedding`."""
        library = library or require()
        _check_sizes(shape, weights)
        self.shape = shape
        self._library = library
        self._team = library.team(threads)
        self._lender = embedding_of  # keeps what is read from it alive
        features = 0 if weights.fusion is None else weights.fusion.weight.in_features - shape.hidden
        self._features = features
        self._scratch = torch.empty(0, shape.vocab_size)  # logits of a draft pass
        self._handle: int = library.c.fs_decoder_create(library.isa(isa), _shape_data(shape, features))
        for index, layer in enumerate(weights.layers):
            self._set_layer(index, layer)
        self._set_weight(-1, _HEAD, weights.lm_head)
        if embedding_of is not None:
            check(library.c.fs_decoder_lend_embedding(self._handle, embedding_of._handle))
        elif _storage(weights.embedding) != _storage(weights.lm_head):
            self._set_weight(-1, _EMBEDDING, weights.embedding)
        if weights.fusion is not None:
            self._set_weight(-1, _FUSION, weights.fusion.weight)
            self._set_vector(-1, _FEATURE_NORM, weights.fusion.feature_norm)
            self._set_vector(-1, _TOKEN_NORM, weights.fusion.token_norm)
        self._set_vector(-1, _FINAL_NORM, weights.final_norm)
        self._set_vector(-1, _COS, weights.rope_cos)
        self._set_vector(-1, _SIN, weights.rope_sin)

    def beside(self, shape: DecoderShape, weights: DecoderWeights) -> NativeDecoder:
        """Shares the packed embedding and the thread team."""
        return NativeDecoder(shape, weights, self._team.threads, library=self._library, embedding_of=self)

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle is not None:
            self._library.c.fs_decoder_destroy(handle)

    def _set_layer(self, index: int, layer: LayerWeights) -> None:
        for slot, weight in enumerate((layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down)):
            self._set_weight(index, slot, weight)
        self._set_vector(index, _ATTENTION_NORM, layer.attention_norm)
        self._set_vector(index, _MLP_NORM, layer.mlp_norm)
        if layer.q_norm is not None:
            self._set_vector(index, _Q_NORM, layer.q_norm)
        if layer.k_norm is not None:
            self._set_vector(index, _K_NORM, layer.k_norm)

    def _set_weight(self, layer: int, slot: int, weight: LayerWeight) -> None:
        check(self._library.c.fs_decoder_set_weight(self._handle, layer, slot, weight_data(weight)))

    def _set_vector(self, layer: int, which: int, values: torch.Tensor) -> None:
        pointer = address(values, torch.float32, "norms and rotary tables")
        check(self._library.c.fs_decoder_set_vector(self._handle, layer, which, pointer, values.numel()))

    def forward(
        self, inputs: StepInputs, store: KVTensors, need_logits: bool, features: torch.Tensor | None = None
    ) -> DecoderOutput:
        """One pass. Raises NativeError, having computed nothing, when an index is out of bounds or features do not fit."""
        return self._forward(inputs, store, need_logits, features, None)

    def profile(
        self, inputs: StepInputs, store: KVTensors, need_logits: bool = False, features: torch.Tensor | None = None
    ) -> dict[str, float]:
        """Seconds the caller's thread spent in each kind of phase of one pass, waiting included."""
        seconds = (c_double * len(PHASES))()
        self._forward(inputs, store, need_logits, features, seconds)
        return dict(zip(PHASES, seconds, strict=True))

    def over(self, store: KVTensors) -> NativePass:
        """The pass over one store from plain buffers."""
        return NativePass(self, self._library, self._handle, self._team.handle, self.shape, store)

    def grower(self, store: KVTensors, rules: GrowthRules) -> NativeTreeGrower | None:
        """Whole trees over one store. None where the states are not as wide as the features that drafted nodes need."""
        if self._features not in (0, self.shape.hidden):
            return None
        sizes = self.shape.hidden, self.shape.vocab_size, self._features
        return NativeTreeGrower(self, self._library, self._handle, self._team.handle, sizes, store, rules)

    def draft(
        self,
        inputs: PackedInputs,
        store: KVTensors,
        features: torch.Tensor | None,
        k: int,
        temperature: Sequence[float] | None = None,
    ) -> Drafted:
        """One call. Raises NativeError as `forward` does."""
        scored, step = inputs.scored, packed_step(inputs)
        if features is not None:
            step.features = self._features_of(features, inputs.nodes)
        if self._scratch.shape[0] < scored:
            self._scratch = torch.empty(scored, self.shape.vocab_size)
        hidden = torch.empty(inputs.nodes, self.shape.hidden)
        divisors = None if temperature is None else array("f", temperature)
        best, ids, shares = (
            array(code, bytes(4 * count)) for code, count in (("i", scored), ("i", scored * k), ("f", scored * k))
        )
        check(
            self._library.c.fs_decoder_draft(
                self._handle,
                self._team.handle,
                step,
                store_data(store),
                hidden.data_ptr(),
                best.buffer_info()[0],
                self._scratch.data_ptr(),
                k,
                None if divisors is None else divisors.buffer_info()[0],
                ids.buffer_info()[0],
                shares.buffer_info()[0],
            )
        )
        return hidden, ids, shares

    def _features_of(self, features: torch.Tensor, nodes: int) -> int:
        if features.shape != (nodes, self._features):
            raise NativeError(f"features are {list(features.shape)}, expected {[nodes, self._features]}")
        return address(features, torch.float32, "features")

    def _forward(
        self,
        inputs: StepInputs,
        store: KVTensors,
        need_logits: bool,
        features: torch.Tensor | None,
        profile: Array[c_double] | None,
    ) -> DecoderOutput:
        scored = inputs.score_rows.shape[0]
        hidden = torch.empty(inputs.num_nodes, self.shape.hidden)
        argmax = torch.empty(scored, dtype=torch.int32)
        logits = torch.empty(scored, self.shape.vocab_size) if need_logits else None
        step = step_data(inputs)
        if features is not None:
            step.features = self._features_of(features, inputs.num_nodes)
        check(
            self._library.c.fs_decoder_forward(
                self._handle,
                self._team.handle,
                step,
                store_data(store),
                hidden.data_ptr(),
                argmax.data_ptr(),
                None if logits is None else logits.data_ptr(),
                profile,
            )
        )
        return DecoderOutput(hidden=hidden, argmax=argmax, logits=logits)


def _shape_data(shape: DecoderShape, features: int) -> ShapeData:
    return ShapeData(
        shape.layers,
        shape.hidden,
        shape.intermediate,
        shape.q_heads,
        shape.kv_heads,
        shape.head_dim,
        shape.vocab_size,
        shape.max_position,
        shape.sliding_window or 0,
        features,
        shape.norm_eps,
        shape.attention_scale,
    )


def _check_sizes(shape: DecoderShape, weights: DecoderWeights) -> None:
    """Raises NativeError naming the first tensor whose size does not follow from the shape."""
    q_width, kv_width = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if shape.q_heads % shape.kv_heads != 0 or shape.head_dim % 2 != 0 or len(weights.layers) != shape.layers:
        raise NativeError("heads must divide evenly, head_dim must be even and every layer must have its weights")
    expected: list[tuple[str, LayerWeight, int, int]] = [("lm_head", weights.lm_head, shape.vocab_size, shape.hidden)]
    for i, layer in enumerate(weights.layers):
        expected += [
            (f"layer {i} q", layer.q, q_width, shape.hidden),
            (f"layer {i} k", layer.k, kv_width, shape.hidden),
            (f"layer {i} v", layer.v, kv_width, shape.hidden),
            (f"layer {i} o", layer.o, shape.hidden, q_width),
            (f"layer {i} gate", layer.gate, shape.intermediate, shape.hidden),
            (f"layer {i} up", layer.up, shape.intermediate, shape.hidden),
            (f"layer {i} down", layer.down, shape.hidden, shape.intermediate),
        ]
    vectors = [("final_norm", weights.final_norm, shape.hidden)]
    if weights.fusion is not None:
        features = max(1, weights.fusion.weight.in_features - shape.hidden)
        expected.append(("fusion", weights.fusion.weight, shape.hidden, features + shape.hidden))
        vectors += [
            ("feature_norm", weights.fusion.feature_norm, features),
            ("token_norm", weights.fusion.token_norm, shape.hidden),
        ]
    for name, weight, out, width in expected:
        if (weight.out_features, weight.in_features) != (out, width):
            raise NativeError(f"{name} is {weight.out_features} x {weight.in_features}, expected {out} x {width}")
    for i, layer in enumerate(weights.layers):
        vectors += [
            (f"layer {i} attention_norm", layer.attention_norm, shape.hidden),
            (f"layer {i} mlp_norm", layer.mlp_norm, shape.hidden),
        ]
        vectors += [
            (f"layer {i} {name}", norm, shape.head_dim)
            for name, norm in (("q_norm", layer.q_norm), ("k_norm", layer.k_norm))
            if norm is not None
        ]
    table = shape.max_position * shape.head_dim // 2
    vectors += [("rope_cos", weights.rope_cos, table), ("rope_sin", weights.rope_sin, table)]
    for name, tensor, size in vectors:
        if tensor.numel() != size and not (tensor.numel() == 0 and name.endswith(_MAY_BE_EMPTY)):
            raise NativeError(f"{name} has {tensor.numel()} values, expected {size}")
