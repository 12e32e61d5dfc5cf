"""Contestants: ours and the peers', all asked the same way. One works, the others stand still.

Knows how each is asked and timed; refuses to know what is compared with what.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from server.compose import Parts, make_engine
from server.local import Completion, run_requests
from server.peers.catalog import Arm, Peer
from server.peers.environments import PeerUnavailable
from server.peers.process import PeerProcess
from spec.request import Request, SamplingParams

LOAD_SECONDS = 900.0
ANSWER_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Answer:
    """New tokens; seconds from submission to the first, and from the first to the last."""

    token_ids: tuple[int, ...]
    first: float
    decode: float


@dataclass(frozen=True, slots=True)
class Turn:
    """All answers to the prompts of one turn, given at once, and the seconds from submission until the last was done."""

    answers: tuple[Answer, ...]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)


class Contestant(Protocol):
    """`answer` gives exactly `tokens[i]` new tokens after `prompts[i]`, greedily, all prompts at once."""

    @property
    def name(self) -> str: ...
    @property
    def versions(self) -> dict[str, str]: ...
    def answer(self, prompts: Sequence[Sequence[int]], tokens: Sequence[int], repeat: int) -> Turn: ...
    def close(self) -> None: ...


class Ours:
    """An engine of ours in this process. Repeats are tenants of their own, so that none finds what another has cached or said."""

    def __init__(self, name: str, parts: Parts, drafters: str | None) -> None:
        self.name = name
        self.versions: dict[str, str] = {}
        self._engine = make_engine(parts, drafters)
        self._asked = 0

    def answer(self, prompts: Sequence[Sequence[int]], tokens: Sequence[int], repeat: int, ignore_eos: bool = True) -> Turn:
        requests = []
        for prompt, count in zip(prompts, tokens, strict=True):
            self._asked += 1
            sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=ignore_eos)
            requests.append(Request(id=self._asked, prompt_ids=tuple(prompt), sampling=sampling, tenant=f"repeat {repeat}"))
        begun = time.perf_counter()
        done = run_requests(self._engine, requests, len(requests))
        return Turn(tuple(_answer(one) for one in done), time.perf_counter() - begun)

    def close(self) -> None:
        pass


def _answer(done: Completion) -> Answer:
    if done.error is not None:
        raise PeerUnavailable(f"our own engine refused a prompt: {done.error}")
    return Answer(tuple(done.token_ids), done.ttft, done.decode_seconds)


class Theirs:
    """A peer's process in one of its settings. It is stopped but while it answers."""

    def __init__(self, peer: Peer, arm: Arm, python: Path, log: Path) -> None:
        self.name = f"{peer.title}, {arm.mode}"
        self.peer, self.arm = peer, arm
        self.versions: dict[str, str] = {}
        self._process = PeerProcess(python, peer.driver, log)

    def load(self, model: Path, bf16: Path, threads: int, streams: int, context: int) -> None:
        """Raises PeerUnavailable; the process is closed then."""
        request: dict[str, Any] = {"op": "load", "model": str(model), "bf16": str(bf16), "threads": threads}
        request |= {"streams": streams, "context": context, "options": dict(self.arm.options)}
        try:
            self.versions = self._process.ask(request, LOAD_SECONDS)["versions"]
        except PeerUnavailable:
            self.close()
            raise
        self._process.pause()

    def answer(self, prompts: Sequence[Sequence[int]], tokens: Sequence[int], repeat: int) -> Turn:
        request = {"op": "answer", "prompts": [list(prompt) for prompt in prompts], "tokens": list(tokens)}
        self._process.resume()
        try:
            reply = self._process.ask(request, ANSWER_SECONDS)
        finally:
            self._process.pause()
        answers = tuple(Answer(tuple(a["token_ids"]), a["first"], a["decode"]) for a in reply["answers"])
        return Turn(answers, reply["seconds"])

    def close(self) -> None:
        self._process.close()
