"""The prefix cache's index: digest of a full committed page and everything before it -> page id. Knows digests and pages;
refuses to know sequences, tensors and when to evict (the page pool decides that and tells).

The digest of page i is a hash of (digest of page i - 1, the page's token ids). The chain starts at a salt made of the model's
identity and the tenant, so nothing is ever shared across either. A digest names one token path only (256 bits of BLAKE2b), so
a hit needs no comparison of tokens.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

from spec.pages import PagePool

_DIGEST_BYTES = 32


class PrefixIndex:
    """Which published page holds which prefix. Entries die with their page's eviction."""

    def __init__(self, pool: PagePool, model_salt: str) -> None:
        pool.on_evict = self._forget
        self._pool = pool
        self._salt = model_salt.encode()
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def root(self, tenant: str) -> bytes:
        """Where a tenant's chains start. The salts' lengths are hashed too, so no pair of salts can imitate another."""
        name = tenant.encode()
        return blake2b(b"%d:%d:" % (len(self._salt), len(name)) + self._salt + name, digest_size=_DIGEST_BYTES).digest()

    @staticmethod
    def digest(parent: bytes, token_ids: list[int]) -> bytes:
        return blake2b(parent + array("i", token_ids).tobytes(), digest_size=_DIGEST_BYTES).digest()

    def find(self, digest: bytes) -> int | None:
        """The page that holds this prefix's last page, live or cached."""
        return self._page_of.get(digest)

    def publish(self, digest: bytes, page: int) -> None:
        """The live page is full and committed. A second page of the same content stays private to its sequence."""
        if digest not in self._page_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest
            self._pool.keep(page)

    def __len__(self) -> int:
        return len(self._page_of)

    def _forget(self, page: int) -> None:
        del self._page_of[self._digest_of.pop(page)]
