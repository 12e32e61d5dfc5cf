"""The tokenizer of the tiny checkpoints: byte-level BPE with 512 entries, made with the `tokenizers` library.

ids 0..255: the byte of that value; 256, 257, 258: <|endoftext|>, <|im_start|>, <|im_end|>; 259..511: merges of two entries.
The first merges are ODD_PIECES, cut at odd places of UTF-8 characters; the rest are pairs of common English letters.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 512
ENDOFTEXT, IM_START, IM_END = 256, 257, 258
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FIRST_MERGE = 259

# bytes of a merged token -> split into the two entries that merge into it
ODD_PIECES: tuple[tuple[bytes, bytes], ...] = (
    (b"\xf0", b"\x9f"),  # first half of most emoji
    (b"\x98", b"\x80"),  # second half of U+1F600
    (b"\xf0\x9f", b"\x98"),  # three quarters of it
    (b"\xe4", b"\xbd"),  # two thirds of U+4F60
    (b"\xa0", b"\xe5"),  # its last byte and the first of U+597D
    (b"\xa5", b"\xbd"),  # the rest of U+597D
    (b"\xc3", b"\xa9"),  # U+00E9 whole
    (b"a", b"\xe4"),  # a letter and the first byte of a CJK character
    (b"\xe2", b"\x80"),  # the first two bytes of U+200D and of typographic quotes
    (b"\x8d", b"\xf0"),  # the last byte of U+200D and the first of an emoji
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_alphabet() -> list[str]:
    """The printable stand-in of each byte in byte-level vocabularies, as GPT-2 defined it."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


def merge_pairs() -> list[tuple[bytes, bytes]]:
    """253 pairs, in order of priority."""
    pairs = list(ODD_PIECES)
    letters = b"etaoinshrdlu"
    pairs += [(b" ", bytes([letter])) for letter in letters]
    pairs += [(bytes([first]), bytes([second])) for first in letters for second in letters]
    pairs += [(b"t", b"he"), (b" t", b"he"), (b"i", b"ng"), (b" a", b"nd")]
    pairs += [(bytes([upper]), bytes([letter])) for upper in b"THASIWY" for letter in letters]
    known = {bytes([byte]) for byte in range(256)}
    kept = []
    for left, right in pairs:
        if left in known and right in known and left + right not in known:
            known.add(left + right)
            kept.append((left, right))
    return kept[: VOCABULARY - FIRST_MERGE]


def vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary (specials included) and merges in stand-in characters."""
    alphabet = byte_alphabet()

    def spell(piece: bytes) -> str:
        return "".join(alphabet[byte] for byte in piece)

    pairs = merge_pairs()
    names = [*alphabet, *SPECIALS, *(spell(left + right) for left, right in pairs)]
    if len(names) != VOCABULARY or len(set(names)) != VOCABULARY:
        raise ValueError(f"{len(set(names))} distinct tokens; {VOCABULARY} were expected")
    return {name: index for index, name in enumerate(names)}, [(spell(left), spell(right)) for left, right in pairs]


def token_id(piece: bytes) -> int:
    """The id of a one-byte token or of a merge, by its bytes."""
    alphabet = byte_alphabet()
    return vocabulary()[0]["".join(alphabet[byte] for byte in piece)]


def build_tokenizer() -> Tokenizer:
    words, merges = vocabulary()
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json"""
    build_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
