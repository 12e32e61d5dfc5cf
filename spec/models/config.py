"""What a loader must know about a model, whatever file said it. Plain values; refuses to know files' own field names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from spec.errors import ConfigError, ModelFileError

RopeKind = Literal["default", "linear", "llama3", "yarn"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")

# Contexts above this are served only when they are asked for: the rotary tables have a row per position.
DEFAULT_CONTEXT_LIMIT = 131_072
MAX_CONTEXT = 1 << 22
_MISSING = object()


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding constants. Only the fields its kind names are read."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0  # linear, llama3, yarn
    original_context: int = 0  # llama3, yarn: positions seen in pretraining
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: ramp bounds rounded to whole channels
    attention_factor: float = 1.0  # yarn: multiplies cos and sin


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes, switches and constants of one checkpoint."""

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    attention_scale: float
    max_position: int  # positions the checkpoint declares
    sliding_window: int | None
    rope: RopeConfig
    qkv_bias: bool | None  # None: whatever the file has (GGUF names no switch)
    o_bias: bool | None
    mlp_bias: bool | None
    qk_norm: bool
    tied: bool  # the output matrix may be the embedding
    eos_ids: tuple[int, ...]

    def context(self, asked: int | None) -> int:
        """Positions to serve: what was asked, else what the checkpoint declares, up to DEFAULT_CONTEXT_LIMIT."""
        if asked is None:
            return min(self.max_position, DEFAULT_CONTEXT_LIMIT)
        if not 2 <= asked <= self.max_position:
            raise ConfigError(f"context is {asked}; this model takes 2 to {self.max_position}")
        return asked


def fail(path: Path, field: str, problem: str) -> NoReturn:
    """Raise the one-line ModelFileError that every loader module uses."""
    raise ModelFileError(f"{path}: {field}: {problem}")


def shown(value: Any) -> str:
    """`repr` of a value from a file, short enough for one line."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class Fields:
    """Typed, bounded reads from an untrusted mapping. Every error names the file, the field, the value and what is allowed."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path, self.values, self.prefix = path, values, prefix

    def has(self, name: str) -> bool:
        return self.values.get(self.prefix + name) is not None

    def get(self, name: str, default: Any = _MISSING) -> Any:
        """The raw value; null counts as absent."""
        value = self.values.get(self.prefix + name)
        if value is not None:
            return value
        if default is _MISSING:
            self.fail(name, "missing")
        return default

    def integer(self, name: str, default: Any = _MISSING, *, low: int = 1, high: int) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.fail(name, f"{shown(value)}; it must be an integer from {low} to {high}")
        return value

    def number(self, name: str, default: Any = _MISSING, *, low: float, high: float = 1e12) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            self.fail(name, f"{shown(value)}; it must be a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            self.fail(name, f"{shown(value)}; it must be true or false")
        return value

    def text(self, name: str, default: Any = _MISSING) -> str:
        value = self.get(name, default)
        if not isinstance(value, str):
            self.fail(name, f"{shown(value)}; it must be text")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """None, one id or a list of ids. Negative ids mean "none" in some files and are dropped."""
        value = self.get(name, ())
        ids = [value] if isinstance(value, int) else value
        if (
            not isinstance(ids, list | tuple)
            or len(ids) > 256
            or any(isinstance(i, bool) or not isinstance(i, int) for i in ids)
        ):
            self.fail(name, f"{shown(value)}; it must be a token id or a list of at most 256")
        return tuple(i for i in ids if i >= 0)

    def fail(self, name: str, problem: str) -> NoReturn:
        fail(self.path, self.prefix + name, problem)


def check_sizes(fields: Fields, heads_name: str, q_heads: int, kv_heads: int, head_dim: int) -> None:
    if q_heads % kv_heads:
        fields.fail(heads_name, f"{kv_heads} key/value heads do not divide {q_heads} query heads")
    if head_dim % 2:
        fields.fail(heads_name, f"head dimension {head_dim} is odd; rotary embedding pairs channels")
