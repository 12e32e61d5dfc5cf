"""Where have the last tokens occurred before? Knows one growing token list; refuses to know requests and trees.

For each order k in ORDERS a chain links every position to the previous one with the same k tokens before it (the hash
chains of LZ77 compressors, newest first). Adding a token costs one dictionary write per order; asking costs a short walk.
Hashes may collide, so every hit is compared token by token.
"""

from __future__ import annotations

from collections.abc import Sequence

from kernels.suffix_index import HEAVIEST, LENGTHS, LONGEST, ORDERS, Found, Index, LookRow, Match, Texts


class SuffixIndex:
    """An append-only list of tokens and the chains over it.

    heads[k][hash of k tokens] = newest position after such tokens; links[k][p] = the one before p, -1 = none.
    A position is indexed once its own token is there, so every hit has a continuation.
    """

    __slots__ = ("_heads", "_links", "tokens")

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self._heads: tuple[dict[int, int], ...] = tuple({} for _ in ORDERS)
        self._links: tuple[list[int], ...] = tuple([] for _ in ORDERS)
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, new: Sequence[int]) -> None:
        """Append tokens. About a microsecond each, in bulk or one by one."""
        first = len(self.tokens)
        self.tokens.extend(new)
        tokens, count = self.tokens, len(self.tokens)
        if count - first <= 4:
            self._append(first)
            return
        for k, head, link in zip(ORDERS, self._heads, self._links, strict=True):
            start = max(first, k)
            if len(link) < start:
                link.extend([-1] * (min(start, count) - len(link)))
            if start >= count:
                continue
            window = tokens[start - k : count - 1]
            keys = window if k == 1 else map(hash, zip(*(window[i:] for i in range(k)), strict=False))
            previous, append = head.get, link.append
            for position, key in enumerate(keys, start):
                append(previous(key, -1))
                head[key] = position

    def _append(self, first: int) -> None:
        """Index the positions from `first` on, one by one: the set-up of the bulk way is dear for a token or two."""
        tokens = self.tokens
        for position in range(first, len(tokens)):
            for k, head, link in zip(ORDERS, self._heads, self._links, strict=True):
                if position < k:
                    link.append(-1)
                    continue
                key = tokens[position - 1] if k == 1 else hash(tuple(tokens[position - k : position]))
                link.append(head.get(key, -1))
                head[key] = position

    def matches(self, tail: Sequence[int], limit: int, shortest: int = 1) -> list[Match]:
        """Up to `limit` earlier occurrences of the end of `tail`, each with its match length (1..8 or one of LENGTHS).

        Longest order first, newest first within an order; a position is listed once, by its longest match. Matches below
        `shortest` are left out, and not looked for where a whole order is.
        """
        found: list[Match] = []
        tokens, size, longer = self.tokens, len(tail), 0
        for k, head, link in zip(ORDERS, self._heads, self._links, strict=True):
            if size < k:  # the longer order lists nothing, but a shorter one may still match all of the tail
                longer = k
                continue
            if 0 < longer <= shortest:
                break  # this order and the ones after it only tell shorter matches
            context = list(tail[size - k :])
            position = head.get(context[0] if k == 1 else hash(tuple(context)), -1)
            # Bounds the walk over positions that a longer order has listed already. Long matches seldom disagree.
            steps = limit if k < ORDERS[0] else (limit + 1) // 2
            while position >= 0 and steps > 0:
                steps -= 1
                if tokens[position - k : position] == context:
                    length = _length(tokens, position, tail, k, longer)
                    if length >= shortest:
                        found.append((position, length))
                        if len(found) == limit:
                            return found
                position = link[position]
            longer = k
            if len(found) >= 4 and k >= 4:
                break  # enough long matches: shorter ones would only add noise
        return found


def _length(tokens: list[int], position: int, tail: Sequence[int], k: int, longer: int) -> int:
    """Match length before `position`, at least k; 0 when the next longer order lists the position already."""
    size = len(tail)
    if k == ORDERS[0]:
        length = k
        for longest in LENGTHS:
            if longest > size or longest > position or tokens[position - longest : position] != tail[size - longest :]:
                break
            length = longest
        return length
    length = k
    while length < longer and length < size and length < position and tokens[position - length - 1] == tail[size - length - 1]:
        length += 1
    return 0 if length == longer else length


def index() -> Index:
    return SuffixIndex()


def looker(limit: int, trust: float, scores: Sequence[float]) -> SuffixLooker:
    return SuffixLooker(limit, trust, scores)


class SuffixLooker:
    """The contract is the package's."""

    def __init__(self, limit: int, trust: float, scores: Sequence[float]) -> None:
        self._limit = limit
        self._trust = trust
        self._scores = scores
        self._rows: Sequence[LookRow] = ()

    def find(self, texts: Texts, shortest: int) -> list[Found]:
        tail = texts[0].tokens[-LONGEST:]
        found: list[Found] = []
        for which, text in enumerate(texts):
            if text is not None:
                found += [(which, at, length) for at, length in text.matches(tail, self._limit, shortest)]
        return found

    def watch(self, rows: Sequence[LookRow]) -> None:
        self._rows = rows

    def look(self, texts: Sequence[Sequence[int]]) -> list[int]:
        hopeful: list[int] = []
        for number, ((own, newer, older, shortest, least), text) in enumerate(zip(self._rows, texts, strict=True)):
            own.extend(text[len(own) :])
            score = self._score((own, newer, older), shortest)
            if score > 0.0 and score * 1e6 >= least:
                hopeful.append(number)
        return hopeful

    def _score(self, texts: Texts, shortest: int) -> float:
        votes: dict[int, tuple[float, int]] = {}
        for which, at, length in self.find(texts, shortest):
            text = texts[which]
            token = text.tokens[at] if text is not None else -1
            if token >= 0:
                votes_for, longest = votes.get(token, (0.0, 0))
                weight = (self._trust if which else 1.0) * 4.0 ** min(length, HEAVIEST)
                votes[token] = (votes_for + weight, max(longest, length))
        if not votes:
            return 0.0
        most, longest = max(votes.values(), key=lambda vote: vote[0])
        return self._scores[min(longest, len(self._scores) - 1)] * (most / sum([vote for vote, _ in votes.values()]))
