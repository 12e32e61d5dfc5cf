"""The page table of each sequence: match, reserve, publish, trim, release. Knows sequences' tokens and pages; refuses to know
who is scheduled and what the tensors hold.

Only full committed pages are shared or published, and a step writes at or after `num_kv`, which lies in a page of the
sequence's own: no page is ever written by two sequences, so nothing is copied on write.
"""

from __future__ import annotations

from spec.config import EngineConfig
from spec.pages import PagePool
from spec.prefix import PrefixIndex
from spec.sequence import Sequence


class Paging:
    """Moves pages between the pool and sequences. Writes `page_ids`, `page_digests`, `num_published` and, in `match`, `num_kv`."""

    def __init__(self, config: EngineConfig, pool: PagePool) -> None:
        self.page_size = config.page_size
        self.pool = pool
        self.index = PrefixIndex(pool, f"{config.page_size}/{config.model_salt}")
        self.enabled = config.prefix_cache

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def next_digest(self, sequence: Sequence) -> bytes | None:
        """Digest of the page the sequence fills next when that page could still be shared, else None.

        None in the middle of a page, with the cache off, where the page would leave no token to compute, and for prompts of which
        every token is scored.
        """
        page, offset = divmod(sequence.num_kv, self.page_size)
        if offset or not self._shares(sequence) or sequence.num_kv + self.page_size >= len(sequence.token_ids):
            return None
        return self._digest(sequence, page)

    def _shares(self, sequence: Sequence) -> bool:
        return self.enabled and not sequence.scores_prompt

    def match(self, sequence: Sequence) -> int:
        """Take published pages that continue what the sequence holds; returns the tokens that need no computing.

        At least one token always stays to be computed, and the result is a multiple of the page size.
        """
        before = sequence.num_kv
        while (digest := self.next_digest(sequence)) is not None:
            page = self.index.find(digest)
            if page is None:
                break
            self.pool.share(page)
            sequence.page_ids.append(page)
            sequence.num_kv += self.page_size
            sequence.num_published += 1
        return sequence.num_kv - before

    def peek(self, sequence: Sequence) -> tuple[int, int]:
        """(pages `match` would take, how many of them are cached rather than live) for a sequence that holds nothing."""
        taken = cached = 0
        if self._shares(sequence):
            for index in range((len(sequence.token_ids) - 1) // self.page_size):
                page = self.index.find(self._digest(sequence, index))
                if page is None:
                    break
                taken += 1
                cached += self.pool.is_cached(page)
        return taken, cached

    def pages_touched(self, sequence: Sequence, tokens: int) -> list[bytes]:
        """Digests of the full pages that the next `tokens` known tokens of the sequence help to fill."""
        if not self.enabled:
            return []
        first = sequence.num_kv // self.page_size
        last = min(self.pages_for(sequence.num_kv + tokens), len(sequence.token_ids) // self.page_size)
        return [self._digest(sequence, index) for index in range(first, last)]

    def reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Give the sequence pages for positions 0 .. tokens - 1. All or nothing; False when the pool is short."""
        missing = self.pages_for(tokens) - len(sequence.page_ids)
        if missing > self.pool.available:
            return False
        for _ in range(missing):
            sequence.page_ids.append(self.pool.allocate())
        return True

    def publish(self, sequence: Sequence) -> None:
        """Offer the full committed pages to others."""
        full = sequence.num_kv // self.page_size
        if not self.enabled:
            return
        while sequence.num_published < full:
            index = sequence.num_published
            self.index.publish(self._digest(sequence, index), sequence.page_ids[index])
            sequence.num_published += 1

    def trim(self, sequence: Sequence) -> None:
        """Give back the pages after the committed keys (the rest of a draft window)."""
        keep = self.pages_for(sequence.num_kv)
        pages = sequence.page_ids
        while len(pages) > keep:
            self.pool.release(pages.pop())

    def release(self, sequence: Sequence) -> None:
        """Give back everything. The last page goes first, so that a chain is evicted from its tail."""
        pages = sequence.page_ids
        while pages:
            self.pool.release(pages.pop())
        sequence.num_kv = 0
        sequence.num_published = 0

    def _digest(self, sequence: Sequence, index: int) -> bytes:
        """Digest of page `index`, made once per page: the chain grows with the sequence and is never rehashed."""
        digests = sequence.page_digests
        while len(digests) <= index:
            parent = digests[-1] if digests else self.index.root(sequence.tenant)
            start = len(digests) * self.page_size
            digests.append(self.index.digest(parent, sequence.token_ids[start : start + self.page_size]))
        return digests[index]
