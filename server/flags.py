"""The command-line flags that are settings: each written once, and a decorator that gives a command the ones it takes.

Knows the flags' names, types and help; refuses to know what a command does with the settings. Ranges are `server.settings`' affair.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar

import typer

from server.settings import DEFAULT_MODEL, Settings, load_settings

P = ParamSpec("P")
R = TypeVar("R")


def _flag(kind: Any, help_: str, *names: str, metavar: str | None = None, panel: str = "Engine") -> Any:
    return Annotated[kind | None, typer.Option(*names, help=help_, metavar=metavar, rich_help_panel=panel)]


# By settings field; the flag is the field's name with dashes unless it is given.
_FLAGS: dict[str, Any] = {
    "model": Annotated[
        str | None, typer.Argument(help=f"alias, GGUF file, safetensors folder or hub id; {DEFAULT_MODEL} when left out")
    ],
    "host": _flag(str, "another address than loopback needs --api-key-file", panel="Server"),
    "port": _flag(int, "0 takes a free one", panel="Server"),
    "api_key_file": _flag(str, "one key a line, NAME:KEY or KEY", metavar="FILE", panel="Server"),
    "allowed_origins": _flag(list[str], "another web origin that may connect", "--allowed-origin", panel="Server"),
    "drain_seconds": _flag(float, "time answers get to finish at shutdown", panel="Server"),
    "metrics_prefix": _flag(str, "first part of every metric's name", panel="Server"),
    "log_json": _flag(bool, "log one JSON object a line", panel="Server"),
    "log_prompts": _flag(bool, "let prompts and answers into the log", panel="Server"),
    "otlp_endpoint": _flag(str, "send OpenTelemetry spans here, for example http://127.0.0.1:4318/v1/traces", panel="Server"),
    "device": _flag(str, "cpu or cuda"),
    "backend": _flag(str, "auto, native, reference or triton"),
    "weights": _flag(str, "native (as stored), float32 or bfloat16"),
    "quantise": _flag(str, "q8 or q4: make 8 or 4-bit weights of a 16-bit checkpoint"),
    "threads": _flag(int, "compute threads, 0 = one per core"),
    "kv_memory": _flag(str, "memory of the KV cache, for example 2GiB"),
    "kv_type": _flag(str, "keys and values as auto, bfloat16, float32, int8 or float8 (not with the native kernels)"),
    "gpu_memory": _flag(float, "share of a GPU that everything may take, for example 0.9; sizes the KV cache"),
    "deterministic": _flag(bool, "on a GPU: the same bits in every batch, slower; on the CPU always so"),
    "page_size": _flag(int, "tokens in a KV page"),
    "context": _flag(str, "longest conversation in tokens, for example 8k"),
    "max_sequences": _flag(int, "conversations answered at once"),
    "chunk_tokens": _flag(int, "prompt tokens a step may carry"),
    "seed": _flag(int, "where the seeds of unseeded requests are drawn from"),
    "drafters": _flag(str, "auto, none, or a comma list of suffix, heads[:PATH], model:PATH, student[:PATH]"),
    "max_tree_nodes": _flag(int, "most drafted nodes a sequence may verify in a step"),
    "draft_vocabulary": _flag(int, "most tokens that heads and students may say, 0 = all that their file has"),
    "tree_shape": _flag(str, "a fixed draft tree such as chain:4 or 4x2 instead of the price rule"),
    "cache_dir": _flag(str, "weights, tokenizers and packed matrices; ~/.cache/forespeak when left out"),
}
CONFIG = Annotated[
    Path | None,
    typer.Option("--config", help="TOML file with the same names as these flags", rich_help_panel="Engine"),
]

# What every command that runs an engine takes, and what only a server does.
ENGINE = (
    "model", "device", "backend", "weights", "quantise", "threads", "kv_memory", "kv_type", "gpu_memory", "deterministic",
    "context", "page_size", "chunk_tokens", "drafters", "max_tree_nodes", "draft_vocabulary", "tree_shape",
    "cache_dir",
)  # fmt: skip
SERVER = (
    "host", "port", "api_key_file", "allowed_origins", "drain_seconds", "metrics_prefix", "log_json", "log_prompts",
    "otlp_endpoint", "max_sequences", "seed",
)  # fmt: skip


def takes(*fields: str, config: bool = True) -> Callable[[Callable[Concatenate[Settings, P], R]], Callable[..., R]]:
    """Give a command these settings as flags, and `--config` unless told not to.

    The decorated function's first parameter is the finished `Settings`; the rest are its own flags, which come first in the help.
    A flag may not have the name of one of them. The settings raise ConfigError naming the flag or the key at fault.
    """

    def decorate(command: Callable[Concatenate[Settings, P], R]) -> Callable[..., R]:
        _, *own = inspect.signature(command, eval_str=True).parameters.values()

        @wraps(command)
        def run(**values: Any) -> R:
            file = values.pop("config", None)
            # An option that may be repeated and was not given is an empty list.
            chosen = {name: value for name in fields if (value := values.pop(name)) not in (None, [])}
            return command(load_settings(file, chosen), **values)  # type: ignore[call-arg]

        shared = {name: _FLAGS[name] for name in fields} | ({"config": CONFIG} if config else {})
        flags = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=a) for n, a in shared.items()]
        first = [flag for flag in flags if flag.name == "model"]
        rest = [flag for flag in flags if flag.name != "model"]
        given = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        run.__signature__ = inspect.Signature([*first, *given, *rest])  # type: ignore[attr-defined]
        return run

    return decorate
