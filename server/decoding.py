"""Bytes to typed requests, with errors that name the field. Knows JSON, msgpack and structs; refuses to know what fields mean."""

from __future__ import annotations

import json
import re
from typing import Any, Generic, TypeVar

import msgspec

from server.api_error import ApiError, invalid

T = TypeVar("T")

_PATH = re.compile(r" - at `(\$[^`]*)`$")
_MISSING = re.compile(r"^Object missing required field `([^`]+)`")
_NOT_FINITE = object()


class TypedDecoder(Generic[T]):
    """One reusable decoder per type and format. NaN and Infinity are refused, unknown fields are ignored."""

    def __init__(self, kind: Any, format: str = "json") -> None:
        self._is_json = format == "json"
        self._decoder: Any = msgspec.json.Decoder(kind) if self._is_json else msgspec.msgpack.Decoder(kind)

    def decode(self, data: bytes | str) -> T:
        """Raises ApiError 400: code invalid_json for bytes that are not the format, else the field's name as param."""
        try:
            return self._decoder.decode(data)  # type: ignore[no-any-return]
        except msgspec.ValidationError as error:
            raise _field_error(str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._malformed(data, str(error)) from None
        except RecursionError:
            raise ApiError(400, "the message is nested too deeply", code="invalid_json") from None

    def _malformed(self, data: bytes | str, reason: str) -> ApiError:
        if not self._is_json:
            return ApiError(400, f"the message is not valid msgpack: {reason}", code="invalid_msgpack")
        path = _not_finite_path(data)
        if path is not None:
            return invalid(path or None, f"{path or 'the body'} is not a finite number; JSON has no NaN or Infinity")
        return ApiError(400, f"the message is not valid JSON: {reason}", code="invalid_json")


def _field_error(text: str) -> ApiError:
    match = _PATH.search(text)
    path = match[1].removeprefix("$").removeprefix(".") if match else ""
    message = text[: match.start()] if match else text
    missing = _MISSING.match(message)
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
        return invalid(path, f"{path} is missing", code="missing_required_parameter")
    path = path.replace("[...]", "")
    message = message[:1].lower() + message[1:].replace("`", "")
    return invalid(path or None, f"{path}: {message}" if path else message, code="invalid_type")


def _not_finite_path(data: bytes | str) -> str | None:
    """Where a NaN or Infinity stands in an otherwise valid body; None when that is not what is wrong with it."""
    try:
        value = json.loads(data, parse_constant=lambda _: _NOT_FINITE)
    except (ValueError, RecursionError):
        return None
    return _find(value, "", 0)


def _find(value: Any, path: str, depth: int) -> str | None:
    if value is _NOT_FINITE:
        return path
    if depth > 32:
        return None
    if isinstance(value, dict):
        items = ((f"{path}.{key}" if path else str(key), item) for key, item in value.items())
    elif isinstance(value, list):
        items = ((f"{path}[{index}]", item) for index, item in enumerate(value))
    else:
        return None
    return next((found for name, item in items if (found := _find(item, name, depth + 1)) is not None), None)


def check_depth(name: str, value: Any, limit: int) -> None:
    """Raise ApiError when a free-form value is nested deeper than `limit`."""
    level: list[Any] = [value]
    for _ in range(limit):
        level = [item for each in level for item in _children(each)]
        if not level:
            return
    raise invalid(name, f"{name} is nested more than {limit} levels deep")


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
