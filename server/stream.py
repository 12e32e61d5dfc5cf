"""One answer on its way to native clients: numbering, merging, replay. Sans-I/O.

Messages are made when somebody is ready to send them, so text that piles up behind a slow reader is one delta, and sequence
numbers have no gaps. Knows one answer; refuses to know sockets and other answers.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from server import shapes
from server.api_error import ApiError
from server.generation import Figures, Generation, Piece
from server.pace import Pacer
from server.ports import Tokenizer
from server.protocol import AnswerMessage, ClientId, Delta, Done, Error, Snapshot, Started
from server.ring import Ring
from server.tool_shapes import CallReader


class ChatStream:
    """`client_id` is what the attached session calls it; it changes with a resume."""

    def __init__(
        self, client_id: ClientId, tenant: str, tokenizer: Tokenizer, ring_frames: int, *, resumable: bool, pace: bool
    ) -> None:
        self.client_id = client_id
        self.tenant = tenant
        self.response_id = "resp_" + secrets.token_urlsafe(24)
        self.resumable = resumable
        self.top_logprobs: int | None = None
        self.reader: CallReader | None = None  # set before the beginning when the request has tools
        self.wake: Callable[[], None] = nobody  # of the attached session
        self.cancelled = False
        self.finished = False  # its last message has been taken
        self._tokenizer = tokenizer
        self._generation: Generation | None = None
        self._pacer = Pacer() if pace else None
        self._ring: Ring[AnswerMessage] = Ring(ring_frames, AnswerMessage)
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._reader_finished = False
        self._replay: deque[AnswerMessage | Snapshot] = deque()

    @property
    def seq(self) -> int:
        """Number of the next new message."""
        return self._ring.end

    @property
    def over(self) -> bool:
        """Nothing more will be made, whether or not somebody has taken it all."""
        return self.finished or (self._generation is not None and self._generation.ended)

    def begin(self, generation: Generation) -> None:
        self._generation = generation

    def cancel(self) -> None:
        self.cancelled = True
        if self._generation is not None:
            self._generation.cancel()

    def on_progress(self, now: float) -> None:
        """The generation has something new: with pacing it is put on the clock now."""
        if self._pacer is not None and self._generation is not None:
            piece = self._generation.take()
            if piece is not None:
                self._pacer.add(piece, self._generation.token_gap, now)

    def pending_bytes(self) -> int:
        """A lower bound of the text that waits to be sent."""
        return self._generation.pending_chars() if self._generation is not None else 0

    def next_time(self) -> float | None:
        """When held text becomes due, if any is held."""
        return self._pacer.next_time() if self._pacer is not None else None

    def take(self, now: float) -> AnswerMessage | Snapshot | None:
        """The next message for the client, None when there is nothing to say now."""
        if self._replay:
            message = self._replay.popleft()
            self.finished = isinstance(message, Done | Error)
            if self.finished:
                self._release()
            return message
        if self.finished:
            return None
        new = self._new_message(now)
        if new is not None:
            self._ring.add(new)
            self.finished = isinstance(new, Done | Error)
            if self.finished:
                self._release()
        return new

    def _release(self) -> None:
        """The last message has been taken. What is left waits minutes for a resume: it keeps no socket, no request, few bytes."""
        self.wake = nobody
        self._generation = self._pacer = self.reader = None
        if self.resumable:
            self._text, self._reasoning = ["".join(self._text)], ["".join(self._reasoning)]
            self._ring.pack()

    def resume(self, client_id: ClientId, after_seq: int) -> None:
        """Replay what came after `after_seq`, or the whole text so far when that is gone. Raises ApiError for a future number."""
        if after_seq >= self.seq or after_seq < -1:
            raise ApiError(
                400, f"after_seq is {after_seq}; the answer has reached {self.seq - 1}", code="invalid_value", param="after_seq"
            )
        self.client_id = client_id
        missed = self._ring.after(after_seq)
        if missed == []:  # an answer that is over says so again: the client would wait for ever
            missed = [message for message in self._ring.after(self.seq - 2) or [] if isinstance(message, Done | Error)]
        if missed is not None:
            self._replay = deque(msgspec.structs.replace(message, id=client_id) for message in missed)
        else:
            last = self._ring.after(self.seq - 2) or []
            ending = [message for message in last if isinstance(message, Done | Error)]
            seq = self.seq - 1 - len(ending)
            reasoning = "".join(self._reasoning) or None
            self._replay = deque([Snapshot(id=client_id, seq=seq, text="".join(self._text), reasoning=reasoning)])
            self._replay.extend(msgspec.structs.replace(message, id=client_id) for message in ending)
        self.finished = self.finished and not self._replay

    # ---- making messages

    def _new_message(self, now: float) -> AnswerMessage | None:
        generation = self._generation
        if generation is None:
            return None
        if not generation.started and not generation.ended:
            return None
        if self.seq == 0 and (generation.started or generation.error is None):
            figures = generation.figures
            return Started(
                id=self.client_id, response_id=self.response_id, seq=0,
                prompt_tokens=figures.prompt_tokens, cached_tokens=figures.cached_tokens,
            )  # fmt: skip
        ended = generation.ended
        piece = generation.take() if self._pacer is None else self._pacer.take(now)
        if piece is not None:
            return self._delta(piece)
        if not ended or self.next_time() is not None:
            return None
        rest = self._rest_of_calls()
        return rest if rest is not None else self._ending(generation)

    def _delta(self, piece: Piece) -> Delta:
        text, runs, calls = piece.text, piece.runs(), None
        if self.reader is not None:
            text, calls = _split(self.reader.feed(text))
        self._text.append(text)
        self._reasoning.append(piece.reasoning)
        # Of what `text` shows where it shows something: reasoning and marks may have been drafted too.
        told = [part for part in piece.parts if part.channel == "content" and part.text] or piece.parts
        drafter = next((part.drafter for part in told if part.drafter), None)
        logprobs = None
        if self.top_logprobs is not None:
            logprobs = shapes.chat_logprobs(self._tokenizer, piece.token_ids, piece.logprobs, self.top_logprobs)
        return Delta(
            id=self.client_id, seq=self.seq, text=text, reasoning=piece.reasoning or None,
            tokens=len(piece.token_ids), drafted=piece.drafted, accepted=piece.accepted, drafter=drafter, logprobs=logprobs, tool_calls=calls,
            pieces=runs if len(runs) > 1 and drafter and self.reader is None else None,
        )  # fmt: skip

    def _rest_of_calls(self) -> Delta | None:
        """Text that could have become a tool call and did not."""
        if self.reader is None or self._reader_finished:
            return None
        self._reader_finished = True
        text, calls = _split(self.reader.finish())
        if not text and calls is None:
            return None
        self._text.append(text)
        return Delta(id=self.client_id, seq=self.seq, text=text, tokens=0, drafted=0, accepted=0, tool_calls=calls)

    def _ending(self, generation: Generation) -> Done | Error:
        if generation.error is not None:
            error = generation.error
            seq = self.seq if self.seq else None
            return Error(
                id=self.client_id, seq=seq, code=error.code or "internal_error", message=error.message, param=error.param
            )
        figures: list[Figures] = [generation.figures]
        reason, reader = str(generation.finish_reason), self.reader
        return Done(
            id=self.client_id, seq=self.seq, finish_reason=reason if reader is None else reader.reason(reason),
            usage=shapes.usage(figures), speculation=shapes.speculation(figures), timings=shapes.timings(figures),
            tool_calls=reader.calls if reader is not None and reader.calls else None,
        )  # fmt: skip


def nobody() -> None:
    """Nobody waits for this answer now."""


def _split(deltas: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]] | None]:
    """(visible text, pieces of tool calls) of a reader's deltas."""
    text = "".join(delta.get("content", "") for delta in deltas)
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    return text, calls or None
