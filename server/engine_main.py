"""`python -m server.engine_main FD FACTORY`: the engine process. Settings come as the first frame, never in the command line.

FACTORY is `module:function`, taking Settings and returning (Engine, Ready). The server passes server.compose:build_engine.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from server import framing
from server.engine_process import Engine, run_engine_process
from server.settings import Settings
from server.wire import Ready
from spec.errors import ForespeakError, InvariantError


def _read_settings(sock: socket.socket) -> Settings:
    header = sock.recv(framing.HEADER_BYTES, socket.MSG_WAITALL)
    payload = sock.recv(int.from_bytes(header, "big"), socket.MSG_WAITALL)
    return msgspec.json.decode(payload, type=Settings)


def _factory(name: str) -> Callable[[Settings], tuple[Engine, Ready]]:
    module, _, attribute = name.partition(":")
    made: Any = getattr(importlib.import_module(module), attribute)
    return made  # type: ignore[no-any-return]


def main(arguments: list[str]) -> int:
    """Exit codes: 0 the server left, 2 settings or files that cannot work (one line on stderr), 3 a fault."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the server decides when we end
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    sock = socket.socket(fileno=int(arguments[0]))
    settings = _read_settings(sock)
    try:
        return run_engine_process(sock, lambda: _factory(arguments[1])(settings), abandon=lambda: os._exit(0))
    except InvariantError:
        logging.getLogger("forespeak.engine").exception("the engine broke a promise")
        return 3
    except ForespeakError as error:
        print(f"forespeak: {error}", file=sys.stderr)
        return 2
    except Exception:
        logging.getLogger("forespeak.engine").exception("the engine failed")
        return 3


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no interpreter teardown: native threads and a large heap make it slow, and nothing is left to save
