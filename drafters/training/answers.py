"""The file of answers: one JSON object a line, gzip. Knows lines and bytes; refuses to know who wrote them.

    {"prompt_ids": [...], "answer_ids": [...], "greedy": true}        greedy may be missing

A file that the target writes for itself is made of gzip members, each a chunk of conversations that ends in a line
{"chunk": 7, "next": 512, ...}. The first member holds {"format": "forespeak.answers/1", ...}. A write that was cut leaves
a broken last member, which is cut off before the next one is written, so the file can be continued after any kill.
Any other file of such lines, gzip or plain, is read as it is.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from spec.errors import ConfigError

FORMAT = "forespeak.answers/1"
_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Conversation:
    """One prompt, complete with everything the template writes, and the answer with its end token if it has one."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    greedy: bool | None = None

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)


class _Line(msgspec.Struct):
    prompt_ids: list[int] | None = None
    answer_ids: list[int] | None = None
    greedy: bool | None = None
    chunk: int | None = None
    next: int = 0
    format: str | None = None
    about: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Contents:
    conversations: list[Conversation]
    about: dict[str, Any]  # what the header says of the writing; {} without one
    chunks: int  # complete chunks
    next: int  # number of the next conversation to be written
    size: int  # bytes up to the end of the last complete member


def read_answers(path: Path) -> Contents:
    """Raises ConfigError naming the line, or the byte where a file of one piece breaks off."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the answers in {path}: {error.strerror}") from error
    if not data.startswith(_MAGIC):
        return _parse(path, [data], len(data))
    members, size = _members(data)
    if not members and data:
        raise ConfigError(f"{path}: no complete gzip member")
    return _parse(path, members, size)


def start(path: Path, about: dict[str, Any]) -> None:
    """A new file with its header. `about` says what was asked for; continuing asks for the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.new")
    draft.write_bytes(_pack([{"format": FORMAT, "about": about}]))
    os.replace(draft, path)


def append(path: Path, size: int, chunk: int, following: int, conversations: Sequence[Conversation]) -> int:
    """Write one chunk behind the first `size` bytes and return the new size. On disk when this returns."""
    lines: list[dict[str, Any]] = [
        {"prompt_ids": c.prompt_ids, "answer_ids": c.answer_ids, "greedy": c.greedy} for c in conversations
    ]
    member = _pack([*lines, {"chunk": chunk, "next": following}])
    with path.open("r+b") as file:
        file.truncate(size)
        file.seek(size)
        file.write(member)
        file.flush()
        os.fsync(file.fileno())
    return size + len(member)


def _pack(lines: Sequence[dict[str, Any]]) -> bytes:
    return gzip.compress(b"".join(msgspec.json.encode(line) + b"\n" for line in lines), mtime=0)


def _members(data: bytes) -> tuple[list[bytes], int]:
    """Contents of the complete gzip members and where the last of them ends."""
    found: list[bytes] = []
    at = 0
    while at < len(data):
        stream = zlib.decompressobj(wbits=31)
        try:
            text = stream.decompress(memoryview(data)[at:])
        except zlib.error:
            break
        if not stream.eof:
            break
        at = len(data) - len(stream.unused_data)
        found.append(text)
    return found, at


def _parse(path: Path, members: Sequence[bytes], size: int) -> Contents:
    decoder = msgspec.json.Decoder(_Line)
    conversations: list[Conversation] = []
    about: dict[str, Any] = {}
    chunks = following = number = 0
    for member in members:
        for text in member.splitlines():
            number += 1
            if not text.strip():
                continue
            try:
                line = decoder.decode(text)
            except msgspec.DecodeError as error:
                raise ConfigError(f"{path}:{number}: {error}") from error
            if line.format is not None:
                about = line.about
            elif line.chunk is not None:
                chunks, following = line.chunk + 1, line.next
            elif line.prompt_ids is None or not line.answer_ids:
                raise ConfigError(f'{path}:{number}: expected "prompt_ids" and "answer_ids", lists of token ids')
            else:
                conversations.append(Conversation(tuple(line.prompt_ids), tuple(line.answer_ids), line.greedy))
    return Contents(conversations, about, chunks, following, size)
