"""Ours beside the peers: sets them up, lets all measure the same prompts, and gives the figures. Prints nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import Progress

from server.compose import Parts, cache_root
from server.models import resolve
from server.peers import measure
from server.peers.catalog import PEERS, Arm, Peer
from server.peers.contest import Contestant, Ours, Theirs
from server.peers.environments import PeerUnavailable, prepare
from spec.errors import ConfigError

OUR_PLAIN, OUR_AUTO = "ours, plain", "ours, auto"
PREFILL_LENGTHS = (512, 2048)
STREAM_TOKENS = 64
CONTEXT = 2304  # of one stream, at the peers: the longest prompt measured and the answers after it


@dataclass(frozen=True, slots=True)
class Order:
    """What to measure. `root` holds the peers' environments, `max_tokens` bounds an answer of one stream."""

    peers: tuple[Peer, ...]
    root: Path
    max_tokens: int
    repeats: int
    streams: int
    threads: int
    lengths: tuple[int, ...] = PREFILL_LENGTHS
    stream_tokens: int = STREAM_TOKENS


@dataclass
class Findings:
    """All figures by contestant, and who is missing why."""

    single: dict[str, measure.SingleStream] = field(default_factory=dict)
    prefill: dict[str, dict[int, float]] = field(default_factory=dict)
    many: dict[str, list[float]] = field(default_factory=dict)
    sanity: dict[str, measure.Sanity] = field(default_factory=dict)
    speculates: dict[str, bool] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    tokens: int = 0


def named(names: str, known: Mapping[str, Peer] = PEERS) -> tuple[Peer, ...]:
    """The peers of a comma list. Raises ConfigError that names the known ones."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            raise ConfigError(f"there is no peer named {name!r}; the known ones are {', '.join(known)}")
    if not wanted:
        raise ConfigError(f"name at least one peer: {', '.join(known)}")
    return tuple(known[name] for name in dict.fromkeys(wanted))


def peers_root(parts: Parts, chosen: Path | None) -> Path:
    return chosen.expanduser() if chosen is not None else cache_root(parts.settings) / "peers"


def compare(order: Order, parts: Parts, prompts: Sequence[Sequence[int]], progress: Progress) -> Findings:
    """Measure everything. A peer that cannot be set up, loaded or asked is in `unavailable` with the reason."""
    findings = Findings()
    ours = [Ours(OUR_PLAIN, parts, "none"), Ours(OUR_AUTO, parts, None)]
    findings.speculates |= {OUR_PLAIN: False, OUR_AUTO: True}
    reference = [ours[0].answer([p], [order.max_tokens], -1, ignore_eos=False).answers[0].token_ids for p in prompts]
    tokens = [max(len(ids), 2) for ids in reference]
    ours[1].answer(prompts[:1], [32], -1)
    findings.tokens = sum(tokens)
    company = _Company(order, parts, findings, progress)
    try:
        company.set_up()
        players = measure.Field([*ours, *company.load(lambda arm: arm.single, 1)])
        _one_stream(order, players, prompts, tokens, findings, progress)
        for name, found in findings.single.items():
            findings.sanity[name] = measure.sanity(found, reference, tokens, parts.model.shape.vocab_size)
        _prefill(order, players, prompts, findings, progress)
        findings.unavailable |= players.failed
        company.close(lambda arm: not (arm.many and arm.shared))
        players = measure.Field([*ours, *company.load(lambda arm: arm.many, order.streams)])
        _many(order, players, prompts, findings, progress)
        findings.unavailable |= players.failed
    finally:
        company.close(lambda arm: True)
    return findings


class _Company:
    """The peers' environments and processes."""

    def __init__(self, order: Order, parts: Parts, findings: Findings, progress: Progress) -> None:
        self._order, self._findings, self._progress = order, findings, progress
        self._weights = resolve(parts.settings.model, parts.cache).weights
        self._bf16 = order.root / f"weights-{parts.model.digest[:16]}"
        self._pythons: list[tuple[Peer, Path]] = []
        self._loaded: list[Theirs] = []

    def set_up(self) -> None:
        task = self._progress.add_task("environments", total=len(self._order.peers))
        for peer in self._order.peers:
            self._progress.update(task, description=f"environment of {peer.title}")
            try:
                self._pythons.append((peer, prepare(peer, self._order.root)))
            except PeerUnavailable as error:
                self._findings.unavailable[peer.title] = str(error)
            self._progress.advance(task)

    def load(self, wanted: Callable[[Arm], bool], streams: int) -> list[Theirs]:
        """Processes of the arms wanted, warm; those that are loaded already are used again."""
        arms = [(peer, python, arm) for peer, python in self._pythons for arm in peer.arms if wanted(arm)]
        task = self._progress.add_task("loading", total=len(arms))
        ready = []
        for peer, python, arm in arms:
            self._progress.update(task, description=f"loading {peer.title}, {arm.mode}")
            here = next((one for one in self._loaded if one.arm is arm), None)
            if here is None:
                here = self._start(peer, python, arm, streams)
            if here is not None:
                ready.append(here)
            self._progress.advance(task)
        return ready

    def _start(self, peer: Peer, python: Path, arm: Arm, streams: int) -> Theirs | None:
        log = self._order.root / peer.name / f"{arm.mode.replace(' ', '-')}-{streams}.log"
        theirs = Theirs(peer, arm, python, log)
        try:
            theirs.load(self._weights, self._bf16, self._order.threads, streams, CONTEXT)
            theirs.answer([list(range(100, 140))] * streams, [16] * streams, 0)
        except PeerUnavailable as error:
            theirs.close()
            self._findings.unavailable[theirs.name] = str(error)
            return None
        self._loaded.append(theirs)
        self._findings.versions[peer.title] = theirs.versions
        self._findings.speculates[theirs.name] = arm.speculates
        return theirs

    def close(self, which: Callable[[Arm], bool]) -> None:
        for theirs in [one for one in self._loaded if which(one.arm)]:
            theirs.close()
            self._loaded.remove(theirs)


def _one_stream(
    order: Order, players: measure.Field, prompts: Any, tokens: list[int], findings: Findings, progress: Progress
) -> None:
    task = progress.add_task("one stream", total=len(players.contestants) * len(prompts) * order.repeats)

    def every(who: Contestant) -> int:
        return who.arm.every if isinstance(who, Theirs) else 1

    def tick(name: str) -> None:
        progress.update(task, advance=1, description=f"one stream: {name}")

    findings.single = measure.one_stream(players, prompts, tokens, order.repeats, every, tick)


def _prefill(order: Order, players: measure.Field, prompts: Any, findings: Findings, progress: Progress) -> None:
    """Only settings that do not speculate: drafting has no part in reading a prompt."""
    plain = measure.Field([who for who in players.contestants if not findings.speculates[who.name]], players.failed)
    repeats = 3
    task = progress.add_task("prompt processing", total=len(plain.contestants) * repeats * len(order.lengths))

    def tick(name: str) -> None:
        progress.update(task, advance=1, description=f"prompt processing: {name}")

    text = [token for prompt in prompts for token in prompt]
    findings.prefill = measure.prompt_processing(plain, text, order.lengths, repeats, tick)


def _many(order: Order, players: measure.Field, prompts: Any, findings: Findings, progress: Progress) -> None:
    repeats = max(order.repeats, 2)
    task = progress.add_task("streams", total=len(players.contestants) * repeats)

    def tick(name: str) -> None:
        progress.update(task, advance=1, description=f"{order.streams} streams: {name}")

    findings.many = measure.many_streams(players, prompts, order.streams, order.stream_tokens, repeats, tick)
