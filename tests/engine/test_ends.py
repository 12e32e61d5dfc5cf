"""Where answers end: end tokens, stop tokens, max_tokens, the context edge, inside an accepted run too; and resumed answers."""

from __future__ import annotations

from functools import cache

import pytest
import toy
from engine_kit import (
    NOISY,
    ORACLE,
    SHAPES,
    SWAPPED,
    Answer,
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
from spec.engine import Engine
from spec.errors import RequestError

K = 8  # drafts a step
CHAIN = (1,) * K
PROMPT = prompts_of([11], seed=21)[0]


@cache
def decoder() -> Decoder:
    return quick_rand(layers=2)


@cache
def golden(prompt: tuple[int, ...] = PROMPT, count: int = 40) -> tuple[int, ...]:
    return tuple(toy.greedy(decoder(), prompt, count))


def engine(
    shape: tuple[int, ...] | None = CHAIN, skill: Skill = ORACLE, prompt: tuple[int, ...] = PROMPT, **settings: int
) -> Engine:
    drafters = [] if shape is None else [ScriptDrafter(answers_of({prompt: golden(prompt)}), shape, skill)]
    return make_engine(decoder(), drafters, **settings)  # type: ignore[arg-type]


def first_places() -> list[int]:
    """Positions of the golden answer whose token appears there first."""
    return [j for j, token in enumerate(golden()) if token not in golden()[:j]]


@pytest.mark.parametrize("j", range(K + 2))
@pytest.mark.parametrize("how", ["eos", "stop_token_ids"])
def test_an_end_token_inside_an_accepted_run_ends_the_answer_there(j: int, how: str) -> None:
    """SD-02: sweep the end over a whole period of K + 1 places."""
    place = first_places()[j]
    end = golden()[place]
    for shape, skill in ((None, ORACLE), (CHAIN, ORACLE), (SHAPES["2x4"], SWAPPED)):
        drafters = [] if shape is None else [ScriptDrafter(answers_of({PROMPT: golden()}), shape, skill)]
        made = make_engine(decoder(), drafters, eos_ids=(end,) if how == "eos" else ())
        options = {"stop_token_ids": (end,)} if how != "eos" else {}
        answer = run(made, [greedy_request(1, PROMPT, 40, logprobs=1, **options)])[1]
        assert tuple(answer.token_ids) == golden()[: place + 1]
        assert (answer.finish_reason, answer.stop_token) == ("stop", end)
        assert len(answer.sources) == len(answer.logprobs) == place + 1
        stats = made.stats()
        assert stats["generation_tokens"] == place + 1
        assert answer.accepted == sum(stats["spec_decode_num_accepted_tokens_per_pos"]) == answer.sources.count("script")
        assert made.pool.cached <= (len(PROMPT) + place) // 4, "nothing behind the end may be published"


def test_ignore_eos_goes_on_and_stop_token_ids_still_hold() -> None:
    eos, stop = golden()[first_places()[2]], golden()[first_places()[5]]
    made = make_engine(decoder(), [ScriptDrafter(answers_of({PROMPT: golden()}), CHAIN)], eos_ids=(eos,))
    requests = [
        greedy_request(1, PROMPT, 40, ignore_eos=True),
        greedy_request(2, PROMPT, 40, ignore_eos=True, stop_token_ids=(stop,)),
    ]
    answers = run(made, requests)
    assert tuple(answers[1].token_ids) == golden()
    assert answers[1].finish_reason == "length"
    assert tuple(answers[2].token_ids) == golden()[: first_places()[5] + 1]
    assert answers[2].stop_token == stop


def test_min_tokens_holds_an_early_end_back_with_and_without_drafts() -> None:
    eos = golden()[first_places()[1]]
    answers: list[Answer] = []
    for shape in (None, CHAIN):
        drafters = [] if shape is None else [ScriptDrafter(answers_of({PROMPT: golden()}), shape)]
        made = make_engine(decoder(), drafters, eos_ids=(eos,))
        answers.append(run(made, [greedy_request(1, PROMPT, 24, min_tokens=12)])[1])
    plain, drafted = answers
    assert plain.token_ids == drafted.token_ids
    assert len(plain.token_ids) >= 12
    assert eos not in plain.token_ids[:12]


@pytest.mark.parametrize("shape", [None, (1, 1, 1), CHAIN, SHAPES["4x3"]], ids=["plain", "3", "8", "4x3"])
@pytest.mark.parametrize("count", [1, 2, 3, 5, K, K + 1])
def test_drafting_never_overshoots_max_tokens(shape: tuple[int, ...] | None, count: int) -> None:
    """SD-04: exactly max_tokens, a prefix of the long answer."""
    answer = run(engine(shape), [greedy_request(1, PROMPT, count)])[1]
    assert tuple(answer.token_ids) == golden()[:count]
    assert (answer.finish_reason, answer.stop_token) == ("length", None)
    if shape is not None and len(set(shape)) == 1:
        assert answer.drafted == count - len(answer.steps), "an oracle's chain leaves the last token to the target"


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("short_by", [1, 2, K, K + 1])
def test_the_context_edge(short_by: int, page_size: int) -> None:
    """SD-05: prompts of C - 1, C - 2, C - K and C - K - 1 tokens with more max_tokens than room."""
    context = 64
    prompt = prompts_of([context - short_by], seed=30)[0]
    for shape in (None, CHAIN, SHAPES["wide"]):
        made = engine(shape, prompt=prompt, page_size=page_size, num_pages=64 // page_size, context=context)
        answer = run(made, [greedy_request(1, prompt, 50)])[1]
        assert tuple(answer.token_ids) == golden(prompt)[:short_by]
        assert answer.finish_reason == "length"


def test_a_prompt_that_never_fits_is_refused_with_both_numbers() -> None:
    """LM-03, the engine's half."""
    made = engine(context=64)
    for length in (64, 65, 640):
        with pytest.raises(RequestError, match=rf"{length} tokens.*64") as caught:
            made.add(greedy_request(length, prompts_of([length])[0], 5))
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    assert not made.has_work()
    small = engine(num_pages=8, page_size=4, context=64)
    with pytest.raises(RequestError, match=r"40 tokens.*32"):
        small.add(greedy_request(1, prompts_of([40])[0], 5))
    answer = run(small, [greedy_request(2, prompts_of([31])[0], 5)])[2]
    assert len(answer.token_ids) == 1


@pytest.mark.parametrize(
    ("prompt", "options", "code"),
    [
        ((), {}, "empty_prompt"),
        ((512,), {}, "invalid_token_id"),
        ((-1,), {}, "invalid_token_id"),
        ((1,), {"generated_ids": (2**40,)}, "invalid_token_id"),
        ((1,), {"max_tokens": 0}, "invalid_value"),
    ],
)
def test_what_cannot_be_answered_is_refused(prompt: tuple[int, ...], options: dict[str, object], code: str) -> None:
    made = engine()
    with pytest.raises(RequestError) as caught:
        made.add(greedy_request(1, prompt, **options))  # type: ignore[arg-type]
    assert caught.value.code == code
    assert not made.has_work()


def test_an_id_is_taken_once() -> None:
    made = engine()
    made.add(greedy_request(1, PROMPT))
    with pytest.raises(RequestError, match="in use"):
        made.add(greedy_request(1, PROMPT))


@pytest.mark.parametrize("shape", [None, CHAIN, SHAPES["2x4"]], ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("delivered", [1, 5, 23])
def test_a_resumed_answer_continues_exactly(shape: tuple[int, ...] | None, temperature: float, delivered: int) -> None:
    options = {"temperature": temperature, "seed": 77, "presence_penalty": 0.4, "frequency_penalty": 0.3}
    whole = run(engine(None), [greedy_request(1, PROMPT, 24, **options)])[1].token_ids
    truth = answers_of({PROMPT: whole})
    made = make_engine(decoder(), [] if shape is None else [ScriptDrafter(truth, shape, NOISY)])
    resumed = greedy_request(2, PROMPT, 24, generated_ids=tuple(whole[:delivered]), **options)
    answer = run(made, [resumed])[2]
    assert whole[:delivered] + answer.token_ids == whole
    assert answer.finish_reason == "length"


def test_a_resumed_answer_that_was_complete_only_ends() -> None:
    made = make_engine(decoder(), eos_ids=(golden()[3],))
    runner = Runner(made)
    runner.add(greedy_request(1, PROMPT, 10, generated_ids=golden()[:4]))
    runner.add(greedy_request(2, PROMPT, 2, generated_ids=golden()[:2]))
    answers = runner.finish()
    assert [(answers[i].finish_reason, answers[i].token_ids) for i in (1, 2)] == [("stop", []), ("length", [])]


@pytest.mark.parametrize("shape", [CHAIN, SHAPES["2x4"], SHAPES["bushy"]], ids=["chain", "2x4", "bushy"])
@pytest.mark.parametrize("skill", [ORACLE, NOISY], ids=["oracle", "noisy"])
def test_seeded_text_and_logprobs_are_the_same_with_drafts(shape: tuple[int, ...], skill: Skill) -> None:
    prompts = prompts_of([4, 13], seed=2)
    requests = [greedy_request(i, p, 20, temperature=0.8, top_p=0.9, seed=i, logprobs=2) for i, p in enumerate(prompts)]
    plain = run(make_engine(decoder()), requests)
    truth = answers_of({p: plain[i].token_ids for i, p in enumerate(prompts)})
    drafted = run(make_engine(decoder(), [ScriptDrafter(truth, shape, skill)]), requests)
    for i in range(len(prompts)):
        assert drafted[i].token_ids == plain[i].token_ids
        assert drafted[i].logprobs == plain[i].logprobs
        assert len(plain[i].logprobs) == 20
        assert drafted[i].accepted > 0
