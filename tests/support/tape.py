"""Calls of the native library written down, to be made by another process: of this machine or, under an emulator, of another.

A tape is a piece of memory with everything the calls read and write, and the calls in order. `Player` compiles replay.cpp beside this file
for one machine and makes a tape's calls there. The list of functions comes from the library's own signatures.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.native.library import SIGNATURES

SET_BYTES, MOST_ARGUMENTS, ALIGN = 16, 16, 64
WHOLE, FLOAT, PLACE, HELD = range(4)

_TYPES = {
    None: "void",
    ctypes.c_int: "int",
    ctypes.c_int32: "int32_t",
    ctypes.c_int64: "int64_t",
    ctypes.c_float: "float",
    ctypes.c_double: "double",
}


@dataclass(frozen=True)
class Place:
    """Where something lies in the tape's memory."""

    offset: int


@dataclass(frozen=True)
class Held:
    """A handle that a call left at `offset`."""

    offset: int


Argument = int | float | None | Place | Held


class Tape:
    """`put` what the calls read, `keep` or make `room` for what they write, then `call` them by name."""

    def __init__(self) -> None:
        self._memory = bytearray(ALIGN)  # the set's name comes first
        self._pointers: list[int] = []
        self._calls: list[bytes] = []
        self._names: dict[str, Place] = {}
        self._kept: dict[str, tuple[int, torch.Size, torch.dtype]] = {}
        self.isa = self.call("fs_isa", Place(0))

    def put(self, tensor: torch.Tensor) -> Place:
        held = tensor.contiguous()
        return self._add(ctypes.string_at(held.data_ptr(), held.nbytes))

    def keep(self, name: str, tensor: torch.Tensor) -> Place:
        """Calls change it, and the result has what became of it."""
        place = self.put(tensor)
        assert name not in self._kept, name
        self._kept[name] = (place.offset, tensor.shape, tensor.dtype)
        return place

    def room(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Place:
        return self.keep(name, torch.zeros(shape, dtype=dtype))

    def data(self, structure: ctypes.Structure, **pointers: Place | None) -> Place:
        """A structure of the library with these of its pointers set to places."""
        for name, place in pointers.items():
            setattr(structure, name, None if place is None else place.offset)
        at = self._add(bytes(structure))
        self._pointers += [at.offset + getattr(type(structure), n).offset for n, place in pointers.items() if place is not None]
        return at

    def call(self, name: str, *arguments: Argument) -> Held:
        if name not in self._names:
            self._names[name] = self._add(name.encode() + b"\0")
        result = self._add(bytes(8))
        packed = [_argument(a) for a in arguments] + [_argument(0)] * (MOST_ARGUMENTS - len(arguments))
        self._calls.append(struct.pack("<QQ", self._names[name].offset, result.offset) + b"".join(packed))
        return Held(result.offset)

    def write(self, path: Path) -> None:
        counts = struct.pack("<QQQ", len(self._memory), len(self._pointers), len(self._calls))
        pointers = struct.pack(f"<{len(self._pointers)}Q", *self._pointers)
        path.write_bytes(counts + self._memory + pointers + b"".join(self._calls))

    def results(self, memory: bytes) -> dict[str, torch.Tensor]:
        """What was kept, as it is in the memory after the calls."""
        return {
            name: torch.frombuffer(bytearray(memory), dtype=dtype, count=shape.numel(), offset=offset).reshape(shape)
            for name, (offset, shape, dtype) in self._kept.items()
        }

    def _add(self, data: bytes) -> Place:
        at = len(self._memory)
        self._memory += data + bytes(-len(data) % ALIGN)
        return Place(at)


def _argument(argument: Argument) -> bytes:
    match argument:
        case float():
            return struct.pack("<Qd", FLOAT, argument)
        case Place():
            return struct.pack("<QQ", PLACE, argument.offset)
        case Held():
            return struct.pack("<QQ", HELD, argument.offset)
        case _:
            return struct.pack("<Qq", WHOLE, argument or 0)


def _entries() -> str:
    lines = []
    for name, (result, arguments) in SIGNATURES.items():
        types = [_TYPES.get(t, "void*") for t in (result, *arguments)]  # type: ignore[call-overload]
        lines.append(f'FS_ENTRY("{name}", {types[0]}({", ".join(types[1:])}))')
    return "\n".join(lines)


@dataclass(frozen=True)
class Player:
    """replay.cpp for one machine beside a library for that machine; `emulator` is the start of the command that runs them."""

    program: Path
    library: Path
    emulator: tuple[str, ...] = ()

    @staticmethod
    def compile(compiler: str, library: Path, folder: Path, emulator: tuple[str, ...] = ()) -> Player:
        (folder / "entries.inc").write_text(_entries())
        source, program = Path(__file__).parent / "replay.cpp", folder / "replay"
        flags = ("-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{folder}", "-ldl")
        subprocess.run([compiler, str(source), *flags, "-o", str(program)], check=True)
        return Player(program, library, emulator)

    def sets(self, *options: str) -> list[str]:
        """The instruction sets it runs, best first. `options`: of the emulator."""
        return self._run(self.emulator + options, ()).split()

    def play(self, tape: Tape, isa: str, folder: Path) -> dict[str, torch.Tensor]:
        written, result = folder / "tape", folder / "result"
        tape.write(written)
        self._run(self.emulator, (isa, str(written), str(result)))
        return tape.results(result.read_bytes())

    def _run(self, emulator: Sequence[str], arguments: Sequence[str]) -> str:
        command = [*emulator, str(self.program), str(self.library), *arguments]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
