"""The price rule: what it verifies, what it lets drafters do, and that it is never worse than not drafting."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable

import pytest
from drafting import GREEDY, View
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.price_simulation import MACHINES, Noise, World, plain_speed, run, started
from spec.budget import PriceSpeculator
from spec.calibration import Calibration
from spec.cost_table import CostTable
from spec.drafter import UNKNOWN, Outcome
from spec.request import SamplingParams, SpeculationPolicy
from spec.speculator import Limit, Load, StepRecord
from spec.tree import EMPTY_TREE, DraftTree, Proposal


def table(ms: Callable[[int], float], per_key: float = 0.0) -> CostTable:
    """A cost table measured on a machine without noise."""
    now = [0.0]

    def one(rows: int, context: int, sequences: int) -> float:
        took = ms(rows) + per_key * context
        now[0] += took * 1e-3
        return took

    costs = CostTable()
    costs.measure(one, max_rows=256, seconds=60.0, clock=lambda: now[0])
    return costs


def linear(rows: int) -> float:
    return 2.0 + 0.5 * rows


def chain(*confidence: float) -> Proposal:
    n = len(confidence)
    return Proposal(tuple(range(10, 10 + n)), tuple(range(-1, n - 1)), confidence, (0,) * n)


class Oracle(Calibration):
    """Scores are true chances."""

    def chance(self, drafter: str, depth: int, rank: int, confidence: float, *, greedy: bool) -> float:
        return 0.5 if confidence < 0 else min(confidence, 1.0)


def admit(
    rule: PriceSpeculator,
    proposals: list[Proposal],
    *,
    policy: SpeculationPolicy | None = None,
    limit: int = 16,
    prefill: int = 0,
) -> list[DraftTree]:
    views = [View(i, [1, 2], 2, policy=policy or SpeculationPolicy()) for i in range(len(proposals))]
    load = Load(prefill_tokens=prefill, sequences=len(views) + bool(prefill), context=0)
    budgets = rule.budgets(views, [Limit(limit, limit)] * len(views), load)
    if not any(b.wants("d") for b in budgets):
        return [EMPTY_TREE] * len(views)
    return rule.admit(views, budgets, {"d": proposals})


@settings(max_examples=80, deadline=None)
@given(
    scores=st.lists(st.lists(st.floats(0.02, 1.0), max_size=4), min_size=1, max_size=4),
    row_ms=st.sampled_from([0.01, 0.1, 0.5, 2.0]),
    kink=st.integers(1, 12),
)
def test_what_is_verified_is_the_best_choice_there_is(scores: list[list[float]], row_ms: float, kink: int) -> None:
    """Against every combination of chain lengths: none is worth more at the price of time."""

    def ms(rows: int) -> float:
        return 2.0 + row_ms * max(0, rows - kink)

    costs = table(ms)
    rule = PriceSpeculator(Oracle(), costs)
    trees = admit(rule, [chain(*s) for s in scores])
    count = len(scores)
    speed = count / costs.step_ms(count, 0, count)  # before anything ran: plain decoding's

    def net(lengths: tuple[int, ...]) -> float:
        gained = sum(math.prod(s[: k + 1]) for s, length in zip(scores, lengths, strict=True) for k in range(length))
        return gained - speed * (costs.pass_ms(count + sum(lengths), 0, 1) - costs.pass_ms(count, 0, 1))

    best = max(net(lengths) for lengths in itertools.product(*[range(len(s) + 1) for s in scores]))
    assert net(tuple(len(tree) for tree in trees)) == pytest.approx(best, abs=1e-9)


def test_one_price_for_all_requests() -> None:
    rule = PriceSpeculator(Oracle(), table(linear))
    trees = admit(rule, [chain(0.9, 0.9, 0.9), chain(0.2), chain(0.6, 0.1)])
    assert [len(tree) for tree in trees] == [3, 0, 1]


def test_trees_shrink_to_nothing_with_load_and_come_back() -> None:
    rule = PriceSpeculator(Oracle(), table(linear))
    offer = chain(0.8, 0.7, 0.6, 0.5, 0.5, 0.5)
    sizes = [len(admit(rule, [offer] * count)[0]) for count in (1, 2, 4, 8, 32, 64, 4, 1)]
    assert sizes[:6] == sorted(sizes[:6], reverse=True)
    assert sizes[0] >= 3
    assert sizes[5] == 0
    assert sizes[-1] == sizes[0]


def test_prompt_rows_do_not_make_nodes_cheap() -> None:
    """A step that carries a chunk is long, but its time is worth as much as ever."""
    rule = PriceSpeculator(Oracle(), table(linear))
    assert len(admit(rule, [chain(0.9, 0.3, 0.9)], prefill=256)[0]) <= len(admit(rule, [chain(0.9, 0.3, 0.9)])[0])


def test_policy_and_limits_are_honoured() -> None:
    offer = chain(*[0.95] * 12)
    rule = PriceSpeculator(Oracle(), table(lambda rows: 5.0 + 0.01 * rows))
    assert len(admit(rule, [offer])[0]) == 12
    assert len(admit(rule, [offer], policy=SpeculationPolicy(max_nodes=3))[0]) == 3
    assert len(admit(rule, [offer], limit=2)[0]) == 2
    assert admit(rule, [offer], policy=SpeculationPolicy(mode="off")) == [EMPTY_TREE]
    assert admit(rule, [offer], policy=SpeculationPolicy(max_nodes=0)) == [EMPTY_TREE]
    assert admit(rule, [offer], policy=SpeculationPolicy(drafters=("other",))) == [EMPTY_TREE]
    assert len(admit(rule, [offer], policy=SpeculationPolicy(drafters=("d",)))[0]) == 12


def test_one_request_may_opt_out_while_its_neighbours_draft() -> None:
    rule = PriceSpeculator(Oracle(), table(lambda rows: 5.0 + 0.01 * rows))
    off = View(1, [1, 2], 2, policy=SpeculationPolicy(mode="off"))
    on = View(2, [1, 2], 2)
    budgets = rule.budgets([off, on], [Limit(8, 8)] * 2, Load(0, 2, 4))
    assert [b.wants("d") for b in budgets] == [False, True]
    assert [len(t) for t in rule.admit([off, on], budgets, {"d": [chain(0.9), chain(0.9)]})] == [0, 1]


def test_steps_in_which_nobody_may_be_asked_rest() -> None:
    rule = PriceSpeculator(Oracle(), table(lambda rows: 5.0 + 0.01 * rows))
    off = [
        View(i, [1, 2], 2, policy=policy) for i, policy in enumerate((SpeculationPolicy("off"), SpeculationPolicy(max_nodes=0)))
    ]
    on = View(2, [1, 2], 2)
    assert not rule.rests(off), "nothing is known of a load yet"
    rule.budgets(off, [Limit(8, 8)] * 2, Load(0, 2, 4))
    assert rule.rests(off)
    assert not rule.rests([*off, on]), "of this load neither"
    rule.budgets([*off, on], [Limit(8, 8)] * 3, Load(0, 3, 6))
    assert not rule.rests([*off, on])
    with pytest.raises(ValueError, match="not preceded"):
        rule.admit([*off, on], [], {})


def test_a_load_at_rest_is_looked_at_now_and_then() -> None:
    lying = Lying(6.0)
    lying.steps(600)  # the guard rests
    view = View(1, [1, 2], 2)
    passed = [lying.rule.rests([view]) or lying.steps(1) < 0 for _ in range(160)]
    assert 0.8 < sum(passed) / len(passed) < 1.0


def test_a_pass_must_bring_what_its_time_would() -> None:
    rule = PriceSpeculator(Oracle(), table(linear))
    view = View(1, [1, 2], 2)
    (budget,) = rule.budgets([view], [Limit(8, 8)], Load(0, 1, 2))
    assert 1.0 <= budget.pass_price(2.5) < 1.2  # one plain step's time, one token, and a margin
    assert budget.pass_price(0.0) == 0.0
    assert len(budget.prices) > 3
    assert budget.prices[0] == pytest.approx(0.5 / 2.5, rel=0.01)
    assert budget.price <= budget.prices[0]


def test_draws_are_chosen_by_the_price_set_before_they_were_drawn() -> None:
    """What a later draw turned out to be worth may not decide about an earlier one."""
    import torch

    from spec.tree import DraftProbs

    probs = DraftProbs(torch.tensor([10, 11]), torch.tensor([0.5, 0.5]))
    policy = SpeculationPolicy(rule="rejection")
    view = View(1, [1, 2], 2, sampling=SamplingParams(max_tokens=9, temperature=1.0), policy=policy)
    sizes = set()
    for later in (0.01, 0.3, 0.99):
        rule = PriceSpeculator(Oracle(), table(lambda rows: 2.0 + (0.02 if rows < 3 else 0.9) * rows))
        budgets = rule.budgets([view], [Limit(8, 8)], Load(0, 1, 2))
        drawn = Proposal((10, 11), (-1, 0), (0.4, later), (0, 0), draft_probs=(probs, probs))
        (tree,) = rule.admit([view], budgets, {"d": [drawn]})
        sizes.add(10 in tree.token_ids)
    assert len(sizes) == 1


def test_the_same_calls_give_the_same_trees() -> None:
    world = World(0.6, 3)
    sizes: list[list[int]] = [[], []]
    for noted in sizes:
        run(world, MACHINES[0], 2, warm_up=0, steps=150, noise=Noise(0.1, 0.05), on_step=noted.append)
    assert sizes[0] == sizes[1]


def test_admit_without_budgets_is_refused() -> None:
    rule = PriceSpeculator(Oracle(), table(linear))
    with pytest.raises(ValueError, match="budgets"):
        rule.admit([View(1, [1])], [], {})


# --- on the simulated clock ------------------------------------------------------------------------------------------

QUIET = Noise(spread=0.05, stalls=0.01)


@pytest.mark.parametrize(("streams", "acceptance"), [(1, 0.02), (4, 0.3), (64, 0.5)])
def test_useless_drafts_cost_nothing_in_the_long_run(streams: int, acceptance: float) -> None:
    """Even with clocks that lie by a quarter and stall, and a drafter that takes a fifth of a pass."""
    slow = MACHINES[1]
    steps = 150 if streams > 16 else 700
    speed = run(World(acceptance, second=0.0), slow, streams, warm_up=steps, steps=steps, noise=Noise(0.25, 0.03))
    assert speed > 0.99 * plain_speed(slow, streams)


def test_probing_finds_out_that_a_text_became_predictable() -> None:
    rule = started(MACHINES[0], QUIET, random.Random(4))
    rows: list[int] = []
    run(World(0.05, second=0.0), MACHINES[0], 1, warm_up=0, steps=600, noise=QUIET, speculator=rule, on_step=rows.append)
    poor = sum(rows[-200:]) / 200
    rows.clear()
    run(World(0.9, second=0.0), MACHINES[0], 1, warm_up=0, steps=3000, noise=QUIET, speculator=rule, on_step=rows.append)
    assert poor < 2.6
    assert sum(rows[-200:]) / 200 > 4.0


class Lying:
    """A machine whose drafting steps cost more than the engine can see coming: the table knows nothing of it."""

    def __init__(self, extra_ms: float) -> None:
        self.rule = PriceSpeculator(Oracle(), table(linear))
        self.extra_ms = extra_ms
        self.drafted = 0

    def steps(self, count: int) -> float:
        """Mean milliseconds per token."""
        view = View(1, [1, 2], 2)
        ms = tokens = 0.0
        for _ in range(count):
            load = Load(0, 1, 0)
            (budget,) = self.rule.budgets([view], [Limit(8, 8)], load)
            tree = EMPTY_TREE
            if budget.wants("d"):
                self.drafted += 1
                (tree,) = self.rule.admit([view], [budget], {"d": [chain(0.9, 0.9)]})
            took = linear(1 + len(tree)) + (self.extra_ms if budget.max_nodes else 0.0)
            path = (0,) if tree.token_ids else ()
            ms += took
            tokens += 1 + len(path)
            outcome = Outcome(view, tree, path, 9, 0, 1 + len(tree), False)
            self.rule.record(StepRecord(1 + len(tree), load, [outcome], {}, linear(1 + len(tree)), took))
        return ms / tokens


def test_the_guard_stops_what_the_model_of_costs_does_not_see() -> None:
    honest, lying = Lying(0.0), Lying(6.0)
    assert honest.steps(1500) < 0.75 * linear(1)
    assert honest.drafted > 1400
    lying.steps(600)
    lying.drafted = 0
    assert lying.steps(3000) < 1.04 * linear(1)  # it looks again now and then
    assert lying.drafted < 200


# --- the cost table --------------------------------------------------------------------------------------------------


def test_measured_costs_are_interpolated_monotone_and_carried_on() -> None:
    machine = MACHINES[0]
    costs = table(lambda rows: machine.target_ms(rows, 0), per_key=1e-3)
    for rows in (1, 3, 4, 6, 7, 8, 12, 16, 40, 64, 100, 300):
        assert costs.pass_ms(rows, 0, 1) == pytest.approx(machine.target_ms(rows, 0), rel=0.06)
    assert costs.pass_ms(1, 1000, 1) - costs.pass_ms(1, 0, 1) == pytest.approx(1.0, rel=0.05)
    values = [costs.pass_ms(rows, 0, 1) for rows in range(1, 1200)]
    assert values == sorted(values)


@settings(max_examples=100, deadline=None)
@given(rows=st.integers(1, 1500), count=st.integers(1, 80))
def test_the_cost_of_each_further_row_adds_up(rows: int, count: int) -> None:
    costs = table(lambda r: MACHINES[0].target_ms(r, 0))
    each = costs.row_ms(rows, count)
    assert len(each) == count
    assert sum(each) == pytest.approx(costs.pass_ms(rows + count, 0, 1) - costs.pass_ms(rows, 0, 1), abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(1, 600), st.integers(0, 9000), st.integers(1, 70), st.floats(0.01, 500.0), st.floats(0, 9)),
        max_size=40,
    )
)
def test_any_record_leaves_it_monotone_and_positive(steps: list[tuple[int, int, int, float, float]]) -> None:
    costs = table(linear, per_key=1e-4)
    for step in steps:
        costs.record(*step)
    values = [costs.step_ms(rows, 100, 2) for rows in range(1, 700)]
    assert values == sorted(values)
    assert 0.0 < values[0] < math.inf


def measuring(ms: Callable[[int, int], float], seconds: float, max_rows: int = 256) -> tuple[float, list[tuple[int, float]]]:
    """What start-up takes on a clock that only passes move, and every pass as (rows, seconds). `ms` is told rows and how many passes
    came before."""
    passes: list[tuple[int, float]] = []

    def one(rows: int, context: int, sequences: int) -> float:
        took = ms(rows, len(passes))
        passes.append((rows, took * 1e-3))
        return took

    CostTable().measure(one, max_rows=max_rows, seconds=seconds, clock=lambda: sum(took for _, took in passes))
    return sum(took for _, took in passes), passes


@settings(max_examples=150, deadline=None)
@given(
    first=st.floats(0.001, 400.0),
    slope=st.floats(0.0, 1.0),
    seconds=st.sampled_from([0.5, 1.0, 3.0]),
    max_rows=st.integers(1, 300),
)
def test_start_up_keeps_to_its_time(first: float, slope: float, seconds: float, max_rows: int) -> None:
    """Machines on which a row costs nothing up to as much as the first one: not a moment longer than asked."""
    took, passes = measuring(lambda rows, before: first * (1.0 + slope * (rows - 1)), seconds, max_rows)
    assert took <= seconds
    assert passes
    dearest = 1e-3 * first * (1.0 + slope * max_rows)
    if 6 * 2 * 21 * dearest < seconds:  # nor is a quick machine looked at once only
        assert len(passes) > 6 * len({rows for rows, _ in passes})


@pytest.mark.parametrize("at", range(0, 31, 3))
def test_a_surprise_at_start_up_costs_its_own_time_only(at: int) -> None:
    """A kernel that is compiled, or a stall of two seconds, at any pass: nothing begins after the time is over."""
    took, passes = measuring(lambda rows, before: 2000.0 if before == at else 20.0 + rows, seconds=1.0)
    assert len(passes) > at
    assert took <= 1.0 + 2.0
    began = took - passes[-1][1]
    assert began <= 1.0


def test_a_target_slower_than_the_time_for_measuring_is_run_once() -> None:
    took, passes = measuring(lambda rows, before: 5000.0 * rows, seconds=1.0)
    assert passes == [(1, 5.0)]
    assert took == 5.0


def test_costs_follow_the_machine_and_shrug_off_stalls() -> None:
    rng = random.Random(6)
    costs = table(linear)
    for _ in range(400):  # this machine is 1.5 times slower than it was at the start, and stalls now and then
        rows = rng.choice([1, 2, 4, 6])
        stall = 8.0 if rng.random() < 0.03 else 1.0
        costs.record(rows, 0, 1, 1.5 * linear(rows) * rng.uniform(0.95, 1.05) * stall, 0.2 * stall)
    for rows in (1, 4, 6):
        assert costs.pass_ms(rows, 0, 1) == pytest.approx(1.5 * linear(rows), rel=0.12)
    assert costs.pass_ms(64, 0, 1) > 1.2 * linear(64)  # never seen, but the clock is the same
    assert costs.overhead_ms(1) == pytest.approx(0.2, rel=0.5)
    assert costs.overhead_ms(64) == costs.overhead_ms(1)


@pytest.mark.parametrize("start", [0.0, 5e-3], ids=["from zero", "from ten times too much"])
def test_the_cost_of_context_is_learnt(start: float) -> None:
    """Start-up saw nothing, or far too much: its probe was short, and a stall or a lucky pass is all it takes."""
    rng, true = random.Random(8), 5e-4
    costs = table(linear, per_key=start)
    for _ in range(400):
        context = rng.choice([20_000, 20_000, 300])  # 20,000 keys cost 10 ms here, a row's pass 2.5
        costs.record(1, context, 1, (linear(1) + true * context) * rng.uniform(0.95, 1.05), 0.0)
    assert costs.pass_ms(1, 20_000, 1) == pytest.approx(linear(1) + 10.0, rel=0.1)
    assert costs.pass_ms(1, 0, 1) == pytest.approx(linear(1), rel=0.25)
    for _ in range(1000):  # and another kernel makes them all but free
        costs.record(1, rng.choice([20_000, 300]), 1, linear(1) * rng.uniform(0.95, 1.05), 0.0)
    assert costs.pass_ms(1, 20_000, 1) == pytest.approx(linear(1), rel=0.15)


def attention(rows: int, context: int, sequences: int) -> float:
    """Every row attends to all keys of its sequence, and reading a key costs little."""
    return linear(rows) + context * (5e-5 + 4e-4 * rows / sequences)


def test_what_a_row_takes_to_attend_is_measured_at_start_up() -> None:
    costs = CostTable()
    costs.measure(attention, max_rows=64, seconds=60.0, clock=lambda: 0.0)
    for size in ((1, 1024, 1), (8, 600, 1), (16, 9600, 16), (40, 9600, 16)):
        assert costs.pass_ms(*size) == pytest.approx(attention(*size), rel=0.03)
    assert costs.row_ms(20, 5, keys=600.0) == pytest.approx([0.5 + 0.24] * 5, rel=0.05)


@pytest.mark.parametrize("seconds", [0.5, 60.0], ids=["seen once", "seen often"])
def test_the_first_touch_of_a_store_is_not_what_its_keys_cost(seconds: float) -> None:
    now, met = [0.0], set[tuple[int, int, int]]()

    def cold(rows: int, context: int, sequences: int) -> float:
        size = (rows, context, sequences)
        took = attention(*size) + (0.0 if size in met or sequences == 1 else 0.04 * context)
        met.add(size)
        now[0] += took * 1e-3
        return took

    costs = CostTable()
    costs.measure(cold, max_rows=64, seconds=seconds, clock=lambda: now[0])
    assert any(context and sequences > 1 for _, context, sequences in met)
    assert costs.pass_ms(16, 4800, 16) == pytest.approx(attention(16, 4800, 16), rel=0.15)


def test_what_a_row_takes_to_attend_is_learnt_and_unlearnt() -> None:
    rng, costs = random.Random(10), table(linear)
    for true in (attention, lambda rows, context, sequences: linear(rows)):
        for _ in range(3000):
            sequences = rng.choice([1, 4, 16])
            size = (sequences * rng.choice([1, 1, 2, 4]), sequences * rng.choice([100, 800, 2000]), sequences)
            costs.record(*size, true(*size) * rng.uniform(0.95, 1.05), 0.0)
        for size in ((1, 2000, 1), (4, 2000, 1), (16, 12_800, 16), (48, 12_800, 16)):
            assert costs.pass_ms(*size) == pytest.approx(true(*size), rel=0.12)


def test_nodes_behind_long_contexts_must_promise_more() -> None:
    costs = CostTable()
    costs.measure(attention, max_rows=64, seconds=60.0, clock=lambda: 0.0)
    views = [View(seq_id, [1]) for seq_id in range(4)]

    def admitted(keys: int) -> int:
        rule = PriceSpeculator(Oracle(), costs)
        budgets = rule.budgets(views, [Limit(16, 16)] * 4, Load(0, 4, 4 * keys))
        return sum(map(len, rule.admit(views, budgets, {"d": [chain(*[0.8] * 8)] * 4})))

    few, many = admitted(4000), admitted(0)
    assert few < many


def test_context_that_is_always_long_does_not_make_rows_dear() -> None:
    costs = table(linear)
    for _ in range(400):
        costs.record(1, 20_000, 1, linear(1) + 10.0, 0.0)
    assert costs.pass_ms(1, 20_000, 1) == pytest.approx(linear(1) + 10.0, rel=0.05)
    assert sum(costs.row_ms(1, 1)) < 2.0 * 0.5


def test_the_cost_of_sequences_is_learnt_from_zero_and_unlearnt() -> None:
    rng = random.Random(9)
    costs = table(linear)
    for each in (0.2, 0.0):
        for _ in range(1500):
            rows = rng.choice([16, 32, 64])
            sequences = rows if rng.random() < 0.5 else 1
            costs.record(rows, 0, sequences, (linear(rows) + each * (sequences - 1)) * rng.uniform(0.95, 1.05), 0.0)
        for rows in (16, 64):
            assert costs.pass_ms(rows, 0, rows) == pytest.approx(linear(rows) + each * (rows - 1), rel=0.1)
            assert costs.pass_ms(rows, 0, 1) == pytest.approx(linear(rows), rel=0.15)


def test_the_probe_of_context_stays_within_what_fits() -> None:
    asked: list[int] = []

    def one(rows: int, context: int, sequences: int) -> float:
        asked.append(context // sequences + rows // sequences - 1)
        return linear(rows) + 1e-3 * context

    costs = CostTable()
    costs.measure(one, max_context=400, seconds=60.0, clock=lambda: 0.0)
    assert max(asked) == 400
    assert costs.pass_ms(1, 1000, 1) == pytest.approx(linear(1) + 1.0)


def test_an_unmeasured_table_takes_its_scale_from_the_first_step() -> None:
    costs = CostTable()
    costs.record(1, 0, 1, 40.0, 0.0)
    assert costs.pass_ms(1, 0, 1) == pytest.approx(40.0)
    assert 40.0 < costs.pass_ms(8, 0, 1) < 100.0


def test_drafting_time_is_kept_by_drafter_and_load() -> None:
    costs = CostTable()
    assert costs.draft_ms("d", 1) == 0.0
    for _ in range(50):
        costs.record_draft("d", 1, 0.5)
        costs.record_draft("d", 64, 4.0)
        costs.record_draft("other", 1, 9.0)
    assert costs.draft_ms("d", 1) == pytest.approx(0.5)
    assert costs.draft_ms("d", 50) == pytest.approx(4.0)
    assert costs.draft_ms("d", 2) == pytest.approx(0.5)


def test_deciding_costs_microseconds() -> None:
    """An order above the cost on an idle core: budgets, then admission of eight nodes, at one stream."""
    rule = PriceSpeculator(Calibration(), table(linear))
    view = View(1, [1, 2], 2, sampling=GREEDY)
    offer = chain(*[0.9] * 8)
    budget_s = admit_s = 1.0
    for _ in range(60):
        began = time.perf_counter()
        budgets = rule.budgets([view], [Limit(8, 8)], Load(0, 1, 2))
        budget_s = min(budget_s, time.perf_counter() - began)
        budgets[0].chance("d", 1, 0, UNKNOWN)
        if budgets[0].max_nodes:
            began = time.perf_counter()
            rule.admit([view], budgets, {"d": [offer]})
            admit_s = min(admit_s, time.perf_counter() - began)
    assert budget_s < 5e-4
    assert admit_s < 2e-3
