"""One answer being made: engine events in, text pieces out. Knows incremental decoding, stop strings and what is counted;
refuses to know sockets and JSON shapes.

Text, ids, log probabilities, usage and draft counts are cut at the same token, but for a stop string found in text that was held
back to the very end: its tokens were counted when they came. Stop strings look at what is said, not at
reasoning. Pieces wait here and merge until they are taken, so a slow reader costs memory for text only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from server.api_error import ApiError, from_engine
from server.channels import Channel, ChannelText
from server.text import StopMatcher, TextStream
from spec.request import PHASES, FinishReason, Request, TokenEvent, TokenLogprob


class Part(NamedTuple):
    """What one token made visible: "" where text is held back or hidden. `drafter` is "" for a token nobody drafted."""

    text: str
    drafter: str = ""
    channel: Channel = "content"


@dataclass(slots=True)
class Piece:
    """Tokens not yet taken and the text they made visible. `parts` has one per token, and one for text released at the end."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    drafted: int = 0

    @property
    def text(self) -> str:
        """What is said; see `reasoning` for what is thought."""
        return "".join([part.text for part in self.parts if part.channel == "content"])

    @property
    def reasoning(self) -> str:
        return "".join([part.text for part in self.parts if part.channel == "reasoning"])

    @property
    def accepted(self) -> int:
        return sum(1 for part in self.parts if part.drafter)

    def runs(self) -> list[tuple[str, str]]:
        """The text in order, neighbours of the same origin joined."""
        joined: list[tuple[str, str]] = []
        for text, drafter, channel in self.parts:
            if channel != "content":
                continue
            if text and joined and joined[-1][1] == drafter:
                joined[-1] = (joined[-1][0] + text, drafter)
            elif text:
                joined.append((text, drafter))
        return joined

    def by_channel(self) -> list[Piece]:
        """Pieces of one channel each, in order. Marks go with the text before them, at the beginning with the text behind."""
        if all(part.channel == "content" for part in self.parts):
            return [self]
        cuts, channel = [0], "mark"
        for index, part in enumerate(self.parts):
            if part.channel == "mark":
                continue
            if channel not in ("mark", part.channel):
                cuts.append(index)
            channel = part.channel
        ends = [*cuts[1:], len(self.parts)]
        split = [Piece(self.token_ids[a:b], self.logprobs[a:b], self.parts[a:b]) for a, b in zip(cuts, ends, strict=True)]
        split[0].drafted = self.drafted
        return split

    def extend(self, other: Piece) -> None:
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.parts += other.parts
        self.drafted += other.drafted


@dataclass(slots=True)
class Figures:
    """Counts and times of one answer. Tokens thrown away after a stop string are in none of them."""

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0  # of the completion tokens, those of reasoning; marks and headers are in neither part
    drafted: int = 0
    accepted: int = 0
    steps: int = 0  # target passes that delivered tokens
    first_step_tokens: int = 0
    drafts: int = 0  # of the steps, those that verified drafts
    accepted_per_position: list[int] = field(default_factory=list)
    judged_per_position: list[int] = field(default_factory=list)  # steps in which drafts stood at that position and were judged
    by_drafter: dict[str, list[int]] = field(default_factory=dict)  # name -> [drafted, accepted]
    phase_seconds: list[float] = field(default_factory=lambda: [0.0] * len(PHASES))  # of the steps in `steps`
    queue_seconds: float = 0.0
    arrival: float = 0.0  # seconds of time.perf_counter()
    first_token: float = 0.0
    last_token: float = 0.0

    def add_step(self, event: TokenEvent, delivered: int, now: float, phases: Sequence[float] = ()) -> tuple[int, int]:
        """Count one event of which `delivered` tokens were kept. Returns how many positions were accepted, and how many judged.

        `phases`: the step's seconds. The request waited for all of the step, so it counts in full however many others shared it."""
        if delivered == 0:
            return 0, 0
        for index, seconds in enumerate(phases):
            self.phase_seconds[index] += seconds
        if self.steps == 0:
            self.first_token, self.first_step_tokens = now, delivered
        self.last_token = now
        self.steps += 1
        self.completion_tokens += delivered
        self.drafted += event.counts.drafted
        self.drafts += event.counts.drafted > 0
        for name, count in event.counts.drafted_by.items():
            self.by_drafter.setdefault(name, [0, 0])[0] += count
        accepted = 0
        for source in event.sources[:delivered]:
            if not source:
                break
            self.by_drafter.setdefault(source, [0, 0])[1] += 1
            accepted += 1
        self.accepted += accepted
        # The position after the accepted ones was judged only where the target's own token there was delivered.
        judged = event.counts.judged if delivered > accepted else accepted
        count_up_to(accepted, self.accepted_per_position)
        count_up_to(judged, self.judged_per_position)
        return accepted, judged

    @property
    def ttft_seconds(self) -> float:
        return max(0.0, self.first_token - self.arrival) if self.steps else 0.0

    @property
    def decode_seconds(self) -> float:
        return self.last_token - self.first_token


def count_up_to(depth: int, counts: list[int]) -> None:
    """One more at each of the first `depth` positions."""
    counts += [0] * (depth - len(counts))
    for position in range(depth):
        counts[position] += 1


class Meter(Protocol):
    """Who counts delivered tokens of all answers."""

    def on_tokens(self, count: int, gap_seconds: float) -> None: ...
    def on_draft(self, drafted_by: Mapping[str, int], accepted: list[str], judged: int) -> None: ...


class Generation:
    """Feed it with `on_event`, empty it with `take`; `notify` is called whenever there is something new to take or it ended."""

    def __init__(
        self,
        request: Request,
        text: TextStream,
        stops: StopMatcher | None,
        notify: Callable[[], None],
        on_end: Callable[[Generation], None],
        meter: Meter,
        arrival: float | None = None,
    ) -> None:
        self.request = request
        self.figures = Figures(len(request.prompt_ids), arrival=time.perf_counter() if arrival is None else arrival)
        self.started = False
        self.finish_reason: FinishReason | None = None
        self.stop_token: int | None = None
        self.error: ApiError | None = None
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt tokens 1, 2, ..., there once it has started
        self.token_gap = 0.0  # seconds between the last two events that brought tokens
        constrained = request.sampling.grammar is not None
        self._text = ChannelText.of(text, request.prompt_ids, constrained=constrained)
        self._stops = stops
        self.notify = notify
        self._on_end = on_end
        self._meter = meter
        self._piece = Piece()

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None

    def take(self) -> Piece | None:
        """What came since the last take, None when nothing did."""
        piece = self._piece
        if not piece.parts:
            return None
        self._piece = Piece()
        return piece

    def pending_chars(self) -> int:
        """Characters waiting to be taken."""
        return sum(len(part.text) for part in self._piece.parts)

    def on_event(self, event: TokenEvent, phases: Sequence[float] = ()) -> None:
        """Take one event of the engine, and the seconds of its step by phase. Events after the end are ignored."""
        if self.ended:
            return
        if event.started and not self.started:
            self.started = True
            self.prompt_logprobs = event.prompt_logprobs
            self.figures.cached_tokens, self.figures.queue_seconds = event.cached_tokens, event.queue_seconds
        now = time.perf_counter()
        before = self.figures.last_token
        delivered, matched = self._add_tokens(event)
        accepted, judged = self.figures.add_step(event, delivered, now, phases)
        if delivered:  # a pass that delivers nothing (an error at its root) is in no figure, here and in the metrics
            self.token_gap = max(now - before, 1e-9) if before else 0.0
            self._meter.on_tokens(delivered, self.token_gap)
            self._piece.drafted += event.counts.drafted
            if event.counts.drafted:
                self._meter.on_draft(event.counts.drafted_by, list(event.sources[:accepted]), judged)
        if matched:
            self._end("stop")
        elif event.finish_reason == "error":
            self.error = from_engine(event.error or "the engine failed", event.error_code, event.error_param)
            self._end("error")
        elif event.finish_reason is not None:
            self.stop_token = event.stop_token
            matched = self._flush()
            self._end("stop" if matched and event.finish_reason == "length" else event.finish_reason)
        self.notify()

    def cancel(self) -> None:
        """End now, with what there is. The caller tells the engine (through on_end)."""
        if not self.ended:
            self._flush()
            self._end("cancelled")
            self.notify()

    def fail(self, error: ApiError) -> None:
        if not self.ended:
            self.error = error
            self._end("error")
            self.notify()

    def _add_tokens(self, event: TokenEvent) -> tuple[int, bool]:
        """Decode an event's tokens one by one. Returns (tokens kept, a stop string was completed)."""
        piece, ids, sources = self._piece, event.token_ids, event.sources
        visible = len(ids) - (1 if event.stop_token is not None else 0)
        matched = False
        for index, token in enumerate(ids):
            # An end token was generated and is counted, and has no text.
            text, channel = self._text.push_one(token) if index < visible else ("", self._text.channel)
            if channel == "reasoning":
                self.figures.reasoning_tokens += index < visible
            elif text and self._stops is not None:
                text, matched = self._stops.push(text)
            piece.token_ids.append(token)
            piece.parts.append(Part(text, sources[index] if index < len(sources) else "", channel))
            if event.logprobs:
                piece.logprobs.append(event.logprobs[index])
            if matched:
                return index + 1, True
        return len(ids), False

    def _flush(self) -> bool:
        """Release text that was held back; an incomplete character at the very end is dropped. True when a stop string ended
        it: the tokens were counted when they came, the text behind it is not shown."""
        rest, matched = self._text.finish(), False
        if self._stops is not None:
            rest, matched = self._stops.push(rest)
            rest += "" if matched else self._stops.finish()
        if rest:
            self._piece.parts.append(Part(rest))
        return matched

    def _end(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self._on_end(self)
