"""Text to token ids and back for one model.

Knows the `tokenizers` library and the vocabulary's byte spelling. Refuses to know files, chats and `transformers`, whose import
alone takes seconds.

Control tokens never come out of text. Inside this module a control token that a chat template writes is a *mark*: one
private-use character that the text at hand does not contain, so that nothing a user types can be taken for it. The marks are
added tokens of the library's own tokenizer, which therefore splits, strips and joins around them as it would around the token.
"""

from __future__ import annotations

import copy
import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from server.spelling import spelling_of
from server.text import Leading, TextStream
from spec.errors import ModelFileError, RequestError

_PLANE = range(0x100000, 0x10FFFE)  # private use plane 16: nearly never typed, and checked for all the same
_IN_PLANE = re.compile(f"[{chr(_PLANE.start)}-{chr(_PLANE.stop - 1)}]")
_VARIANTS = 3  # tokenizers kept besides the main one, for text that holds private-use characters itself


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What a model's files declare about its tokenizer besides the vocabulary."""

    name: str
    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    pad_token: str | None = None
    other_special: tuple[str, ...] = ()
    end_ids: tuple[int, ...] = ()  # of generation_config and config, joined with eos_token's
    add_bos: bool | None = None  # None = as the vocabulary's own post-processing says
    chat_templates: Mapping[str, str] = field(default_factory=dict)

    def named_tokens(self) -> dict[str, str]:
        """bos_token, eos_token, ... that exist, as chat templates name them."""
        named = {name: getattr(self, name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        return {name: token for name, token in named.items() if token is not None}


class Marked:
    """A backend whose control tokens are written as private-use characters. `marks` maps token -> character."""

    def __init__(self, backend: Backend, special: Mapping[str, int], flags: Mapping[int, AddedToken], base: int) -> None:
        self._backend = backend
        self.marks = {token: chr(base + k) for k, token in enumerate(special)}
        added = []
        for token, index in special.items():
            flag = flags.get(index)
            added.append(
                AddedToken(
                    self.marks[token],
                    lstrip=bool(flag and flag.lstrip),
                    rstrip=bool(flag and flag.rstrip),
                    normalized=bool(flag and flag.normalized),
                    special=False,  # special ones are off in this backend; these must be matched
                )
            )
        backend.encode_special_tokens = True
        backend.add_tokens(added)
        ids = {token: backend.token_to_id(mark) for token, mark in self.marks.items()}
        self._real = {found: special[token] for token, found in ids.items() if found is not None}

    @property
    def lowest_id(self) -> int:
        """The lowest id a mark was given; it must lie above the vocabulary."""
        return min(self._real, default=1 << 32)

    def encode(self, text: str, *, around: bool = False) -> list[int]:
        """Token ids of text in which only marks are control tokens. `around` adds what the model's raw prompts begin with."""
        try:
            ids = self._backend.encode(text, add_special_tokens=around).ids
        except (UnicodeEncodeError, TypeError):
            raise RequestError("the text holds half of a surrogate pair", code="invalid_value", param="messages") from None
        if self._real.keys().isdisjoint(ids):
            return list(ids)
        return [self._real.get(index, index) for index in ids]


class Tokenizer:
    """One model's tokenizer. Safe to share between threads."""

    def __init__(self, tokenizer_json: str, facts: TokenizerFacts) -> None:
        self._json = tokenizer_json
        self.facts = facts
        backend = self._load_backend()
        self.vocab_size = _size(backend)
        self._flags = backend.get_added_tokens_decoder()
        self.spelling = spelling_of(backend, facts.name)
        self.special_tokens = self._special(backend)
        self.special_ids = frozenset(self.special_tokens.values())
        self._unknown_id = self._id(backend, facts.unk_token)
        self._block = max(len(self.special_tokens), 1)
        self._backend = backend
        self._main = Marked(backend, self.special_tokens, self._flags, _PLANE.stop - self._block)
        if self._main.lowest_id < self.vocab_size:
            raise ModelFileError(f"{facts.name}: the tokenizer's vocabulary has gaps in its ids; this is not supported")
        self._variants: OrderedDict[int, Marked] = OrderedDict()
        self._lock = threading.Lock()
        self._bytes: dict[int, bytes] = {}
        self.bos_id = self._id(backend, facts.bos_token)
        ends = {*facts.end_ids, self._id(backend, facts.eos_token)}
        self.eos_ids = tuple(sorted(index for index in ends if index is not None and 0 <= index < self.vocab_size))
        self.hidden_ids = self.special_ids | frozenset(self.eos_ids)

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def chat_template(self) -> str | None:
        """The default chat template's source."""
        return self.facts.chat_templates.get("default")

    @property
    def leading(self) -> Leading:
        return self.spelling.leading

    def encode(self, text: str, *, allow_special: bool = False, add_special: bool = False) -> list[int]:
        """Token ids. With `allow_special` control tokens in the text count as such; by default they are plain characters.

        `add_special` puts the beginning-of-text token in front where the model's raw prompts have one. Chats never need it.
        """
        marked = self.marked(text)
        if allow_special:
            return self._with_bos(marked, _mark(text, marked.marks), add_special)
        ids = self._with_bos(marked, text, add_special)
        start = 1 if add_special and ids and ids[0] == self.bos_id else 0
        if self._has_control(ids[start:]):
            # The vocabulary has a control token that text can be merged into: cut such text in the middle of its name.
            pieces = _cut(text, self.special_tokens)
            ids = ids[:start] + [index for piece in pieces for index in marked.encode(piece)]
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True, *, continuation: bool = False) -> str:
        """Text of the ids, the same as a `TextStream` gives in any chunking; see there for `continuation`."""
        hidden = self.hidden_ids if skip_special else frozenset[int]()
        return TextStream(self, continuation=continuation, hidden_ids=hidden).push(ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes the token stands for, anywhere but at the start of a text; empty for ids outside the vocabulary."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._spell(token_id, self.spelling.token_bytes)
        return found

    def first_token_bytes(self, token_id: int) -> bytes:
        """The bytes of the first token of a text in vocabularies whose `leading` is "drop"."""
        return self._spell(token_id, self.spelling.first_token_bytes)

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        found = self._backend.token_to_id(token)
        return found if found is not None and found < self.vocab_size else None

    def tokenizer_json(self) -> str:
        """The vocabulary as a tokenizer.json, for libraries that read one."""
        return self._json

    @cached_property
    def longest_token_bytes(self) -> int:
        """No token stands for more bytes than this. Spells them all, once: from then on the table of spellings does not grow."""
        return max((len(self.token_bytes(index)) for index in self._vocabulary.values()), default=1)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the tokens in id order: equal for two files of one vocabulary, whatever their formats."""
        ordered = sorted(self._vocabulary.items(), key=lambda item: item[1])
        return hashlib.sha256("\n".join(f"{index} {token}" for token, index in ordered).encode()).hexdigest()

    def with_ends(self, ids: Sequence[int]) -> Tokenizer:
        """The same tokenizer with more tokens that end an answer."""
        other = copy.copy(self)
        other.eos_ids = tuple(sorted({*self.eos_ids, *ids}))
        other.hidden_ids = self.special_ids | frozenset(other.eos_ids)
        return other

    def marked(self, text: str) -> Marked:
        """A backend none of whose marks occurs in `text`. Raises RequestError for text that leaves no private-use block free."""
        if text.isascii() or (found := _IN_PLANE.findall(text)) == []:
            return self._main
        used = {(_PLANE.stop - 1 - ord(character)) // self._block for character in set(found)}
        free = next((k for k in range(len(_PLANE) // self._block) if k not in used), None)
        if free is None:
            raise RequestError("the text holds too many private-use characters", code="invalid_value", param="messages")
        return self._main if free == 0 else self._variant(free)

    def _variant(self, block: int) -> Marked:
        with self._lock:
            marked = self._variants.pop(block, None)
            if marked is None:
                base = _PLANE.stop - (block + 1) * self._block
                marked = Marked(self._load_backend(), self.special_tokens, self._flags, base)
            self._variants[block] = marked
            while len(self._variants) > _VARIANTS:
                self._variants.popitem(last=False)
            return marked

    def _with_bos(self, marked: Marked, text: str, add_special: bool) -> list[int]:
        ids = marked.encode(text, around=add_special)
        if not add_special or self.facts.add_bos is None or self.bos_id is None:
            return ids
        has = bool(ids) and ids[0] == self.bos_id
        if self.facts.add_bos:
            return ids if has else [self.bos_id, *ids]
        return ids[1:] if has else ids

    def _has_control(self, ids: Sequence[int]) -> bool:
        return not self.special_ids.isdisjoint(ids) and any(i in self.special_ids and i != self._unknown_id for i in ids)

    def _load_backend(self) -> Backend:
        try:
            backend = Backend.from_str(self._json)
        except Exception as error:  # the library raises plain Exception
            raise ModelFileError(f"{self.facts.name}: the tokenizer cannot be read: {error}") from None
        backend.no_padding()
        backend.no_truncation()
        return backend

    def _spell(self, token_id: int, spell: Callable[[str], bytes]) -> bytes:
        token = self.id_to_token(token_id)
        if token is None:
            return b""
        return token.encode() if token_id in self._flags else spell(token)

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        return {token: index for token, index in self._backend.get_vocab(True).items() if index < self.vocab_size}

    def _id(self, backend: Backend, token: str | None) -> int | None:
        return None if token is None else backend.token_to_id(token)

    def _special(self, backend: Backend) -> dict[str, int]:
        """Control tokens of the vocabulary and those the model's files name as such, longest first."""
        special = {token.content: index for index, token in self._flags.items() if token.special}
        for token in (*self.facts.named_tokens().values(), *self.facts.other_special):
            index = backend.token_to_id(token)
            if index is not None:
                special[token] = index
        return dict(sorted(special.items(), key=lambda item: (-len(item[0]), item[1])))


def _size(backend: Backend) -> int:
    """Ids below this may exist. Libraries count tokens, which is less when ids have gaps."""
    size = int(backend.get_vocab_size(True))
    if size and backend.id_to_token(size - 1) is None:
        size = max(backend.get_vocab(True).values()) + 1
    return size


def _mark(text: str, marks: Mapping[str, str]) -> str:
    """Control tokens written out in the text replaced by their marks, the longest first."""
    if not marks:
        return text
    return re.sub("|".join(map(re.escape, marks)), lambda found: marks[found.group()], text)


def _cut(text: str, special: Mapping[str, int]) -> list[str]:
    """The text in pieces none of which holds a whole control token's name."""
    pieces, start = [], 0
    for found in re.finditer("|".join(map(re.escape, special)), text):
        middle = (found.start() + found.end()) // 2
        pieces.append(text[start:middle])
        start = middle
    return [*pieces, text[start:]]
