"""Typed errors of the engine. Each message says what came, what was expected, and where possible what to do next."""

from __future__ import annotations


class ForespeakError(Exception):
    """Base of every error this project raises on purpose."""


class ConfigError(ForespeakError):
    """A setting or a combination of settings that cannot work (exit code 2)."""


class ModelFileError(ForespeakError):
    """A weight, tokenizer or config file that is broken, missing or unsupported; names the file and the field."""


class RequestError(ForespeakError):
    """A request the engine refuses at once. `code` is the OpenAI error code, `param` the field at fault."""

    def __init__(self, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class InvariantError(ForespeakError):
    """An internal promise was broken (accounting, tree order, shapes). Always a bug."""
