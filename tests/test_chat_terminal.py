"""`forespeak chat` in a terminal of its own: what it prints, its commands, its keys, its exit codes."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Running, running, toy_settings, toy_text
from wire_cutter import wire_cutter
from words import words_settings

from server.chat import CONTROLS

ROOT = Path(__file__).resolve().parents[1]
FORESPEAK = str(Path(sys.executable).parent / "forespeak")
# Makes the pseudo terminal the one that controls the process, so that ^C typed there is a signal.
TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
GREEN = "\x1b[32m"
SECONDS = 30.0


class Screen:
    """A process on a pseudo terminal. `raw` is everything it has printed, `text` the same without colours."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
        environment.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL, FORESPEAK, "chat", *arguments],
            stdin=slave, stdout=slave, stderr=slave, env=environment, cwd=ROOT,
        )  # fmt: skip
        os.close(slave)
        self.raw = ""
        self._read_to = 0

    @property
    def text(self) -> str:
        return ESCAPES.sub("", self.raw).replace("\r\n", "\n")

    def expect(self, pattern: str) -> re.Match[str]:
        """Wait until the text after the last match holds `pattern`."""
        end = time.monotonic() + SECONDS
        while (found := re.compile(pattern, re.DOTALL).search(self.text, self._read_to)) is None:
            assert time.monotonic() < end, f"{pattern!r} did not come; the screen holds:\n{self.text}"
            self._read()
        self._read_to = found.end()
        return found

    def _read(self) -> None:
        if select.select([self._master], [], [], 0.1)[0]:
            try:
                self.raw += os.read(self._master, 65536).decode(errors="replace")
            except OSError:  # the other end is closed
                assert self.process.wait(5) is None, f"it ended; the screen holds:\n{self.text}"

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait(self) -> int:
        """Its exit code."""
        end = time.monotonic() + SECONDS
        while self.process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(OSError):
                if select.select([self._master], [], [], 0.1)[0]:
                    self.raw += os.read(self._master, 65536).decode(errors="replace")
        with contextlib.suppress(OSError):
            while data := os.read(self._master, 65536):
                self.raw += data.decode(errors="replace")
        return self.process.wait(1)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)


@contextlib.contextmanager
def screen(*arguments: str) -> Iterator[Screen]:
    made = Screen(*arguments)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    # A fixed shape: the price rule may find on a busy machine that drafts of so small a model do not pay.
    with running(words_settings(tmp_path_factory.mktemp("words"), tree_shape="chain:4")) as run:
        yield run


def test_a_conversation(server: Running) -> None:
    with screen("--url", server.ws_url, "--max-tokens", "40", "--temperature", "0") as chat:
        chat.expect("words: accepted drafts are coloured.*> ")
        chat.type("Hello\n")
        said = chat.expect(r"(shores .*)\n\(length\)\n> ")[1]
        assert set(said.split()) <= {"shores", "sh", "shor"}
        assert f"{GREEN}" in chat.raw  # accepted drafts
        chat.type("/stats\n")
        table = chat.expect("tokens .*> ")[0]
        assert re.search(r"tokens +│ 40 +│ 40 ", table)
        accepted = re.search(r"accepted drafts +│ (\d+)", table)
        assert accepted is not None
        assert 0 < int(accepted[1]) < 40
        assert re.search(rf"by suffix +│ {accepted[1]} of \d+", table)
        chat.type("Again\n")
        chat.expect(r"shores .*\(length\)\n> ")
        chat.type("/stats\n")
        assert re.search(r"tokens +│ 40 +│ 80 ", chat.expect("tokens .*> ")[0])
        chat.type("/nonsense\n")
        chat.expect("unknown command /nonsense.*> ")
        chat.type("/help\n")
        chat.expect("stop the answer.*> ")
        chat.type("/quit\n")
        assert chat.wait() == 0


def test_ctrl_c_stops_the_answer_only(server: Running) -> None:
    with screen("--url", server.ws_url) as chat:
        chat.expect("> ")
        chat.type("Hello\n")
        chat.expect("(?:[a-z]+ ){20}")
        chat.type("\x03")
        chat.expect(r"\(cancelled\)\n> ")
        chat.type("\x03")  # nothing to stop
        chat.expect("Ctrl-D or /quit leaves\n> ")
        chat.type("/system Be brief.\n")
        chat.expect("system prompt set.*> ")
        chat.type("Again\n")
        chat.expect("(?:[a-z]+ ){5}")
        chat.type("\x03")
        chat.expect(r"\(cancelled\)\n> ")
        chat.type("\x04")
        assert chat.wait() == 0
        assert "Traceback" not in chat.text


def test_error_of_the_server(tmp_path: Path) -> None:
    """One question is refused, the conversation goes on."""
    with running(toy_settings(), toy_text(tmp_path)) as server, screen("--url", server.ws_url, "--max-tokens", "8") as chat:
        chat.expect("> ")
        chat.type("x" * 600 + "\n")
        chat.expect("the prompt has 613 tokens; .*> ")
        chat.type("Hello\n")
        chat.expect(r"\(length\)\n> ")


def test_goes_on_after_a_cut(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 1, "seed": 4, "max_tokens": 400}
    expected = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    with wire_cutter(server.port) as wire:
        url = ("--url", wire.ws_url)
        with screen(*url, "--temperature", "1", "--seed", "4", "--max-tokens", "400") as chat:
            chat.expect("> ")
            chat.type("Hello\n")
            start = chat.expect(r"Hello\n").end()
            chat.expect("(?:[a-z]+ ){10}")
            wire.cut()
            chat.expect(r"\(length\)\n> ")
            said = re.sub(r"\n\(the connection is lost: [^)]*\)\n|\(connected again\)\n", "", chat.text[start:])
            assert said.removesuffix("\n(length)\n> ") == expected
            assert "connected again" in chat.text


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ("--url", "ws://127.0.0.1:9/v1/ws"),
            3,
            r"cannot connect to ws://127\.0\.0\.1:9/v1/ws: .*is `forespeak serve` running\?",
        ),
        (("--url", "http://x"), 2, "http://x is not the address of a WebSocket"),
        (("--api-key-file", "/nowhere/key"), 2, "cannot read the key file /nowhere/key"),
    ],
)
def test_exit_codes(arguments: tuple[str, ...], code: int, message: str) -> None:
    with screen(*arguments) as chat:
        assert chat.wait() == code
        [line] = chat.text.strip().splitlines()
        assert re.match(f"forespeak: {message}", line)


def test_keys(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("# a comment\n\nme:a-key-for-tests\n")
    wrong.write_text("another-key\n")
    settings = toy_settings(api_key_file=str(right))
    with running(settings, toy_text(tmp_path / "tokenizer")) as server:
        with screen("--url", server.ws_url, "--api-key-file", str(right), "--max-tokens", "8") as chat:
            chat.expect("> ")
            chat.type("Hello\n")
            chat.expect(r"\(length\)\n> ")
            chat.type("/quit\n")
            assert chat.wait() == 0
        with screen("--url", server.ws_url, "--api-key-file", str(wrong)) as chat:
            assert chat.wait() == 3
            assert "this API key is not known" in chat.text
        with screen("--url", server.ws_url) as chat:
            assert chat.wait() == 3
            assert "it needs an API key" in chat.text


def test_lines_from_a_pipe(server: Running) -> None:
    command = [FORESPEAK, "chat", "--url", server.ws_url, "--max-tokens", "8", "--temperature", "0"]
    ran = subprocess.run(command, input="Hello\n/stats", capture_output=True, text=True, timeout=SECONDS, cwd=ROOT, check=True)
    assert "shores shores" in ran.stdout
    assert "accepted drafts" in ran.stdout
    assert "\x1b" not in ran.stdout  # no colours in a file
    assert ran.stderr == ""


def test_sigterm_ends_it(server: Running) -> None:
    with screen("--url", server.ws_url) as chat:
        chat.expect("> ")
        chat.process.send_signal(signal.SIGTERM)
        assert chat.wait() == -signal.SIGTERM


def test_model_text_cannot_drive_the_terminal() -> None:
    text = "a\x1b]0;title\x07b\x9bc\rd\te\nf"
    assert text.translate(CONTROLS) == "a�]0;title�b�c�d\te\nf"
