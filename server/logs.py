"""Structured logs: one JSON object or one plain line per event, to stderr. Never prompts or keys, unless prompts are asked for."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import msgspec

_EXTRA = "fields"


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(getattr(record, _EXTRA, {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def event(logger: logging.Logger, message: str, **fields: Any) -> None:
    """One info line with named values."""
    logger.info(message, extra={_EXTRA: fields})


class PlainFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        fields = getattr(record, _EXTRA, None)
        return line + "".join(f" {name}={value}" for name, value in fields.items()) if fields else line


def set_up(as_json: bool, level: int = logging.INFO) -> None:
    """Route every logger of the process to stderr in one format. uvicorn's access log is off: metrics count requests."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else PlainFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
