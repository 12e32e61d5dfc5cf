"""The target talks to itself: user turns from the bare user prefix, then answers, through the engine's own batches.

Knows requests and the file of answers; refuses to know text, which the `Speaker` brings. Conversation i depends on (seed, i)
alone, because the engine's text never depends on its neighbours: a file that was continued is the file of an unbroken run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from drafters.training.answers import Conversation, append, read_answers, start
from drafters.training.corpus import digest_of, loops
from drafters.training.order import Order
from spec.engine import Engine
from spec.errors import ConfigError, RequestError
from spec.request import Request, SamplingParams

_LEAST_ANSWER = 4  # tokens
_PATIENCE = 8  # conversations tried for each that is wanted


class Speaker(Protocol):
    """The model's chat format in tokens."""

    user_prefix: tuple[int, ...]  # what the template writes before the first user turn
    user_stops: tuple[int, ...]  # tokens that end a user turn besides the model's end tokens

    def prompt_of(self, user_ids: Sequence[int]) -> list[int] | None:
        """The whole prompt for a user turn; None when there is nothing in it."""


class Answered(Protocol):
    """Called after each chunk: conversations kept so far, wanted, tried."""

    def __call__(self, kept: int, wanted: int, tried: int) -> None: ...


def seed_of(seed: int, number: int, role: str) -> int:
    """A 63-bit seed of its own for every turn of every conversation."""
    digest = hashlib.blake2b(f"{seed} {number} {role}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def write_answers(
    path: Path,
    order: Order,
    target: str,
    make_engine: Callable[[], Engine],
    speaker: Speaker,
    on_chunk: Answered,
    stop: Callable[[], bool],
) -> int:
    """Write or continue `path` until it holds `order.answers` conversations; returns how many it holds.

    `target` identifies the weights. Raises ConfigError when the file is another target's or was asked for differently.
    """
    about: dict[str, Any] = {
        "target": target,
        "seed": order.seed,
        "answer_tokens": order.answer_tokens,
        "user_tokens": order.user_tokens,
        "temperature": order.temperature,
    }
    if not path.exists():
        start(path, about)
    contents = read_answers(path)
    if contents.about != about:
        wrong = [name for name in about if contents.about.get(name) != about[name]]
        raise ConfigError(f"{path} was written with another {', '.join(wrong)}; take it as it is with --data, or remove it")
    kept, size, number, chunk = len(contents.conversations), contents.size, contents.next, contents.chunks
    seen = {digest_of(c.prompt_ids) for c in contents.conversations} | {digest_of(c.answer_ids) for c in contents.conversations}
    if kept >= order.answers:
        return kept
    engine = make_engine()
    while kept < order.answers and not stop():
        if number >= _PATIENCE * order.answers + 256:
            break
        numbers = range(number, number + order.writers)
        fresh = []
        for item in _converse(engine, order, speaker, numbers):
            prompt, answer = digest_of(item.prompt_ids), digest_of(item.answer_ids)
            if len(item.answer_ids) >= _LEAST_ANSWER and not loops(item.answer_ids) and not {prompt, answer} & seen:
                seen |= {prompt, answer}
                fresh.append(item)
        size = append(path, size, chunk, numbers.stop, fresh)
        kept, number, chunk = kept + len(fresh), numbers.stop, chunk + 1
        on_chunk(kept, order.answers, number)
    return kept


def _converse(engine: Engine, order: Order, speaker: Speaker, numbers: range) -> list[Conversation]:
    """Both turns of some conversations, all at once; what the engine refuses is left out."""
    turns = _run(
        engine,
        [
            Request(
                id=i,
                prompt_ids=speaker.user_prefix,
                sampling=SamplingParams(
                    max_tokens=order.user_tokens,
                    temperature=1.0,
                    seed=seed_of(order.seed, i, "user"),
                    stop_token_ids=speaker.user_stops,
                ),
            )
            for i in numbers
        ],
    )
    prompts = {}
    for i, (ids, ended) in turns.items():
        prompt = speaker.prompt_of(ids[:-1] if ended else ids)
        if prompt:
            prompts[i] = tuple(prompt)
    requests = [
        Request(
            id=i,
            prompt_ids=prompt,
            sampling=SamplingParams(
                max_tokens=order.answer_tokens,
                temperature=0.0 if i % 2 == 0 else order.temperature,
                seed=seed_of(order.seed, i, "answer"),
            ),
        )
        for i, prompt in prompts.items()
    ]
    answers = _run(engine, requests)
    return [Conversation(prompts[i], tuple(ids), i % 2 == 0) for i, (ids, _) in sorted(answers.items()) if ids]


def _run(engine: Engine, requests: Sequence[Request]) -> dict[int, tuple[list[int], bool]]:
    """Tokens of every answer, and whether its last one is an end or stop token."""
    found: dict[int, tuple[list[int], bool]] = {}
    for request in requests:
        try:
            engine.add(request)
        except RequestError:  # longer than the context
            continue
        found[request.id] = ([], False)
    while engine.has_work():
        for event in engine.step():
            ids, _ = found[event.request_id]
            ids += event.token_ids
            if event.finish_reason is not None:
                found[event.request_id] = (ids, event.stop_token is not None)
            if event.finish_reason == "error":
                found.pop(event.request_id)
    return found
