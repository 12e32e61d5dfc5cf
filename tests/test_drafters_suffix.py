"""Copying: what is found, what is proposed of it, and whose text it may come from."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from drafting import Pool, View, budget, drive, paths
from hypothesis import example, given, settings
from hypothesis import strategies as st

from drafters.nothing import NothingDrafter
from drafters.suffix import SuffixDrafter
from drafters.suffix_index import RecentTexts
from kernels.suffix_index import LENGTHS, ORDERS, Found, Index, Looker, LookRow, Texts, reference
from kernels.suffix_index.reference import SuffixIndex
from spec.drafter import Outcome
from spec.tree import EMPTY_TREE, NOTHING

TEXTS = st.lists(st.integers(0, 3), min_size=0, max_size=80)


def match_length(text: list[int], position: int, tail: list[int]) -> int:
    """Brute force: how many tokens before `position` equal the end of `tail`."""
    length = 0
    while length < min(position, len(tail)) and text[position - 1 - length] == tail[-1 - length]:
        length += 1
    return length


def level(length: int) -> int:
    """What the index tells of a true match length."""
    return length if length <= ORDERS[0] else max([k for k in LENGTHS if k <= length], default=ORDERS[0])


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, cuts=st.lists(st.integers(1, 9), max_size=20), other=TEXTS)
@example(text=[0, 0, 0, 0], cuts=[], other=[0, 0, 0])  # a tail between two orders
@example(text=[0] * 12, cuts=[], other=[])  # four matches of eight tokens: those of four are not looked for
@example(text=[1, 0, 2, 0, 1, 1] * 3, cuts=[], other=[0, 2, 0, 1, 1])
def test_matches_are_what_brute_force_finds(text: list[int], cuts: list[int], other: list[int]) -> None:
    index, at = SuffixIndex(), 0
    for size in [*cuts, len(text)]:  # any way of feeding gives the same index
        index.extend(text[at : at + size])
        at += size
    for tail in (index.tokens[-32:], other[-32:]):
        truth = {p: level(match_length(index.tokens, p, tail)) for p in range(1, len(index))}
        found = dict(index.matches(tail, 1000))
        assert len(found) == len(index.matches(tail, 1000))  # no position twice
        assert all(truth[p] == length for p, length in found.items())
        best = max(truth.values(), default=0)
        assert max(found.values(), default=0) == best
        # An order that leaves at least four matches listed is the last one asked: shorter matches would only add noise.
        last = next((k for k in ORDERS if k >= 4 and sum(length >= k for length in truth.values()) >= 4), 1)
        assert {p for p, length in truth.items() if length >= last} == set(found)


@settings(max_examples=60, deadline=None)
@given(text=TEXTS, limit=st.integers(1, 6))
def test_a_limit_keeps_the_longest_and_newest(text: list[int], limit: int) -> None:
    index = SuffixIndex(text)
    everything = index.matches(text[-32:], 1000)
    few = index.matches(text[-32:], limit)
    assert len(few) <= limit
    if everything:
        assert few
        assert few[0] == everything[0]


def view_of(tokens: list[int], seq_id: int = 1, tenant: str = "", prompt_len: int = 0) -> View:
    return View(seq_id, tokens, prompt_len or len(tokens), tenant=tenant)


@settings(max_examples=150, deadline=None)
@given(text=st.lists(st.integers(0, 4), min_size=1, max_size=60), nodes=st.integers(1, 12), depth=st.integers(1, 6))
def test_every_path_proposed_continued_the_same_context_before(text: list[int], nodes: int, depth: int) -> None:
    (proposal,) = SuffixDrafter().propose([view_of(text)], [budget(nodes=nodes, depth=depth)])
    assert len(proposal.token_ids) <= nodes
    found = paths(proposal)
    assert len(set(found)) == len(found)
    for path in found:
        assert len(path) <= depth
        wanted = [text[-1], *path]
        assert any(text[i : i + len(wanted)] == wanted for i in range(len(text)))
    assert all(0.0 < c <= 1.0 for c in proposal.confidence)
    # the longest match has a say: its continuation is the first node, if it is alone
    truth = {p: level(match_length(text, p, text)) for p in range(1, len(text))}
    best = max(truth.values(), default=0)
    if best:
        assert proposal.token_ids
        leaders = {text[p] for p, length in truth.items() if length == best}
        rivals = sum(1 for length in truth.values() if length == best - 1)
        if best >= 2 and len(leaders) == 1 and rivals < 4:
            assert proposal.token_ids[0] in leaders
    else:
        assert proposal == NOTHING


def test_history_that_branches_gives_a_tree_with_the_common_branch_first() -> None:
    text = [7, 1, 2, 3, 10, 8, 1, 2, 3, 11, 9, 1, 2, 3, 10, 6, 1, 2, 3]
    (proposal,) = SuffixDrafter().propose([view_of(text)], [budget(nodes=8)])
    top = [(t, r) for t, p, r in zip(proposal.token_ids, proposal.parents, proposal.ranks, strict=True) if p == -1]
    assert top == [(10, 0), (11, 1)]
    assert proposal.confidence[0] > proposal.confidence[proposal.token_ids.index(11)]


def test_long_matches_propose_long_chains_and_short_ones_short() -> None:
    rng = random.Random(1)
    text = [rng.randrange(1000, 2000) for _ in range(60)]
    long = [*text, 5, *text[:40]]
    (proposal,) = SuffixDrafter().propose([view_of(long)], [budget(nodes=16, depth=16, price=0.3)])
    assert proposal.token_ids == tuple(text[40:56])
    short = [*text, 5, text[0]]
    (proposal,) = SuffixDrafter().propose([view_of(short)], [budget(nodes=16, depth=16, price=0.15)])
    assert 1 <= len(proposal.token_ids) < 4
    assert SuffixDrafter().propose([view_of(short)], [budget(nodes=16, depth=16, price=0.5)]) == [NOTHING]


def test_a_copied_text_takes_few_passes() -> None:
    rng = random.Random(2)
    source = [rng.randrange(500) for _ in range(200)]
    view = View(1, [*source, 501, source[0]], 201)
    passes = drive(SuffixDrafter(), [view], [[*source, 501, *source]], Pool(64, 16), nodes=8)
    assert passes[0] <= 26


def finish(drafter: SuffixDrafter, view: View) -> None:
    drafter.open(view)
    drafter.observe([Outcome(view, EMPTY_TREE, (), 0, 0, 1, True)], torch.zeros(0, 1))
    drafter.close(view.seq_id)


def test_answers_are_shared_within_a_tenant_and_never_across() -> None:
    drafter = SuffixDrafter()
    answer = list(range(100, 140))
    finish(drafter, view_of([1, 2, 3, *answer], 1, "alice", prompt_len=3))
    asked = {t: view_of([50, *answer[:6]], 9, t, prompt_len=1) for t in ("alice", "bob", "")}
    found = {t: drafter.propose([view], [budget(nodes=4)])[0].token_ids for t, view in asked.items() if not drafter.close(9)}
    assert found["alice"] == tuple(answer[6:10])
    assert found["bob"] == ()
    assert found[""] == ()


def test_prompts_and_unfinished_answers_are_not_stored() -> None:
    drafter = SuffixDrafter()
    finish(drafter, view_of([*range(100, 140), 7], 1, prompt_len=40))
    left = view_of([1, *range(200, 240)], 2, prompt_len=1)
    drafter.open(left)
    drafter.observe([Outcome(left, EMPTY_TREE, (), 0, 0, 1, False)], torch.zeros(0, 1))
    drafter.close(2)
    for tokens in ([100, 101, 102], [200, 201, 202]):
        assert drafter.propose([view_of(tokens, 3)], [budget()]) == [NOTHING]
        drafter.close(3)


def test_the_answer_store_is_bounded_and_texts_do_not_run_into_each_other() -> None:
    texts = RecentTexts(100)
    for i in range(50):
        texts.add([i, 1000, 1001, i])
        assert len(texts) <= 100
    texts.add(list(range(500)))
    assert len(texts) <= 100
    for index in (texts.newer, texts.older):
        assert all(length <= 4 for _, length in index.matches([48, 1000, 1001, 48, 49, 1000], 50))

    drafter = SuffixDrafter(tenant_tokens=64, max_tenants=3)
    for i in range(20):
        finish(drafter, view_of([0, *range(i * 10, i * 10 + 10)], i, tenant=f"t{i}", prompt_len=1))
    assert drafter.propose([view_of([0, 0, 1], 99, "t0")], [budget()]) == [NOTHING]
    assert drafter.propose([view_of([0, 190, 191], 98, "t19")], [budget()])[0].token_ids


def test_short_prompts_draft_nothing_and_close_is_forgiving() -> None:
    drafter = SuffixDrafter()
    assert drafter.propose([view_of([5]), view_of([5, 6], 2)], [budget(), budget()]) == [NOTHING, NOTHING]
    drafter.close(12345)
    quiet = NothingDrafter()
    quiet.open(view_of([1]))
    assert quiet.propose([view_of([5, 5, 5])], [budget()]) == [NOTHING]
    quiet.close(1)


def test_a_sequence_that_lost_its_tail_is_indexed_anew() -> None:
    drafter = SuffixDrafter()
    drafter.propose([view_of([1, 2, 3, 4, 1, 2, 3])], [budget()])
    (proposal,) = drafter.propose([view_of([7, 8, 7])], [budget(nodes=1)])
    assert proposal.token_ids == (8,)


@pytest.mark.parametrize("kind", ["random", "loop"])
def test_it_costs_microseconds(kind: str) -> None:
    """Bounds are an order above the cost on an idle core: they catch a wrong algorithm, not a slow machine."""
    rng = random.Random(3)
    text = [rng.randrange(400) for _ in range(4096)] if kind == "random" else [1, 2, 3, 4] * 1024
    drafter, view = SuffixDrafter(), view_of(text)
    began = time.perf_counter()
    drafter.propose([view], [budget()])
    indexing = time.perf_counter() - began
    assert indexing < 0.1
    best = 1.0
    for _ in range(50):
        view.token_ids.append(rng.randrange(400))
        began = time.perf_counter()
        drafter.propose([view], [budget(nodes=8)])
        best = min(best, time.perf_counter() - began)
    assert best < 1e-3


def test_a_newcomer_does_not_start_from_the_floor_of_one_that_drafts_were_wrong_on() -> None:
    """The price a sequence asks for says what is known of that sequence; the next one is looked at as if nothing were known."""
    drafter = SuffixDrafter()
    paying = replace(budget(), entry=0.3)
    hopeless = replace(budget(chance=lambda *_: 0.01), entry=0.3)
    first = View(0, [5, 6, 7, 8, 9, 5, 6, 7])
    assert list(drafter.hopes([first])) == [0]
    drafter.propose([first], [paying])
    for _ in range(20):  # long enough for its floor to be worked out again
        first.token_ids += [8, 9, 5, 6, 7]
        if list(drafter.hopes([first])):
            drafter.propose([first], [hopeless])
    assert list(drafter.hopes([first])) == [], "nothing pays on this one any more"
    second = View(1, [5, 6, 7, 8, 9, 5, 6, 7])
    assert list(drafter.hopes([second])) == [0]


class CountingLooker:
    """The reference's looker, which tells how many rows each look had."""

    def __init__(self, looker: Looker, rows: list[int]) -> None:
        self._looker, self._rows = looker, rows

    def watch(self, rows: Sequence[LookRow]) -> None:
        self._looker.watch(rows)

    def look(self, texts: Sequence[Sequence[int]]) -> list[int]:
        self._rows.append(len(texts))
        return self._looker.look(texts)

    def find(self, texts: Texts, shortest: int) -> list[Found]:
        return self._looker.find(texts, shortest)


class CountingOps:
    def __init__(self) -> None:
        self.rows: list[int] = []

    def index(self) -> Index:
        return reference.index()

    def looker(self, limit: int, trust: float, scores: Sequence[float]) -> Looker:
        return CountingLooker(reference.looker(limit, trust, scores), self.rows)


def test_sequences_that_nothing_pays_on_cost_no_look_until_they_are_asked_about_again() -> None:
    ops = CountingOps()
    drafter = SuffixDrafter(ops=ops)
    paying = replace(budget(), entry=0.3)
    hopeless = replace(budget(chance=lambda *_: 0.01), entry=0.3)
    copying = [5, 6, 7, 8, 9, 5, 6, 7, 8]
    views = [View(0, list(copying)), View(1, list(copying))]
    assert list(drafter.hopes(views)) == [0, 1]
    drafter.propose(views, [hopeless, paying])
    ops.rows.clear()
    hopes = []
    for step in range(70):
        for view in views:
            view.token_ids.append((9, 5, 6, 7, 8)[step % 5])
        hopes.append(list(drafter.hopes(views)))
    assert hopes[0] == [1], "of the two only the one that pays"
    assert sum(ops.rows) < 1.1 * 70, "and the other is not even looked at"
    assert [0, 1] in hopes, "but its price is asked for again, with all it said in between"


def test_who_is_left_out_is_thought_over_when_the_sequences_change() -> None:
    drafter = SuffixDrafter()
    hopeless = replace(budget(chance=lambda *_: 0.01), entry=0.3)
    first, second = (View(i, [5, 6, 7, 8, 9, 5, 6, 7, 8]) for i in range(2))
    drafter.hopes([first])
    drafter.propose([first], [hopeless])
    assert list(drafter.hopes([first])) == []
    drafter.open(second)
    assert list(drafter.hopes([second, first])) == [0, 1], "another load has other prices"
