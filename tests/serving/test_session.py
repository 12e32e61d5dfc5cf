"""Sessions without sockets: numbering, turns, cancel, resume, slow readers, pacing. Generations are fed by hand."""

from __future__ import annotations

import gc
import json
import weakref
from typing import Any, cast

import pytest

from server.api_error import ApiError
from server.generation import Generation, Part, Piece
from server.limits import Limits
from server.metrics import Metrics
from server.pace import Pacer
from server.ports import TextTools
from server.protocol import CODECS, JSON_SUBPROTOCOL, Hello
from server.resumables import Resumables
from server.ring import Ring
from server.session import Begin, Session, SessionSettings
from server.text import StopMatcher, TextStream
from spec.request import Request, SamplingParams, StepCounts, TokenEvent

LIMITS = Limits(ring_frames=4, requests_per_socket=3, resumable_per_key=2, resume_seconds=10, errors_per_socket=20)


class Desk:
    """One session and its running answers."""

    def __init__(
        self, text: TextTools, resumables: Resumables | None = None, tenant: str | None = "t", limits: Limits = LIMITS
    ) -> None:
        self.text = text
        self.woken = 0
        self.resumables = Resumables(limits) if resumables is None else resumables
        keys = {"right-key": "t"}
        shared = SessionSettings(
            limits, text.tokenizer, lambda: Hello(version="1", model="m", limits={}), keys.get, self.resumables
        )
        self.session = Session(shared, CODECS[JSON_SUBPROTOCOL], tenant, self._wake)
        self.generations: dict[Any, Generation] = {}

    def _wake(self) -> None:
        self.woken += 1

    def send(self, **message: Any) -> Begin | None:
        return self.session.receive(json.dumps(message))

    def chat(self, client_id: Any, stops: tuple[str, ...] = (), **fields: Any) -> Generation:
        """A chat message, accepted and begun."""
        intent = self.send(type="chat", id=client_id, messages=[{"role": "user", "content": "x"}], **fields)
        assert isinstance(intent, Begin)
        stream = intent.stream
        request = Request(id=1, prompt_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=99))

        def notify() -> None:
            stream.on_progress(self.now)
            stream.wake()

        matcher = StopMatcher(stops) if stops else None
        generation = Generation(request, TextStream(self.text.tokenizer), matcher, notify, lambda g: None, Metrics())
        stream.begin(generation)
        self.generations[client_id] = generation
        return generation

    now = 0.0

    def frames(self) -> list[dict[str, Any]]:
        found = []
        while (frame := self.session.next_frame(self.now)) is not None:
            found.append(json.loads(frame))
        return found


def say(generation: Generation, text: str, drafter: str = "", **fields: Any) -> None:
    """One event whose tokens are the bytes of `text`, all but the last drafted when a drafter is named."""
    ids = tuple(text.encode())
    sources = (drafter,) * max(0, len(ids) - 1) + ("",) if ids else ()
    counts = StepCounts(4, len(ids) - 1, {drafter: 4}, {drafter: len(ids) - 1}, len(ids)) if drafter else StepCounts()
    generation.on_event(TokenEvent(1, ids, sources, counts=counts, **fields))


@pytest.fixture
def desk(text: TextTools) -> Desk:
    made = Desk(text)
    assert [f["type"] for f in made.frames()] == ["hello"]
    return made


def test_one_answer_is_numbered_without_gaps(desk: Desk) -> None:
    generation = desk.chat("a")
    assert desk.frames() == []
    say(generation, "he", started=True, cached_tokens=2)
    started, first = desk.frames()
    assert (started["type"], started["seq"], started["prompt_tokens"], started["cached_tokens"]) == ("started", 0, 3, 2)
    assert (first["type"], first["seq"], first["text"], first["tokens"]) == ("delta", 1, "he", 2)
    say(generation, "llo", "suffix")
    [second] = desk.frames()
    assert (second["seq"], second["drafted"], second["accepted"], second["drafter"]) == (2, 4, 2, "suffix")
    assert second["pieces"] == [["ll", "suffix"], ["o", ""]]
    say(generation, "!", finish_reason="stop")
    third, done = desk.frames()
    assert (third["seq"], done["seq"], done["type"], done["finish_reason"]) == (3, 4, "done", "stop")
    assert done["usage"]["completion_tokens"] == 6
    assert done["speculation"]["accepted"] == 2
    assert desk.frames() == []


def test_deltas_merge_while_nobody_reads(desk: Desk) -> None:
    generation = desk.chat("a")
    for text in ("a", "b", "c", "d"):
        say(generation, text, started=True)
    _, delta = desk.frames()
    assert (delta["text"], delta["tokens"], delta["seq"]) == ("abcd", 4, 1)


def test_answers_take_turns(desk: Desk) -> None:
    first, second = desk.chat("a"), desk.chat("b")
    say(first, "1", started=True)
    say(second, "2", started=True)
    assert [f["id"] for f in desk.frames()] == ["a", "b", "a", "b"]


def test_cancel_ends_at_once_and_says_nothing_more(desk: Desk) -> None:
    generation = desk.chat("a")
    say(generation, "ab", started=True)
    desk.send(type="cancel", id="a")
    frames = desk.frames()
    assert [f["type"] for f in frames] == ["started", "delta", "done"]
    assert frames[-1]["finish_reason"] == "cancelled"
    say(generation, "late")
    assert desk.frames() == []
    desk.send(type="cancel", id="a")
    [unknown] = desk.frames()
    assert (unknown["type"], unknown["code"], unknown["id"]) == ("error", "unknown_id", "a")


def test_ids(desk: Desk) -> None:
    desk.chat("a")
    assert desk.send(type="chat", id="a", messages=[]) is None
    [error] = desk.frames()
    assert error["code"] == "duplicate_id"
    assert "id" not in error  # the running answer's client must not take it for its own
    desk.chat(5)
    desk.chat("5")
    assert desk.send(type="chat", id="d", messages=[]) is None
    [error] = desk.frames()
    assert (error["code"], error["id"]) == ("rate_limit_exceeded", "d")
    for bad in ("", "x" * 129):
        desk.send(type="chat", id=bad, messages=[])
        assert desk.frames()[0]["param"] == "id"


def test_refused_request_gets_one_error_and_frees_its_id(desk: Desk) -> None:
    intent = desk.send(type="chat", id="a", messages=[])
    assert intent is not None
    desk.session.refuse(intent.stream, ApiError(400, "no", code="empty_array", param="messages"))
    assert desk.frames() == [{"type": "error", "code": "empty_array", "message": "no", "id": "a", "param": "messages"}]
    desk.chat("a")


def test_bad_frames_are_answered_and_harmless(desk: Desk) -> None:
    generation = desk.chat("a")
    for bad in ("{bad", "[]", "", b"\x00", '{"type":"what"}', '{"type":"chat","id":"a","messages":4}'):
        desk.session.receive(bad)
        [error] = desk.frames()
        assert error["type"] == "error"
        assert "id" not in error
    say(generation, "ok", started=True, finish_reason="length")
    assert [f["type"] for f in desk.frames()] == ["started", "delta", "done"]


def test_ping_and_key(text: TextTools) -> None:
    desk = Desk(text, tenant=None)
    assert desk.frames() == []
    desk.session.receive("{bad")
    assert desk.session.close_code is None
    desk.frames()
    desk.send(type="auth", key="right-key")
    assert [f["type"] for f in desk.frames()] == ["hello"]
    desk.send(type="ping", t="x")
    assert desk.frames() == [{"type": "pong", "t": "x"}]


@pytest.mark.parametrize(
    "first", [{"type": "auth", "key": "wrong"}, {"type": "ping"}, {"type": "chat", "id": "a", "messages": []}]
)
def test_no_key_no_service(text: TextTools, first: dict[str, Any]) -> None:
    desk = Desk(text, tenant=None)
    assert desk.send(**first) is None
    assert desk.session.close_code == 4401
    assert desk.frames() == []


def test_engine_error_ends_the_answer_with_its_number(desk: Desk) -> None:
    generation = desk.chat("a")
    say(generation, "ab", started=True)
    say(generation, "", finish_reason="error", error="broke", error_code="engine_crashed")
    assert [(f["type"], f["seq"]) for f in desk.frames()] == [("started", 0), ("delta", 1), ("error", 2)]


# ---- resume


def resumed(desk: Desk, text: TextTools, response_id: str, after: int, tenant: str = "t") -> Desk:
    other = Desk(text, desk.resumables, tenant)
    other.frames()
    other.send(type="resume", id="new", response_id=response_id, after_seq=after)
    return other


def test_resume_replays_what_was_missed(desk: Desk, text: TextTools) -> None:
    generation = desk.chat("a", resumable=True)
    say(generation, "one", started=True)
    started, _ = desk.frames()
    say(generation, "two")
    desk.frames()
    desk.session.detach(1.0)
    assert not generation.ended
    say(generation, "three")
    other = resumed(desk, text, started["response_id"], 1)
    assert [(f["id"], f["seq"], f["text"]) for f in other.frames()] == [("new", 2, "two"), ("new", 3, "three")]
    say(generation, "!", finish_reason="stop")
    assert [f["seq"] for f in other.frames()] == [4, 5]


class Thinks(TextStream):
    """Everything is reasoning."""

    channel = "reasoning"

    def push_one(self, token: int) -> tuple[str, str]:
        return chr(token), "reasoning"


def test_a_snapshot_holds_the_reasoning_too(desk: Desk, text: TextTools) -> None:
    generation = desk.chat("a", resumable=True)
    generation._text = cast(Any, Thinks(text.tokenizer))
    for letter in "abcdefgh":
        say(generation, letter, started=True)
        frames = desk.frames()
        if letter == "a":
            response_id = frames[0]["response_id"]
    desk.session.detach(1.0)
    [snapshot] = resumed(desk, text, response_id, 0).frames()
    assert (snapshot["type"], snapshot["text"], snapshot["reasoning"]) == ("snapshot", "", "abcdefgh")


def test_resume_past_the_ring_is_a_snapshot(desk: Desk, text: TextTools) -> None:
    generation = desk.chat("a", resumable=True)
    for letter in "abcdefgh":
        say(generation, letter, started=True)
        frames = desk.frames()
        if letter == "a":
            response_id = frames[0]["response_id"]
    desk.session.detach(1.0)
    say(generation, "i")
    snapshot, delta = resumed(desk, text, response_id, 2).frames()
    assert (snapshot["type"], snapshot["seq"], snapshot["text"]) == ("snapshot", 8, "abcdefgh")
    assert (delta["seq"], delta["text"]) == (9, "i")


def test_finished_answer_can_be_fetched_again(desk: Desk, text: TextTools) -> None:
    generation = desk.chat("a", resumable=True)
    for letter in "abcdefg":
        say(generation, letter, started=True)
        frames = desk.frames()
        if letter == "a":
            response_id = frames[0]["response_id"]
    say(generation, "", finish_reason="length")
    assert desk.frames()[-1]["type"] == "done"
    snapshot, done = resumed(desk, text, response_id, 0).frames()
    assert (snapshot["seq"], snapshot["text"], done["type"], done["seq"]) == (7, "abcdefg", "done", 8)
    again = resumed(desk, text, response_id, 7)
    assert [f["type"] for f in again.frames()] == ["done"]


def test_answer_belongs_to_its_key_and_its_time(desk: Desk, text: TextTools) -> None:
    generation = desk.chat("a", resumable=True)
    say(generation, "x", started=True)
    response_id = desk.frames()[0]["response_id"]
    for tenant, name in (("other", response_id), ("t", response_id + "x")):
        [error] = resumed(desk, text, name, 0, tenant).frames()
        assert (error["code"], error["id"]) == ("unknown_response", "new")
    [error] = resumed(desk, text, response_id, 99).frames()
    assert error["param"] == "after_seq"
    desk.session.detach(1.0)
    desk.resumables.expire(10.9)
    assert not generation.ended
    desk.resumables.expire(11.0)
    assert generation.finish_reason == "cancelled"
    assert len(desk.resumables) == 0


def test_second_socket_takes_the_answer_over(desk: Desk, text: TextTools) -> None:
    generation = desk.chat("a", resumable=True)
    say(generation, "x", started=True)
    response_id = desk.frames()[0]["response_id"]
    other = resumed(desk, text, response_id, 1)
    [lost] = desk.frames()
    assert (lost["code"], lost["id"]) == ("resumed_elsewhere", "a")
    desk.session.detach(1.0)
    say(generation, "y")
    assert [f["text"] for f in other.frames()] == ["y"]


def test_socket_lost(desk: Desk) -> None:
    plain, unborn, kept = desk.chat("a"), desk.chat("b", resumable=True), desk.chat("c", resumable=True)
    say(plain, "x", started=True)
    say(kept, "x", started=True)
    desk.frames()
    desk.session.detach(1.0)
    assert plain.finish_reason == "cancelled"
    assert unborn.finish_reason == "cancelled"  # its id was never told, so nobody could resume it
    assert not kept.ended


def test_resumable_answers_are_bounded(desk: Desk) -> None:
    desk.chat("a", resumable=True)
    desk.chat("b", resumable=True)
    assert desk.send(type="chat", id="c", messages=[], resumable=True) is None
    assert desk.frames()[-1]["code"] == "too_many_resumable"


def test_ring() -> None:
    ring: Ring[int] = Ring(3, int)
    for number in range(5):
        ring.add(number)
    assert ring.after(4) == []
    assert ring.after(1) == [2, 3, 4]
    assert ring.after(0) is None
    assert Ring[int](3, int).after(-1) == []
    ring.pack()
    ring.pack()
    assert ring.after(4) == []
    assert ring.after(1) == [2, 3, 4]
    assert ring.after(0) is None
    assert ring.end == 5


def test_finished_answers_wait_without_their_socket(text: TextTools) -> None:
    """For minutes after its end an answer can be resumed; what it keeps till then is small and holds nobody else alive."""
    desk = Desk(text, limits=Limits())
    generation = desk.chat("a", resumable=True)
    sent = desk.frames()
    for number in range(64):
        say(generation, f"word {number} ", started=number == 0, finish_reason="stop" if number == 63 else None)
        sent += desk.frames()
    shared, session, request = desk.resumables, weakref.ref(desk.session), weakref.ref(generation)
    response_id = next(frame["response_id"] for frame in sent if frame["type"] == "started")
    del desk, generation
    gc.collect()
    assert session() is None
    assert request() is None
    again = Desk(text, shared)
    again.frames()
    again.send(type="resume", id="a", response_id=response_id, after_seq=0)
    assert again.frames() == [frame for frame in sent if frame.get("seq", -1) > 0]


@pytest.mark.parametrize("message", [
    {"type": "cancel", "id": "x" * 129}, {"type": "cancel", "id": 2**64}, {"type": "ping", "t": "x" * 129}, {"type": "x", "id": "y" * 9999},
    {"type": "resume", "id": "x" * 129, "response_id": "resp_1", "after_seq": 0}, {"type": "chat", "id": 2**70, "messages": []},
])  # fmt: skip
def test_what_comes_back_is_bounded(desk: Desk, message: dict[str, Any]) -> None:
    """Errors and pongs wait for a reader who may never come, and ids are kept with finished answers."""
    assert desk.send(**message) is None
    [error] = desk.frames()
    assert error["type"] == "error"
    assert error.get("id") is None
    assert len(json.dumps(error)) < 600


def test_ids_of_64_bits_live_as_long_as_others(desk: Desk, text: TextTools) -> None:
    generation = desk.chat(2**63 - 1, resumable=True)
    say(generation, "hi", started=True, finish_reason="stop")
    response_id = desk.frames()[0]["response_id"]
    assert [f["type"] for f in resumed(desk, text, response_id, 0).frames()] == ["delta", "done"]


def test_an_answer_that_is_over_says_so_to_who_has_it_all(desk: Desk, text: TextTools) -> None:
    generation = desk.chat("a", resumable=True)
    say(generation, "hi", started=True, finish_reason="stop")
    started, _, done = desk.frames()
    for _ in range(2):
        again = resumed(desk, text, started["response_id"], done["seq"])
        assert [(f["type"], f["seq"]) for f in again.frames()] == [("done", done["seq"])]
        assert again.session.num_running == 0


def test_answers_that_end_while_nobody_listens_make_room(text: TextTools) -> None:
    resumables = Resumables(LIMITS)
    for name in ("a", "b", "c", "d"):  # two may be kept
        desk = Desk(text, resumables)
        generation = desk.chat(name, resumable=True)
        say(generation, "hi", started=True)
        desk.frames()
        desk.session.detach(1.0)
        say(generation, "!", finish_reason="stop")
    assert len(resumables) == 2


# ---- slow readers and pace


def test_slow_reader_is_given_up(text: TextTools) -> None:
    desk = Desk(text, limits=Limits(pending_bytes=100, slow_seconds=20))
    generation = desk.chat("a")
    say(generation, "x" * 101, started=True)
    desk.session.check_slow(None, 5.0)
    assert desk.session.close_code is None  # nothing is blocked
    desk.session.check_slow(4.0, 5.0)
    assert desk.session.close_code == 4503
    other = Desk(text, limits=Limits(slow_seconds=20))
    other.session.check_slow(4.0, 23.0)
    assert other.session.close_code is None
    other.session.check_slow(4.0, 25.0)
    assert other.session.close_code == 4503


def test_unread_errors_are_bounded(desk: Desk) -> None:
    for _ in range(30):
        desk.session.receive("{bad")
    assert desk.session.close_code == 4503


def test_pace_spreads_a_run_and_not_the_first_token() -> None:
    pacer = Pacer()
    pacer.add(Piece([1], [], [Part("a")]), 0.0, 10.0)
    assert pacer.take(10.0).text == "a"
    pacer.add(Piece([2, 3, 4, 5], [], [Part(t, "d") for t in "bcde"]), 0.2, 10.2)
    assert pacer.take(10.2).text == "b"
    assert pacer.next_time() == pytest.approx(10.25)
    assert pacer.take(10.24) is None
    assert pacer.take(10.31).text == "cd"
    pacer.add(Piece([6], [], [Part("f")]), 0.1, 10.32)  # a new run pushes out the rest of the last one
    assert pacer.take(10.32).text == "ef"
    assert pacer.next_time() is None


def test_paced_answer_is_complete_and_done_comes_last(desk: Desk) -> None:
    generation = desk.chat("a", pace=True)
    say(generation, "x", started=True)
    assert [f["type"] for f in desk.frames()] == ["started", "delta"]
    generation.figures.last_token -= 0.4  # the next run comes 0.4 s after the first token
    say(generation, "abcd", "toy", finish_reason="length")
    texts, done = [], []
    while not done:
        for frame in desk.frames():
            texts += [frame["text"]] if frame["type"] == "delta" else []
            done += [frame] if frame["type"] == "done" else []
        desk.now = desk.session.next_time() or desk.now
    assert texts == ["a", "b", "c", "d"]
    assert done[0]["speculation"]["accepted"] == 3
