"""config.json of a decoder -> ModelFacts: what a token leaves in the cache of every layer, and how many weights there are.

Knows the field names of the usual families, mixtures, sliding windows and latent attention. Refuses to know bytes, memory and
whether Forespeak can run the model: planning needs sizes only, so it reads more families than the loader does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec.errors import ModelFileError

GROUPS = ("embedding", "output", "layers", "experts", "small")


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one token leaves in one layer. `window`: keys that a later token can still see; None = all."""

    elements: int  # numbers, keys and values together
    row: int  # numbers that share a scale when the cache is quantised
    window: int | None = None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes of one model. `parameters` has the GROUPS: layer matrices, expert matrices, and norms, biases and routers as small."""

    name: str
    family: str
    context: int  # longest conversation the config declares, in tokens
    layers: tuple[LayerCache, ...]
    parameters: Mapping[str, int]
    active: int  # parameters that one token meets
    stored_type: str = "bf16"  # weight type of the published checkpoint
    stored_bytes: int | None = None  # of the weight files that are here, when they are

    @property
    def total(self) -> int:
        return sum(self.parameters.values())


class Sizes:
    """Typed reads from a config; an error names the file and the field."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where, self.values = where, values

    def count(self, name: str, default: int | None = None, low: int = 1) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 1 << 40:
            raise ModelFileError(f"{self.where}: {name}: {value!r}; it must be a whole number of at least {low}")
        return value

    def maybe(self, name: str) -> int | None:
        return None if self.values.get(name) is None else self.count(name)


Windows = Callable[[Sizes, int], list[int | None]]


def _full(_: Sizes, layers: int) -> list[int | None]:
    return [None] * layers


def _same(default: int | None) -> Windows:
    """One window for all layers; null says none, absence is the family's default."""

    def read(sizes: Sizes, layers: int) -> list[int | None]:
        window = sizes.maybe("sliding_window") if "sliding_window" in sizes.values else default
        return [window] * layers

    return read


def _every(full_every: int, field: str = "sliding_window", default: int | None = None) -> Windows:
    """Windowed layers but for every n-th."""

    def read(sizes: Sizes, layers: int) -> list[int | None]:
        every = sizes.count("sliding_window_pattern", full_every)
        window = sizes.count(field, default)
        return [None if (i + 1) % every == 0 else window for i in range(layers)]

    return read


def _switched(sizes: Sizes, layers: int) -> list[int | None]:
    """Qwen's: off unless use_sliding_window, and then only behind the first max_window_layers."""
    if not sizes.values.get("use_sliding_window"):
        return [None] * layers
    first = sizes.count("max_window_layers", 28, low=0)
    return [None if i < first else sizes.count("sliding_window", 4096) for i in range(layers)]


@dataclass(frozen=True, slots=True)
class Family:
    """How a family departs from plain Llama, as far as sizes go."""

    windows: Windows = _full
    head_dim: int | None = None  # when the config has none; None = hidden / heads
    tied: bool = False  # what an absent tie_word_embeddings means
    norms: int = 2  # vectors of `hidden` in a layer
    qk_norm: bool = False
    qkv_bias: bool = False
    expert_bias: bool = False


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "llama4_text": Family(_every(4, "attention_chunk_size", 8192)),
    "mistral": Family(_same(4096)),
    "mixtral": Family(_same(None)),
    "qwen2": Family(_switched, qkv_bias=True),
    "qwen3": Family(_switched, 128, qk_norm=True),
    "qwen3_moe": Family(_switched, qk_norm=True),
    "gemma2": Family(_every(2, default=4096), 256, True, 4),
    "gemma3_text": Family(_every(6, default=4096), 256, True, 4, True),
    "phi3": Family(_same(None)),
    "gpt_oss": Family(_every(2, default=128), 64, expert_bias=True),
    "deepseek_v2": Family(),
    "deepseek_v3": Family(),
    "kimi_k2": Family(),
    "glm4_moe": Family(head_dim=128, qkv_bias=True),
}


def from_config(name: str, where: str, config: Mapping[str, Any], stored_bytes: int | None = None) -> ModelFacts:
    """Facts of a parsed config.json; a multimodal config's text part is taken. Raises ModelFileError naming the field."""
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        config = {**config, **inner}
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None or not isinstance(kind, str):
        raise ModelFileError(f"{where}: model_type: {kind!r} is not known to plan; known: {', '.join(FAMILIES)}")
    sizes = Sizes(where, config)
    layers = sizes.count("num_hidden_layers")
    cache, attention, small = _attention(sizes, family, layers)
    hidden, vocabulary = sizes.count("hidden_size"), sizes.count("vocab_size")
    mlp = [_mlp(sizes, family, i) for i in range(layers)]
    tied = config.get("tie_word_embeddings", family.tied)
    parameters = {
        "embedding": vocabulary * hidden,
        "output": 0 if tied else vocabulary * hidden,
        "layers": layers * attention + sum(m.dense for m in mlp),
        "experts": sum(m.experts for m in mlp),
        "small": hidden + layers * (small + family.norms * hidden) + sum(m.small for m in mlp),
    }
    # A token reads its own row of the embedding, which counts only where it is the output matrix too.
    active = sum(parameters.values()) - sum(m.idle for m in mlp) - (0 if tied else vocabulary * hidden)
    quantised = config.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
    windows = _windows(sizes, family, layers)
    return ModelFacts(
        name=name,
        family=kind,
        context=sizes.count("max_position_embeddings", 2048),
        layers=tuple(LayerCache(*cache, window) for window in windows),
        parameters=parameters,
        active=active,
        stored_type=method if method in ("mxfp4", "fp8") else "bf16",
        stored_bytes=stored_bytes,
    )


def _windows(sizes: Sizes, family: Family, layers: int) -> list[int | None]:
    kinds = sizes.values.get("layer_types")
    if kinds is None:
        return family.windows(sizes, layers)
    known: dict[str, Callable[[], int | None]] = {
        "full_attention": lambda: None,
        "sliding_attention": lambda: sizes.count("sliding_window"),
        "chunked_attention": lambda: sizes.count("attention_chunk_size"),
    }
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in known for kind in kinds):
        raise ModelFileError(f"{sizes.where}: layer_types: {layers} entries are wanted, each one of {', '.join(known)}")
    return [known[kind]() for kind in kinds]


def _attention(sizes: Sizes, family: Family, layers: int) -> tuple[tuple[int, int], int, int]:
    """((cached numbers of a token, numbers a scale), matrix parameters, small parameters) of one layer."""
    hidden, heads = sizes.count("hidden_size"), sizes.count("num_attention_heads")
    latent = sizes.maybe("kv_lora_rank")
    if latent is not None:  # multi-head latent attention (DeepSeek-V2, 2024): one latent and one rotary key for all heads
        rope, nope = sizes.count("qk_rope_head_dim"), sizes.count("qk_nope_head_dim")
        value, rank = sizes.count("v_head_dim"), sizes.maybe("q_lora_rank")
        query = heads * (nope + rope)
        queries = hidden * query if rank is None else rank * (hidden + query)
        matrices = queries + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
        return (latent + rope, latent + rope), matrices, latent + (rank or 0)
    kv = sizes.count("num_key_value_heads", heads)
    dim = sizes.maybe("head_dim") or family.head_dim or _shared_out(sizes, "hidden_size", "num_attention_heads")
    small = 2 * dim if family.qk_norm else 0
    if family.qkv_bias or sizes.values.get("attention_bias"):
        small += (heads + 2 * kv) * dim
    return (2 * kv * dim, dim), 2 * hidden * heads * dim + 2 * hidden * kv * dim, small


def _shared_out(sizes: Sizes, width: str, heads: str) -> int:
    """Numbers of a head where the file does not say: an equal share of the width."""
    share = sizes.count(width) // sizes.count(heads)
    if not share:
        raise ModelFileError(f"{sizes.where}: {heads}: {sizes.count(heads)}; {width} is only {sizes.count(width)}")
    return share


@dataclass(frozen=True, slots=True)
class _Mlp:
    """Parameters of one layer's MLP. `idle`: those of the experts that one token does not meet."""

    dense: int
    experts: int = 0
    small: int = 0  # the router, and the experts' biases where they have any
    idle: int = 0


def _mlp(sizes: Sizes, family: Family, layer: int) -> _Mlp:
    """All these families' MLPs are gated: three matrices."""
    hidden, wide = sizes.count("hidden_size"), sizes.count("intermediate_size")
    values = sizes.values
    experts = next((sizes.count(n) for n in ("num_local_experts", "n_routed_experts", "num_experts") if values.get(n)), 0)
    if not experts or not _is_mixture(sizes, layer):
        return _Mlp(3 * hidden * (sizes.maybe("intermediate_size_mlp") or wide))
    inner = sizes.maybe("moe_intermediate_size") or wide
    each = 3 * hidden * inner
    shared = sizes.count("n_shared_experts", 1 if values.get("model_type") == "llama4_text" else 0, low=0)
    biases = 2 * inner + hidden if family.expert_bias else 0
    idle = (experts - sizes.count("num_experts_per_tok")) * (each + biases)
    return _Mlp(shared * each, experts * each, experts * (hidden + 1 + biases), idle)


def _is_mixture(sizes: Sizes, layer: int) -> bool:
    if layer < sizes.count("first_k_dense_replace", 0, low=0) or layer in (sizes.values.get("mlp_only_layers") or ()):
        return False
    step = sizes.maybe("decoder_sparse_step") or sizes.maybe("interleave_moe_layer_step") or 1
    return (layer + 1) % step == 0


def from_gguf(name: str, path: Path) -> ModelFacts:
    """Facts of a GGUF file: sizes from its metadata, weights counted tensor by tensor."""
    from spec.models.gguf_file import GGUFFile, LazyArray

    file = GGUFFile(path)
    kind = str(file.metadata.get("general.architecture"))
    prefix = f"{kind}."
    values: dict[str, Any] = {}
    for key, value in file.metadata.items():
        if key.startswith(prefix):
            values[key.removeprefix(prefix)] = list(value) if isinstance(value, LazyArray) else value
    sizes = Sizes(str(path), values)
    layers, heads = sizes.count("block_count"), values.get("attention.head_count")
    counts = values.get("attention.head_count_kv", heads)
    per_layer = counts if isinstance(counts, list) else [counts] * layers
    if len(per_layer) != layers or not all(isinstance(count, int) and count >= 0 for count in per_layer):
        raise ModelFileError(f"{path}: {prefix}attention.head_count_kv: {str(counts)[:80]}; {layers} head counts are wanted")
    windows = _gguf_windows(sizes, kind, layers)
    latent = sizes.maybe("attention.kv_lora_rank")
    if latent is not None:
        row = latent + sizes.count("rope.dimension_count")
        cache = [LayerCache(row, row, window) for window in windows]
    else:
        dim = sizes.maybe("attention.key_length") or _shared_out(sizes, "embedding_length", "attention.head_count")
        both = dim + sizes.count("attention.value_length", dim)
        cache = [LayerCache(n * both, dim, window) for n, window in zip(per_layer, windows, strict=True)]
    parameters = dict.fromkeys(GROUPS, 0)
    for tensor in file.tensors.values():
        size = 1
        for extent in tensor.shape:
            size *= extent
        parameters[_group(tensor.name, len(tensor.shape))] += size
    share = sizes.count("expert_used_count", 1, low=0) / max(1, sizes.count("expert_count", 1, low=0))
    active = sum(parameters.values()) - round(parameters["experts"] * (1.0 - share))
    if parameters["output"]:
        active -= parameters["embedding"]
    stored = sum(tensor.nbytes for tensor in file.tensors.values())
    return ModelFacts(name, kind, sizes.count("context_length"), tuple(cache), parameters, active, "stored", stored)


def _gguf_windows(sizes: Sizes, kind: str, layers: int) -> list[int | None]:
    """The file has one window; which layers it holds for is the architecture's affair."""
    window = sizes.maybe("attention.sliding_window") if sizes.values.get("attention.sliding_window") else None
    every = {"gpt-oss": 2, "gemma2": 2, "gemma3": 6}.get(kind, 0)
    return [None if every and (i + 1) % every == 0 else window for i in range(layers)]


def _group(name: str, dimensions: int) -> str:
    if name == "token_embd.weight":
        return "embedding"
    if name == "output.weight":
        return "output"
    if "_exps." in name:
        return "experts" if dimensions > 2 else "small"
    return "layers" if dimensions > 1 and "gate_inp" not in name else "small"
