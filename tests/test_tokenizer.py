"""Tokenizers of model folders: control tokens never come out of text, every declared end token ends an answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import llguidance
import pytest
from text_kit import STRINGS, byte_folder, sentencepiece_folder
from tokenizers import Tokenizer as Library

from server.tokenizer import Tokenizer, load_tokenizer
from spec.errors import ModelFileError, RequestError

IM_START, IM_END = 257, 258


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(byte_folder(tmp_path_factory.mktemp("bytes")), None)


def test_text_round_trips_and_never_gives_a_control_token(tokenizer: Tokenizer) -> None:
    for text in STRINGS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.special_ids.isdisjoint(ids)


def test_plain_text_is_encoded_as_the_library_encodes_it(tokenizer: Tokenizer) -> None:
    library = Library.from_str(tokenizer.tokenizer_json())
    for text in STRINGS:
        if "<|" not in text:
            assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids


def test_control_tokens_count_only_when_allowed(tokenizer: Tokenizer) -> None:
    text = "a<|im_end|>b"
    assert IM_END not in tokenizer.encode(text)
    assert tokenizer.encode(text, allow_special=True) == [ord("a"), IM_END, ord("b")]


def test_private_use_characters_are_text_like_any_other(tokenizer: Tokenizer) -> None:
    """The characters that stand for control tokens inside the tokenizer, typed by a user on purpose."""
    for mark in tokenizer.marked("").marks.values():
        text = f"x {mark}y"
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.encode(f"{text}<|im_end|>", allow_special=True) == [*text.encode(), IM_END]
    every = "".join(chr(code) for code in range(0x100000, 0x10FFFE))
    assert tokenizer.decode(tokenizer.encode(every[:9000])) == every[:9000]
    with pytest.raises(RequestError, match="private-use"):
        tokenizer.encode(every)


def test_half_a_surrogate_pair_is_the_clients_fault(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        tokenizer.encode("x\ud800y")


def test_a_vocabulary_that_would_merge_text_into_a_control_token(tmp_path: Path) -> None:
    """`he` made a control token although its merge exists: the text `he` must be spelled otherwise."""
    plain = load_tokenizer(byte_folder(tmp_path / "a"), None)
    [he] = plain.encode("he")
    hostile = load_tokenizer(byte_folder(tmp_path / "b", tokenizer_config={"additional_special_tokens": ["he"]}), None)
    assert he in hostile.special_ids
    ids = hostile.encode("he, the other")
    assert he not in ids
    assert hostile.decode(ids) == "he, the other"


def test_non_special_added_tokens_are_matched_in_text(tmp_path: Path) -> None:
    folder = byte_folder(tmp_path, added=[{"content": "<think>", "special": False}])
    tokenizer = load_tokenizer(folder, None)
    assert tokenizer.encode("a<think>") == [ord("a"), 512]
    assert tokenizer.decode([512]) == "<think>"
    assert tokenizer.vocab_size == 513


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({"eos_token": None}, {"generation_config": {"eos_token_id": [256, 258]}}, {256, 258}),
        ({"eos_token": None}, {"config": {"eos_token_id": 256}}, {256, IM_END}),
        ({"eos_token": "<|endoftext|>"}, {"generation_config": {"eos_token_id": 258}}, {256, 258}),
        ({"eos_token": {"content": "<|endoftext|>"}, "chat_template": None}, {}, {256}),
        ({"eos_token": None, "chat_template": None}, {"config": {"text_config": {"eos_token_id": 257}}}, {257}),
        ({"eos_token": None}, {}, {IM_END}),  # only the chat template ends turns with it
        ({"eos_token": None, "chat_template": None}, {"generation_config": {"eos_token_id": None}}, set()),
        ({"eos_token": None, "chat_template": None}, {"config": {"eos_token_id": [99_999, True]}}, set()),
    ],
)
def test_ld07_every_declared_end_token_ends_an_answer(
    tmp_path: Path, config: dict[str, Any], files: dict[str, Any], expected: set[int]
) -> None:
    tokenizer = load_tokenizer(byte_folder(tmp_path, tokenizer_config=config, **files), None)
    assert set(tokenizer.eos_ids) == expected
    for index in expected:
        assert tokenizer.decode([*b"x", index, *b"y"]) == "xy"


def test_ld07_an_end_token_that_is_no_control_token_is_not_shown(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_folder(tmp_path, generation_config={"eos_token_id": [ord("!"), 258]}), None)
    assert tokenizer.eos_ids == (ord("!"), 258)
    assert tokenizer.decode(list(b"end!")) == "end"


def test_a_template_whose_answers_have_several_parts_declares_its_own_end(tmp_path: Path) -> None:
    folder = byte_folder(tmp_path, tokenizer_config={"eos_token": "<|endoftext|>"}, added=[{"content": "<|channel|>"}])
    assert load_tokenizer(folder, None).eos_ids == (256,)


@pytest.mark.parametrize("flag", [None, True, False])
@pytest.mark.parametrize("post", [False, True])
def test_beginning_of_text_is_added_to_raw_prompts_once_at_most(tmp_path: Path, flag: bool | None, post: bool) -> None:
    folder = byte_folder(
        tmp_path, tokenizer_config={"bos_token": "<|im_start|>"} | ({} if flag is None else {"add_bos_token": flag})
    )
    config = json.loads((folder / "tokenizer_config.json").read_text())
    if flag is None:
        del config["add_bos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if post:
        text = json.loads((folder / "tokenizer.json").read_text())
        special = {"id": "<|im_start|>", "ids": [IM_START], "tokens": ["<|im_start|>"]}
        pieces = [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        text["post_processor"] = {
            "type": "TemplateProcessing",
            "single": pieces,
            "pair": [*pieces, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<|im_start|>": special},
        }
        (folder / "tokenizer.json").write_text(json.dumps(text))
    tokenizer = load_tokenizer(folder, None)
    wanted = [IM_START] if flag or (flag is None and post) else []
    assert tokenizer.encode("xy", add_special=True) == [*wanted, *b"xy"]
    assert tokenizer.encode("xy") == list(b"xy")


def test_token_bytes_join_to_the_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for text in STRINGS:
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
    pieces = load_tokenizer(sentencepiece_folder(tmp_path), None)
    assert b"".join(map(pieces.token_bytes, pieces.encode("the fox\n你"))) == " the fox\n你".encode()
    assert pieces.token_bytes(3 + 0xE4) == b"\xe4"
    assert pieces.token_bytes(pieces.vocab_size) == b""
    assert pieces.longest_token_bytes == max(len(pieces.token_bytes(index)) for index in range(pieces.vocab_size))


def test_fingerprint_depends_on_the_vocabulary_alone(tmp_path: Path) -> None:
    first = load_tokenizer(byte_folder(tmp_path / "a"), None)
    second = load_tokenizer(byte_folder(tmp_path / "b", tokenizer_config={"chat_template": None, "name": "other"}), None)
    third = load_tokenizer(byte_folder(tmp_path / "c", added=[{"content": "<x>"}]), None)
    assert first.fingerprint == second.fingerprint != third.fingerprint
    assert (second.name, third.vocab_size) == ("other", 513)


def test_grammar_library_reads_the_tokenizer(tokenizer: Tokenizer) -> None:
    read = llguidance.LLTokenizer(tokenizer.tokenizer_json(), n_vocab=tokenizer.vocab_size, eos_token=258)
    assert read.vocab_size == 512


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("tokenizer.json", "{", "cannot be read"),
        ("tokenizer.json", "", "cannot be read"),
        ("tokenizer_config.json", "[]", "an object was expected"),
        ("tokenizer_config.json", '{"a":', "not valid JSON"),
        ("generation_config.json", "\x00", "not valid JSON"),
    ],
)
def test_broken_files_end_in_one_line(tmp_path: Path, file: str, text: str, message: str) -> None:
    (byte_folder(tmp_path) / file).write_text(text)
    with pytest.raises(ModelFileError, match=message) as caught:
        load_tokenizer(tmp_path, None)
    assert "\n" not in str(caught.value)


def test_unknown_decoder_is_refused(tmp_path: Path) -> None:
    text = json.loads((byte_folder(tmp_path) / "tokenizer.json").read_text())
    text["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(text))
    with pytest.raises(ModelFileError, match="WordPiece"):
        load_tokenizer(tmp_path, None)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path, None)
    with pytest.raises(ModelFileError, match="no such file"):
        load_tokenizer(tmp_path / "x.gguf", None)


def test_chat_template_files_in_order_of_precedence(tmp_path: Path) -> None:
    config = {"chat_template": [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "T"}]}
    folder = byte_folder(tmp_path, tokenizer_config=config)
    assert load_tokenizer(folder, None).facts.chat_templates == {"default": "A", "tool_use": "T"}
    (folder / "chat_template.json").write_text('{"chat_template": "B"}')
    assert load_tokenizer(folder, None).chat_template == "B"
    (folder / "chat_template.jinja").write_text("C")
    assert load_tokenizer(folder, None).chat_template == "C"


def test_the_serving_path_does_not_import_transformers_or_torch(tmp_path: Path) -> None:
    byte_folder(tmp_path)
    code = (
        "import sys; from pathlib import Path; from server.tokenizer import load_tokenizer; from server.template import ChatTemplate;"
        f"t = load_tokenizer(Path({str(tmp_path)!r}), None); ChatTemplate(t).encode_chat([dict(role='user', content='x')]);"
        "import server.models; print([m for m in ('transformers', 'torch', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
