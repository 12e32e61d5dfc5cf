"""Which drafters there are and how each is made. The one table; an unknown name lists the known ones.

Two steps, because page memory is divided in between: `plan` loads weights and tells the shapes of the stores that are
needed, `build` makes the drafters over the page pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from drafters.grammar import GrammarDrafter
from drafters.heads import HeadsDrafter
from drafters.model import ModelDrafter
from drafters.suffix import SuffixDrafter
from kernels.batch import KVTensors
from kernels.decoder import Decoder, DecoderShape, DecoderWeights
from spec.config import EngineConfig
from spec.drafter import Drafter
from spec.errors import ConfigError
from spec.models import LoadedModel
from spec.pages import PagePool

KNOWN = ("suffix", "heads[:PATH]", "model:PATH", "student[:PATH]")
SHIPPED = Path(__file__).parent / "shipped"  # trained drafters by target: SHIPPED/<target name>/{heads,student}.safetensors


@dataclass(frozen=True, slots=True)
class Target:
    """What drafters must fit."""

    name: str  # short name of the target, the folder of its shipped drafters
    shape: DecoderShape
    weights: DecoderWeights  # embedding rows and vocabulary matrix, for drafters that share them
    load: Callable[[Path], LoadedModel]  # a draft model's weights, trimmed to the target's vocabulary, or a clear error
    make_decoder: Callable[[LoadedModel], Decoder]


@dataclass(frozen=True, slots=True)
class _Entry:
    kind: str
    path: Path | None
    decoder: Decoder | None = None


@dataclass(frozen=True, slots=True)
class DrafterPlan:
    entries: tuple[_Entry, ...]
    target: Target

    @property
    def shapes(self) -> tuple[DecoderShape, ...]:
        """Shapes of the draft models that need a store of their own."""
        return tuple(entry.decoder.shape for entry in self.entries if entry.decoder is not None)


def shipped(target_name: str, kind: str) -> Path | None:
    path = SHIPPED / target_name / f"{kind}.safetensors"
    return path if path.exists() else None


def parse(text: str, target_name: str) -> list[tuple[str, Path | None]]:
    """`--drafters` text to (kind, path) pairs. Raises ConfigError."""
    if text in ("", "none"):
        return []
    if text == "auto":
        found = shipped(target_name, "heads")
        return [("suffix", None), *([("heads", found)] if found else [])]
    pairs: list[tuple[str, Path | None]] = []
    for item in text.split(","):
        kind, _, path = item.strip().partition(":")
        if kind not in ("suffix", "heads", "model", "student") or (kind == "suffix" and path) or (kind == "model" and not path):
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


def plan(text: str, target: Target) -> DrafterPlan:
    """Load what the named drafters need. Raises ConfigError or ModelFileError; nothing is allocated yet."""
    entries = []
    for kind, path in parse(text, target.name):
        if kind in ("model", "student"):
            if path is None:
                raise ConfigError(f"drafter {kind!r} needs a path")
            entries.append(_Entry(kind, path, target.make_decoder(target.load(path))))
        else:
            entries.append(_Entry(kind, path))
    return DrafterPlan(tuple(entries), target)


def build(plan: DrafterPlan, pool: PagePool, config: EngineConfig, kv_dtype: torch.dtype, device: str) -> list[Drafter]:
    """The drafters, each draft model with its own store over the target's page ids."""
    drafters: list[Drafter] = []
    for entry in plan.entries:
        if entry.decoder is not None:
            s = entry.decoder.shape
            store = KVTensors.allocate(s.layers, config.num_pages, s.kv_heads, s.head_dim, config.page_size, kv_dtype, device)
            drafters.append(ModelDrafter(entry.kind, entry.decoder, store, pool))
        elif entry.path is not None:
            drafters.append(HeadsDrafter.load(entry.path, plan.target))
        else:
            drafters.append(SuffixDrafter())
    if drafters:
        drafters.append(GrammarDrafter())  # costs nothing without a grammar, so it is not asked for by name
    return drafters
