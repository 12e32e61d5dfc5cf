"""How text was cut before merging when each family of byte-level vocabularies was learned: a frozen table of facts.

Knows the names that GGUF files carry in `tokenizer.ggml.pre`. A name is here only if its split is known; there is no default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


def _words(digits: str) -> str:
    """The split of cl100k-like vocabularies; they differ in how many digits go together."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _cased_words(contractions: str, digits: str) -> str:
    """The split of o200k-like vocabularies: a change from lower to upper case begins a new piece."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{lead}{upper}*{lower}+{contractions}|{lead}{upper}+{lower}*{contractions}|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _split(regex: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def byte_level(use_regex: bool) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


_DIGITS: Json = {"type": "Digits", "individual_digits": True}
_GPT2 = (byte_level(use_regex=True),)  # GPT-2's own split is built into the byte-level step
_CL100K = (_split(_words(r"\p{N}{1,3}")), byte_level(use_regex=False))
_QWEN = (_split(_words(r"\p{N}")), byte_level(use_regex=False))
_DEEPSEEK3 = (
    _split(r"\p{N}{1,3}"),
    _split("[一-龥぀-ゟ゠-ヿ]+"),
    _split(
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
    ),
    byte_level(use_regex=False),
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut before merging. `whole_words`: a piece that is a token is taken as it is, without its merges."""

    steps: tuple[Json, ...]
    whole_words: bool = False
    nfc: bool = False
    add_bos: bool = False  # when the file does not say


_LLAMA3 = PreTokenizer(_CL100K, whole_words=True, add_bos=True)
_QWEN2 = PreTokenizer(_QWEN, nfc=True)
_SMOLLM = PreTokenizer((_DIGITS, *_GPT2))
_O200K = PreTokenizer((_split(_cased_words("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}")), byte_level(use_regex=False)))

# `tokenizer.ggml.pre` -> facts of the tokenizer.json each vocabulary was published with.
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,  # Granite
    "gpt-2": PreTokenizer(_GPT2),
    "olmo": PreTokenizer(_GPT2),
    "mpt": PreTokenizer(_GPT2),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": PreTokenizer(_CL100K),
    "dbrx": PreTokenizer(_CL100K),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": PreTokenizer(_QWEN),
    "deepseek-v3": PreTokenizer(_DEEPSEEK3, add_bos=True),
    "tekken": PreTokenizer((_split(_cased_words("", r"\p{N}")), byte_level(use_regex=False)), whole_words=True, add_bos=True),
    "gpt-4o": _O200K,
    "llama4": PreTokenizer(_O200K.steps, add_bos=True),
}
