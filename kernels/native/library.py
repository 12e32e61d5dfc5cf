"""The loaded C++ library and its plain data. Knows ctypes; refuses to know decoders, requests or torch.

`load()` is cached because a shared library can be loaded only once per process anyway; everything else is an explicit object.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

from kernels.native.toolchain import DEFAULT_CACHE, BuildError, build

ERRORS = {
    1: "a token id is outside the vocabulary",
    2: "a position is outside the rotary tables",
    3: "a slot or page id is outside the store",
    4: "a row is malformed (row_ptr, words, page table or score rows)",
    5: "the store or the weights do not fit the decoder's shape",
    6: "out of memory",
    7: "features were given to a decoder that takes none, or none to one that needs them",
}


class NativeError(ValueError):
    """The library refused its input; nothing was computed."""


def check(code: int) -> None:
    """Raises NativeError for any code but 0."""
    if code != 0:
        raise NativeError(ERRORS.get(code, f"error {code}"))


class WeightData(Structure):
    _fields_ = [
        ("kind", c_int32),
        ("out", c_int32),
        ("in_", c_int32),
        ("codes", c_void_p),
        ("scale", c_void_p),
        ("minimum", c_void_p),
        ("bias", c_void_p),
    ]


class StepData(Structure):
    _fields_ = [
        ("nodes", c_int32),
        ("rows", c_int32),
        ("pages", c_int32),
        ("scored", c_int32),
        ("input_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("words", c_void_p),
        ("causal", c_void_p),
        ("row_ptr", c_void_p),
        ("page_table", c_void_p),
        ("kv_lens", c_void_p),
        ("score_rows", c_void_p),
        ("features", c_void_p),
    ]


class StoreData(Structure):
    _fields_ = [
        ("k", c_void_p),
        ("v", c_void_p),
        ("layers", c_int32),
        ("pages", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("page_size", c_int32),
        ("kind", c_int32),
    ]


class ShapeData(Structure):
    _fields_ = [
        ("layers", c_int32),
        ("hidden", c_int32),
        ("intermediate", c_int32),
        ("q_heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("vocab", c_int32),
        ("max_position", c_int32),
        ("window", c_int32),
        ("features", c_int32),
        ("norm_eps", c_float),
        ("scale", c_float),
    ]


_P = c_void_p
SIGNATURES: dict[str, tuple[object, Sequence[object]]] = {
    "fs_isa_name": (c_char_p, [c_int]),
    "fs_isa": (_P, [c_char_p]),
    "fs_trim": (None, []),
    "fs_team_create": (_P, [c_int]),
    "fs_team_destroy": (None, [_P]),
    "fs_matrix_create": (_P, [POINTER(WeightData)]),
    "fs_matrix_destroy": (None, [_P]),
    "fs_matrix_bytes": (c_int64, [_P]),
    "fs_matrix_row": (None, [_P, c_int, _P]),
    "fs_linear": (None, [_P, _P, _P, _P, c_int, _P]),
    "fs_quantise": (None, [_P, _P, c_int, c_int, _P, _P]),
    "fs_rms_norm": (None, [_P, _P, _P, _P, c_int, c_int, c_float, _P, _P]),
    "fs_rope": (None, [_P, _P, _P, _P, _P, c_int, c_int, c_int, _P]),
    "fs_kv_write": (None, [_P, POINTER(StoreData), c_int, _P, _P, _P, c_int]),
    "fs_kv_move": (None, [_P, _P, POINTER(StoreData), _P, _P, c_int]),
    "fs_tree_attention": (c_int32, [_P, _P, _P, c_int, POINTER(StoreData), c_int, POINTER(StepData), c_float, c_int, _P]),
    "fs_tree_accept": (None, [_P, _P, _P, _P, _P, c_int, c_int, _P, _P, _P]),
    "fs_sample": (None, [_P, _P, _P, c_int, c_int, _P, _P, _P, _P, _P, _P, _P]),
    "fs_top_shares": (None, [_P, _P, _P, c_int, c_int, c_int, _P, _P, _P]),
    "fs_limit": (c_double, [_P, _P, c_int, _P, c_int64, c_int]),
    "fs_all_finite": (c_int32, [_P, c_int64]),
    "fs_suffix_create": (_P, []),
    "fs_suffix_destroy": (None, [_P]),
    "fs_suffix_extend": (None, [_P, _P, c_int]),
    "fs_suffix_matches": (c_int, [_P, _P, c_int, c_int, c_int, _P, _P]),
    "fs_suffix_looker": (_P, [c_int, c_double, _P, c_int]),
    "fs_suffix_looker_destroy": (None, [_P]),
    "fs_suffix_watch": (None, [_P, _P, c_int]),
    "fs_suffix_look": (c_int, [_P, _P]),
    "fs_suffix_find": (c_int, [_P, _P, _P, _P, c_int, _P]),
    "fs_tree_create": (_P, [_P, c_int, c_int, c_int, _P, _P, c_int, _P, c_int, c_int, c_int, c_int]),
    "fs_tree_destroy": (None, [_P]),
    "fs_tree_grow": (c_int32, [_P, _P, POINTER(StoreData), _P, _P, c_int, _P, _P, c_int, _P, _P, _P]),
    "fs_decoder_create": (_P, [_P, POINTER(ShapeData)]),
    "fs_decoder_destroy": (None, [_P]),
    "fs_decoder_set_weight": (c_int32, [_P, c_int, c_int, POINTER(WeightData)]),
    "fs_decoder_lend_embedding": (c_int32, [_P, _P]),
    "fs_decoder_set_vector": (c_int32, [_P, c_int, c_int, _P, c_int64]),
    "fs_decoder_draft": (c_int32, [_P, _P, POINTER(StepData), POINTER(StoreData), _P, _P, _P, c_int, _P, _P, _P]),
    "fs_decoder_forward": (c_int32, [_P, _P, POINTER(StepData), POINTER(StoreData), _P, _P, _P, _P]),
}


class Team:
    """A persistent team of threads, the caller included. Freed with the last reference."""

    def __init__(self, library: NativeLibrary, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        self.threads = threads
        self._destroy = library.c.fs_team_destroy
        self.handle: int = library.c.fs_team_create(threads)

    def __del__(self) -> None:
        self._destroy(self.handle)


@dataclass(frozen=True, eq=False)
class NativeLibrary:
    """The library, ready to call. `c` has the functions of entry.cpp with their argument types set."""

    path: Path
    c: ctypes.CDLL

    @functools.cached_property
    def isas(self) -> tuple[str, ...]:
        """Instruction sets this build has and this machine runs, best first."""
        names: list[str] = []
        while (name := self.c.fs_isa_name(len(names))) is not None:
            names.append(name.decode())
        return tuple(names)

    def isa(self, name: str | None = None) -> int:
        """Handle of an instruction set, the best one by default. Raises ValueError with the known names."""
        wanted = self.isas[0] if name is None else name
        handle = self.c.fs_isa(wanted.encode())
        if handle is None:
            raise ValueError(f"instruction set {wanted!r} is not one of {', '.join(self.isas)}")
        return int(handle)

    def trim(self) -> None:
        """Gives freed memory back to the system. Worth a call once the weights that were packed are dropped."""
        self.c.fs_trim()

    def team(self, threads: int) -> Team:
        """The process's team of that size: decoders of one size share their threads."""
        return _team(self, threads)


@functools.cache
def _team(library: NativeLibrary, threads: int) -> Team:
    return Team(library, threads)


def open_library(path: Path) -> NativeLibrary:
    """Loads a built library. Raises OSError."""
    c = ctypes.CDLL(str(path))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(c, name)
        function.restype = result
        function.argtypes = arguments
    return NativeLibrary(path, c)


@functools.cache
def load(cache: Path = DEFAULT_CACHE) -> NativeLibrary | None:
    """Builds if needed and loads. None where no compiler is at hand or the build fails: use the torch reference then."""
    try:
        path, _ = build(cache)
    except BuildError:
        return None
    return None if path is None else open_library(path)


def require() -> NativeLibrary:
    """The library, or NativeError where there is none."""
    library = load()
    if library is None:
        raise NativeError("the native library is not available (no C++ compiler, or the build failed)")
    return library
