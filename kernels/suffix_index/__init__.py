"""suffix_index: where have the last tokens of a growing text occurred before, and what followed them?

A text is an append-only list of tokens >= 0; BARRIER ends one text where several are stored in one list.

index.matches(tail, limit, shortest) -> [(position, length)]: up to `limit` earlier occurrences of the end of `tail`, each as the position
    of the token after it and the length of the match: 1 .. 8, or one of LENGTHS. Context lengths are tried longest first (ORDERS), within
    one the newest occurrence first, and a position is listed once, by its longest match. Matches below `shortest` are left out.

looker.find(texts, shortest) -> [(which, position, length)]: the matches of the end of texts[0] in each of the three texts.

looker.watch(rows): the texts that looks are about from now on, one row per sequence.

looker.look(texts) -> [row]: one call for all watched rows. texts[i] is all of row i's text so far; what its own index does not have of it
    is appended there. The end of each row's own text is found as above, and each match votes for the token after it with weight
    4 ** min(length, HEAVIEST), times `trust` in the other texts. The score of the token with the most votes (the first found on a tie) is scores[length of the longest match behind it]
    times its share of the votes; lengths past the table count as its last. Only matches of at least the row's `shortest` tokens count. Listed are the rows that
    score above 0 and at least their `least`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

ORDERS = (8, 4, 2, 1)  # context lengths that are indexed, longest first
LENGTHS = (12, 16, 24, 32)  # longer matches are told apart at these lengths
LONGEST = LENGTHS[-1]
BARRIER = -1  # a token no text holds: no match spans it
HEAVIEST = 8  # a match of n tokens weighs 4 ** n, longer ones no more

Match = tuple[int, int]  # position of the continuation's first token, length of the match before it
Found = tuple[int, int, int]  # which text, and a match in it


class Index(Protocol):
    """One growing list of tokens."""

    tokens: list[int]  # all of them; read only

    def __len__(self) -> int: ...
    def extend(self, new: Sequence[int]) -> None: ...
    def matches(self, tail: Sequence[int], limit: int, shortest: int = 1) -> list[Match]: ...


Texts = tuple[Index, Index | None, Index | None]  # a sequence's own, and two others
LookRow = tuple[
    Index, Index | None, Index | None, int, int
]  # a sequence's own text, two others, `shortest`, `least` in millionths


class Looker(Protocol):
    """Its limit, trust and scores are chosen when it is made."""

    def watch(self, rows: Sequence[LookRow]) -> None: ...
    def look(self, texts: Sequence[Sequence[int]]) -> list[int]: ...
    def find(self, texts: Texts, shortest: int) -> list[Found]: ...


class SuffixOps(Protocol):
    """What a backend has of it. Indexes and lookers of one backend belong together."""

    def index(self) -> Index:
        """An empty one."""

    def looker(self, limit: int, trust: float, scores: Sequence[float]) -> Looker: ...
