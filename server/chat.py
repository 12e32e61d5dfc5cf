"""`forespeak chat`: a conversation in the terminal over the native WebSocket. Knows lines and colours; the client does the rest."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from server.client import Answer, Client, ClientError, State
from spec.errors import ConfigError

COLOURS = ("green", "yellow", "magenta", "cyan", "blue")
HELP = """/stats     figures of the last answer and of the conversation
/reset     forget the conversation
/system T  set the system prompt to T and start over
/help      this list
/quit      leave (Ctrl-D too)
Ctrl-C     stop the answer, keep the conversation"""
# What would move the cursor or worse is shown as a symbol: the text comes from a model.
CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class Lines:
    """Standard input line by line, read on a thread that never keeps the process from ending."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[str | None] = asyncio.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    async def next(self) -> str | None:
        """None at the end of input."""
        return await self._queue.get()

    def _read(self) -> None:
        # Not sys.stdin: a thread waiting inside it would hold its lock while the interpreter ends.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = ""
        while True:
            try:
                data = os.read(sys.stdin.fileno(), 4096)
            except OSError:  # the terminal is gone
                data = b""
            text += decoder.decode(data, final=not data)
            *lines, text = text.split("\n")
            if not data and text:
                lines.append(text)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                for line in lines:
                    self._loop.call_soon_threadsafe(self._queue.put_nowait, line)
                if not data:
                    self._loop.call_soon_threadsafe(self._queue.put_nowait, None)
            if not data:
                return


class Terminal:
    """One conversation. `options` are the sampling fields sent with every message."""

    def __init__(self, console: Console, system: str | None, options: dict[str, Any]) -> None:
        self.console = console
        self.options = options
        self.messages: list[dict[str, str]] = []
        self.drafters: list[str] = []  # in order of appearance; their place is their colour
        self.last: dict[str, Any] | None = None
        self.totals = {"answers": 0, "tokens": 0, "steps": 0, "accepted": 0}
        self._answer: Answer | None = None  # the one that is being printed
        self._stopping: set[asyncio.Task[None]] = set()
        self.set_system(system)

    def set_system(self, system: str | None) -> None:
        self.messages = [{"role": "system", "content": system}] if system else []

    def say(self, text: str, style: str = "dim") -> None:
        self.console.print(Text(text.translate(CONTROLS), style=style))

    async def run(self, client: Client) -> int:
        """Read lines until the end of input. Returns the exit code."""
        lines = Lines()
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._interrupt)
        self.say(f"{client.hello.get('model', '')}: accepted drafts are coloured, /help lists commands", "bold")
        while True:
            self._prompt()
            line = await lines.next()
            if line is None:
                self.console.print()
            if line is None or line.strip() in ("/quit", "/exit"):
                return 0
            if line.startswith("/"):
                self.command(line.strip())
            elif line.strip():
                await self.ask(client, line.strip())

    def _prompt(self) -> None:
        self.console.print(Text("> ", style="bold blue"), end="")

    def _interrupt(self) -> None:
        """Ctrl-C."""
        if self._answer is None:
            self.say("\nCtrl-D or /quit leaves")
            self._prompt()
            return
        task = asyncio.create_task(self._answer.cancel())
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    def on_state(self, state: State, why: str) -> None:
        """What the client says of its connection."""
        if state == "lost":
            self.say(f"\n(the connection is lost: {why}; trying again)")
        elif state == "open":
            self.say("(connected again)")
        else:
            self.say(f"\n(this is over: {why})", "red")

    def command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/stats":
            self.console.print(self.stats())
        elif name == "/reset":
            self.set_system(next((m["content"] for m in self.messages if m["role"] == "system"), None))
            self.say("the conversation is empty again")
        elif name == "/system":
            self.set_system(rest.strip() or None)
            self.say("system prompt set" if rest.strip() else "system prompt cleared")
        elif name == "/help":
            self.say(HELP, "")
        else:
            self.say(f"unknown command {name}; /help lists them", "red")

    async def ask(self, client: Client, text: str) -> None:
        """Send one message and print the answer as it comes. Raises ClientError when the client cannot ask any more."""
        self.messages.append({"role": "user", "content": text})
        self._answer = await client.chat(self.messages, **self.options)
        try:
            await self._print(self._answer)
            done = await self._answer.result()
            self.messages.append({"role": "assistant", "content": self._answer.text})
            if "usage" in done:
                self._count(done)
            if done["finish_reason"] != "stop":
                self.say(f"({done['finish_reason']})")
        except ClientError as error:
            self.messages.pop()
            self.say(f"\n{error}", "red")
        finally:
            self._answer = None

    async def _print(self, answer: Answer) -> None:
        thinking = False  # the last text was reasoning
        async for delta in answer:
            if reasoning := delta.get("reasoning"):
                self.console.print(Text(reasoning.translate(CONTROLS), style="dim italic"), end="", soft_wrap=True)
                thinking = True
            if thinking and delta["text"]:
                self.console.print()
                thinking = False
            if delta["type"] == "snapshot":
                self.say("\n(much of it was lost on the way; from the start)")
            for text, drafter in delta.get("pieces") or [(delta["text"], delta.get("drafter") or "")]:
                style = self.colour(drafter) if drafter else ""
                self.console.print(Text(text.translate(CONTROLS), style=style), end="", soft_wrap=True)
        self.console.print()

    def colour(self, drafter: str) -> str:
        if drafter not in self.drafters:
            self.drafters.append(drafter)
        return COLOURS[self.drafters.index(drafter) % len(COLOURS)]

    def _count(self, done: dict[str, Any]) -> None:
        self.last = done
        self.totals["answers"] += 1
        self.totals["tokens"] += done["usage"]["completion_tokens"]
        self.totals["steps"] += done["speculation"]["steps"]
        self.totals["accepted"] += done["speculation"]["accepted"]

    def stats(self) -> Table:
        table = Table("figure", "last answer", "conversation")
        last, total = self.last, self.totals
        speculation = last["speculation"] if last else {}
        timings = last["timings"] if last else {}
        passes = total["tokens"] / total["steps"] if total["steps"] else 0.0
        table.add_row("tokens", str(last["usage"]["completion_tokens"]) if last else "-", str(total["tokens"]))
        table.add_row("accepted drafts", str(speculation.get("accepted", "-")), str(total["accepted"]))
        table.add_row("tokens a pass", f"{speculation.get('acceptance_length', 0.0):.2f}", f"{passes:.2f}")
        table.add_row("tokens a second", f"{timings.get('tokens_per_second', 0.0):.0f}", "")
        table.add_row("first token", f"{timings.get('ttft_ms', 0.0):.0f} ms", "")
        for name, row in speculation.get("by_drafter", {}).items():
            table.add_row(f"by {name}", f"{row['accepted']} of {row['drafted']}", "")
        return table


def run_chat(
    url: str, api_key_file: Path | None, system: str | None, max_tokens: int | None, temperature: float | None, seed: int | None
) -> int:
    """Returns the exit code: 0, or 3 when the server cannot be reached or refuses. Raises ConfigError for a bad URL or key file."""
    key = read_key(api_key_file) if api_key_file else None
    given = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    terminal = Terminal(Console(highlight=False), system, {name: value for name, value in given.items() if value is not None})

    async def session() -> int:
        async with Client(url, key, on_state=terminal.on_state) as client:
            return await terminal.run(client)

    try:
        return asyncio.run(session())
    except ClientError as error:
        if error.code == "bad_url":
            raise ConfigError(str(error)) from error
        print(f"forespeak: {error}", file=sys.stderr)
        return 3


def read_key(path: Path) -> str:
    """The first key of a key file (KEY or NAME:KEY)."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ConfigError(f"cannot read the key file {path}: {error.strerror}") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"the key file {path} holds no key")
    return keys[0].rpartition(":")[2]
