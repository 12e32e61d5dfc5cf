"""`forespeak train`: the text side of training, the progress bar, the result. The training itself is behind `server.compose`."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from server.compose import train_drafter, training_report
from server.settings import Settings
from server.template import ChatTemplate
from server.tokenizer import Tokenizer
from spec.errors import ConfigError, RequestError

_PLAIN_BYTES = frozenset(range(128)) - frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_SHORT = 3  # bytes: longer runs of punctuation must earn their place
_QUIET_SECONDS = 30.0  # between progress lines where there is no terminal


class Dialogue:
    """A chat template as the trainer needs it: what stands before the first user turn, what ends it, and whole prompts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ConfigError for a model without a chat template."""
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"{tokenizer.name} has no chat template to write its own answers with; give some with --data FILE"
            )
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        a, b = (self._template.encode_chat([{"role": "user", "content": text}]) for text in ("A", "7"))
        self.user_prefix = tuple(a[: _shared(a, b)])
        after = a[len(a) - _shared(a[::-1], b[::-1]) :]
        self.user_stops = tuple(i for i in after[:1] if i in tokenizer.special_ids)
        if not self.user_prefix:
            raise ConfigError(
                f"the chat template of {tokenizer.name} writes nothing before a user turn; give answers with --data FILE"
            )

    def prompt_of(self, user_ids: Sequence[int]) -> list[int] | None:
        """The prompt of a conversation that begins with this user turn, as a request would send it."""
        text = self._tokenizer.decode(user_ids).strip()
        if not text:
            return None
        try:
            return self._template.encode_chat([{"role": "user", "content": text}])
        except RequestError:  # a template that will not have such a text
            return None


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Leading items in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def always_tokens(tokenizer: Tokenizer) -> list[int]:
    """Control tokens, and short tokens of whitespace, digits and punctuation: rare in any one text, frequent in some."""
    return [
        i
        for i in range(tokenizer.vocab_size)
        if i in tokenizer.hidden_ids
        or ((spelled := tokenizer.token_bytes(i)) and len(spelled) <= _SHORT and _PLAIN_BYTES.issuperset(spelled))
    ]


def run(settings: Settings, flags: Mapping[str, Any], restart: bool) -> int:
    """Exit code 0, also after Ctrl-C, which ends the run behind its current step with everything saved."""
    console = Console(stderr=True)
    with _interrupts() as stop, _shown(console) as on_progress:
        finished, facts = train_drafter(settings, flags, Dialogue, always_tokens, on_progress, stop, restart)
    if not finished:
        print("forespeak: stopped; the same command goes on from here", file=sys.stderr)
    print(msgspec.json.encode({"finished": finished} | facts).decode(), flush=True)
    return 0


def plot(log: Path, out: Path | None) -> int:
    target = out or log.with_name(f"{log.name.removesuffix('.jsonl').removesuffix('.log')}.svg")
    return _write(target, training_report(log, ())[0])


def card(log: Path, benches: Sequence[Path], out: Path | None) -> int:
    target = out or log.with_name(f"{log.name.removesuffix('.jsonl').removesuffix('.log')}.md")
    return _write(target, training_report(log, benches)[1])


def _write(path: Path, text: str) -> int:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    print(path)
    return 0


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C (or SIGTERM) is a request to stop, the second one stops at once."""
    asked = False

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        asked = True
        for one, before in previous.items():
            signal.signal(one, before)

    previous = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        for one in previous:
            signal.signal(one, ask)
    except ValueError:  # not the main thread
        previous.clear()
    try:
        yield lambda: asked
    finally:
        for one, before in previous.items():
            signal.signal(one, before)


@contextmanager
def _shown(console: Console) -> Iterator[Callable[[str, float, Mapping[str, float]], None]]:
    """A bar with the time left in a terminal, a line now and then elsewhere."""
    if not console.is_terminal:
        yield _Lines(console).show
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[facts]}"), console=console, speed_estimate_period=300) as bar:
        tasks: dict[str, TaskID] = {}

        def show(stage: str, share: float, facts: Mapping[str, float]) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=1.0, facts="")
            bar.update(tasks[stage], completed=share, facts=_facts(facts))

        yield show


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage, self._last = "", float("-inf")
        self._began, self._from = 0.0, 0.0

    def show(self, stage: str, share: float, facts: Mapping[str, float]) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._last, self._began, self._from = stage, float("-inf"), now, share
        if now - self._last < _QUIET_SECONDS and share < 1:
            return
        self._last = now
        left = (now - self._began) / (share - self._from) * (1 - share) if share > self._from else 0.0
        self._console.print(f"{stage} {share:.1%}, {left / 60:.1f} min left, {_facts(facts)}".strip(", "), highlight=False)


def _facts(facts: Mapping[str, float]) -> str:
    """Acceptances of all positions as one figure each, in a row."""
    acceptance = [value for name, value in facts.items() if name.startswith("acceptance")]
    parts = [f"{name} {value:g}" for name, value in facts.items() if name in ("step", "kept", "tried")]
    parts += [f"loss {facts['loss']:.3f}"] if "loss" in facts else []
    parts += [f"acceptance {' '.join(f'{value:.2f}' for value in acceptance)}"] if acceptance else []
    return ", ".join(parts)
