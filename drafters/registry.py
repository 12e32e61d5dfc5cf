"""Which drafters there are and how each is made. The one table; an unknown name lists the known ones.

Two steps, because page memory is divided in between: `plan` loads weights and tells the shapes of the stores that are
needed, `build` makes the drafters over the page pool.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from drafters.at_once import WIDTH, growth_rules
from drafters.draws import TopShares
from drafters.grammar import GrammarDrafter
from drafters.heads import HeadsDrafter
from drafters.layer_models import HEADS_FORMAT, LayerModel, load_attention_head
from drafters.model import FAN, ModelDrafter
from drafters.node_inputs import NodeInputs, TargetStates, TokensOnly
from drafters.published import is_eagle, load_eagle
from drafters.scoring import OneCallScorer
from drafters.student_file import load_student
from drafters.suffix import SuffixDrafter
from drafters.tensor_file import TensorFile
from kernels.batch import KVTensors, fitting
from kernels.decoder import DecoderShape, DecoderWeights, FusedDecoder
from kernels.suffix_index import SuffixOps
from kernels.suffix_index import reference as suffix_reference
from kernels.top_shares.reference import top_shares
from spec.config import EngineConfig
from spec.drafter import Drafter
from spec.errors import ConfigError
from spec.models import LoadedModel
from spec.pages import PagePool

KNOWN = ("suffix", "heads[:PATH]", "model:PATH", "student[:PATH]")
# Trained drafters by model: SHIPPED/<folder_of(name)>/{heads,student}.safetensors and calibration.json
SHIPPED = Path(__file__).parent / "shipped"

_QUANTISED = re.compile(r"[._-](?:i?q\d(?:_[a-z0-9]+)*|b?f(?:p?16|32)|fp32|mxfp4|gguf)\Z")


@dataclass(frozen=True, slots=True)
class Target:
    """What drafters must fit, and how decoders are made on its device."""

    name: str  # short name of the target
    shape: DecoderShape
    weights: DecoderWeights  # embedding rows and vocabulary matrix, for drafters that share them
    load: Callable[[Path], LoadedModel]  # a draft model's weights, trimmed to the target's vocabulary, or a clear error
    make_decoder: Callable[[LoadedModel], FusedDecoder]
    make_beside: Callable[[LayerModel], FusedDecoder]  # a decoder that reads token rows from the target's own embedding
    top: TopShares = top_shares
    suffix: SuffixOps = suffix_reference
    device: str = "cpu"
    vocabulary: int = 0  # most tokens that a trained drafter with a list of its own may say, 0 = all of the list


@dataclass(frozen=True, slots=True)
class Place:
    """Where drafters are built."""

    pool: PagePool
    config: EngineConfig
    kv_dtype: torch.dtype
    device: str


@dataclass(frozen=True, slots=True)
class _Entry:
    make: Callable[[Place], Drafter]
    shape: DecoderShape | None = None  # of the store it needs


@dataclass(frozen=True, slots=True)
class DrafterPlan:
    entries: tuple[_Entry, ...]

    @property
    def shapes(self) -> tuple[DecoderShape, ...]:
        """Shapes of the drafters that need a store of their own."""
        return tuple(entry.shape for entry in self.entries if entry.shape is not None)


def folder_of(model_name: str) -> str:
    """The folder of a model's shipped drafters: its name in lower case, without owner and quantisation.

    `SmolLM2-135M-Instruct.Q4_1` and `HuggingFaceTB--SmolLM2-135M-Instruct` are both `smollm2-135m-instruct`.
    """
    name = model_name.lower().rsplit("--", 1)[-1]
    while (shorter := _QUANTISED.sub("", name)) != name:
        name = shorter
    return name


def shipped(target_name: str, kind: str) -> Path | None:
    path = SHIPPED / folder_of(target_name) / f"{kind}.safetensors"
    return path if path.exists() else None


def shipped_calibration(target_name: str) -> Path | None:
    """What the shipped drafters' scores are worth, as measured where they were trained."""
    path = SHIPPED / folder_of(target_name) / "calibration.json"
    return path if path.exists() else None


def parse(text: str, target_name: str) -> list[tuple[str, Path | None]]:
    """`--drafters` text to (kind, path) pairs. Raises ConfigError."""
    if text in ("", "none"):
        return []
    if text == "auto":
        return [
            ("suffix", None)
        ]  # the heads that ship cost more time than they save (docs/performance-log.md), so they are asked for by name
    pairs: list[tuple[str, Path | None]] = []
    for item in text.split(","):
        kind, _, path = item.strip().partition(":")
        if kind not in _KINDS or (kind == "suffix" and path) or (kind == "model" and not path):
            raise ConfigError(f"unknown drafter {item.strip()!r}; known are auto, none, or a comma list of {', '.join(KNOWN)}")
        if kind in ("heads", "student") and not path:
            found = shipped(target_name, kind)
            if found is None:
                raise ConfigError(
                    f"no trained {kind} ship for {target_name!r}; give a file as {kind}:PATH or train one: forespeak train {kind}"
                )
            pairs.append((kind, found))
        else:
            pairs.append((kind, Path(path) if path else None))
    if len({kind for kind, _ in pairs}) != len(pairs):
        raise ConfigError(f"a drafter is named twice in {text!r}")
    return pairs


def weights_of(text: str, target_name: str) -> dict[str, str]:
    """What names the weights of each named drafter that has some: another file, or a file written anew, has another name."""
    found: dict[str, str] = {}
    for kind, path in parse(text, target_name):
        if path is not None:
            parts = [str(path)]
            if path.exists():
                facts = path.stat()
                parts = [str(path.resolve()), str(facts.st_size), str(facts.st_mtime_ns)]
            found[kind] = hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]
    return found


def not_shipped(text: str, target_name: str) -> set[str]:
    """The named drafters whose weights are not those that ship for the model."""
    return {kind for kind, path in parse(text, target_name) if path is not None and path != shipped(target_name, kind)}


def said_by(text: str, target_name: str) -> dict[str, tuple[int, ...]]:
    """The tokens that each named drafter can say, rising, of those that have a list of their own. Raises as `parse`."""
    found: dict[str, tuple[int, ...]] = {}
    for kind, path in parse(text, target_name):
        if path is not None and path.suffix == ".safetensors" and path.is_file():
            ids = TensorFile.open(path).tensors.get("token_ids")
            if ids is not None:
                found[kind] = tuple(sorted(ids.tolist()))
    return found


def plan(text: str, target: Target) -> DrafterPlan:
    """Load what the named drafters need. Raises ConfigError or ModelFileError; nothing is allocated yet."""
    return DrafterPlan(tuple(_KINDS[kind](path, target) for kind, path in parse(text, target.name)))


def build(plan: DrafterPlan, pool: PagePool, config: EngineConfig, kv_dtype: torch.dtype, device: str) -> list[Drafter]:
    """The drafters, each model with its own store over the target's page ids."""
    place = Place(pool, config, kv_dtype, device)
    drafters = [entry.make(place) for entry in plan.entries]
    if drafters:
        drafters.append(GrammarDrafter())  # costs nothing without a grammar, so it is not asked for by name
    return drafters


# --- the kinds -------------------------------------------------------------------------------------------------------


def _suffix(path: Path | None, target: Target) -> _Entry:
    return _Entry(lambda place: SuffixDrafter(ops=target.suffix))


def _heads(path: Path | None, target: Target) -> _Entry:
    file = TensorFile.open(_needed("heads", path), target.device).saying(target.vocabulary)
    if file.format == HEADS_FORMAT:
        return _layers("heads", load_attention_head(file, target), target, lambda: _states(target))
    if is_eagle(file):
        return _layers("heads", load_eagle(file, target), target, lambda: _states(target))
    drafter = HeadsDrafter.load(file.path, target, device=target.device, top=target.top, vocabulary=target.vocabulary)
    return _Entry(lambda place: drafter)


def _model(path: Path | None, target: Target) -> _Entry:
    return _decoder("model", target.make_decoder(target.load(_needed("model", path))), None, target, TokensOnly)


def _student(path: Path | None, target: Target) -> _Entry:
    path = _needed("student", path)
    if path.suffix == ".safetensors" and path.is_file():
        return _layers(
            "student", load_student(TensorFile.open(path, target.device).saying(target.vocabulary), target), target, TokensOnly
        )
    return _decoder("student", target.make_decoder(target.load(path)), None, target, TokensOnly)


_KINDS: dict[str, Callable[[Path | None, Target], _Entry]] = {
    "suffix": _suffix,
    "heads": _heads,
    "model": _model,
    "student": _student,
}


def _needed(kind: str, path: Path | None) -> Path:
    if path is None:
        raise ConfigError(f"drafter {kind!r} needs a path")
    return path


def _states(target: Target) -> TargetStates:
    return TargetStates(target.shape.hidden, torch.device(target.device))


def _layers(name: str, model: LayerModel, target: Target, inputs: Callable[[], NodeInputs]) -> _Entry:
    return _decoder(name, target.make_beside(model), model.token_ids, target, inputs)


def _decoder(
    name: str, decoder: FusedDecoder, token_ids: tuple[int, ...] | None, target: Target, inputs: Callable[[], NodeInputs]
) -> _Entry:
    shape = decoder.shape

    def make(place: Place) -> Drafter:
        pages, size = place.config.num_pages, place.config.page_size
        dtype = fitting(place.kv_dtype, shape.head_dim, size)
        store = KVTensors.allocate(shape.layers, pages, shape.kv_heads, shape.head_dim, size, dtype, place.device)
        score = OneCallScorer(decoder, store)
        make_grower = getattr(decoder, "grower", None)  # kernels.decoder.GrowingDecoder
        grower = None if make_grower is None else make_grower(store, growth_rules(FAN, WIDTH, token_ids))
        return ModelDrafter(
            name,
            decoder,
            store,
            place.pool,
            token_ids=token_ids,
            inputs=inputs(),
            score=score,
            grower=grower,
            fan=FAN,
            width=WIDTH,
        )

    return _Entry(make, shape)
