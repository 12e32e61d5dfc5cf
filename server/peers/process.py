"""A peer's process: requests and replies as JSON lines, stopped while others work. Knows signals; nothing of engines."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec

from server.peers.environments import PeerUnavailable

ENDING_SECONDS = 10.0


class PeerProcess:
    """One driver at work. Between `pause` and `resume` the whole process group is stopped and takes no processor time."""

    def __init__(self, python: Path, driver: Path, log: Path) -> None:
        """Start `driver` under `python`; what it prints outside the protocol goes to `log`."""
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [str(python), str(driver)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=log.parent,
                start_new_session=True,
            )
        self._rest = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send one request and wait for its reply. Raises PeerUnavailable when it fails, dies or takes longer than `seconds`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise PeerUnavailable(f"its process ended: {self._last_words()}") from error
        reply: dict[str, Any] = msgspec.json.decode(self._line(time.monotonic() + seconds, seconds))
        if "error" in reply:
            raise PeerUnavailable(str(reply["error"]))
        return reply

    def _line(self, deadline: float, seconds: float) -> bytes:
        assert self._process.stdout is not None
        handle = self._process.stdout.fileno()
        while b"\n" not in self._rest:
            ready, _, _ = select.select([handle], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise PeerUnavailable(f"no reply within {seconds:.0f} s")
            got = os.read(handle, 1 << 16)
            if not got:
                raise PeerUnavailable(f"its process ended: {self._last_words()}")
            self._rest += got
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _last_words(self) -> str:
        lines = [line for line in self._log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        return lines[-1].strip()[:300] if lines else "it said nothing"

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End it: by its closed input, or by force when that does not help."""
        self.resume()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        try:
            self._process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _signal(self, which: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, which)
