"""Conversations fit for training: no doubles, no loops, and a part held out. Knows token ids; refuses to know where they come from."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from drafters.training.answers import Conversation
from spec.errors import ConfigError

LOOP_TOKENS = 20  # an answer that says the same so many tokens twice has gone round in a circle
_BUCKETS = 1 << 20


@dataclass(frozen=True, slots=True)
class Corpus:
    train: tuple[Conversation, ...]
    held_out: tuple[Conversation, ...]
    loops: int  # dropped
    doubles: int  # dropped
    digest: str  # of all conversations kept, in order

    @property
    def answer_tokens(self) -> int:
        return sum(len(c.answer_ids) for c in self.train)


def loops(ids: Sequence[int], span: int = LOOP_TOKENS) -> bool:
    """Whether some `span` tokens in a row occur twice. Small models under greedy decoding end so; it teaches a drafter nothing."""
    seen = set()
    for start in range(len(ids) - span + 1):
        piece = tuple(ids[start : start + span])
        if piece in seen:
            return True
        seen.add(piece)
    return False


def digest_of(ids: Iterable[int]) -> bytes:
    return hashlib.blake2b(array("q", ids).tobytes(), digest_size=16).digest()


def is_held_out(conversation: Conversation, share: float) -> bool:
    """Decided by the prompt alone, so it stays so however a file grows or is shuffled."""
    place = int.from_bytes(digest_of(conversation.prompt_ids)[:8], "little") % _BUCKETS
    return place < share * _BUCKETS


def make_corpus(conversations: Sequence[Conversation], *, share: float, vocab_size: int, context: int) -> Corpus:
    """Clean and split. Answers are cut at the target's context. Raises ConfigError when nothing is left to learn from."""
    kept: list[Conversation] = []
    prompts: set[bytes] = set()
    answers: set[bytes] = set()
    looping = doubles = 0
    for item in conversations:
        if max(max(item.prompt_ids, default=0), max(item.answer_ids)) >= vocab_size or min(*item.answer_ids, 0) < 0:
            raise ConfigError(f"the answers hold token ids past this target's {vocab_size} tokens: they are another model's")
        prompt, answer = digest_of(item.prompt_ids), digest_of(item.answer_ids)
        if loops(item.answer_ids):
            looping += 1
        elif prompt in prompts or answer in answers:
            doubles += 1
        elif len(item.prompt_ids) + 2 <= context:
            room = context - len(item.prompt_ids)
            kept.append(Conversation(item.prompt_ids, item.answer_ids[:room], item.greedy))
            prompts.add(prompt)
            answers.add(answer)
    held = [item for item in kept if is_held_out(item, share)]
    if not held and kept:
        held = [min(kept, key=lambda item: digest_of(item.prompt_ids))]
    outside = {item.prompt_ids for item in held}
    train = [item for item in kept if item.prompt_ids not in outside]
    if not train:
        raise ConfigError(
            f"of {len(conversations)} conversations none is left to train on "
            f"({looping} loop, {doubles} are doubles, {len(held)} held out)"
        )
    whole = hashlib.blake2b(digest_size=16)
    for item in kept:
        whole.update(digest_of(item.prompt_ids) + digest_of(item.answer_ids))
    return Corpus(tuple(train), tuple(held), looping, doubles, whole.hexdigest())
