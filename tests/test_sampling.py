"""The pipeline from logits to token: what counts, what masks, in which order, and what extremes do. Hand tables."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from acceptance import View, accept_one, generate, tree, view

from spec.request import SamplingParams, SpeculationPolicy
from spec.sampling import is_greedy, need_logits

X, Y, Z, END, STOP = 1, 2, 3, 4, 5
FLAT = torch.zeros(8, 8)


def table(**rows: dict[int, float]) -> torch.Tensor:
    """Logits 0 but for the given ones; `all` is every row, `after_N` the row after token N."""
    logits = torch.zeros(8, 8)
    for token, value in rows.pop("all", {}).items():
        logits[:, token] = value
    for name, entries in rows.items():
        for token, value in entries.items():
            logits[int(name.removeprefix("after_")), token] = value
    return logits


def first_token(logits: torch.Tensor, one: View, **more: Any) -> int:
    return accept_one(logits, one, **more).next_id


# --- what penalties count (SA-03, SD-07) -------------------------------------------------------------------------------

CLEAR = table(all={X: 5.0, Y: 4.5})
PROMPT = [X] * 5 + [0]  # the prompt holds x five times


@pytest.mark.parametrize("options", [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}])
def test_presence_and_frequency_do_not_count_the_prompt(options: dict[str, float]) -> None:
    assert first_token(CLEAR, view(PROMPT, len(PROMPT), **options)) == X


def test_repetition_counts_the_prompt() -> None:
    assert first_token(CLEAR, view(PROMPT, len(PROMPT), repetition_penalty=1.3)) == Y


def test_repetition_divides_positive_and_multiplies_negative_logits() -> None:
    logits = torch.full((8, 8), -9.0)
    logits[:, X], logits[:, Y] = -1.0, -1.2
    assert first_token(logits, view([X], 1, repetition_penalty=1.3)) == Y  # -1.3 < -1.2; divided it would stay first
    assert first_token(logits, view([X], 1, repetition_penalty=1.1)) == X


def test_frequency_grows_per_occurrence_and_presence_does_not() -> None:
    assert generate(CLEAR, view([0], frequency_penalty=0.4), 6) == [X, X, Y, X, Y, X]  # 5.0 4.6 | 4.5 4.2 | 4.1 ...
    assert generate(CLEAR, view([0], presence_penalty=0.4), 3) == [X, X, X]
    assert generate(CLEAR, view([0], presence_penalty=0.6), 3) == [X, Y, X]


def test_negative_penalties_raise() -> None:
    flat = table(all={X: 1.0, Y: 0.9})
    assert first_token(flat, view([0, Y], 1, presence_penalty=-0.2)) == Y
    assert first_token(flat, view([0, Y], 1, frequency_penalty=-0.2)) == Y
    assert first_token(flat, view([Y], 1, repetition_penalty=0.5)) == Y


@pytest.mark.parametrize(
    "options",
    [{"frequency_penalty": 1.5}, {"presence_penalty": 1.0}, {"repetition_penalty": 1.3}, {"frequency_penalty": -2.0}],
)
@pytest.mark.parametrize("drafts", ["right", "wrong"])
def test_penalties_are_counted_per_token_along_the_path(options: dict[str, float], drafts: str) -> None:
    logits = torch.randn(8, 8, generator=torch.Generator().manual_seed(3)) * 2
    one = view([0, 1], 2, **options)
    plain = generate(logits, one, 30)

    def drafted(now: View) -> Any:
        done = len(now.token_ids) - 2
        ahead = plain[done : done + 4] if drafts == "right" else [(t + 1) % 8 for t in plain[done : done + 4]]
        return tree(ahead)

    assert generate(logits, one, 30, drafted) == plain
    assert plain != generate(logits, view([0, 1], 2), 30), "a penalty without effect would pass anything"


def test_a_resumed_answer_counts_as_answer() -> None:
    prompt, before = [0], [X, X, Y]
    whole = generate(CLEAR, view(prompt, 1, frequency_penalty=0.4), 8)
    assert whole[:3] == before
    assert generate(CLEAR, view(prompt + before, 1, frequency_penalty=0.4), 5) == whole[3:]


# --- bias, bad words, min_tokens (SD-08, LM-05) ------------------------------------------------------------------------


def test_logit_bias_bans_and_forces() -> None:
    assert first_token(CLEAR, view([0], logit_bias={X: -100.0})) == Y
    assert first_token(CLEAR, view([0], logit_bias={Z: 100.0})) == Z
    drafted = tree([X, X, X])
    assert accept_one(CLEAR, view([0], logit_bias={X: -100.0}), drafted).path == ()


def test_ids_outside_the_vocabulary_are_harmless() -> None:
    odd = {
        "logit_bias": {-1: 100.0, 8: 100.0, 10**9: 100.0},
        "bad_words": ((8,), (-1,)),
        "stop_token_ids": (99,),
        "min_tokens": 3,
    }
    assert first_token(CLEAR, view([0], **odd)) == X
    outside = View([700, 0], 2, SamplingParams(max_tokens=9, temperature=0.0, repetition_penalty=1.2))
    assert first_token(CLEAR, outside) == X


def test_a_bad_word_masks_its_last_token_after_its_prefix_only() -> None:
    logits = table(all={X: 5.0, Y: 4.0}, after_1={Y: 6.0})  # x, then after x: y
    word = ((X, Y),)
    assert generate(logits, view([0]), 4) == [X, Y, X, Y]
    assert generate(logits, view([0], bad_words=word), 4) == [X, X, X, X]
    assert first_token(logits, view([0], bad_words=((Z, X),))) == X
    assert first_token(logits, view([0], bad_words=((X,),))) == Y
    assert first_token(logits, view([0, Z, X], 3, bad_words=((Z, X, Y),))) == X


def test_a_bad_words_prefix_may_lie_on_drafted_nodes() -> None:
    logits = table(all={X: 5.0, Y: 4.0}, after_1={Y: 6.0})
    one = view([0], bad_words=((X, X, Y),))
    kept = accept_one(logits, one, tree([X, Y, X, X, Y]))
    assert kept.path == (0, 1, 2)  # x y x; y again is right ([y, x] is no prefix), so the draft x is refused
    assert kept.next_id == Y
    forced = accept_one(table(all={X: 5.0, Y: 4.9}), one, tree([X, X, Y]))
    assert (forced.path, forced.next_id) == ((0, 1), X)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_holds_back_every_end_until_its_own_position(ignore_eos: bool) -> None:
    logits = table(all={END: 5.0, STOP: 4.0, X: 3.0})
    one = view([0, 0], 2, min_tokens=3, stop_token_ids=(STOP,), ignore_eos=ignore_eos)
    wanted = [END] * 3 if ignore_eos else [X, X, X]  # with ignore_eos an end token is text and only STOP ends
    assert generate(logits, one, 4, eos_ids=(END,)) == [*wanted, END]
    for drafted in (tree([X, X, X, END]), tree([END, END, END, END]), tree([X, END, X, X], (-1, 0, 0, 2))):
        assert generate(logits, one, 4, lambda _, t=drafted: t, eos_ids=(END,)) == [*wanted, END]


def test_min_tokens_without_end_tokens_masks_nothing() -> None:
    assert first_token(CLEAR, view([0], min_tokens=50)) == X


# --- order (SA-04) -----------------------------------------------------------------------------------------------------

STEEP = torch.log(torch.tensor([[0.90, 0.06, 0.03, 0.01]])).expand(4, 4)


def support(logits: torch.Tensor, samples: int = 400, **options: Any) -> set[int]:
    return {first_token(logits, view([0], seed=seed, **options)) for seed in range(samples)}


def test_temperature_comes_before_min_p() -> None:
    assert support(STEEP, temperature=2.0, min_p=0.05) == {0, 1, 2, 3}  # p ** (1/2): the least is 0.105 of the best
    assert support(STEEP, temperature=1.0, min_p=0.05) == {0, 1}
    assert support(STEEP, temperature=2.0, min_p=0.12) == {0, 1, 2}


def test_penalties_and_bias_come_before_temperature_and_filters() -> None:
    assert support(STEEP, temperature=1.0, top_k=2, logit_bias={3: 10.0}) == {0, 3}
    assert support(STEEP, temperature=1.0, top_p=0.5, logit_bias={0: -100.0}) == {1}


def test_masks_come_after_bias() -> None:
    assert first_token(CLEAR, view([0], bad_words=((X,),), logit_bias={X: 100.0})) == Y


# --- extremes (SA-02) --------------------------------------------------------------------------------------------------

ROUGH = torch.randn(8, 8, generator=torch.Generator().manual_seed(9)) * 4
GREEDY = [
    {"temperature": 0.0},
    {"temperature": 1e-45},
    {"temperature": 1e-38},
    {"temperature": 1e-5},
    {"temperature": 2.0, "top_p": 1e-9},
    {"temperature": 2.0, "top_k": 1},
    {"temperature": 2.0, "top_k": 1, "top_p": 0.8},
    {"temperature": 2.0, "min_p": 1.0},
    {"temperature": 2.0, "min_p": 1.0, "top_p": 0.1},
    {"temperature": 1e-45, "logit_bias": {0: 0.0}},
]


@pytest.mark.parametrize("options", GREEDY, ids=str)
@pytest.mark.parametrize("rule", ["exact", "rejection"])
def test_degenerate_settings_give_the_greedy_text(options: dict[str, Any], rule: str) -> None:
    greedy = generate(ROUGH, view([0]), 12)
    assert generate(ROUGH, view([0], rule=rule, seed=5, **options), 12) == greedy
    assert generate(ROUGH, view([0], rule=rule, seed=5, **options), 12, lambda _: tree([4, 2, 7])) == greedy


@pytest.mark.parametrize("top_k", [0, -1, 8, 9, 10**6])
def test_top_k_of_the_whole_vocabulary_is_off(top_k: int) -> None:
    plain = generate(ROUGH, view([0], temperature=1.5, seed=3), 20)
    assert generate(ROUGH, view([0], temperature=1.5, seed=3, top_k=top_k), 20) == plain


def test_which_requests_need_no_logits() -> None:
    def needs(**options: Any) -> bool:
        return need_logits(SamplingParams(**{"max_tokens": 1, "temperature": 0.0, **options}), SpeculationPolicy())

    assert not needs()
    assert not needs(temperature=1e-45)
    assert not needs(temperature=1.0, top_k=1)
    assert not needs(stop_token_ids=(3,), ignore_eos=True, seed=9)
    for options in (
        {"temperature": 0.01},
        {"logprobs": 0},
        {"logit_bias": {1: 1.0}},
        {"bad_words": ((1,),)},
        {"min_tokens": 1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": -0.1},
        {"frequency_penalty": 0.1},
    ):
        assert needs(**options), options


def test_greedy_begins_where_the_op_begins_it() -> None:
    """The smallest temperature that is not greedy: 1 / t is finite in float32."""
    for temperature in (2.9e-39, 2.94e-39, 1e-38, 1e-45, 0.0, 1e-37):
        by_op = temperature == 0.0 or math.isinf(float(1.0 / torch.tensor(temperature, dtype=torch.float32)))
        assert is_greedy(SamplingParams(max_tokens=1, temperature=temperature)) == by_op
