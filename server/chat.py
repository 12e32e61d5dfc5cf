"""`forespeak chat`: a conversation in the terminal over the native WebSocket. Knows lines and colours; the client does the rest."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from server.client import Answer, Client, ClientError
from spec.errors import ConfigError

COLOURS = ("green", "yellow", "magenta", "cyan", "blue")
HELP = """/stats     figures of the last answer and of the conversation
/reset     forget the conversation
/system T  set the system prompt to T and start over
/help      this list
/quit      leave (Ctrl-D too)
Ctrl-C     stop the answer, keep the conversation"""


class Terminal:
    """One conversation. `options` are the sampling fields sent with every message."""

    def __init__(self, client: Client, console: Console, system: str | None, options: dict[str, Any]) -> None:
        self.client = client
        self.console = console
        self.options = options
        self.messages: list[dict[str, str]] = []
        self.drafters: list[str] = []  # in order of appearance; their place is their colour
        self.last: dict[str, Any] | None = None
        self.totals = {"answers": 0, "tokens": 0, "steps": 0, "accepted": 0}
        self.set_system(system)

    def set_system(self, system: str | None) -> None:
        self.messages = [{"role": "system", "content": system}] if system else []

    async def run(self) -> int:
        """Read lines until the end of input."""
        self.console.print(
            f"[bold]{self.client.hello.get('model', '')}[/bold]  accepted drafts are coloured · /help for commands"
        )
        while True:
            try:
                line = (await asyncio.to_thread(self._read)).strip()
            except EOFError:
                self.console.print()
                return 0
            if line in ("/quit", "/exit"):
                return 0
            if line.startswith("/"):
                self.command(line)
            elif line:
                await self.ask(line)

    def _read(self) -> str:
        self.console.print("[bold blue]>[/bold blue] ", end="")
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line

    def command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/stats":
            self.console.print(self.stats())
        elif name == "/reset":
            self.set_system(next((m["content"] for m in self.messages if m["role"] == "system"), None))
            self.console.print("the conversation is empty again")
        elif name == "/system":
            self.set_system(rest.strip() or None)
            self.console.print("system prompt set" if rest.strip() else "system prompt cleared")
        elif name == "/help":
            self.console.print(HELP, highlight=False)
        else:
            self.console.print(f"unknown command {name}; /help lists them", style="red")

    async def ask(self, text: str) -> None:
        """Send one message and print the answer as it comes."""
        self.messages.append({"role": "user", "content": text})
        answer = await self.client.chat(self.messages, **self.options)
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        loop.add_signal_handler(signal.SIGINT, stop.set)
        stopper = asyncio.create_task(self._cancel_when(stop, answer))
        try:
            said = await self._stream(answer)
            self.last = await answer.result()
            self.messages.append({"role": "assistant", "content": said})
            self._count(self.last)
            if self.last["finish_reason"] != "stop":
                self.console.print(f"[dim]({self.last['finish_reason']})[/dim]")
        except ClientError as error:
            self.messages.pop()
            self.console.print(f"\n{error}", style="red", highlight=False)
        finally:
            stopper.cancel()
            loop.remove_signal_handler(signal.SIGINT)

    @staticmethod
    async def _cancel_when(stop: asyncio.Event, answer: Answer) -> None:
        await stop.wait()
        await answer.cancel()

    async def _stream(self, answer: Answer) -> str:
        said = ""
        async for delta in answer:
            if delta["type"] == "snapshot":
                self.console.print(f"\n[dim](resumed)[/dim]\n{delta['text']}", end="", markup=False)
                said = delta["text"]
                continue
            said += delta["text"]
            for text, drafter in delta.get("pieces") or [(delta["text"], delta.get("drafter") or "")]:
                self.console.print(Text(text, style=self.colour(drafter) if drafter else ""), end="", soft_wrap=True)
        self.console.print()
        return said

    def colour(self, drafter: str) -> str:
        if drafter not in self.drafters:
            self.drafters.append(drafter)
        return COLOURS[self.drafters.index(drafter) % len(COLOURS)]

    def _count(self, done: dict[str, Any]) -> None:
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
    """Returns the exit code: 0, or 3 when the server cannot be reached or refuses."""
    key = read_key(api_key_file) if api_key_file else None
    given = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    options = {name: value for name, value in given.items() if value is not None}

    async def session() -> int:
        async with Client(url, key) as client:
            return await Terminal(client, Console(), system, options).run()

    try:
        return asyncio.run(session())
    except ClientError as error:
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
