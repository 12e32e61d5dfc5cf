"""A GGUF file's tokenizer metadata to the files of a model folder (tokenizer.json and its neighbours).

Knows the `tokenizer.ggml.*` keys and how text was split when each vocabulary was learned. Refuses to guess: the same vocabulary
under another split gives other ids without any error, so an absent or unknown `tokenizer.ggml.pre` ends here with the known
names. Pure: metadata in, JSON values out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.pre_tokenizers import PRE_TOKENIZERS, Json, byte_level
from spec.errors import ModelFileError

# The key of cached conversions: raise it whenever this module's output changes.
FORMAT = 1

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

KNOWN_MODELS = ("gpt2", "llama")


@dataclass(frozen=True, slots=True)
class Converted:
    """File name -> JSON value, as a model folder would hold them."""

    files: Mapping[str, Json] = field(default_factory=dict)


def convert(metadata: Mapping[str, Any], where: str) -> Converted:
    """Raises ModelFileError naming `where`, the key and what is supported."""
    model = metadata.get("tokenizer.ggml.model")
    if model not in KNOWN_MODELS:
        raise ModelFileError(
            f"{where}: tokenizer.ggml.model is {model!r}; supported are {', '.join(KNOWN_MODELS)} "
            "(byte-level BPE and sentencepiece BPE)"
        )
    vocabulary = _Vocabulary(metadata, where)
    tokenizer = _byte_level_bpe(metadata, vocabulary, where) if model == "gpt2" else _sentencepiece(metadata, vocabulary)
    return Converted(
        {
            "tokenizer.json": tokenizer,
            "tokenizer_config.json": vocabulary.config(metadata),
            "generation_config.json": {"eos_token_id": vocabulary.end_ids(metadata)},
        }
    )


class _Vocabulary:
    """Tokens and types of the file, without the unused padding rows at the end."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        tokens = metadata.get("tokenizer.ggml.tokens")
        if tokens is None or isinstance(tokens, str | int) or not len(tokens):
            raise ModelFileError(f"{where}: tokenizer.ggml.tokens is missing or empty")
        self.tokens: list[str] = list(tokens)
        types = metadata.get("tokenizer.ggml.token_type")
        self.types: list[int] = [NORMAL] * len(self.tokens) if types is None else list(types)
        if len(self.types) != len(self.tokens) or not isinstance(self.tokens[0], str):
            raise ModelFileError(
                f"{where}: tokenizer.ggml.token_type has {len(self.types)} entries for {len(self.tokens)} tokens"
            )
        while self.types and self.types[-1] == UNUSED:
            self.types.pop()
            self.tokens.pop()
        self.where = where

    def id(self, metadata: Mapping[str, Any], name: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{name}")
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise ModelFileError(
                f"{self.where}: tokenizer.ggml.{name} is {value!r}; the vocabulary has {len(self.tokens)} tokens"
            )
        return value

    def token(self, metadata: Mapping[str, Any], name: str) -> str | None:
        index = self.id(metadata, name)
        return None if index is None else self.tokens[index]

    def added(self) -> list[Json]:
        """Control tokens and tokens that are matched whole in text."""
        special = {CONTROL: True, UNKNOWN: True, USER_DEFINED: False}
        return [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": special[kind],
            }
            for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in special and token
        ]

    def learned(self) -> dict[str, int]:
        """Token -> id of the merge model. Added tokens at the end stay out, so that no merge can ever form one."""
        end = len(self.tokens)
        while end and self.types[end - 1] in (CONTROL, USER_DEFINED):
            end -= 1
        return {token: index for index, token in enumerate(self.tokens[:end])}

    def end_ids(self, metadata: Mapping[str, Any]) -> list[int]:
        """Every token that the file declares to end an answer."""
        found = (self.id(metadata, name) for name in ("eos_token_id", "eot_token_id", "eom_token_id"))
        return sorted({index for index in found if index is not None})

    def config(self, metadata: Mapping[str, Any]) -> Json:
        config: Json = {
            "name": metadata.get("general.name"),
            "bos_token": self.token(metadata, "bos_token_id"),
            "eos_token": self.token(metadata, "eos_token_id"),
            "unk_token": self.token(metadata, "unknown_token_id"),
            "pad_token": self.token(metadata, "padding_token_id"),
        }
        templates = {
            key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default": value
            for key, value in metadata.items()
            if key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template.")
        }
        if templates:
            config["chat_template"] = [{"name": name, "template": value} for name, value in templates.items()]
        return config


def _assemble(
    vocabulary: _Vocabulary, model: Json, decoder: Json, normalizer: Json | None, pre_tokenizer: Json | None, post: Json | None
) -> Json:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added(),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post,
        "decoder": decoder,
        "model": model,
    }


def _sequence(kind: str, key: str, steps: Sequence[Json]) -> Json | None:
    if len(steps) < 2:
        return steps[0] if steps else None
    return {"type": kind, key: list(steps)}


def _prefixes(metadata: Mapping[str, Any], vocabulary: _Vocabulary, default_bos: bool) -> Json | None:
    """What a raw prompt gets around it. Chat templates write their own and never pass here."""
    around: list[list[tuple[str, int]]] = []
    for flag, name, default in (("add_bos_token", "bos_token_id", default_bos), ("add_eos_token", "eos_token_id", False)):
        index = vocabulary.id(metadata, name)
        wanted = metadata.get(f"tokenizer.ggml.{flag}", default) and index is not None
        around.append([(vocabulary.tokens[index], index)] if wanted and index is not None else [])
    if not any(around):
        return None

    def pieces(tokens: list[tuple[str, int]]) -> list[Json]:
        return [{"SpecialToken": {"id": token, "type_id": 0}} for token, _ in tokens]

    def text(name: str) -> list[Json]:
        return [{"Sequence": {"id": name, "type_id": 0}}]

    before, after = around
    return {
        "type": "TemplateProcessing",
        "single": [*pieces(before), *text("A"), *pieces(after)],
        "pair": [*pieces(before), *text("A"), *text("B"), *pieces(after)],
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]} for token, index in before + after},
    }


def _byte_level_bpe(metadata: Mapping[str, Any], vocabulary: _Vocabulary, where: str) -> Json:
    name = metadata.get("tokenizer.ggml.pre")
    pre = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if pre is None:
        what = "is missing" if name is None else f"is {name!r}, which does not say how text was split"
        raise ModelFileError(
            f"{where}: tokenizer.ggml.pre {what}; token ids would be a guess. Known names: {', '.join(sorted(PRE_TOKENIZERS))}. "
            "Convert the model again with a current converter, or serve its safetensors folder"
        )
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise ModelFileError(f"{where}: tokenizer.ggml.merges is missing; a gpt2 vocabulary needs it")
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": pre.whole_words,
        "vocab": vocabulary.learned(),
        "merges": list(merges),
    }
    return _assemble(
        vocabulary,
        model,
        decoder=byte_level(use_regex=True),
        normalizer={"type": "NFC"} if pre.nfc else None,
        pre_tokenizer=_sequence("Sequence", "pretokenizers", pre.steps),
        post=_prefixes(metadata, vocabulary, pre.add_bos),
    )


def _sentencepiece(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> Json:
    """A sentencepiece BPE vocabulary: spaces are written as U+2581, unknown characters fall back to byte tokens."""
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) < len(vocabulary.tokens):
        raise ModelFileError(f"{vocabulary.where}: tokenizer.ggml.scores is missing or shorter than the vocabulary")
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    to_mark = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    to_space = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    decoders: list[Json] = [to_space, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = vocabulary.token(metadata, "unknown_token_id")
    if unknown is None and UNKNOWN in vocabulary.types:
        unknown = vocabulary.tokens[vocabulary.types.index(UNKNOWN)]
    merges = metadata.get("tokenizer.ggml.merges")
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": {token: index for index, token in enumerate(vocabulary.tokens)},
        "merges": list(merges) if merges is not None else _merges(vocabulary, list(scores)),
    }
    return _assemble(
        vocabulary,
        model,
        decoder={"type": "Sequence", "decoders": decoders},
        normalizer=_sequence(
            "Sequence", "normalizers", [{"type": "Prepend", "prepend": "▁"}, to_mark] if prefix else [to_mark]
        ),
        pre_tokenizer=None,
        post=_prefixes(metadata, vocabulary, default_bos=True),
    )


def _merges(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges a sentencepiece vocabulary implies: every cut of a token into two tokens, better scores first.

    Control and byte tokens take no part, so that text never merges into one.
    """
    ids = {
        token: index
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind == NORMAL
    }
    found: list[tuple[float, int, int, int, int, str, str]] = []
    for token, index in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((-scores[index], -cut, cut - len(token), ids[left], ids[right], left, right))
    found.sort()
    return [(item[5], item[6]) for item in found]
