"""Random requests, cancellations, trees and pools: accounts balance after every step and no text ever changes."""

from __future__ import annotations

import random
from functools import cache

import toy
from engine_kit import OFF, RandomTreeDrafter, Runner, answers_of, greedy_request, make_engine, quick_rand
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.decoder import Decoder
from spec.request import Request

COUNT = 10


@cache
def decoder() -> Decoder:
    return quick_rand(layers=2, hidden=32, intermediate=32)


@cache
def prompt_pool() -> list[tuple[int, ...]]:
    """Prompts of all sizes, many of which share beginnings."""
    chance = random.Random(3)
    base = tuple(chance.randrange(512) for _ in range(24))
    prompts = []
    for _ in range(12):
        shared = base[: chance.choice([0, 0, 3, 8, 16, 24])]
        prompts.append(shared + tuple(chance.randrange(512) for _ in range(chance.randint(1, 12))))
    return prompts


@cache
def golden(prompt: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(toy.greedy(decoder(), prompt, COUNT))


@cache
def seeded(prompt: tuple[int, ...], seed: int) -> tuple[int, ...]:
    runner = Runner(make_engine(decoder(), page_size=16, prefix_cache=False))
    runner.add(greedy_request(1, prompt, COUNT, temperature=1.0, seed=seed))
    return tuple(runner.finish()[1].token_ids)


def expected(request: Request) -> tuple[int, ...]:
    if request.sampling.temperature == 0.0:
        return golden(request.prompt_ids)
    return seeded(request.prompt_ids, request.sampling.seed)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10**6),
    page_size=st.sampled_from([1, 4, 16]),
    tokens=st.sampled_from([64, 96, 400]),
    chunk=st.sampled_from([3, 16, 64]),
    max_sequences=st.sampled_from([1, 3, 16]),
    prefix_cache=st.booleans(),
    max_tree_nodes=st.sampled_from([0, 4, 16, 63]),
)
def test_anything_goes(
    seed: int, page_size: int, tokens: int, chunk: int, max_sequences: int, prefix_cache: bool, max_tree_nodes: int
) -> None:
    chance = random.Random(seed)
    truths: dict[tuple[int, ...], tuple[int, ...]] = {}
    drafter = RandomTreeDrafter(answers_of(truths), seed)
    engine = make_engine(
        decoder(),
        [drafter],
        num_pages=tokens // page_size,
        page_size=page_size,
        context=48,
        chunk_tokens=chunk,
        max_sequences=max_sequences,
        prefix_cache=prefix_cache,
        max_tree_nodes=max_tree_nodes,
    )
    runner = Runner(engine)
    requests: dict[int, Request] = {}
    for number in range(14):
        prompt = chance.choice(prompt_pool())
        options: dict[str, object] = {"tenant": chance.choice("ab")}
        if chance.random() < 0.3:
            options |= {"temperature": 1.0, "seed": chance.randint(0, 2)}
        if chance.random() < 0.2:
            options["speculation"] = OFF
        request = greedy_request(number, prompt, COUNT, **options)
        truths[prompt] = expected(request)  # the drafter knows one of the answers to a prompt, right or wrong
        requests[number] = request
        runner.add(request)
        for _ in range(chance.randint(0, 3)):
            runner.step()
        if chance.random() < 0.25:
            engine.cancel(chance.choice(list(requests)))
    answers = runner.finish()
    for number, request in requests.items():
        got = tuple(answers[number].token_ids)
        if answers[number].finish_reason == "cancelled":
            assert got == expected(request)[: len(got)]
        else:
            assert (answers[number].finish_reason, got) == ("length", expected(request))
    stats = engine.stats()
    assert stats["generation_tokens"] == sum(len(answer.token_ids) for answer in answers.values())
    assert sum(stats["finished"].values()) == len(requests)
    assert sum(stats["spec_decode_num_accepted_tokens"].values()) == sum(answer.accepted for answer in answers.values())
    assert not any(stats["drafter_faults"].values())
    assert drafter.opened == set()
