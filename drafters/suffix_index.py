"""A bounded store of texts over two suffix indexes. Knows lists of tokens; refuses to know whose they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kernels.suffix_index import BARRIER, Index
from kernels.suffix_index.reference import SuffixIndex


class RecentTexts:
    """Two generations: when the newer is full, the older is dropped. Costs stay amortised."""

    __slots__ = ("_half", "_make", "newer", "older")

    def __init__(self, max_tokens: int, make: Callable[[], Index] = SuffixIndex) -> None:
        self._half = max(1, max_tokens // 2)
        self._make = make
        self.newer = make()
        self.older = make()

    def __len__(self) -> int:
        return len(self.newer) + len(self.older)

    def add(self, tokens: Sequence[int]) -> None:
        """Store one text (its last tokens when it alone is too long)."""
        text = list(tokens[-(self._half - 1) :]) if len(tokens) >= self._half else list(tokens)
        if len(self.newer) + len(text) + 1 > self._half:
            self.older, self.newer = self.newer, self._make()
        self.newer.extend([*text, BARRIER])
