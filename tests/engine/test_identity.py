"""Greedy text never changes by speculation, tree shape, page size, chunking, neighbours, cache hits or preemption.

The golden answers come from toy.greedy: one token a step, no engine.
"""

from __future__ import annotations

from functools import cache

import pytest
import toy
from engine_kit import (
    NOISY,
    OFF,
    ORACLE,
    SHAPES,
    SWAPPED,
    UNRELATED,
    KeepAll,
    RandomTreeDrafter,
    Runner,
    ScriptDrafter,
    Skill,
    answers_of,
    greedy_request,
    make_engine,
    prompts_of,
    quick_rand,
    run,
)

from kernels.decoder import Decoder
from spec.request import SpeculationPolicy
from spec.shapes import ShapeSpeculator

Prompt = tuple[int, ...]
TOKENS = 24


@cache
def decoder() -> Decoder:
    return quick_rand(layers=2)


@cache
def golden(prompt: Prompt, count: int = TOKENS) -> tuple[int, ...]:
    return tuple(toy.greedy(decoder(), prompt, count))


def known(prompts: list[Prompt], count: int = TOKENS) -> dict[Prompt, tuple[int, ...]]:
    return {prompt: golden(prompt, count) for prompt in prompts}


PROMPTS = prompts_of([1, 7, 16, 30])


@pytest.mark.parametrize("skill", [ORACLE, SWAPPED, NOISY, UNRELATED], ids=["oracle", "swapped", "noisy", "unrelated"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_and_skill_says_what_plain_decoding_says(shape: str, skill: Skill) -> None:
    drafter = ScriptDrafter(answers_of(known(PROMPTS)), SHAPES[shape], skill)
    answers = run(make_engine(decoder(), [drafter]), [greedy_request(i, p, TOKENS) for i, p in enumerate(PROMPTS)])
    for i, prompt in enumerate(PROMPTS):
        assert tuple(answers[i].token_ids) == golden(prompt)
        assert answers[i].finish_reason == "length"
        assert answers[i].drafted > 0, "a silently disabled drafter would pass everything"
        if skill.accuracy == 1.0:
            assert len(answers[i].steps) <= 1 + -(-(TOKENS - 1) // 2), "everything right should be accepted"
        assert (answers[i].accepted == 0) == (skill.accuracy == 0.0)
        assert answers[i].accepted == sum(source == "script" for source in answers[i].sources)


def test_the_reference_kernels_say_the_same_with_drafts() -> None:
    """The machine without a compiler: no native kernel takes part."""
    target = toy.rand_decoder(layers=2)
    prompt = PROMPTS[1]
    answer = toy.greedy(target, prompt, 16)
    for shape, skill in (("chain", NOISY), ("2x4", SWAPPED)):
        drafter = ScriptDrafter(answers_of({prompt: answer}), SHAPES[shape], skill)
        engine = make_engine(target, [drafter], native=False)
        assert run(engine, [greedy_request(1, prompt, 16)])[1].token_ids == answer


@pytest.mark.parametrize("page_size", [1, 4, 16, 32])
@pytest.mark.parametrize("skill", [SWAPPED, NOISY], ids=["swapped", "noisy"])
def test_page_size_changes_nothing(page_size: int, skill: Skill) -> None:
    drafter = ScriptDrafter(answers_of(known(PROMPTS)), SHAPES["2x4"], skill)
    engine = make_engine(decoder(), [drafter], page_size=page_size, num_pages=400 // page_size)
    answers = run(engine, [greedy_request(i, p, TOKENS) for i, p in enumerate(PROMPTS)])
    assert [tuple(answers[i].token_ids) for i in answers] == [golden(p) for p in PROMPTS]


@pytest.mark.parametrize("chunk", [1, 3, 5, 16, 64])
def test_chunk_size_changes_nothing(chunk: int) -> None:
    engine = make_engine(decoder(), [ScriptDrafter(answers_of(known(PROMPTS)), SHAPES["4x3"], NOISY)], chunk_tokens=chunk)
    answers = run(engine, [greedy_request(i, p, TOKENS) for i, p in enumerate(PROMPTS)])
    assert [tuple(answers[i].token_ids) for i in answers] == [golden(p) for p in PROMPTS]


@pytest.mark.parametrize("shape", ["chain", "2x4", "4x3", "wide"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("batch", [1, 4])
def test_a_second_turn_continues_on_compacted_keys(shape: str, page_size: int, batch: int) -> None:
    """SD-11: the accepted leaf is the second sibling, so keys must move; turn 2 hits the pages that turn 1 published."""
    long = 200
    first = prompts_of([9, 5, 14, 20][:batch], seed=batch)
    turn_two = {p: (*p, *golden(p, long), 3, 4, 5) for p in first}
    truth = known(first, long) | known(list(turn_two.values()), 12)
    drafter = ScriptDrafter(answers_of(truth), SHAPES[shape], SWAPPED)
    runner = Runner(make_engine(decoder(), [drafter], page_size=page_size, num_pages=1600 // page_size))
    runner.add(*[greedy_request(i, p, long) for i, p in enumerate(first)])
    runner.finish()
    runner.add(*[greedy_request(10 + i, turn_two[p], 12) for i, p in enumerate(first)])
    answers = runner.finish()
    for i, prompt in enumerate(first):
        assert tuple(answers[i].token_ids) == golden(prompt, long)
        assert answers[10 + i].cached_tokens >= (len(prompt) + long - 1) // page_size * page_size > 0
        assert tuple(answers[10 + i].token_ids) == golden(turn_two[prompt], 12)


def test_a_neighbour_in_the_batch_changes_nothing() -> None:
    """KV-03: eight lengths around the page size alone, together, and arriving while others decode."""
    page_size, count = 16, 16
    prompts = prompts_of([1, 2, page_size - 1, page_size, page_size + 1, 37, 90, 120], seed=5)
    truth = answers_of(known(prompts, count))
    settings = {"page_size": page_size, "num_pages": 64, "chunk_tokens": 48}
    requests = [greedy_request(i, p, count) for i, p in enumerate(prompts)]
    for drafters in ([], [ScriptDrafter(truth, SHAPES["2x4"], NOISY)]):
        together = run(make_engine(decoder(), drafters, **settings), requests)
        assert [tuple(together[i].token_ids) for i in together] == [golden(p, count) for p in prompts]
    runner = Runner(make_engine(decoder(), [ScriptDrafter(truth, SHAPES["4x3"], NOISY)], **settings))
    for request in requests:
        runner.add(request)
        runner.step()
        runner.step()
    answers = runner.finish()
    assert [tuple(answers[i].token_ids) for i in answers] == [golden(p, count) for p in prompts]


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("skill", [None, ORACLE, NOISY], ids=["plain", "oracle", "noisy"])
def test_preemption_changes_nothing(page_size: int, skill: Skill | None) -> None:
    prompts = prompts_of([6, 9, 12, 5], seed=3)
    drafters = [] if skill is None else [ScriptDrafter(answers_of(known(prompts)), SHAPES["2x4"], skill)]
    engine = make_engine(decoder(), drafters, page_size=page_size, num_pages=80 // page_size, context=80)
    answers = run(engine, [greedy_request(i, p, TOKENS) for i, p in enumerate(prompts)])
    assert engine.stats()["preemptions"] > 0, "the pool was too large to force one"
    assert [tuple(answers[i].token_ids) for i in answers] == [golden(p) for p in prompts]
    assert engine.stats()["prefix_cache_hits"] == 0, "recomputing is not a prefix hit"
    assert all(answer.cached_tokens == 0 for answer in answers.values())
    assert engine.stats()["prompt_tokens"] == engine.stats()["prefix_cache_queries"] == sum(map(len, prompts))
    assert engine.stats()["generation_tokens"] == 4 * TOKENS


def test_two_drafters_and_policies_in_one_batch() -> None:
    """SD-13: rows with many drafts, with few, without any, and one-token prompts side by side."""
    prompts = prompts_of([1, 2, 30, 8, 11], seed=8)
    truth = answers_of(known(prompts))
    drafters = [
        ScriptDrafter(truth, SHAPES["chain"], ORACLE, name="good"),
        ScriptDrafter(truth, SHAPES["wide"], UNRELATED, name="bad"),
    ]
    policies = [
        SpeculationPolicy(),
        SpeculationPolicy(drafters=("bad",)),
        SpeculationPolicy(max_nodes=2),
        OFF,
        SpeculationPolicy(drafters=("nobody",)),
    ]
    requests = [greedy_request(i, p, TOKENS, speculation=policies[i]) for i, p in enumerate(prompts)]
    for order in (requests, requests[::-1], requests[2:] + requests[:2]):
        answers = run(make_engine(decoder(), drafters), order)
        assert [tuple(answers[i].token_ids) for i in range(5)] == [golden(p) for p in prompts]
        assert set(answers[0].sources) == {"", "good"}
        assert answers[1].drafted > 0 == answers[1].accepted
        assert 0 < answers[2].drafted <= 2 * len(answers[2].steps)
        assert answers[3].drafted == answers[4].drafted == 0


@pytest.mark.parametrize("shape", ["2x4", "4x3", "mixed", "wide"])
def test_merged_trees_of_three_drafters(shape: str) -> None:
    prompts = prompts_of([4, 21], seed=12)
    truth = answers_of(known(prompts))
    drafters = [
        ScriptDrafter(truth, (2, 1, 1), SWAPPED, name="a"),
        ScriptDrafter(truth, (1, 1, 1, 1), NOISY, name="b"),
        RandomTreeDrafter(truth, seed=4, name="c"),
    ]
    engine = make_engine(decoder(), drafters, speculator=ShapeSpeculator(shape, 512))
    answers = run(engine, [greedy_request(i, p, TOKENS) for i, p in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        assert tuple(answers[i].token_ids) == golden(prompt)
        assert answers[i].accepted > 0
    assert not any(engine.stats()["drafter_faults"].values())


def test_drafters_hear_of_every_pass() -> None:
    """Sequences are opened once, observed at every pass of theirs, and closed, preempted or not."""
    prompts = prompts_of([6, 9, 12, 5], seed=3)
    drafter = ScriptDrafter(answers_of(known(prompts)), SHAPES["chain"], NOISY)
    speculator = KeepAll()
    engine = make_engine(decoder(), [drafter], speculator=speculator, num_pages=20, context=80)
    run(engine, [greedy_request(i, p, TOKENS) for i, p in enumerate(prompts)])
    assert engine.stats()["preemptions"] > 0
    assert drafter.opened == set()
    rows = sum(record.load.sequences for record in speculator.records)
    assert drafter.outcomes == rows
    assert sum(len(record.outcomes) for record in speculator.records) == engine.stats()["row_steps"]
