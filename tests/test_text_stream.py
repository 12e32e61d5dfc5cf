"""Incremental decoding: whole characters only, deltas join to the full decode, tokens are counted where the text is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_kit import answer_of, byte_folder, say, sentencepiece_folder, sentencepiece_vocabulary
from tokenizers import Tokenizer as Library

from server.text import TextStream
from server.tokenizer import Tokenizer, load_tokenizer

SPLIT_TEXTS = (
    "😀",
    "👩‍👩‍👧‍👦",
    "🇩🇪",
    "你好，世界",
    "a 你b",
    "e\u0301a\u0308",
    "שלום",
    "\ufeffbom",
    "naïve\u2028x\u0085",
    "\ufffd stays",
)


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(byte_folder(tmp_path_factory.mktemp("bytes")), None)


@pytest.fixture(scope="module")
def library(byte_tokenizer: Tokenizer) -> Library:
    return Library.from_str(byte_tokenizer.tokenizer_json())


@pytest.fixture(scope="module", params=["strip", "plain", "metaspace"])
def space_tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(sentencepiece_folder(tmp_path_factory.mktemp("pieces"), request.param), None)


def deltas(tokenizer: Tokenizer, ids: list[int], size: int = 1) -> list[str]:
    stream = TextStream(tokenizer)
    out = [stream.push(ids[k : k + size]) for k in range(0, len(ids), size)]
    return [*out, stream.finish()]


@pytest.mark.parametrize("text", SPLIT_TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_ts01_a_byte_per_token_gives_whole_characters(byte_tokenizer: Tokenizer, text: str, size: int) -> None:
    ids = list(text.encode())  # ids 0..255 are the bytes
    out = deltas(byte_tokenizer, ids, size)
    assert "".join(out) == text == byte_tokenizer.decode(ids)
    assert ("\ufffd" in "".join(out)) == ("\ufffd" in text)
    assert all(delta.encode().decode() == delta for delta in out)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"a \xe4\xbd\xa0\xe4\xbdb", "a 你b"),  # half a character, then a letter
        (b"ok \xf0\x9f\x98", "ok "),  # the answer ends inside a character
        (b"\x80\xbfx\xff", "x"),  # bytes that begin nothing
        (b"\xed\xa0\x80y", "y"),  # a surrogate is no character
    ],
)
def test_ts01_what_is_no_character_is_dropped_streamed_or_not(byte_tokenizer: Tokenizer, data: bytes, text: str) -> None:
    assert "".join(deltas(byte_tokenizer, list(data))) == text == byte_tokenizer.decode(list(data))


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=40), cuts=st.lists(st.integers(1, 5), min_size=1, max_size=40))
def test_any_chunking_of_any_bytes_joins_to_the_full_decode(byte_tokenizer: Tokenizer, data: bytes, cuts: list[int]) -> None:
    stream, out, start = TextStream(byte_tokenizer), [], 0
    for cut in [*cuts, len(data)]:
        out.append(stream.push(list(data[start : start + cut])))
        start += cut
    out.append(stream.finish())
    assert "".join(out) == byte_tokenizer.decode(list(data)) == data.decode("utf-8", "ignore")
    assert all("\ufffd" not in delta or "\ufffd".encode() in data for delta in out)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30))
def test_merged_tokens_of_any_text_decode_as_the_library_decodes(
    byte_tokenizer: Tokenizer, library: Library, text: str
) -> None:
    ids = byte_tokenizer.encode(text)
    assert "".join(deltas(byte_tokenizer, ids)) == text
    assert byte_tokenizer.decode(ids) == library.decode(ids)


SPACED = ("▁", "▁the", "▁", "▁", "▁fox", "<0x0A>", "<0x09>", "▁dog")


def spaced_ids() -> list[int]:
    known = {row[0]: index for index, row in enumerate(sentencepiece_vocabulary())}
    return [known[piece] for piece in SPACED]


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("skip", [0, 1, 2])
def test_ts04_spaces_as_the_library_decodes_them(space_tokenizer: Tokenizer, size: int, skip: int) -> None:
    ids = spaced_ids()[skip:]
    library = Library.from_str(space_tokenizer.tokenizer_json())
    assert "".join(deltas(space_tokenizer, ids, size)) == library.decode(ids)


@settings(max_examples=100, deadline=None)
@given(picks=st.lists(st.integers(0, 10_000), max_size=12))
def test_ts04_any_pieces_as_the_library_decodes_them(space_tokenizer: Tokenizer, picks: list[int]) -> None:
    ids = [259 + pick % (space_tokenizer.vocab_size - 259) for pick in picks]  # byte tokens may make no character
    library = Library.from_str(space_tokenizer.tokenizer_json())
    assert "".join(deltas(space_tokenizer, ids, 2)) == library.decode(ids)


def test_ts04_text_that_goes_on_after_a_prompt_keeps_its_space(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece_folder(tmp_path), None)
    prompt, answer = tokenizer.encode("the fox"), tokenizer.encode("dog runs")
    stream = TextStream(tokenizer, continuation=True)
    shown = "".join(stream.push([index]) for index in answer)
    assert shown == " dog runs" == tokenizer.decode(answer, continuation=True)
    assert tokenizer.decode(prompt) + shown == tokenizer.decode(prompt + answer)


def test_control_and_end_tokens_are_counted_and_never_shown(byte_tokenizer: Tokenizer) -> None:
    ids = [*b"one", 257, *b" two", 258]
    answer = answer_of(byte_tokenizer)
    piece = say(answer, ids)
    assert (piece.text, piece.token_ids, answer.figures.completion_tokens) == ("one two", ids, len(ids))
    assert byte_tokenizer.decode(ids, skip_special=False) == "one<|im_start|> two<|im_end|>"


def test_a_character_is_shown_with_its_last_token_and_half_of_one_never(byte_tokenizer: Tokenizer) -> None:
    answer = answer_of(byte_tokenizer)
    assert [say(answer, [byte]).text for byte in "a你b".encode()] == ["a", "", "", "你", "b"]
    last = say(answer, list(b"\xe4"), finish_reason="length")
    assert (last.text, answer.figures.completion_tokens) == ("", 6)


def test_a_stop_token_is_counted_and_not_shown(byte_tokenizer: Tokenizer) -> None:
    answer = answer_of(byte_tokenizer)
    piece = say(answer, list(b"hi!"), stop_token=ord("!"), finish_reason="stop")
    assert (piece.text, answer.figures.completion_tokens, answer.stop_token) == ("hi", 3, ord("!"))


def test_ids_outside_the_vocabulary_have_no_text(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.decode([*b"a", 512, 100_000, *b"b"]) == "ab"
