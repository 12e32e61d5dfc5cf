"""Small tokenizers on disk for tests of the text edge: byte-level and sentencepiece, as model folders and as GGUF files.

byte_folder(path, *, tokenizer_config=None, added=(), **files) -> Path    the 512-entry byte-level vocabulary of the test checkpoints
sentencepiece_folder(path, decoder="strip"|"metaspace"|"plain") -> Path
tokenizer_gguf(path, metadata) -> Path                          a GGUF file with this metadata and no tensors
sentencepiece_metadata() / byte_metadata(pre) -> dict           what such a file says
STRINGS                                                         200 texts that tokenizers split differently
answer_of(vocabulary, stops) -> Generation                      an answer as the server makes it, to be fed by hand
say(answer, token_ids, **fields) -> Piece                       feed one event; what became visible
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
from checkpoint_tokenizer import SPECIALS, vocabulary, write_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from server.generation import Generation, Piece
from server.metrics import Metrics
from server.text import StopMatcher, TextStream, Vocabulary
from spec.request import Request, SamplingParams, TokenEvent

_CORPUS = """the quick brown fox jumps over the lazy dog and then the dog runs after the fox through the thick dark forest
hello world, this is a small text that teaches a small vocabulary how words are put together from their pieces
She said: "it's time", and they'll see what we've got; I'm sure that the others don't mind waiting for the weather"""

_SEEDS: tuple[str, ...] = (
    *("1234567", "3.14159", "1,000,000 and 42", "2026-11-30", "0x1F600", "v1.2.3-rc4", "100%", "№ 7", "½ ⅓ ²", "٣٤٥"),
    *("I'm you're he'll they've it's we'd don't", "I'M YOU'RE", "l'été d'où", "rock'n'roll", "'s 'S 'll", "ten o'clock’s"),
    *("line\r\nnext\r\n\r\n  end", "a\n\n\nb", "\n", "\r\n", " \n ", "tab\tand\t\ttabs", "trailing  ", "  leading", "   "),
    *("a  b   c    d", " ", "    four spaces", "x \t y", "a\u00a0b", "a\u3000b", "\u2028x\u2029", "zero\u200bwidth"),
    *(
        "def f(x):\n    return x ** 2  # ok\n",
        "if (a&&b){c[i]+=1;}",
        "<div class='x'>&amp;</div>",
        "SELECT * FROM t;",
        "a_b__c",
    ),
    *("https://example.org/a?b=c&d=%20#e", "foo@bar.com", "C:\\dir\\file.txt", "camelCaseAndPascalCase HTTPServer", "x=-1"),
    *("😀", "👩‍👩‍👧‍👦", "🇩🇪🇫🇷", "👍🏽 ok", "a😀b", "☃️❤️", "é", "e\u0301", "ñandú", "Ångström", "naïve café"),
    *("สวัสดีครับ", "ภาษาไทยไม่มีช่องว่าง", "你好，世界！", "これはテストです", "한국어 텍스트", "Привет, мир", "שלום עולם", "مرحبا"),
    *("हिन्दी में", "ελληνικά", "Việt Nam", "İstanbul ıI", "ǅ ǆ", "ﬁne", "…—–", "“quotes” «guillemets»", "\ufeffbom"),
    *("<|im_start|>user", "<|im_end|>", "<s></s>", "[INST] x [/INST]", "$x^2$", "\\frac{a}{b}", "!!!???", "...", "--", "~`"),
)


def _strings() -> list[str]:
    pairs = itertools.product(_SEEDS, (" ", "\n", "", "123 "))
    mixed = [f"{text}{glue}{_SEEDS[(7 * k + 3) % len(_SEEDS)]}" for k, (text, glue) in enumerate(pairs)]
    return list(dict.fromkeys([*_SEEDS, *mixed]))[:200]


STRINGS = _strings()


def byte_folder(
    path: Path, *, tokenizer_config: Mapping[str, Any] | None = None, added: Sequence[Mapping[str, Any]] = (), **files: Any
) -> Path:
    """`tokenizer_config` updates tokenizer_config.json, `added` appends added tokens, `files` are more JSON files by their stem."""
    path.mkdir(parents=True, exist_ok=True)
    write_tokenizer(path)
    if added:
        text = json.loads((path / "tokenizer.json").read_text())
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        text["added_tokens"] += [plain | {"id": 512 + k} | dict(token) for k, token in enumerate(added)]
        (path / "tokenizer.json").write_text(json.dumps(text))
    if tokenizer_config is not None:
        file = path / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | dict(tokenizer_config)))
    for stem, value in files.items():
        (path / f"{stem}.json").write_text(json.dumps(value))
    return path


@functools.cache
def sentencepiece_vocabulary() -> tuple[tuple[str, float, int], ...]:
    """(piece, score, ggml token type): control tokens, 256 byte tokens, merged pieces by rank, single characters."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    learner.train_from_iterator(_CORPUS.split("\n"), trainers.BpeTrainer(vocab_size=300, show_progress=False))
    learned = [piece for piece, _ in sorted(learner.get_vocab().items(), key=lambda item: item[1])]
    merged = [piece for piece in learned if len(piece) > 1]
    single = sorted({piece for piece in learned if len(piece) == 1} | {"▁"})
    rows = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    rows += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    rows += [(piece, -float(rank), 1) for rank, piece in enumerate([*merged, *single])]
    return tuple(rows)


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    rows = sentencepiece_vocabulary()
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [row[0] for row in rows],
        "tokenizer.ggml.scores": [row[1] for row in rows],
        "tokenizer.ggml.token_type": [row[2] for row in rows],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.{key.replace('__', '.')}": value for key, value in changes.items()}


def byte_metadata(pre: str | None = "gpt-2", **changes: Any) -> dict[str, Any]:
    words, merges = vocabulary()
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": list(words),
        "tokenizer.ggml.token_type": [3 if token in SPECIALS else 1 for token in words],
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        "tokenizer.ggml.eos_token_id": words["<|im_end|>"],
    } | {f"tokenizer.{key.replace('__', '.')}": value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def tokenizer_gguf(path: Path, metadata: Mapping[str, Any]) -> Path:
    writer = gguf.GGUFWriter(str(path), str(metadata.get("general.architecture", "llama")))
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, list(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


_DECODERS: dict[str, dict[str, Any]] = {
    "strip": {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    },
    "plain": {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ],
    },
    "metaspace": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
}


def sentencepiece_folder(path: Path, decoder: str = "strip") -> Path:
    """A Llama-2 like tokenizer.json, made here and not by the code under test."""
    path.mkdir(parents=True, exist_ok=True)
    rows = sentencepiece_vocabulary()
    pieces = {row[0]: index for index, row in enumerate(rows)}
    merges = []
    for piece, _, kind in rows:
        cuts = [(piece[:k], piece[k:]) for k in range(1, len(piece))] if kind == 1 else []
        merges += [list(cut) for cut in cuts if cut[0] in pieces and cut[1] in pieces]
    added = [
        {"id": pieces[token], "content": token, "special": True}
        | {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for token in ("<unk>", "<s>", "</s>")
    ]
    text = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": _DECODERS[decoder],
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": pieces,
            "merges": merges,
        },
    }
    (path / "tokenizer.json").write_text(json.dumps(text))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}))
    return path


def answer_of(vocabulary: Vocabulary, stops: Sequence[str] = ()) -> Generation:
    request = Request(1, (0,), SamplingParams(max_tokens=9999))
    matcher = StopMatcher(stops) if stops else None
    return Generation(request, TextStream(vocabulary), matcher, lambda: None, lambda ended: None, Metrics())


def say(answer: Generation, token_ids: Sequence[int], **fields: Any) -> Piece:
    answer.on_event(TokenEvent(1, tuple(token_ids), ("",) * len(token_ids), **fields))
    return answer.take() or Piece()
