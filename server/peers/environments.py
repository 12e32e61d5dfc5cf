"""A virtual environment per peer, made once from the package index and kept. Knows venv and pip; nothing of what they install."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from server.peers.catalog import Peer
from spec.errors import ForespeakError

INSTALL_SECONDS = 1800.0  # of one command


class PeerUnavailable(ForespeakError):
    """A peer that cannot be installed or run here; the message is the reason, one line."""


def prepare(peer: Peer, root: Path, on_line: Callable[[str], None] = lambda line: None) -> Path:
    """The Python of the peer's environment, made if it is not there or was made from other pins.

    Raises PeerUnavailable with pip's own reason; the whole of what pip said is in `install.log` beside the environment.
    """
    home = root / peer.name
    python, stamp = home / "venv" / "bin" / "python", home / "stamp"
    pins = "\n".join((*peer.requirements, *(f"without {name}" for name in peer.dropped)))
    if python.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == pins:
        return python
    home.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    commands = [[sys.executable, "-m", "venv", "--clear", "--without-pip", str(home / "venv")]]
    if peer.requirements:
        commands.append([*pip, "install", "--progress-bar", "off", *peer.requirements])
    if peer.dropped:
        commands.append([*pip, "uninstall", "--yes", *peer.dropped])
    with (home / "install.log").open("w", encoding="utf-8") as log:
        for command in commands:
            _run(command, log.write, on_line)
    stamp.write_text(pins, encoding="utf-8")
    return python


def _run(command: list[str], write: Callable[[str], object], on_line: Callable[[str], None]) -> None:
    lines: list[str] = []
    late = threading.Event()
    try:  # a session of its own, so that what it starts can be ended with it
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
        )
    except OSError as error:
        raise PeerUnavailable(f"{command[0]}: {error.strerror}") from error

    def give_up() -> None:
        late.set()
        _kill(process)

    timer = threading.Timer(INSTALL_SECONDS, give_up)  # reading its lines waits for as long as anything holds its output
    timer.daemon = True
    with process:
        assert process.stdout is not None
        timer.start()
        try:
            for line in process.stdout:
                write(line)
                lines.append(line.strip())
                on_line(line.strip())
            code = process.wait()
        except BaseException:
            _kill(process)
            raise
        finally:
            timer.cancel()
    if late.is_set():
        raise PeerUnavailable(f"installing took longer than {INSTALL_SECONDS:g} s")
    if code != 0:
        errors = [line for line in lines if line.lower().startswith("error")]
        told = (errors or [line for line in lines if line] or ["it said nothing"])[-1]
        raise PeerUnavailable(f"installing failed: {told}")


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
