"""Which model a name means to `forespeak plan`: a shipped config, a config.json or its folder, a GGUF file, a pulled model. Never
fetches anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from server.models import resolve
from server.planning.facts import ModelFacts, from_config, from_gguf
from spec.errors import ConfigError, ModelFileError

SHIPPED = Path(__file__).resolve().parents[2] / "configs" / "models"
_LARGEST = 1 << 22  # bytes of a config file


def shipped_names() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def read_facts(name: str, cache: Path) -> ModelFacts:
    """The facts of a model by path, pulled name, or shipped name, in this order. One clear line when there are none."""
    path = Path(name).expanduser()
    if path.exists():
        return _local(name, path)
    shipped = SHIPPED / f"{Path(name).name}.json"
    if "/" not in name and shipped.is_file():
        return from_config(name, str(shipped), _read(shipped))
    try:
        return _local(name, resolve(name, cache, fetch=False).weights)
    except ConfigError as error:
        known = ", ".join(shipped_names())
        raise ConfigError(
            f"no model {name!r}: it is no config.json, folder or GGUF file, and no pulled model; known: {known}"
        ) from error


def _local(name: str, path: Path) -> ModelFacts:
    if path.is_file() and path.suffix == ".gguf":
        return from_gguf(name, path)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return from_gguf(name, ggufs[0])
        raise ModelFileError(f"{path}: neither a config.json nor one GGUF file is in this folder")
    stored = sum(weights.stat().st_size for weights in file.parent.glob("*.safetensors"))
    return from_config(name, str(file), _read(file), stored or None)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > _LARGEST:
            raise ModelFileError(f"{path}: more than {_LARGEST >> 20} MiB; this is no model's config")
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: not a usable config: {str(error)[:120]}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: a JSON {type(value).__name__}; an object was expected")
    return value
