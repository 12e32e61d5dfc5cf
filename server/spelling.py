"""How a vocabulary spells bytes: token string to the bytes it stands for. Knows decoders of tokenizer.json; knows no ids.

Two families exist. Byte-level vocabularies write each byte as one printable character (the GPT-2 alphabet). Sentencepiece ones
write text with U+2581 for a space and single bytes as `<0xE4>`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend

from server.text import Leading
from spec.errors import ModelFileError

_SPACE_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: bytes that print as themselves, the other ones moved to U+0100 and up in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + k): byte for k, byte in enumerate(moved)}


BYTE_ALPHABET = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class Spelling:
    """`byte_level` chooses the family; `byte_tokens` says whether `<0x..>` names a byte in the other one."""

    byte_level: bool
    leading: Leading = "keep"
    byte_tokens: bool = False

    def token_bytes(self, token: str) -> bytes:
        if self.byte_level:
            try:
                return bytes([BYTE_ALPHABET[character] for character in token])
            except KeyError:
                return token.encode()  # not in the alphabet, so not spelled with it
        if self.byte_tokens and (found := _BYTE_TOKEN.match(token)):
            return bytes([int(found.group(1), 16)])
        return token.replace(_SPACE_MARK, " ").encode()

    def first_token_bytes(self, token: str) -> bytes:
        """As `token_bytes`, with the space marks of a text's first token dropped where `leading` says so."""
        return self.token_bytes(token.replace(_SPACE_MARK, "") if self.leading == "drop" else token)


def spelling_of(backend: Backend, where: str) -> Spelling:
    """Read the backend's decoder. Raises ModelFileError for one that bytes cannot be taken from token by token."""
    if backend.decoder is None:
        raise ModelFileError(f"{where}: the tokenizer has no decoder; its text cannot be put together")
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    byte_level, byte_tokens, leading = False, False, "keep"
    for step in steps:
        kind = step["type"]
        if kind == "ByteLevel":
            byte_level = True
        elif kind == "ByteFallback":
            byte_tokens = True
        elif kind == "Metaspace" and step["replacement"] == _SPACE_MARK:
            leading = "keep" if step.get("prepend_scheme") == "never" else "drop"
        elif kind == "Strip" and step["content"] == " " and step["stop"] == 0 and step["start"] <= 1:
            leading = "strip" if step["start"] else leading
        elif kind == "Fuse" or (kind == "Replace" and step["pattern"] == {"String": _SPACE_MARK} and step["content"] == " "):
            continue
        else:
            raise ModelFileError(
                f"{where}: the tokenizer's decoder step {kind!r} is not supported; supported are ByteLevel and sentencepiece's "
                "Replace, ByteFallback, Fuse, Strip and Metaspace"
            )
    return Spelling(byte_level, leading, byte_tokens)  # type: ignore[arg-type]
