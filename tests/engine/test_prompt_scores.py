"""Log probabilities of prompts: those an answer of the same tokens had, in any chunks, from any cache state, beside anybody."""

from __future__ import annotations

from functools import cache

import pytest
from engine_kit import (
    NOISY,
    SHAPES,
    Answer,
    Runner,
    ScriptDrafter,
    answers_of,
    greedy_request,
    make_engine,
    prompts_of,
    quick_rand,
)

from kernels.batch import KVTensors, StepInputs
from kernels.decoder import Decoder, DecoderOutput
from spec.engine import Engine
from spec.errors import RequestError
from spec.prompt_scores import SCORED_TOKENS
from spec.request import Request, TokenLogprob

PROMPT = prompts_of([9], seed=4)[0]
TOP = 3


@cache
def decoder() -> Decoder:
    return quick_rand(layers=2)


class Counting:
    """A decoder that notes how many nodes each pass scored with logits, and how many rows it had."""

    def __init__(self, inner: Decoder) -> None:
        self.inner, self.shape = inner, inner.shape
        self.scored: list[int] = []

    def forward(self, inputs: StepInputs, store: KVTensors, need_logits: bool) -> DecoderOutput:
        self.scored.append(inputs.score_rows.shape[0] if need_logits else 0)
        return self.inner.forward(inputs, store, need_logits)


@cache
def spoken(count: int = 150) -> Answer:
    """A plain answer with its log probabilities as they were generated, one a step."""
    runner = Runner(make_engine(decoder()))
    runner.add(greedy_request(1, PROMPT, count, logprobs=TOP))
    return runner.finish()[1]


def whole(count: int = 150) -> tuple[int, ...]:
    return (*PROMPT, *spoken().token_ids[:count])


def scored(engine: Engine, *requests: Request) -> tuple[dict[int, list[TokenLogprob]], dict[int, Answer]]:
    """Prompt log probabilities and answers of requests that run together."""
    runner = Runner(engine)
    runner.add(*requests)
    found: dict[int, list[TokenLogprob]] = {}
    while engine.has_work():
        for event in runner.step():
            if event.prompt_logprobs:
                assert event.started
                assert event.request_id not in found, "said twice"
                found[event.request_id] = list(event.prompt_logprobs)
    return found, runner.finish()


@pytest.mark.parametrize("chunk_tokens", [1, 5, 64, 256])
def test_they_are_bitwise_those_the_answer_had(chunk_tokens: int) -> None:
    counting = Counting(decoder())
    engine = make_engine(counting, chunk_tokens=chunk_tokens)
    found, answers = scored(engine, greedy_request(1, whole(), 0, prompt_logprobs=TOP))
    assert len(found[1]) == len(whole()) - 1
    assert found[1][len(PROMPT) - 1 :] == spoken().logprobs
    assert (answers[1].token_ids, answers[1].finish_reason) == ([], "length")
    assert sum(counting.scored) == len(whole())
    assert max(counting.scored) == min(chunk_tokens, SCORED_TOKENS)


def test_the_answer_behind_them_is_the_plain_one() -> None:
    prompt, rest = whole(40), spoken().token_ids[40:60]
    found, answers = scored(make_engine(decoder()), greedy_request(1, prompt, 20, prompt_logprobs=0, logprobs=TOP))
    assert answers[1].token_ids == rest
    assert answers[1].logprobs == spoken().logprobs[40:60]
    assert [entry.chosen for entry in found[1][len(PROMPT) - 1 :]] == [entry.chosen for entry in spoken().logprobs[:40]]
    assert all(entry.top == () for entry in found[1])


def test_a_warm_cache_is_not_used_and_is_filled() -> None:
    engine = make_engine(decoder())
    first, _ = scored(engine, greedy_request(1, whole(), 0, prompt_logprobs=TOP))
    second, answers = scored(engine, greedy_request(2, whole(), 1, prompt_logprobs=TOP))
    assert second[2] == first[1]
    assert answers[2].cached_tokens == 0
    assert engine.stats()["prefix_cache_queries"] == 0
    _, answers = scored(engine, greedy_request(3, whole(), 1))
    assert answers[3].cached_tokens >= len(whole()) - 4


def test_neighbours_notice_nothing_and_a_step_scores_so_many_at_most() -> None:
    """Drafting neighbours, plain prompts and several scored prompts in the same steps."""
    prompts = prompts_of([7, 30, 61], seed=8)
    alone = {}
    for index, prompt in enumerate(prompts):
        runner = Runner(make_engine(decoder()))
        runner.add(greedy_request(index, prompt, 40))
        alone[index] = runner.finish()[index].token_ids
    drafter = ScriptDrafter(answers_of({p: alone[i] for i, p in enumerate(prompts)}), SHAPES["2x4"], NOISY)
    counting = Counting(decoder())
    engine = make_engine(counting, [drafter], num_pages=400)
    runner = Runner(engine)
    runner.add(*(greedy_request(i, p, 40) for i, p in enumerate(prompts[:2])))
    for _ in range(3):
        runner.step()
    runner.add(*(greedy_request(10 + i, whole(), 0, prompt_logprobs=TOP) for i in range(4)), greedy_request(2, prompts[2], 40))
    said: dict[int, list[TokenLogprob]] = {}
    while engine.has_work():
        for event in runner.step():
            if event.prompt_logprobs:
                said[event.request_id] = list(event.prompt_logprobs)
    answers = runner.finish()
    assert {i: answers[i].token_ids for i in alone} == alone
    assert all(said[10 + i][len(PROMPT) - 1 :] == spoken().logprobs for i in range(4))
    most = SCORED_TOKENS + 3 * (engine.config.max_tree_nodes + 1)
    assert SCORED_TOKENS <= max(counting.scored) <= most


def test_a_newcomer_does_not_wait_for_prompts_that_are_scored() -> None:
    """However many there are, they take their small part of the chunk and leave the rest."""
    plain = prompts_of([20], seed=9)[0]
    runner = Runner(make_engine(decoder(), num_pages=900, chunk_tokens=256))
    runner.add(*(greedy_request(10 + i, whole(), 0, prompt_logprobs=0) for i in range(10)), greedy_request(1, plain, 4))
    assert runner.finish()[1].steps[0] == 0


def test_preempted_prompts_are_scored_anew_and_said_once() -> None:
    engine = make_engine(decoder(), num_pages=60, chunk_tokens=8)
    growing = [greedy_request(i, p, 60, ignore_eos=True) for i, p in enumerate(prompts_of([9, 9, 9], seed=3))]
    runner = Runner(engine)
    runner.add(*growing)
    for _ in range(8):
        runner.step()
    runner.add(greedy_request(9, whole(80), 30, prompt_logprobs=TOP, ignore_eos=True))
    said: list[TokenLogprob] = []
    while engine.has_work():
        for event in runner.step():
            said += event.prompt_logprobs
    assert engine.stats()["preemptions"] > 0, "the pool was too large to force one"
    assert said[len(PROMPT) - 1 :] == spoken().logprobs[:80]
    assert runner.finish()[9].token_ids == spoken().token_ids[80:110]


def test_a_resumed_answer_does_not_repeat_them() -> None:
    request = greedy_request(1, PROMPT, 20, prompt_logprobs=TOP, generated_ids=tuple(spoken().token_ids[:5]))
    found, answers = scored(make_engine(decoder()), request)
    assert found == {}
    assert answers[1].token_ids == spoken().token_ids[5:20]


def test_one_token_has_none_and_no_answer_needs_the_question() -> None:
    engine = make_engine(decoder())
    found, answers = scored(engine, greedy_request(1, PROMPT[:1], 0, prompt_logprobs=TOP))
    assert found == {}
    assert answers[1].finish_reason == "length"
    with pytest.raises(RequestError):
        engine.add(greedy_request(2, PROMPT, 0))
