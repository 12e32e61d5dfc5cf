"""The three measurements, each alternating turn by turn between all contestants so that a drifting machine shifts all alike.

Knows turns and seconds; refuses to know how a contestant computes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from server.peers.contest import Answer, Contestant, Turn
from server.peers.environments import PeerUnavailable

Prompt = Sequence[int]
Tick = Callable[[str], None]


@dataclass
class Field:
    """Who takes part, and why others no longer do."""

    contestants: list[Contestant]
    failed: dict[str, str] = field(default_factory=dict)

    def ask(self, who: Contestant, prompts: Sequence[Prompt], tokens: Sequence[int], repeat: int) -> Turn | None:
        """A turn, or None when the contestant failed: it is out then."""
        try:
            return who.answer(prompts, tokens, repeat)
        except PeerUnavailable as error:
            self.failed[who.name] = str(error)
            who.close()
            self.contestants = [one for one in self.contestants if one is not who]
            return None

    def order(self, turn: int) -> list[Contestant]:
        """Everybody, another one first each turn."""
        start = turn % max(len(self.contestants), 1)
        return self.contestants[start:] + self.contestants[:start]


@dataclass(frozen=True)
class SingleStream:
    """Answers of one contestant by (repeat, prompt number); those it was not asked are missing."""

    answers: dict[tuple[int, int], Answer] = field(default_factory=dict)

    def rate(self, among: set[tuple[int, int]] | None = None) -> float:
        """Tokens after the first over the time from first to last, over the answers in `among` (tokens a second)."""
        chosen = [a for key, a in self.answers.items() if among is None or key in among]
        seconds = sum(a.decode for a in chosen)
        return sum(len(a.token_ids) - 1 for a in chosen) / seconds if seconds > 0 else 0.0

    def over(self, other: SingleStream) -> float:
        """How many times the other's rate, on the answers that both gave: the median over repeats."""
        both = self.answers.keys() & other.answers.keys()
        ratios = []
        for repeat in sorted({key[0] for key in both}):
            among = {key for key in both if key[0] == repeat}
            if other.rate(among) > 0:
                ratios.append(self.rate(among) / other.rate(among))
        return statistics.median(ratios) if ratios else 0.0

    def usually_over(self, other: SingleStream) -> float:
        """The same by single answers, and the median of those: one disturbed turn does not move it."""
        both = self.answers.keys() & other.answers.keys()
        ratios = [self.rate({key}) / other.rate({key}) for key in both if other.rate({key}) > 0]
        return statistics.median(ratios) if ratios else 0.0


def one_stream(
    players: Field,
    prompts: Sequence[Prompt],
    tokens: Sequence[int],
    repeats: int,
    every: Callable[[Contestant], int],
    tick: Tick,
) -> dict[str, SingleStream]:
    """Every prompt through every contestant, one after the other."""
    found = {who.name: SingleStream() for who in players.contestants}
    for repeat in range(repeats):
        for i, prompt in enumerate(prompts):
            for who in players.order(i + repeat):
                if i % every(who) == 0:
                    turn = players.ask(who, [prompt], [tokens[i]], repeat)
                    if turn is not None:
                        found[who.name].answers[repeat, i] = turn.answers[0]
                tick(who.name)
    return found


def prompt_processing(
    players: Field, text: Sequence[int], lengths: Sequence[int], repeats: int, tick: Tick
) -> dict[str, dict[int, float]]:
    """Median prompt tokens a second by prompt length: the whole of a call for one new token. Every repeat has another prompt."""
    seconds: dict[str, dict[int, list[float]]] = {who.name: {n: [] for n in lengths} for who in players.contestants}
    start = 0
    for repeat in range(repeats):
        for length in lengths:
            prompt = [text[(start + i) % len(text)] for i in range(length)]
            start += length + 7
            for who in players.order(repeat):
                turn = players.ask(who, [prompt], [1], 10**6 + start)
                if turn is not None:
                    seconds[who.name][length].append(turn.seconds)
                tick(who.name)
    return {
        name: {length: length / statistics.median(taken) for length, taken in by_length.items() if taken}
        for name, by_length in seconds.items()
    }


def many_streams(
    players: Field, prompts: Sequence[Prompt], streams: int, tokens: int, repeats: int, tick: Tick
) -> dict[str, list[float]]:
    """Tokens a second of all streams together, prompts included, by repeat; all submitted at once."""
    found: dict[str, list[float]] = {who.name: [] for who in players.contestants}
    for repeat in range(repeats):
        group = [prompts[(repeat * streams + i) % len(prompts)] for i in range(streams)]
        for who in players.order(repeat):
            turn = players.ask(who, group, [tokens] * streams, 2 * 10**6 + repeat)
            if turn is not None:
                found[who.name].append(turn.tokens / turn.seconds)
            tick(who.name)
    return found


@dataclass(frozen=True, slots=True)
class Sanity:
    """Whether answers look like answers. `agreed` is the mean number of first tokens equal to our plain answer."""

    complete: bool
    varied: bool
    agreed: float
    first_equal: float

    @property
    def sane(self) -> bool:
        return self.complete and self.varied


def sanity(found: SingleStream, reference: Sequence[Sequence[int]], tokens: Sequence[int], vocabulary: int) -> Sanity:
    """Complete: as many tokens as asked, all in the vocabulary. Varied: at least half as many different ones as we have."""
    pairs = [(a.token_ids, reference[i], tokens[i]) for (_, i), a in found.answers.items()]
    if not pairs:
        return Sanity(False, False, 0.0, 0.0)
    complete = all(len(ids) == count and all(0 <= t < vocabulary for t in ids) for ids, _, count in pairs)
    theirs, ours = sum(len(set(ids)) for ids, _, _ in pairs), sum(len(set(ref)) for _, ref, _ in pairs)
    agreed = [_common(ids, ref) for ids, ref, _ in pairs]
    return Sanity(complete, 2 * theirs >= ours, statistics.mean(agreed), sum(n > 0 for n in agreed) / len(agreed))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
