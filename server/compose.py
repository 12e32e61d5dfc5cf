"""The composition root: settings in, a ready engine out. The one place that knows which concrete parts exist.

It chooses kernels, weights, stores, drafters and the speculator, and nothing after it asks which ones they are.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib.metadata
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import kernels
from drafters import registry
from drafters.draws import TopShares
from drafters.layer_models import LayerModel, quantised
from kernels import native
from kernels.batch import KVTensors, bytes_per_token, fitting
from kernels.decoder import DecoderShape, DecoderWeights, FusedDecoder, HostDecoder
from kernels.decoder.placement import placed
from kernels.decoder.reference import ReferenceDecoder
from kernels.kv_slots import reference as slots_reference
from kernels.linear import BlockWeight
from kernels.sample import reference as sample_reference
from kernels.suffix_index import SuffixOps
from kernels.suffix_index import reference as suffix_reference
from kernels.top_shares import reference as top_shares_reference
from kernels.whole_store import why_not
from server.gpu_memory import kv_bytes, largest_step, step_bytes
from server.models import resolve
from server.settings import Settings
from server.tokenizer import Tokenizer, load_tokenizer
from server.wire import Ready
from spec.config import EngineConfig
from spec.drafter import Drafter
from spec.engine import Engine
from spec.errors import ConfigError
from spec.grammar import GrammarCompiler
from spec.models import LoadedModel, load_model
from spec.pages import PagePool
from spec.sampling import SampleOps
from spec.speculator import Speculator
from spec.store import Move
from spec.target import TargetModel

# Bits a weight of trained drafters on the CPU: of their layers, and of their vocabulary matrix.
DRAFT_BITS, DRAFT_HEAD_BITS = 8, 4

_KV_TYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float8": torch.float8_e4m3fn, "int8": torch.uint8}


def cache_root(settings: Settings) -> Path:
    return Path(settings.cache_dir).expanduser() if settings.cache_dir else Path.home() / ".cache" / "forespeak"


def check_kernels_package() -> None:
    """Another distribution named `kernels` would shadow ours at import and fail much later in a puzzling way."""
    ours = Path(__file__).resolve().parent.parent / "kernels" / "__init__.py"
    try:
        version = importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        version = None
    found = Path(kernels.__file__ or "").resolve()
    if version is not None or found != ours:
        raise ConfigError(
            f"a package named 'kernels' ({version or found}) is installed in this environment and collides with Forespeak's own; "
            "remove it: pip uninstall kernels"
        )


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything loaded once and shared by the engines of one process (verify builds many over the same weights)."""

    settings: Settings
    model: LoadedModel
    tokenizer: Tokenizer
    decoder: HostDecoder
    backend: Backend
    cache: Path
    eos_ids: tuple[int, ...]
    grammars: GrammarCompiler

    @property
    def kv_type(self) -> str:
        """What keys and values are kept in, by the setting's names. Of a model whose weights are whole numbers they are too, where the
        backend is faster with them."""
        if self.settings.kv_type != "auto":
            return self.settings.kv_type
        if self.settings.weights == "float32":
            return "float32"
        whole = self.backend.prefers_int8 and isinstance(self.model.weights.layers[0].down, BlockWeight)
        return "int8" if whole and why_not(self.model.shape.head_dim, self.settings.page_size) is None else "bfloat16"

    @property
    def kv_dtype(self) -> torch.dtype:
        return _KV_TYPES[self.kv_type]


def load_parts(settings: Settings) -> Parts:
    """Load weights and tokenizer. Raises ConfigError or ModelFileError with one clear line."""
    check_kernels_package()
    cache = cache_root(settings)
    backend = choose_backend(settings)
    if settings.kv_type not in ("auto", *backend.kv_types):
        raise ConfigError(
            f"--kv-type {settings.kv_type} is not for the {backend.name} kernels; they keep {' or '.join(backend.kv_types)}"
        )
    paths = resolve(settings.model, cache)
    tokenizer = load_tokenizer(paths.weights, cache / "tokenizers")
    model = load_model(
        paths.weights,
        weights=settings.weights,
        context=settings.context or None,
        quantise=settings.quantise,
        published=backend.published,
    )
    model = _placed(model.trimmed(tokenizer.vocab_size), settings.device)
    eos_ids = tuple(sorted({*model.eos_ids, *tokenizer.eos_ids}))
    grammars = GrammarCompiler(tokenizer.tokenizer_json(), eos_ids, model.shape.vocab_size)
    parts = Parts(settings, model, tokenizer, backend.make(model), backend, cache, eos_ids, grammars)
    reason = why_not(model.shape.head_dim, settings.page_size) if parts.kv_dtype == torch.uint8 else None
    if reason is not None:
        raise ConfigError(f"--kv-type {parts.kv_type}: {reason}")
    return parts


def _placed(model: LoadedModel, device: str) -> LoadedModel:
    return dataclasses.replace(model, weights=placed(model.weights, device))


def _nothing() -> None:
    pass


def _as_stored(weights: DecoderWeights) -> DecoderWeights:
    return weights


@dataclass(frozen=True, slots=True)
class Backend:
    """One family of kernels: how a decoder is made from weights, and the ops the engine calls itself."""

    name: str
    make: Callable[[LoadedModel], HostDecoder]
    ops: SampleOps
    move: Move
    draft_weights: Callable[[DecoderWeights], DecoderWeights] = _as_stored  # the form in which drafters' own matrices are kept
    top: TopShares = top_shares_reference.top_shares
    suffix: SuffixOps = suffix_reference
    trim: Callable[[], None] = _nothing  # gives freed memory back to the system
    kv_types: tuple[str, ...] = ("bfloat16", "float32", "float8", "int8")  # what keys and values may be kept in
    prefers_int8: bool = False  # of these, where the weights are whole numbers too
    published: bool = False  # the layers' matrices of quantised safetensors stay in their published form


def choose_backend(settings: Settings) -> Backend:
    """The kernels to compute with. Raises ConfigError when what was asked for cannot run here."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda was asked for, but PyTorch sees no CUDA device here; use --device cpu")
    name = settings.backend
    if name == "auto":
        name = "triton" if settings.device == "cuda" else "native" if native.load() is not None else "reference"
    return _BACKENDS[name](settings)


def _reference(settings: Settings) -> Backend:
    torch.set_num_threads(thread_count(settings))
    return Backend(
        "reference", lambda model: ReferenceDecoder(model.shape, model.weights), sample_reference, slots_reference.move
    )


def _native(settings: Settings) -> Backend:
    from kernels.decoder.native import NativeDecoder
    from kernels.kv_slots import native as slots
    from kernels.sample.native import NativeSample
    from kernels.suffix_index.native import NativeSuffix
    from kernels.top_shares.native import NativeTopShares

    library = native.load()
    if library is None:
        raise ConfigError("the native kernels are not built (no C++ compiler was found); use --backend reference")
    torch.set_num_threads(1)  # the kernels have their own threads; torch only makes small tensors here
    threads = thread_count(settings)
    return Backend(
        "native",
        lambda model: NativeDecoder(model.shape, model.weights, threads),
        NativeSample(threads),
        slots.move,
        lambda weights: quantised(weights, bits=DRAFT_BITS, head_bits=DRAFT_HEAD_BITS),
        NativeTopShares(threads),
        NativeSuffix(),
        trim=library.trim,
        kv_types=("bfloat16", "float32", "int8"),
        prefers_int8=True,
    )


def _triton(settings: Settings) -> Backend:
    from kernels.decoder.triton import TritonDecoder
    from kernels.kv_slots import triton as slots
    from kernels.sample import triton as sample
    from kernels.top_shares.triton import top_shares

    return Backend(
        "triton",
        lambda model: TritonDecoder(model.shape, model.weights, settings.deterministic),
        sample,
        slots.move,
        top=top_shares,
        kv_types=("bfloat16", "float32", "float8", "int8"),
        published=True,
    )


_BACKENDS = {"reference": _reference, "native": _native, "triton": _triton}


def thread_count(settings: Settings) -> int:
    """Compute threads: those asked for, else one per core this process may use."""
    return settings.threads or len(os.sched_getaffinity(0))


def kv_bytes_per_token(shape: DecoderShape, dtype: torch.dtype) -> int:
    return bytes_per_token(shape.layers, shape.kv_heads, shape.head_dim, dtype)


def _kv_memory(settings: Settings, shape: DecoderShape) -> int:
    """What was asked for in bytes, or what a share of the GPU leaves beside weights and the largest step."""
    if not settings.gpu_memory:
        return settings.kv_memory
    if settings.device != "cuda":
        raise ConfigError(f"--gpu-memory is for --device cuda; on {settings.device} give --kv-memory")
    step = largest_step(settings.chunk_tokens, settings.max_sequences, settings.max_tree_nodes)
    return kv_bytes(settings.gpu_memory, step_bytes(shape, step, settings.deterministic), torch.cuda.mem_get_info)


def make_engine(
    parts: Parts,
    drafters: str | None = None,
    speculator: Callable[[Parts, EngineConfig, TargetModel, Sequence[Drafter]], Speculator] | None = None,
) -> Engine:
    """An engine with its own pages and stores over the parts' weights. `drafters` overrides the setting of that name."""
    settings = parts.settings
    shape = parts.model.shape
    chosen = settings.drafters if drafters is None else drafters
    plan = registry.plan(chosen, _drafting_target(parts))
    per_token = kv_bytes_per_token(shape, parts.kv_dtype) + sum(
        kv_bytes_per_token(s, fitting(parts.kv_dtype, s.head_dim, settings.page_size)) for s in plan.shapes
    )
    kv_memory = _kv_memory(settings, shape)
    num_pages = kv_memory // (per_token * settings.page_size)
    if num_pages < 2:
        raise ConfigError(
            f"kv_memory of {kv_memory} bytes holds {num_pages} pages of {settings.page_size} tokens "
            f"({per_token} bytes a token); give at least {2 * per_token * settings.page_size} bytes with --kv-memory"
        )
    context = min(parts.model.context, num_pages * settings.page_size)
    config = EngineConfig(
        num_pages=num_pages,
        page_size=settings.page_size,
        context=context,
        max_sequences=settings.max_sequences,
        chunk_tokens=settings.chunk_tokens,
        max_tree_nodes=settings.max_tree_nodes,
        prefix_cache=settings.prefix_cache,
        model_salt=f"{parts.model.digest}/{parts.backend.name}/{parts.kv_type}/{settings.weights}",
    )
    pool = PagePool(num_pages)
    device = settings.device
    store = KVTensors.allocate(
        shape.layers, num_pages, shape.kv_heads, shape.head_dim, settings.page_size, parts.kv_dtype, device
    )
    target = TargetModel(parts.decoder, store)
    built = registry.build(plan, pool, config, parts.kv_dtype, device)
    spec = (speculator or default_speculator)(parts, config, target, built)
    return Engine(
        config,
        target,
        built,
        spec,
        parts.eos_ids,
        grammar_compiler=parts.grammars,
        pool=pool,
        ops=parts.backend.ops,
        move=parts.backend.move,
    )


def _drafting_target(parts: Parts) -> registry.Target:
    """The target as drafters see it; a draft model with other tokens is refused with both names in the message."""

    def load(name: Path) -> LoadedModel:
        path = resolve(str(name), parts.cache).weights  # an alias or a hub id as well as a path
        tokenizer = load_tokenizer(path, parts.cache / "tokenizers")
        ours = parts.tokenizer
        if tokenizer.fingerprint != ours.fingerprint:
            why = " of the same size, but with other tokens" if tokenizer.vocab_size == ours.vocab_size else ""
            raise ConfigError(
                f"the draft model's tokenizer ({tokenizer.name}, {tokenizer.vocab_size} tokens) is not the target's "
                f"({ours.name}, {ours.vocab_size} tokens){why}; a drafter must share the target's vocabulary"
            )
        model = load_model(path, weights=parts.settings.weights, published=parts.backend.published)
        return _placed(model.trimmed(parts.tokenizer.vocab_size), parts.settings.device)

    def make_beside(model: LayerModel) -> FusedDecoder:
        return parts.decoder.beside(model.shape, parts.backend.draft_weights(model.weights))

    return registry.Target(
        name=parts.model.name,
        shape=parts.model.shape,
        weights=parts.model.weights,
        load=load,
        make_decoder=parts.backend.make,
        make_beside=make_beside,
        top=parts.backend.top,
        suffix=parts.backend.suffix,
        device=parts.settings.device,
        vocabulary=parts.settings.draft_vocabulary,
    )


def shipped_drafters(model_name: str) -> list[str]:
    """Kinds of trained drafters that ship for a model."""
    return [kind for kind in ("heads", "student") if registry.shipped(model_name, kind) is not None]


def draft_vocabularies(parts: Parts, drafters: str) -> dict[str, tuple[int, ...]]:
    """The tokens that each of these drafters can say, rising, of those that have a list of their own."""
    return registry.said_by(drafters, parts.model.name)


def default_speculator(parts: Parts, config: EngineConfig, target: TargetModel, drafters: Sequence[Drafter]) -> Speculator:
    """The price rule over a cost table measured here, or the fixed shape the settings ask for."""
    from server.speculation import measured_price_speculator, starting_calibration
    from spec.shapes import ShapeSpeculator

    if parts.settings.tree_shape:
        return ShapeSpeculator(parts.settings.tree_shape)
    path = parts.cache / "calibration" / f"{parts.model.digest[:16]}.json"
    name, chosen = parts.model.name, parts.settings.drafters
    calibration = starting_calibration(
        path, registry.shipped_calibration(name), registry.weights_of(chosen, name), registry.not_shipped(chosen, name)
    )
    return measured_price_speculator(target, config, path, calibration, measure=bool(drafters))


def build_engine(settings: Settings) -> tuple[Engine, Ready]:
    """What the engine process runs. Everything is loaded, measured and warm when it returns."""
    start = time.perf_counter()
    parts = load_parts(settings)
    warming = threading.Thread(target=parts.grammars.warm)  # its vocabulary trie would hold up the first grammar's neighbours
    warming.start()
    engine = make_engine(parts)
    warming.join()
    name, backend, vocabulary = parts.model.name, parts.backend, parts.model.shape.vocab_size
    del parts, warming  # and with them the weights as they were loaded: the decoder has packed its own
    gc.collect()
    backend.trim()
    ready = Ready(
        model=name,
        vocab_size=vocabulary,
        context=engine.config.context,
        num_pages=engine.config.num_pages,
        page_size=engine.config.page_size,
        drafters=tuple(drafter.name for drafter in engine.drafters),
        backend=backend.name,
        load_seconds=time.perf_counter() - start,
    )
    return engine, ready


def train_drafter(
    settings: Settings,
    flags: Mapping[str, Any],
    speak: Callable[[Tokenizer], Any],
    always: Callable[[Tokenizer], Sequence[int]],
    on_progress: Callable[[str, float, Mapping[str, float]], None],
    stop: Callable[[], bool],
    restart: bool,
) -> tuple[bool, dict[str, Any]]:
    """Write answers and train; see `drafters.training`. (whether the budget was used up, facts of the result)

    `flags` are the fields of its Order. `speak` brings the chat format, `always` the tokens every drafter can say.
    """
    from drafters.training import run  # not loaded by a server
    from drafters.training.order import Places, parse_order

    order = parse_order(flags)
    parts = load_parts(settings)
    target = run.Target(
        model=parts.model,
        decoder=parts.decoder,
        make_engine=lambda: make_engine(parts, "none"),
        speaker=lambda: speak(parts.tokenizer),
        kv_dtype=parts.kv_dtype,
        device=settings.device,
        always=always(parts.tokenizer),
    )
    if not run.write(target, order, on_progress, stop):
        return False, {"answers": str(Places(order).answers)}
    torch.set_num_threads(thread_count(settings))  # the rest is torch's own work
    outcome = run.train(target, order, on_progress, stop, restart)
    facts = {"out": order.out, "steps": outcome.steps, "bytes": outcome.size, "held_out": outcome.figures}
    return outcome.finished, facts


def training_report(log: Path, benches: Sequence[Path]) -> tuple[str, str]:
    """The curves (SVG) and the card (Markdown) of a training log, with what `forespeak bench` measured since."""
    from drafters.training.report import report

    return report(log, benches)
