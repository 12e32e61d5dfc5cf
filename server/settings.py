"""Settings of one server or one local run: defaults, a TOML file, then command-line flags. Unknown keys are errors.

Knows names and ranges; refuses to know how any of it is used. Plain data, so that it crosses into the engine process as JSON.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

from spec.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m"
_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
}


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One field per `serve` flag; a config file's keys are these names."""

    model: str = DEFAULT_MODEL
    # where it listens
    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: str | None = None
    allowed_origins: tuple[str, ...] = ()
    drain_seconds: float = 30.0
    metrics_prefix: str = "forespeak:"
    log_prompts: bool = False
    log_json: bool = False  # one JSON object a line instead of plain text
    otlp_endpoint: str = ""  # OpenTelemetry spans go here, for example http://127.0.0.1:4318/v1/traces; "" = none
    # how it computes
    device: Literal["cpu", "cuda"] = "cpu"
    backend: Literal["auto", "native", "reference", "triton"] = "auto"
    weights: Literal["native", "float32", "bfloat16"] = "native"
    quantise: Literal["q8", "q4"] | None = None  # for checkpoints stored in 16 or 32 bits
    kv_type: Literal["auto", "bfloat16", "float32", "int8", "float8"] = (
        "auto"  # see Parts.kv_type; int8: a step per token and head; float8 (e4m3, no scale): where not native
    )
    deterministic: bool = False  # on a GPU: kernels whose bits do not depend on the batch, slower; on the CPU they never do
    threads: int = 0  # 0 = one per core
    kv_memory: int = 2**30  # bytes, target and drafters together
    gpu_memory: float = 0.0  # share of a GPU that everything may take, which then sizes the KV cache; 0 = kv_memory counts
    page_size: int = 16
    context: int = 0  # 0 = the model's own, as far as kv_memory allows
    max_sequences: int = 64
    chunk_tokens: int = 256
    prefix_cache: bool = True
    seed: int = 0  # where drawn seeds come from; 0 = the system's entropy
    # how it speculates
    drafters: str = "auto"  # auto, none, or a comma list of suffix, heads[:PATH], model:PATH, student[:PATH]
    max_tree_nodes: int = 16
    draft_vocabulary: int = 0  # most tokens that heads and students may say, the lowest ids of their list; 0 = all of it
    tree_shape: str = ""  # a fixed shape such as chain:4 or 4x2 instead of the price rule
    cache_dir: str = ""  # "" = ~/.cache/forespeak


def parse_bytes(text: str) -> int:
    """'2GiB', '512MiB', '80GB' or a plain number of bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"{text!r} is not a memory size; write for example 2GiB or 512MiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def parse_count(text: str) -> int:
    """'8k' is 8192 tokens; a plain number is itself."""
    match = re.fullmatch(r"\s*(\d+)\s*([kK]?)\s*", text)
    if match is None:
        raise ConfigError(f"{text!r} is not a number of tokens; write for example 4096 or 8k")
    return int(match[1]) * (1024 if match[2] else 1)


def load_settings(config: Path | None, overrides: dict[str, Any]) -> Settings:
    """Defaults, then the file, then the flags that were given. Raises ConfigError naming the key at fault."""
    values: dict[str, Any] = {}
    if config is not None:
        try:
            values = tomllib.loads(config.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read the config file {config}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{config} is not valid TOML: {error}") from error
    values.update({key: value for key, value in overrides.items() if value is not None})
    if isinstance(values.get("kv_memory"), str):
        values["kv_memory"] = parse_bytes(values["kv_memory"])
    if isinstance(values.get("context"), str):
        values["context"] = parse_count(values["context"])
    try:
        settings = msgspec.convert(values, Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"bad setting{f' in {config}' if config else ''}: {error}") from error
    _check(settings)
    return settings


def _check(settings: Settings) -> None:
    low: dict[str, float] = {"port": 0, "threads": 0, "kv_memory": 1, "page_size": 1, "context": 0, "max_sequences": 1}
    low |= {"chunk_tokens": 1, "gpu_memory": 0, "max_tree_nodes": 0, "draft_vocabulary": 0, "drain_seconds": 0, "seed": 0}
    high: dict[str, float] = {
        "port": 65535,
        "page_size": 256,
        "max_sequences": 4096,
        "max_tree_nodes": 63,
        "threads": 1024,
        "gpu_memory": 1,
    }
    for name, least in low.items():
        value = getattr(settings, name)
        if value < least or value > high.get(name, value):
            limit = f"between {least:g} and {high[name]:g}" if name in high else f"at least {least:g}"
            raise ConfigError(f"{name} is {value}; it must be {limit}")
