"""The page pool: which pages of the KV stores are live, cached or free. Knows page ids and counts only; refuses to know
tokens, hashes, sequences and tensors.

A page is in exactly one state:

    live    one or more sequences hold it (references >= 1)
    cached  nobody holds it, its content is published and may be shared again; evicted oldest release first
    free    nobody holds it and its content is worthless

Every operation is O(1). `live + cached + free == total` always holds; `check` proves it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from spec.errors import InvariantError


def _nothing(page: int) -> None:
    return None


class PagePool:
    """`on_evict(page)` is called when a cached page is about to be handed out for new content; the prefix index sets it.

    `generations[page]` rises each time the page is handed out for new content: a draft store that remembers the number it
    filled a page under knows whether its copy still belongs to the page's tokens.
    """

    def __init__(self, num_pages: int) -> None:
        self.total = num_pages
        self.generations = [0] * num_pages
        self._references = [0] * num_pages
        self._kept = bytearray(num_pages)  # 1 = published: becomes cached, not free, when its last holder lets go
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: the page used last is the warmest
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest release first
        self.on_evict: Callable[[int], None] = _nothing

    @property
    def available(self) -> int:
        """Pages `allocate` can still hand out, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def live(self) -> int:
        return self.total - len(self._free) - len(self._cached)

    def references(self, page: int) -> int:
        return self._references[page]

    def allocate(self) -> int:
        """A page with one reference for new content; a free one if there is any, else the oldest cached one.

        Raises InvariantError when nothing is available: callers ask `available` first.
        """
        if self._free:
            page = self._free.pop()
        elif self._cached:
            page, _ = self._cached.popitem(last=False)
            self._kept[page] = 0
            self.on_evict(page)
        else:
            raise InvariantError(f"no page is available; all {self.total} are live")
        self.generations[page] += 1
        self._references[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more holder of a live or cached page."""
        if self._references[page] == 0:
            if page not in self._cached:
                raise InvariantError(f"page {page} is free; only live and cached pages can be shared")
            del self._cached[page]
        self._references[page] += 1

    def release(self, page: int) -> None:
        """One holder lets go."""
        left = self._references[page] - 1
        if left < 0:
            raise InvariantError(f"page {page} was released once too often")
        self._references[page] = left
        if left == 0:
            if self._kept[page]:
                self._cached[page] = None
            else:
                self._free.append(page)

    def keep(self, page: int) -> None:
        """The page's content is published: cache it when its last holder lets go."""
        if self._references[page] == 0:
            raise InvariantError(f"page {page} is not live; only live pages can be published")
        self._kept[page] = 1

    def is_cached(self, page: int) -> bool:
        return page in self._cached

    def check(self, holders: Iterable[Iterable[int]] | None = None) -> None:
        """Raise InvariantError unless every page is in exactly one state (O(total), for tests and idle moments).

        `holders`: the page lists of all sequences; given, every reference must have its holder.
        """
        free, cached = set(self._free), set(self._cached)
        live = {page for page, count in enumerate(self._references) if count > 0}
        if len(free) != len(self._free) or free & cached or free & live or cached & live:
            raise InvariantError("a page is in two states")
        if len(live) + len(cached) + len(free) != self.total:
            raise InvariantError(f"{len(live)} live + {len(cached)} cached + {len(free)} free pages are not {self.total}")
        if any(not self._kept[page] for page in cached) or any(self._kept[page] for page in free):
            raise InvariantError("a cached page is unpublished, or a free page is published")
        if holders is None:
            return
        counts = [0] * self.total
        for pages in holders:
            for page in pages:
                counts[page] += 1
        for page, count in enumerate(counts):
            if count != self._references[page]:
                raise InvariantError(f"page {page} has {self._references[page]} references and {count} holders")
