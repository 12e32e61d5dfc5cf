"""The page pool's states, eviction order and accounting identity, and the prefix chain over it."""

from __future__ import annotations

import pytest
from engine_kit import greedy_request
from hypothesis import given, settings
from hypothesis import strategies as st

from spec.config import EngineConfig
from spec.errors import InvariantError
from spec.pages import PagePool
from spec.paging import Paging
from spec.prefix import PrefixIndex
from spec.sequence import Sequence


def test_a_page_goes_from_free_to_live_to_cached_and_back_to_free_content() -> None:
    pool = PagePool(2)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    page = pool.allocate()
    assert (pool.live, pool.cached, pool.free) == (1, 0, 1)
    pool.keep(page)
    pool.release(page)
    assert (pool.live, pool.cached, pool.free, pool.available) == (0, 1, 1, 2)
    other = pool.allocate()
    assert other != page, "a free page goes before a cached one"
    assert evicted == []
    again = pool.allocate()
    assert (again, evicted) == (page, [page])
    pool.release(again)
    assert pool.free == 1, "an evicted page lost its publication"


def test_unpublished_pages_are_free_when_released() -> None:
    pool = PagePool(1)
    pool.release(pool.allocate())
    assert (pool.live, pool.cached, pool.free) == (0, 0, 1)


def test_eviction_takes_the_page_released_longest_ago() -> None:
    pool = PagePool(3)
    order: list[int] = []
    pool.on_evict = order.append
    pages = [pool.allocate() for _ in range(3)]
    for page in pages:
        pool.keep(page)
    for page in (pages[1], pages[0], pages[2]):
        pool.release(page)
    pool.share(pages[1])  # used again: now the youngest
    pool.release(pages[1])
    for _ in range(3):
        pool.allocate()
    assert order == [pages[0], pages[2], pages[1]]


def test_a_generation_ends_only_when_the_page_is_handed_out_for_new_content() -> None:
    pool = PagePool(1)
    page = pool.allocate()
    first = pool.generations[page]
    pool.keep(page)
    pool.share(page)
    pool.release(page)
    pool.release(page)
    pool.share(page)
    assert pool.generations[page] == first, "sharing keeps the content"
    pool.release(page)
    assert pool.generations[pool.allocate()] == first + 1


def test_wrong_use_is_refused() -> None:
    pool = PagePool(1)
    with pytest.raises(InvariantError, match="free"):
        pool.share(0)
    with pytest.raises(InvariantError, match="not live"):
        pool.keep(0)
    page = pool.allocate()
    with pytest.raises(InvariantError, match="no page is available; all 1 are live"):
        pool.allocate()
    pool.release(page)
    with pytest.raises(InvariantError, match="once too often"):
        pool.release(page)


def test_check_finds_a_reference_without_a_holder() -> None:
    pool = PagePool(4)
    page = pool.allocate()
    pool.check([[page]])
    with pytest.raises(InvariantError, match="1 references and 0 holders"):
        pool.check([])
    with pytest.raises(InvariantError, match="1 references and 2 holders"):
        pool.check([[page], [page]])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 7)), max_size=120))
def test_the_accounting_identity_holds_under_any_order_of_operations(moves: list[tuple[int, int]]) -> None:
    pool = PagePool(8)
    held: list[int] = []  # one entry a reference
    published: set[int] = set()

    def forget(page: int) -> None:
        published.remove(page)  # raises when a page is evicted that was never published, or twice

    pool.on_evict = forget
    for move, number in moves:
        if move == 0 and pool.available:
            held.append(pool.allocate())
        elif move == 1 and held:
            pool.release(held.pop(number % len(held)))
        elif move == 2 and held:
            page = held[number % len(held)]
            pool.keep(page)
            published.add(page)
        elif move == 3 and held:
            page = held[number % len(held)]
            pool.share(page)
            held.append(page)
        elif move == 4 and (idle := [p for p in sorted(published) if pool.references(p) == 0]):
            page = idle[number % len(idle)]
            pool.share(page)
            held.append(page)
        pool.check([held])
        assert pool.live == len(set(held))
        assert pool.live + pool.cached + pool.free == pool.total


# --- the chain of prefixes -----------------------------------------------------------------------------------------------


def paging(pages: int = 16, page_size: int = 4, salt: str = "m", prefix_cache: bool = True) -> Paging:
    config = EngineConfig(num_pages=pages, page_size=page_size, model_salt=salt, prefix_cache=prefix_cache)
    return Paging(config, PagePool(pages))


def sequence(number: int, tokens: list[int], tenant: str = "") -> Sequence:
    request = greedy_request(number, tokens, 64, tenant=tenant)
    return Sequence(request, ordinal=number, context=1000, end_ids=frozenset(), arrived_at=0.0)


def computed(table: Paging, number: int, tokens: list[int], tenant: str = "") -> Sequence:
    """A sequence whose keys are all committed but the last token's, published and let go."""
    made = sequence(number, tokens, tenant)
    assert table.reserve(made, len(tokens) - 1)
    made.num_kv = len(tokens) - 1
    table.publish(made)
    return made


@pytest.mark.parametrize(("length", "hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (13, 12)])
def test_a_match_is_whole_pages_and_leaves_a_token_to_compute(length: int, hit: int) -> None:
    table = paging()
    tokens = list(range(20))
    table.release(computed(table, 1, tokens))
    assert table.match(again := sequence(2, tokens[:length])) == hit
    assert again.num_kv == hit == len(again.page_ids) * 4


def test_only_an_equal_beginning_matches() -> None:
    table = paging()
    table.release(computed(table, 1, list(range(13))))
    assert table.match(sequence(2, [0, 1, 2, 3, 99, 5, 6, 7, 8])) == 4
    assert table.match(sequence(3, [99, 1, 2, 3, 4, 5, 6, 7, 8])) == 0
    assert table.match(sequence(4, [4, 5, 6, 7, 8, 9, 10])) == 0, "the same page after another beginning is another page"


def test_salts_keep_tenants_and_models_apart() -> None:
    table = paging()
    tokens = list(range(9))
    table.release(computed(table, 1, tokens, tenant="a"))
    assert table.match(sequence(2, tokens, tenant="b")) == 0
    assert table.match(sequence(3, tokens)) == 0
    assert table.match(sequence(4, tokens, tenant="a")) == 8
    roots = {
        PrefixIndex(PagePool(1), salt).root(tenant) for salt, tenant in (("ab", "c"), ("a", "bc"), ("", "abc"), ("abc", ""))
    }
    assert len(roots) == 4, "no pair of salts may imitate another"


def test_an_evicted_page_is_not_found_any_more() -> None:
    table = paging(pages=4)
    tokens = list(range(13))
    table.release(computed(table, 1, tokens))
    assert (table.pool.cached, table.pool.free) == (3, 1)
    other = sequence(2, [100, 101, 102, 103, 104])
    assert table.reserve(other, 8)
    assert table.match(sequence(3, tokens)) == 8, "the tail of a chain is evicted before its head"
    assert len(table.index) == 2


def test_a_duplicate_page_stays_private() -> None:
    table = paging()
    tokens = list(range(9))
    first, second = computed(table, 1, tokens), computed(table, 2, tokens)
    assert first.page_ids != second.page_ids
    table.release(second)
    assert table.pool.cached == 0
    table.release(first)
    assert table.pool.cached == 2
    table.pool.check([])


def test_switched_off_it_neither_matches_nor_publishes() -> None:
    table = paging(prefix_cache=False)
    tokens = list(range(9))
    table.release(computed(table, 1, tokens))
    assert table.pool.cached == 0
    assert table.match(sequence(2, tokens)) == 0


def test_a_page_is_hashed_once_in_a_sequence_life(monkeypatch: pytest.MonkeyPatch) -> None:
    table = paging(pages=64)
    hashed: list[int] = []
    digest = PrefixIndex.digest

    def counting(parent: bytes, token_ids: list[int]) -> bytes:
        hashed.append(token_ids[0])
        return digest(parent, token_ids)

    monkeypatch.setattr(PrefixIndex, "digest", staticmethod(counting))
    grown = sequence(1, list(range(10)))
    assert table.reserve(grown, 200)
    for length in range(10, 100):
        grown.num_kv = length - 1
        table.publish(grown)
        table.next_digest(grown)
        grown.token_ids.append(length)
    assert hashed == list(range(0, 98, 4))[: len(hashed)]
    assert len(hashed) == len(set(hashed)) >= 24
