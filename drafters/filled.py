"""Which keys of a draft store are filled. Knows pages, their generations and lengths; refuses to know tensors and models.

The store lies over the target's page ids, so a prefix-cache hit is a hit for both, provided this drafter did fill the page: it
remembers the generation under which it filled each page, and what it did not fill is computed anew.
"""

from __future__ import annotations

from typing import Protocol

from spec.drafter import SequenceView


class Pages(Protocol):
    """What is asked of the page pool: `generations[page]` rises whenever the page is handed out for new content."""

    generations: list[int]


class Draft:
    """One sequence: the first `valid` tokens have draft keys; `chain` are tokens drafted after `base` whose keys exist."""

    __slots__ = ("base", "chain", "faults", "marked", "valid")

    def __init__(self) -> None:
        self.valid = 0
        self.marked = 0  # leading pages already noted as filled
        self.base = 0
        self.chain: list[int] = []
        self.faults = 0

    def matched(self, token_ids: list[int]) -> int:
        """How many tokens of the chain were committed. The chain is over with this."""
        count = 0
        if self.chain:
            for token, drafted in zip(token_ids[self.base :], self.chain, strict=False):
                if token != drafted:
                    break
                count += 1
            self.chain = []
        return count


class FilledPages:
    """The record of one store."""

    def __init__(self, pages: Pages, page_size: int) -> None:
        self.page_size = page_size
        self._pages = pages
        self._filled: dict[int, int] = {}  # page -> the generation under which this store was filled

    def begin(self, view: SequenceView) -> Draft:
        """A sequence starts after the leading pages that were filled for the very content they hold."""
        draft = Draft()
        for page in view.page_ids:
            if self._filled.get(page) != self._pages.generations[page]:
                break
            draft.marked += 1
        draft.valid = min(draft.marked * self.page_size, len(view.token_ids) - 1)
        draft.marked = draft.valid // self.page_size
        return draft

    def mark(self, view: SequenceView, draft: Draft) -> None:
        """Note the pages that `valid` fills by now."""
        full = draft.valid // self.page_size
        if full > draft.marked:
            for page in view.page_ids[draft.marked : full]:
                self._filled[page] = self._pages.generations[page]
            draft.marked = full

    def forget(self, view: SequenceView) -> None:
        """Whatever lies in the sequence's pages is not to be trusted."""
        for page in view.page_ids:
            self._filled.pop(page, None)
