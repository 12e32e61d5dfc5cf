"""The predictor on a simulated clock: scripted acceptance and made-up tables in, figures that can be worked out by hand out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.tuning.offered import offered
from server.tuning.predict import Choice, View, accepted_path, predict
from server.tuning.search import LoadPoint, Workload, by_load, choices, finalists, search, stops_paying, verdict
from server.tuning.traces import Curve, DraftCost, Machine, StepCurves, Trace, kept
from spec.calibration import Calibration
from spec.cost_table import CostTable
from spec.drafter import Budget
from spec.request import SamplingParams, SpeculationPolicy
from spec.shapes import ShapeSpeculator
from spec.tree import DraftTree, Proposal

RIGHT, WRONG = 5, 9


def chain(right: int, length: int) -> Proposal:
    """A chain whose first `right` tokens come true, and whose drafter knows it."""
    tokens = tuple(RIGHT if i < right else WRONG for i in range(length))
    confidence = tuple(0.97 if i < right else 0.02 for i in range(length))
    return Proposal(tokens, tuple(range(-1, length - 1)), confidence, (0,) * length)


def trace(rights: Sequence[int], prompt: int = 50, length: int = 6, names: Sequence[str] = ("guess",)) -> Trace:
    """An answer of one token more than `rights`: at position i a chain with rights[i] right tokens is on offer."""
    return Trace(prompt, (RIGHT,) * (len(rights) + 1), (*({name: chain(r, length) for name in names} for r in rights), {}))


def machine_of(first: float = 4.0, each_row: float = 0.1, drafting: float = 0.05, per_level: float = 0.0) -> Machine:
    costs = CostTable()
    now = [0.0]
    costs.measure(
        lambda rows, context, sequences: first + each_row * (rows - 1), max_rows=256, seconds=60.0, clock=lambda: now[0]
    )
    levels = Curve(tuple((float(depth), drafting + per_level * depth) for depth in range(17)))
    return Machine(
        decode=costs,
        chunk=Curve(((1.0, first), (257.0, first + 25.6))),
        plain=StepCurves(Curve(((1.0, 0.5),))),
        drafting=StepCurves(Curve(((1.0, 0.6),))),
        drafts={"guess": DraftCost(levels), "poor": DraftCost(levels)},
        pages={16: 1.0, 32: 0.85},
    )


def workload(traces: Sequence[Trace], machine: Machine) -> Workload:
    return Workload(traces, machine, Calibration(), 64)


def test_an_accepted_path_follows_the_answer_through_a_tree() -> None:
    #      root -> 9, 5 -> 7, 5 -> 5
    tree = DraftTree((9, 5, 7, 5, 5), (-1, -1, 1, 1, 3), (0.5,) * 5, (("a",),) * 5, (((0, 0),),) * 5)
    assert accepted_path(tree, [5, 5, 5, 5]) == (1, 3, 4)
    assert accepted_path(tree, [5, 7, 5]) == (1, 2)
    assert accepted_path(tree, [4]) == ()
    assert accepted_path(tree, []) == ()


def test_plain_decoding_is_chunks_and_then_one_pass_a_token() -> None:
    machine = machine_of()
    choice = Choice((), chunk_tokens=64)
    found = predict([trace([0] * 10, prompt=129)], machine, choice, 1, lambda: ShapeSpeculator("chain:1"))
    # two chunks of 64 tokens and one of 1, then ten passes of one row
    chunks = 2 * (4.0 + 25.6 * 63 / 256) + 4.0
    assert found.ttft_ms == [pytest.approx(chunks + 3 * 0.5)]
    assert found.total_ms == pytest.approx(chunks + 10 * 4.0 + 13 * 0.5)
    assert found.tokens == 11
    assert found.acceptance_length == 1.0


def test_a_fixed_chain_brings_what_the_script_says() -> None:
    rights = [3, 0, 1, 2, 0, 5, 5, 5, 5, 5, 5, 1, 0, 0, 2, 2, 2]
    for length in (1, 2, 4):
        found = predict([trace(rights)], machine_of(), Choice(("guess",)), 1, lambda n=length: ShapeSpeculator(f"chain:{n}"))
        at = steps = 0
        nodes = 0
        while at < len(rights):  # the same, worked out without trees
            left = len(rights) - at
            drafted = min(length, left - 1)
            nodes += drafted
            at += min(rights[at], drafted) + 1
            steps += 1
        assert (found.steps, found.step_tokens, found.drafted) == (steps, len(rights), nodes)
        plain_passes = steps * 4.0 + nodes * 0.1
        assert found.pass_ms - (4.0 + 25.6 * 49 / 256) == pytest.approx(plain_passes)


def test_a_drafter_that_looks_first_is_not_asked_where_it_has_nothing() -> None:
    """Nothing on offer but at every tenth token: asking costs there only, and what is accepted is the same."""
    said = trace([6] * 60)
    offers = tuple(each if i % 10 == 0 else {} for i, each in enumerate(said.offers))
    dear = machine_of(drafting=1.0)
    asked, looked = (
        predict([replace(said, offers=offers)], machine, Choice(("guess",)), 1, lambda: ShapeSpeculator("chain:2"))
        for machine in (dear, replace(dear, glancing=frozenset({"guess"})))
    )
    assert (asked.steps, asked.accepted) == (looked.steps, looked.accepted)
    assert looked.accepted > 0
    assert asked.draft_ms > 5.0 * looked.draft_ms > 0.0


def test_a_budget_caps_what_a_step_brings() -> None:
    work = workload([trace([6] * 60)], machine_of())
    lengths = [work.predict(Choice(("guess",), max_tree_nodes=n), 1).acceptance_length for n in (1, 2, 4)]
    assert lengths[0] <= 2.0 < lengths[1] <= 3.0 < lengths[2] <= 5.0


def test_page_size_scales_passes_and_nothing_else() -> None:
    work = workload([trace([0] * 20)], machine_of())
    usual, large = work.predict(Choice(), 1), work.predict(Choice(page_size=32), 1)
    assert large.pass_ms == pytest.approx(0.85 * usual.pass_ms)
    assert large.total_ms - large.pass_ms == pytest.approx(usual.total_ms - usual.pass_ms)


def test_conversations_at_once_share_passes_and_wait_their_turn() -> None:
    work = workload([trace([0] * 20)] * 6, machine_of())
    alone, three = work.predict(Choice(), 1), work.predict(Choice(), 3)
    assert alone.tokens == three.tokens == 6 * 21
    assert three.tokens_per_second > 2.0 * alone.tokens_per_second
    assert len(three.ttft_ms) == 6


@given(
    rights=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=25), min_size=1, max_size=4),
    concurrency=st.integers(1, 4),
    shape=st.sampled_from(["", "chain:2", "chain:4"]),
    chunk=st.sampled_from([1, 16, 64]),
)
@settings(max_examples=40, deadline=None)
def test_every_token_is_answered_once_whatever_is_drafted(
    rights: list[list[int]], concurrency: int, shape: str, chunk: int
) -> None:
    work = workload([trace(r) for r in rights], machine_of())
    choice = Choice(("guess",), tree_shape=shape, chunk_tokens=chunk)
    found = work.predict(choice, concurrency)
    assert found.tokens == sum(len(r) + 1 for r in rights)
    assert found.step_tokens == sum(len(r) for r in rights)
    assert found.accepted <= found.drafted
    assert found.accepted + found.steps >= found.step_tokens


def test_the_price_rule_drafts_where_it_pays_and_stops_where_it_does_not() -> None:
    good, bad = [trace([4] * 80)] * 4, [trace([0] * 80)] * 4
    cheap = machine_of()
    plain = workload(good, cheap).predict(Choice(), 1).tokens_per_second
    assert workload(good, cheap).predict(Choice(("guess",)), 1).tokens_per_second > 2.0 * plain
    # Nothing comes true: the rule gives up, and loses no more than its looks.
    assert workload(bad, cheap).predict(Choice(("guess",)), 1).tokens_per_second > 0.93 * plain


def test_a_pass_of_a_drafter_is_made_only_while_it_pays() -> None:
    machine = machine_of(per_level=1.0)
    view = View(0, trace([4, 4]), SamplingParams(max_tokens=9), SpeculationPolicy(), said=1)

    def asked(ms_price: float, nodes: int = 16) -> tuple[int, float | None]:
        budget = Budget(nodes, 16, 0.0, lambda ms: ms * ms_price, lambda d, k, r, c: (0.8 if r == 0 else 0.0) if c < 0 else c)
        proposals, ms = offered("guess", [view], [budget], machine)
        return len(proposals[0].token_ids), ms

    assert asked(0.0)[0] == 6
    assert asked(0.0, nodes=3)[0] == 3
    assert asked(10.0) == (0, pytest.approx(0.05))
    few, ms = asked(0.7)  # 0.8 for the first level, 0.8 * 0.97 for the next, ...
    assert 0 < few < 6
    assert ms == pytest.approx(0.05 + few * 1.0)
    assert offered("guess", [view], [Budget(0, 0, 1.0, lambda ms: ms, lambda d, k, r, c: 0.0)], machine)[1] is None


def test_kept_nodes_are_renumbered() -> None:
    proposal = Proposal((1, 2, 3, 4), (-1, 0, 0, 2), (0.9, 0.1, 0.8, 0.7), (0, 1, 0, 0))
    assert kept(proposal, [True, False, True, True]) == Proposal((1, 3, 4), (-1, 0, 1), (0.9, 0.8, 0.7), (0, 0, 0))


def test_the_search_finds_the_drafter_that_helps_and_the_sizes_that_pay() -> None:
    def mixed(right: int) -> Trace:
        both = trace([right] * 60, prompt=300, names=("guess", "poor"))
        return replace(both, offers=tuple(o and {"guess": o["guess"], "poor": chain(0, 6)} for o in both.offers))

    work = workload([mixed(4)] * 2, machine_of())
    usual = Choice(chunk_tokens=64)
    ranked = search(work, ["guess", "poor"], usual, [1, 2])
    tried = {entry.choice for entry in ranked}
    assert set(choices(["guess", "poor"], usual)) <= tried
    best = ranked[0]
    assert "guess" in best.choice.drafters
    assert best.choice.page_size == 32
    assert best.choice.chunk_tokens > 64
    assert best.worth > 1.5
    alone = next(e for e in ranked if e.choice == Choice(("poor",), 16, "", 16, 64))
    assert alone.worth < best.worth
    three = finalists(ranked, usual)
    assert three[0] is best
    assert len({(f.choice.drafters, f.choice.max_tree_nodes, f.choice.tree_shape) for f in three}) == 3


def test_a_size_that_promises_nothing_is_left_as_it_was() -> None:
    machine = replace(machine_of(), pages={16: 1.0, 32: 0.98})
    work = workload([trace([4] * 60)] * 2, machine)
    assert all(f.choice.page_size == 16 for f in finalists(search(work, ["guess"], Choice(), [1]), Choice()))


def test_a_search_without_time_still_ranks_plain_decoding_and_all_drafters() -> None:
    work = workload([trace([4] * 10)], machine_of())
    ranked = search(work, ["guess"], Choice(), [1], time_is_up=lambda: True)
    assert {entry.choice.drafters for entry in ranked} == {(), ("guess",)}
    assert len(ranked) == 2


def test_the_load_is_found_at_which_speculation_stops_paying() -> None:
    steep = machine_of(first=4.0, each_row=0.2)
    free = machine_of(each_row=0.0)
    traces = [trace([1] * 40, length=2)] * 4
    assert stops_paying(by_load(workload(traces, free), Choice(("guess",), tree_shape="chain:2"), (1, 2, 4, 8))) is None
    # At 8 at once two nodes each cost 16 rows, as much as the pass itself, for one token in two.
    costly = replace(steep, decode=machine_of(first=4.0, each_row=2.0).decode)
    end = stops_paying(by_load(workload(traces, costly), Choice(("guess",), tree_shape="chain:2"), (1, 2, 4, 8)))
    assert end is not None


@pytest.mark.parametrize(
    ("ratios", "end", "words"),
    [
        ([1.2, 1.1], None, "every load"),
        ([0.9, 0.8], 1, "no load"),
        ([1.2, 0.9], 2, "stops paying at 2"),
        ([0.9, 1.2], None, "at 2 at once only"),
    ],
)
def test_the_verdict_says_where_it_pays(ratios: list[float], end: int | None, words: str) -> None:
    points = [LoadPoint(load, 100.0, 100.0 * ratio) for load, ratio in zip((1, 2), ratios, strict=True)]
    assert stops_paying(points) == end
    assert words in verdict(points)
