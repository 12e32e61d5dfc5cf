"""Who runs when: decode first, shared chunks, fair tenants, preemption of the youngest, cancelling; counted in steps."""

from __future__ import annotations

from functools import cache

import pytest
import toy
from engine_kit import (
    NOISY,
    OFF,
    SHAPES,
    KeepAll,
    RandomTreeDrafter,
    Runner,
    ScriptDrafter,
    answers_of,
    greedy_request,
    make_engine,
    prompts_of,
    quick_rand,
    run,
)

from kernels.decoder import Decoder
from spec.sequence import Phase, Sequence
from spec.waiting import WaitingQueue


@cache
def decoder() -> Decoder:
    return quick_rand(layers=1)


@cache
def golden(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    return tuple(toy.greedy(decoder(), prompt, count))


def test_a_long_prompt_does_not_freeze_a_running_chat() -> None:
    """SC-02: the victim gets a token in every step while twenty chunks of another prompt are computed."""
    victim, attacker = prompts_of([5, 20 * 8], seed=1)
    runner = Runner(make_engine(decoder(), chunk_tokens=8))
    runner.add(greedy_request(1, victim, 60))
    for _ in range(20):
        runner.step()
    runner.add(greedy_request(2, attacker, 4))
    answers = runner.finish()
    assert answers[1].steps == list(range(60)), "the victim's gap is one step throughout"
    assert answers[2].steps[0] == 20 + 19, "the attacker's first token comes as soon as alone"
    assert tuple(answers[1].token_ids) == golden(victim, 60)


def test_a_short_prompt_overtakes_a_long_one_that_loses_at_most_half() -> None:
    long, *short = prompts_of([20 * 8, 7, 3, 9], seed=2)
    runner = Runner(make_engine(decoder(), chunk_tokens=8))
    runner.add(greedy_request(1, long, 4))
    runner.step()
    for number, prompt in enumerate(short):
        runner.add(greedy_request(10 + number, prompt, 4))
    answers = runner.finish()
    assert max(answers[10 + number].steps[0] for number in range(3)) < 8
    assert answers[1].steps[0] <= 2 * 20


def test_several_prompts_share_a_chunk() -> None:
    prompts = prompts_of([5, 6, 7, 8], seed=3)
    runner = Runner(make_engine(decoder(), chunk_tokens=32))
    runner.add(*[greedy_request(i, p, 3) for i, p in enumerate(prompts)])
    assert len(runner.step()) == 4, "26 prompt tokens fit one step"
    runner.finish()


def test_a_step_carries_no_more_than_the_chunk() -> None:
    speculator = KeepAll()
    prompts = prompts_of([30, 41, 2, 17, 9], seed=4)
    drafter = RandomTreeDrafter(lambda view: (), 1)
    engine = make_engine(decoder(), [drafter], speculator=speculator, chunk_tokens=10)
    run(engine, [greedy_request(i, p, 6) for i, p in enumerate(prompts)])
    carried = [record.load.prefill_tokens for record in speculator.records]
    assert max(carried) == 10
    assert sum(carried) == sum(map(len, prompts))


def test_max_sequences_is_kept() -> None:
    engine = make_engine(decoder(), max_sequences=2)
    runner = Runner(engine)
    runner.add(*[greedy_request(i, p, 5) for i, p in enumerate(prompts_of([4] * 5, seed=5))])
    seen = set()
    while engine.has_work():
        runner.step()
        seen.add(engine.stats()["num_requests_running"])
    assert max(seen) == 2
    assert all(answer.finish_reason == "length" for answer in runner.answers.values())


def test_cancelled_waiting_requests_never_run() -> None:
    """SC-03: A runs, B C D queue, C and B leave; D is next, and only A's and D's tokens are ever made."""
    a, b, c, d = prompts_of([6, 7, 8, 9], seed=6)
    engine = make_engine(decoder(), max_sequences=1)
    runner = Runner(engine)
    runner.add(greedy_request(1, a, 20))
    runner.step()
    runner.add(greedy_request(2, b, 20), greedy_request(3, c, 20), greedy_request(4, d, 5))
    runner.step()
    assert engine.stats()["num_requests_waiting"] == 3
    engine.cancel(3)
    engine.cancel(2)
    assert engine.stats()["num_requests_waiting"] == 1
    answers = runner.finish()
    assert tuple(answers[1].token_ids) == golden(a, 20)
    assert tuple(answers[4].token_ids) == golden(d, 5)
    assert [answers[i].finish_reason for i in (2, 3)] == ["cancelled"] * 2
    assert not answers[2].token_ids
    assert not answers[3].token_ids
    assert engine.stats()["generation_tokens"] == 25
    assert engine.stats()["prompt_tokens"] == len(a) + len(d)
    assert answers[4].steps[0] == answers[1].steps[-1] + 1


def test_a_cancelled_request_gives_its_pages_back_at_once() -> None:
    drafter = ScriptDrafter(lambda view: (), SHAPES["2x4"])
    engine = make_engine(decoder(), [drafter], prefix_cache=False)
    runner = Runner(engine)
    runner.add(greedy_request(1, prompts_of([20])[0], 50))
    for _ in range(3):
        runner.step()
    assert engine.pool.live > 0
    assert drafter.opened == {1}
    engine.cancel(1)
    assert engine.pool.live == 0
    assert drafter.opened == set()
    engine.cancel(1)
    engine.cancel(99)
    answers = runner.finish()
    assert answers[1].finish_reason == "cancelled"
    assert len(answers[1].token_ids) == 3


def test_the_youngest_is_preempted_and_the_oldest_never() -> None:
    prompts = prompts_of([8, 8, 8], seed=7)
    engine = make_engine(decoder(), num_pages=14, page_size=4, context=56)
    runner = Runner(engine)
    runner.add(*[greedy_request(i, p, 30) for i, p in enumerate(prompts)])
    while engine.stats()["preemptions"] == 0:
        runner.step()
    assert engine.pool.cached > 0, "what was computed stays in the cache"
    answers = runner.finish()
    assert answers[0].steps == list(range(30)), "the oldest got a token in every step"
    gaps = [max(b - a for a, b in zip(answers[i].steps, answers[i].steps[1:], strict=False)) for i in (0, 1, 2)]
    assert gaps[0] == 1
    assert gaps[2] > 1
    for i, prompt in enumerate(prompts):
        assert tuple(answers[i].token_ids) == golden(prompt, 30)


def test_a_prompt_waits_until_it_fits_beside_the_running_ones() -> None:
    grower, newcomer = prompts_of([8, 30], seed=12)
    engine = make_engine(decoder(), num_pages=10, page_size=4, context=40)
    runner = Runner(engine)
    runner.add(greedy_request(1, grower, 24))
    runner.step()
    runner.add(greedy_request(2, newcomer, 6))
    answers = runner.finish()
    assert engine.stats()["preemptions"] == 0
    assert answers[2].steps[0] > answers[1].steps[-1]
    assert tuple(answers[2].token_ids) == golden(newcomer, 6)


def test_short_pages_shrink_drafts_instead_of_preempting() -> None:
    """Two answers fit exactly; drafts may use only what is left over."""
    prompts = prompts_of([8, 8], seed=8)
    drafter = ScriptDrafter(lambda view: (), SHAPES["wide"])
    engine = make_engine(decoder(), [drafter], num_pages=10, page_size=4, context=40)
    answers = run(engine, [greedy_request(i, p, 12) for i, p in enumerate(prompts)])
    assert engine.stats()["preemptions"] == 0
    assert all(tuple(answers[i].token_ids) == golden(p, 12) for i, p in enumerate(prompts))
    assert 0 < sum(answer.drafted for answer in answers.values()) < 2 * 11 * 8


def test_equal_prompts_at_once_are_computed_once() -> None:
    """The second prompt waits for the first one's pages instead of computing them beside it."""
    speculator = KeepAll()
    prompt = prompts_of([33], seed=9)[0]
    engine = make_engine(decoder(), [ScriptDrafter(lambda view: (), (1,))], speculator=speculator, page_size=4, chunk_tokens=16)
    answers = run(engine, [greedy_request(i, prompt, 6, temperature=1.0, seed=i) for i in range(8)])
    carried = sum(record.load.prefill_tokens for record in speculator.records)
    assert carried == 33 + 7 * 1, "seven of eight compute the last token only"
    assert sorted(answer.cached_tokens for answer in answers.values()) == [0] + [32] * 7
    assert max(answer.steps[0] for answer in answers.values()) <= 4


def test_the_one_that_computes_may_leave_and_the_others_go_on() -> None:
    prompt = prompts_of([33], seed=9)[0]
    runner = Runner(make_engine(decoder(), chunk_tokens=8))
    runner.add(*[greedy_request(i, prompt, 6) for i in range(3)])
    runner.step()
    runner.step()
    runner.engine.cancel(0)
    answers = runner.finish()
    assert tuple(answers[1].token_ids) == tuple(answers[2].token_ids) == golden(prompt, 6)


def waiting(number: int, tenant: str, prompt: int, max_tokens: int = 4, recomputing: bool = False) -> Sequence:
    request = greedy_request(number, (1,) * prompt, max_tokens, tenant=tenant)
    sequence = Sequence(request, ordinal=number, context=10_000, end_ids=frozenset(), arrived_at=0.0)
    sequence.recomputing = recomputing
    return sequence


def drain(queue: WaitingQueue, count: int | None = None) -> list[int]:
    order: list[int] = []
    while (head := queue.head()) is not None and len(order) != count:
        queue.admit(head)
        order.append(head.seq_id)
    return order


def test_tenants_share_the_queue_by_tokens() -> None:
    queue = WaitingQueue()
    for number in range(6):
        queue.add(waiting(number, "flood", 96))  # 100 tokens each
    for number in range(10, 14):
        queue.add(waiting(number, "light", 46))  # 50 tokens each
    order = drain(queue)
    assert order[:6] in ([0, 10, 11, 1, 12, 13], [0, 10, 11, 12, 1, 13], [0, 10, 11, 1, 12, 2])
    assert order[-3:] == [3, 4, 5]
    assert len(queue) == 0


def test_a_late_tenant_waits_for_one_request_not_for_the_flood() -> None:
    queue = WaitingQueue()
    for number in range(50):
        queue.add(waiting(number, "flood", 96))
    assert drain(queue, 20) == list(range(20))
    queue.add(waiting(100, "late", 500))
    assert 100 in drain(queue, 2)


def test_idling_saves_nothing_up() -> None:
    queue = WaitingQueue()
    queue.add(waiting(0, "idle", 10))
    drain(queue)
    for number in range(1, 31):
        queue.add(waiting(number, "busy", 96))
    drain(queue, 20)
    for number in range(100, 120):
        queue.add(waiting(number, "idle", 96))
    shares = drain(queue, 10)
    assert 4 <= sum(number >= 100 for number in shares) <= 6


def test_preempted_sequences_go_first_and_oldest_first() -> None:
    queue = WaitingQueue()
    queue.add(waiting(5, "a", 4))
    queue.add(waiting(9, "b", 4, recomputing=True))
    queue.add(waiting(7, "a", 4, recomputing=True))
    assert len(queue) == 3
    assert drain(queue) == [7, 9, 5]


def test_a_tenant_s_burst_does_not_starve_another_in_the_engine() -> None:
    flood = prompts_of([10] * 12, seed=10)
    single = prompts_of([10], seed=11)[0]
    runner = Runner(make_engine(decoder(), max_sequences=1))
    runner.add(*[greedy_request(i, p, 4, tenant="flood") for i, p in enumerate(flood)])
    runner.step()
    runner.add(greedy_request(100, single, 4, tenant="single"))
    answers = runner.finish()
    assert answers[100].steps[0] <= answers[2].steps[0]


@pytest.mark.parametrize("mode", ["off", "zero", "auto"])
def test_nothing_drafted_is_the_plain_path(mode: str) -> None:
    """A policy that forbids drafting asks no drafter and opens none."""
    from spec.request import SpeculationPolicy

    class Silent(ScriptDrafter):
        asked = 0

        def propose(self, views, budgets):  # type: ignore[no-untyped-def]
            self.asked += len(views)
            return super().propose(views, budgets)

    prompt = prompts_of([6])[0]
    drafter = Silent(answers_of({}), SHAPES["chain"], NOISY)
    policy = {"off": OFF, "zero": SpeculationPolicy(max_nodes=0), "auto": SpeculationPolicy()}[mode]
    engine = make_engine(decoder(), [drafter])
    answer = run(engine, [greedy_request(1, prompt, 8, speculation=policy)])[1]
    assert tuple(answer.token_ids) == golden(prompt, 8)
    assert (drafter.asked > 0) == (answer.drafted > 0) == (mode == "auto")


def test_phases_only_move_forward() -> None:
    from spec.errors import InvariantError

    sequence = waiting(1, "", 3)
    with pytest.raises(InvariantError, match="from waiting to decode"):
        sequence.move_to(Phase.DECODE)
    sequence.move_to(Phase.PREFILL)
    sequence.move_to(Phase.FINISHED)
    with pytest.raises(InvariantError, match="from finished to waiting"):
        sequence.move_to(Phase.WAITING)
