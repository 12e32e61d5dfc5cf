"""Pages and the prefix cache in a running engine: what comes back, what is shared, what may never be."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
import toy
from engine_kit import (
    NOISY,
    SHAPES,
    KeepAll,
    Runner,
    ScriptDrafter,
    Skill,
    answers_of,
    greedy_request,
    make_engine,
    prompts_of,
    quick,
    quick_rand,
    run,
)

from drafters.model import ModelDrafter
from drafters.suffix import SuffixDrafter
from kernels.batch import KVTensors
from kernels.decoder import Decoder
from spec.drafter import Drafter
from spec.errors import RequestError
from spec.pages import PagePool
from spec.shapes import ShapeSpeculator

Prompt = tuple[int, ...]
SHAPE, WEIGHTS = toy.rand_weights(layers=2)


@cache
def decoder() -> Decoder:
    return quick(SHAPE, WEIGHTS)


@cache
def golden(prompt: Prompt, count: int) -> tuple[int, ...]:
    return tuple(toy.greedy(decoder(), prompt, count))


@cache
def noisy() -> Decoder:
    return quick(SHAPE, toy.noisy(WEIGHTS))


def drafters(kind: str, prompts: list[Prompt], count: int, pool: PagePool | None = None, page_size: int = 4) -> list[Drafter]:
    """ "tree" knows the answers; "suffix" copies; "model" has keys of its own on the pool's pages."""
    if kind == "off":
        return []
    if kind == "suffix":
        return [SuffixDrafter()]
    if kind == "model" and pool is not None:
        shape = noisy().shape
        store = KVTensors.allocate(shape.layers, pool.total, shape.kv_heads, shape.head_dim, page_size, torch.float32)
        store.k.fill_(float("nan"))
        return [ModelDrafter("model", noisy(), store, pool)]
    truth = answers_of({prompt: golden(prompt, count) for prompt in prompts})
    return [ScriptDrafter(truth, SHAPES["2x4"], Skill(0.7, rank=1))]


@pytest.mark.parametrize("kind", ["off", "tree"])
def test_pages_come_back_after_finish_cancel_and_refusal(kind: str) -> None:
    """KV-01: 300 requests through 64 pages; a third finish, a third are cancelled at random, a third are refused."""
    chance = random.Random(1)
    light = quick_rand(layers=1, hidden=32, intermediate=32)
    made = [] if kind == "off" else [ScriptDrafter(lambda view: (), SHAPES["2x4"])]
    engine = make_engine(light, made, num_pages=64, page_size=4, context=64, max_sequences=8)
    runner = Runner(engine)
    ends: dict[int, int] = {}
    for number, prompt in enumerate(prompts_of([chance.randint(1, 30) for _ in range(300)], seed=2)):
        if number % 3 == 0:
            with pytest.raises(RequestError):
                engine.add(greedy_request(number, prompt * 70, 4))
            continue
        runner.add(greedy_request(number, prompt, 4))
        if number % 3 == 1:
            ends[number] = runner.steps + chance.randint(0, 8)
        if number % 4 == 0:
            runner.step()
        for other in [other for other, step in ends.items() if step <= runner.steps]:
            engine.cancel(other)
            del ends[other]
    answers = runner.finish()
    stats = engine.stats()
    assert stats["kv_pages_live"] == 0
    assert stats["kv_pages_cached"] + stats["kv_pages_free"] == 64
    assert stats["kv_pages_cached"] > 40, "the cache fills and is evicted under pressure"
    assert all(answers[n].finish_reason == "length" for n in answers if n % 3 == 2)
    assert {"length", "cancelled"} == {answer.finish_reason for answer in answers.values()}
    assert stats["num_requests_running"] == stats["num_requests_waiting"] == 0


@pytest.mark.parametrize("kind", ["off", "tree"])
@pytest.mark.parametrize("page_size", [4, 16])
def test_a_prompt_that_is_wholly_cached_leaves_a_token_to_compute(kind: str, page_size: int) -> None:
    """PC-01: lengths around the page boundary, four times in a row, then four at once."""
    lengths = [page_size - 1, page_size, page_size + 1, 2 * page_size, 2 * page_size + 1]
    prompts = prompts_of(lengths, seed=3)
    engine = make_engine(decoder(), drafters(kind, prompts, 8), page_size=page_size, num_pages=64)
    runner = Runner(engine)
    for i, prompt in enumerate(prompts):
        for again in range(4):
            runner.add(greedy_request(10 * i + again, prompt, 8))
            runner.finish()
        runner.add(*[greedy_request(10 * i + again, prompt, 8) for again in range(4, 8)])
        answers = runner.finish()
        for again in range(8):
            answer = answers[10 * i + again]
            assert tuple(answer.token_ids) == golden(prompt, 8)
            assert answer.cached_tokens == (0 if again == 0 else (len(prompt) - 1) // page_size * page_size)
            assert answer.cached_tokens < len(prompt)


@pytest.mark.parametrize("kind", ["off", "tree", "suffix", "model"])
def test_cancel_and_retry_among_requests_that_share_a_prefix(kind: str) -> None:
    """PC-02: six requests share eight pages, two unrelated ones run beside; two are cancelled anywhere and sent again."""
    chance = random.Random(4)
    shared = prompts_of([32], seed=5)[0]
    prompts = [shared + tail for tail in prompts_of([3, 4, 5, 6, 7, 8], seed=6)] + prompts_of([20, 9], seed=7)
    pool = PagePool(96)
    made = drafters(kind, prompts, 6, pool)
    speculator = ShapeSpeculator("2x4") if kind in ("suffix", "model") else KeepAll()
    engine = make_engine(decoder(), made, speculator=speculator, pool=pool, page_size=4, num_pages=96, chunk_tokens=24)
    runner = Runner(engine)
    number = cut = 0
    for turn in range(50):
        batch = {number + i: prompt for i, prompt in enumerate(prompts)}
        number += len(prompts)
        runner.add(*[greedy_request(i, prompt, 6) for i, prompt in batch.items()])
        for _ in range(chance.randint(0, 6)):
            runner.step()
        retries = []
        for victim in chance.sample(list(batch)[:6], 2):
            engine.cancel(victim)
            retry = batch.pop(victim)
            runner.add(greedy_request(number, retry, 6))
            batch[number] = retry
            retries.append(number)
            cut += bool(runner.answers[victim].token_ids)
            number += 1
        answers = runner.finish()
        for i, prompt in batch.items():
            assert tuple(answers[i].token_ids) == golden(prompt, 6)
        # The shared pages stay while the others use them, so a retry finds at least those, though once computed by itself.
        assert turn == 0 or all(answers[i].cached_tokens >= 32 for i in retries)
    assert cut > 10, "some were cancelled in the middle of their answers"
    assert kind == "off" or sum(answer.accepted for answer in runner.answers.values()) > 50
    assert not any(engine.stats()["drafter_faults"].values())


@pytest.mark.parametrize("kind", ["off", "tree", "model"])
@pytest.mark.parametrize("page_size", [4, 16])
def test_a_half_filled_page_is_never_shared(kind: str, page_size: int) -> None:
    """PC-03: P = 2 pages + 5 tokens (with page size 4: one more full page and one token), four different next tokens."""
    long = 40
    base = prompts_of([2 * page_size + 5], seed=8)[0]
    prompts = [(*base, token) for token in (1, 2, 3, 4)]
    turns = [(*prompts[0], *golden(prompts[0], long), *user) for user in ((7, 8, 9), (10, 11))]
    pool = PagePool(96)
    truths = {prompt: golden(prompt, long) for prompt in (*prompts, *turns)}
    made = [ScriptDrafter(answers_of(truths), SHAPES["2x4"], Skill(0.7, rank=1))] if kind == "tree" else None
    speculator = ShapeSpeculator("2x4") if kind == "model" else KeepAll()
    engine = make_engine(
        decoder(),
        made or drafters(kind, [], 0, pool, page_size),
        speculator=speculator,
        pool=pool,
        page_size=page_size,
        num_pages=96,
    )
    runner = Runner(engine)
    runner.add(*[greedy_request(i, prompt, long) for i, prompt in enumerate(prompts)])
    answers = runner.finish()
    assert [tuple(answers[i].token_ids) for i in range(4)] == [golden(prompt, long) for prompt in prompts]
    runner.add(*[greedy_request(10 + i, turn, long) for i, turn in enumerate(turns)])
    answers = runner.finish()
    for i, turn in enumerate(turns):
        assert answers[10 + i].cached_tokens == (len(prompts[0]) + long - 1) // page_size * page_size
        assert tuple(answers[10 + i].token_ids) == golden(turn, long)
        assert (answers[10 + i].accepted > long // 4) == (kind != "off"), "keys were moved in turn 2 as well"


def test_a_tenant_never_hits_another_tenant_s_pages() -> None:
    """PC-05: tenant A, A, B, none, none."""
    prompt = prompts_of([17], seed=9)[0]
    runner = Runner(make_engine(decoder()))
    for number, tenant in enumerate(["a", "a", "b", "", ""]):
        runner.add(greedy_request(number, prompt, 4, tenant=tenant))
        runner.finish()
    assert [runner.answers[i].cached_tokens for i in range(5)] == [0, 16, 0, 0, 16]
    assert {tuple(answer.token_ids) for answer in runner.answers.values()} == {golden(prompt, 4)}


def test_an_evicted_page_never_answers_for_its_old_prefix() -> None:
    """PC-06: forty pages, a small set of prompts in random order, against the answers without a cache."""
    chance = random.Random(10)
    a = prompts_of([32], seed=11)[0]
    prompts = [a, a[:8] + prompts_of([20], seed=12)[0], *prompts_of([31, 40, 33, 28], seed=13)]
    engine = make_engine(decoder(), drafters("tree", prompts, 6), num_pages=40, page_size=4, context=64)
    runner = Runner(engine)
    order = [0, 2, 3, 4, 5, 0, 1, *[chance.randrange(len(prompts)) for _ in range(30)]]
    hits = 0
    for number, which in enumerate(order):
        runner.add(greedy_request(number, prompts[which], 6))
        answer = runner.finish()[number]
        assert tuple(answer.token_ids) == golden(prompts[which], 6)
        assert answer.cached_tokens % 4 == 0
        hits += answer.cached_tokens
    assert runner.answers[5].cached_tokens < 32
    assert hits > 0, "nothing was ever shared"
    assert engine.pool.cached + engine.pool.free == 40


def test_hits_are_the_same_with_drafts_and_only_real_ones_count() -> None:
    """MX-02, the engine's half: random prompts hit nothing, a repeat hits exactly its full pages, and zero divides nothing."""
    prompts = prompts_of([11] * 10, seed=14)
    figures = []
    for kind in ("off", "tree"):
        engine = make_engine(decoder(), drafters(kind, prompts, 12), num_pages=24, page_size=4, context=64)
        assert all(not value for value in engine.stats().values() if isinstance(value, int | float) and value != 24)
        runner = Runner(engine)
        runner.add(*[greedy_request(i, prompt, 12) for i, prompt in enumerate(prompts)])
        runner.finish()
        stats = engine.stats()
        assert stats["preemptions"] > 0
        assert stats["prefix_cache_hits"] == 0
        assert stats["prefix_cache_queries"] == stats["prompt_tokens"] == 110
        last = max(runner.answers, key=lambda i: runner.answers[i].steps[-1])
        runner.add(greedy_request(99, prompts[last], 12))
        runner.finish()
        figures.append((runner.answers[99].cached_tokens, engine.stats()["prefix_cache_hits"]))
    assert figures == [(8, 8), (8, 8)]


def test_the_cache_can_be_switched_off() -> None:
    prompt = prompts_of([17])[0]
    engine = make_engine(decoder(), prefix_cache=False)
    answers = run(engine, [greedy_request(i, prompt, 4) for i in range(3)])
    assert all(tuple(answer.token_ids) == golden(prompt, 4) for answer in answers.values())
    assert engine.pool.cached == 0
    assert engine.stats()["prefix_cache_hits"] == 0


def test_a_resumed_answer_hits_at_most_its_prompt_in_usage() -> None:
    prompt = prompts_of([9], seed=15)[0]
    runner = Runner(make_engine(decoder(), [ScriptDrafter(lambda view: (), SHAPES["chain"], NOISY)]))
    runner.add(greedy_request(1, prompt, 20))
    runner.finish()
    runner.add(greedy_request(2, prompt, 24, generated_ids=golden(prompt, 24)[:16]))
    runner.finish()
    assert runner.answers[2].cached_tokens == 8
    assert tuple(runner.answers[2].token_ids) == golden(prompt, 24)[16:]
