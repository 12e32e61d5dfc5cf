"""Stop strings: the cut is the same in every chunking, near misses are released, tokens end where the text does (TS-03)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_kit import answer_of, byte_folder, say

from server.text import StopMatcher
from server.tokenizer import Tokenizer, load_tokenizer

TEXT = "alpha beta gamma delta epsilon zeta eta theta"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(byte_folder(tmp_path_factory.mktemp("bytes")), None)


def run(text: str, stops: list[str], size: int) -> tuple[str, bool]:
    matcher, shown, stopped = StopMatcher(stops), [], False
    for start in range(0, len(text), size):
        out, stopped = matcher.push(text[start : start + size])
        shown.append(out)
        if stopped:
            break
    return "".join(shown) + matcher.finish(), stopped


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("stops", "visible"),
    [
        (["ta epsilon "], "alpha beta gamma del"),  # last letters of a word, a space, a word, a space
        (["gamma x", "gx"], TEXT),
        (["gam", "gamma"], "alpha beta "),  # one is a prefix of the other
        (["gamma", "gam"], "alpha beta "),
        (["delta", "beta"], "alpha "),  # the earlier in the text wins, not the earlier in the list
        (["gammy", "zetta"], TEXT),  # near misses
        (["alpha"], ""),
        (["theta"], "alpha beta gamma delta epsilon zeta eta "),
        ([""], TEXT),
        ([], TEXT),
        (["", "zeta"], "alpha beta gamma delta epsilon "),
    ],
)
def test_ts03_visible_text_is_what_precedes_the_match(stops: list[str], visible: str, size: int) -> None:
    assert run(TEXT, stops, size) == (visible, visible != TEXT)


def test_near_miss_is_held_and_then_released() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("no ST") == ("no ", False)
    assert matcher.push("ART") == ("START", False)
    assert matcher.push("STO") == ("", False)
    assert matcher.finish() == "STO"


def test_nothing_is_shown_after_a_match() -> None:
    matcher = StopMatcher(["end"])
    assert matcher.push("the end of it") == ("the ", True)
    assert matcher.push("more") == ("", True)
    assert matcher.finish() == ""
    assert matcher.matched == "end"


def test_overlapping_beginnings_are_followed() -> None:
    assert run("aaaaab", ["aab"], 1) == ("aaa", True)
    assert run("abababac", ["ababac"], 1) == ("ab", True)


def expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """By definition: the shortest prefix that ends with a stop string, cut in front of the longest such."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@settings(max_examples=400, deadline=None)
@given(
    text=st.text("ab ", max_size=40),
    stops=st.lists(st.text("ab ", max_size=5), max_size=5),
    cuts=st.lists(st.integers(1, 6), min_size=1, max_size=30),
)
def test_every_chunking_cuts_at_the_same_place(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher, shown, start, stopped = StopMatcher(stops), "", 0, False
    for cut in [*cuts, len(text)]:
        out, stopped = matcher.push(text[start : start + cut])
        shown += out
        start += cut
        if stopped:
            break
    shown += matcher.finish()
    assert (shown, stopped) == expected(text, stops)


# --- the same in an answer: what is shown, and what is counted ---------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 5, 64])
def test_ts03_tokens_behind_the_stop_string_are_no_part_of_the_answer(tokenizer: Tokenizer, size: int) -> None:
    """One token a step or accepted runs of any length: the same text, the same token count."""
    ids = list(b"one two END three")
    answer, text, tokens = answer_of(tokenizer, ["two END"]), "", 0
    for start in range(0, len(ids), size):
        piece = say(answer, ids[start : start + size])
        text += piece.text
        tokens += len(piece.token_ids)
        if answer.ended:
            break
    assert (text, tokens, answer.finish_reason) == ("one ", len("one two END"), "stop")
    assert answer.figures.completion_tokens == tokens


def test_held_text_is_released_and_its_tokens_were_counted_when_they_came(tokenizer: Tokenizer) -> None:
    answer = answer_of(tokenizer, ["STOP"])
    assert say(answer, list(b"an ST")).text == "an "
    assert answer.figures.completion_tokens == 5
    assert say(answer, list(b"x")).text == "STx"
    last = say(answer, list(b"STO"), finish_reason="length")
    assert (last.text, answer.figures.completion_tokens, answer.finish_reason) == ("STO", 9, "length")


@settings(max_examples=200, deadline=None)
@given(
    data=st.one_of(st.binary(max_size=30), st.text("aé你 ", max_size=20).map(str.encode)),
    stops=st.lists(st.text("aé你 ", min_size=1, max_size=3), max_size=3),
    cuts=st.lists(st.integers(1, 6), min_size=1, max_size=30),
)
def test_text_and_count_do_not_depend_on_the_chunking(
    tokenizer: Tokenizer, data: bytes, stops: list[str], cuts: list[int]
) -> None:
    results = []
    for sizes in ([1] * len(data), [*cuts, len(data) or 1]):
        answer, text, start, counted = answer_of(tokenizer, stops), "", 0, 0
        for size in sizes:
            piece = say(answer, list(data[start : start + size]))
            text += piece.text
            counted += len(piece.token_ids)
            start += size
        text += say(answer, [], finish_reason="length").text
        assert counted == answer.figures.completion_tokens <= len(data)
        results.append((text, counted, answer.finish_reason))
    assert results[0] == results[1]
    if results[0][2] == "length":
        assert results[0][1] == len(data)
