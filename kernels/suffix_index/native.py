"""suffix_index in C++: the same answers as the reference, all rows of a step in one call."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kernels.native import NativeLibrary, require
from kernels.suffix_index import Found, Index, LookRow, Match, Texts

_MOST = 64  # matches of one text in one question


class NativeSuffixIndex:
    """Keeps the tokens as a list too, for those who read what follows a match."""

    __slots__ = ("_c", "handle", "tokens")

    def __init__(self, library: NativeLibrary) -> None:
        self._c = library.c
        self.tokens: list[int] = []
        self.handle: int = library.c.fs_suffix_create()

    def __del__(self) -> None:
        handle = getattr(self, "handle", None)
        if handle is not None:
            self._c.fs_suffix_destroy(handle)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, new: Sequence[int]) -> None:
        self.tokens += new
        fresh = array("i", new)
        self._c.fs_suffix_extend(self.handle, fresh.buffer_info()[0], len(fresh))

    def matches(self, tail: Sequence[int], limit: int, shortest: int = 1) -> list[Match]:
        """At most 64."""
        context, found = array("i", tail), array("i", bytes(8 * _MOST))
        at = found.buffer_info()[0]
        count = self._c.fs_suffix_matches(
            self.handle, context.buffer_info()[0], len(context), limit, shortest, at, at + 4 * _MOST
        )
        return list(zip(found[:count], found[_MOST : _MOST + count], strict=True))


class NativeLooker:
    """Rows' indexes must be this backend's."""

    def __init__(self, library: NativeLibrary, limit: int, trust: float, scores: Sequence[float]) -> None:
        self._c = library.c
        self._look, self._find = library.c.fs_suffix_look, library.c.fs_suffix_find
        table = array("d", scores)
        self._handle: int = library.c.fs_suffix_looker(limit, trust, table.buffer_info()[0], len(table))
        self._found = array("i", bytes(4 * 3 * 3 * _MOST))
        self._found_at = self._found.buffer_info()[0]
        self._rows: Sequence[LookRow] = ()
        self._own: list[list[int]] = []

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle is not None:
            self._c.fs_suffix_looker_destroy(handle)

    def watch(self, rows: Sequence[LookRow]) -> None:
        words: list[int] = []
        for own, newer, older, shortest, least in rows:
            second = 0 if newer is None else newer.handle  # type: ignore[attr-defined]
            third = 0 if older is None else older.handle  # type: ignore[attr-defined]
            words += (own.handle, second, third, shortest, least)  # type: ignore[attr-defined]
        packed = array("q", words)
        self._rows = rows  # the library holds their addresses
        self._own = [row[0].tokens for row in rows]
        self._c.fs_suffix_watch(self._handle, packed.buffer_info()[0], len(rows))

    def look(self, texts: Sequence[Sequence[int]]) -> list[int]:
        words: list[int] = []  # per row: how many tokens are new, and those
        for own, text in zip(self._own, texts, strict=True):
            fresh = text[len(own) :]
            own += fresh
            words.append(len(fresh))
            words += fresh
        packed = array("i", words)
        count = self._look(self._handle, packed.buffer_info()[0])
        return packed[:count].tolist() if count else []

    def find(self, texts: Texts, shortest: int) -> list[Found]:
        own, newer, older = [text.handle if text else None for text in texts]  # type: ignore[attr-defined]
        count = self._find(self._handle, own, newer, older, shortest, self._found_at) if own is not None else 0
        flat = self._found[: 3 * count].tolist()
        return list(zip(flat[::3], flat[1::3], flat[2::3], strict=True))


class NativeSuffix:
    """`SuffixOps` of the library."""

    def __init__(self) -> None:
        self._library = require()

    def index(self) -> Index:
        return NativeSuffixIndex(self._library)

    def looker(self, limit: int, trust: float, scores: Sequence[float]) -> NativeLooker:
        return NativeLooker(self._library, limit, trust, scores)
