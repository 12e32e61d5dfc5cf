"""TS-06 below the wire: whatever blocks an answer's tokens come in, its parts are the same, with a real engine and an all-accept
drafter, and with blocks cut at random. Two known faults, put in on purpose, are caught.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import channel_kit
import pytest
import torch
from engine_kit import OFF, ScriptDrafter, answers_of, greedy_request, make_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import FIRST_CONTROL, HALVES
from toy import script_table, table_decoder

from server.generation import Generation, Part, Piece
from server.metrics import Metrics
from server.ports import TextTools
from server.text import StopMatcher, TextStream
from spec.request import Request, SamplingParams, StepCounts, TokenEvent, TokenLogprob

START, CHANNEL, MESSAGE, END, CALL, THINK, ANSWER = range(FIRST_CONTROL, FIRST_CONTROL + 7)
IM_END = 258
BLOCK = 9  # K = 8 drafts and the token behind them


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def channels(tmp_path_factory: pytest.TempPathFactory) -> TextTools:
    return channel_kit.text_tools(tmp_path_factory.mktemp("channels"), channel_kit.CHANNELS)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> TextTools:
    return channel_kit.text_tools(tmp_path_factory.mktemp("thinking"), channel_kit.THINKING)


@dataclass(frozen=True)
class Seen:
    said: str
    thought: str
    finish: str | None
    ids: tuple[int, ...]
    reasoning_tokens: int


def listen(
    events: Sequence[TokenEvent],
    text: TextTools,
    request: Request,
    stops: Sequence[str] = (),
    kind: type[Generation] = Generation,
) -> Seen:
    """What a client sees that takes after every event. What it takes, and the pieces of one channel, must agree."""
    matcher = StopMatcher(stops) if stops else None
    generation = kind(request, TextStream(text.tokenizer), matcher, lambda: None, lambda g: None, Metrics())
    whole = Piece()
    for event in events:
        generation.on_event(event)
        piece = generation.take()
        if piece is None:
            continue
        parts = piece.by_channel()
        assert [t for p in parts for t in p.token_ids] == piece.token_ids
        assert [t for p in parts for t in p.parts] == piece.parts
        assert not any(p.text and p.reasoning for p in parts)
        whole.extend(piece)
    figures = generation.figures
    assert len(whole.token_ids) == figures.completion_tokens
    assert whole.logprobs == [] or len(whole.logprobs) == figures.completion_tokens
    return Seen(whole.text, whole.reasoning, generation.finish_reason, tuple(whole.token_ids), figures.reasoning_tokens)


def in_blocks(ids: Sequence[int], sizes: Sequence[int]) -> list[TokenEvent]:
    """Events of these sizes, over and over; all but the last token of each drafted. The last token ends the answer."""
    events, at, turn = [], 0, 0
    while at < len(ids):
        block = tuple(ids[at : at + sizes[turn % len(sizes)]])
        at, turn = at + len(block), turn + 1
        sources = ("toy",) * (len(block) - 1) + ("",)
        last = at == len(ids)
        logprobs = tuple(TokenLogprob(-float(token), ()) for token in block)
        counts = StepCounts(8, len(block) - 1, {"toy": 8}, {"toy": len(block) - 1}, len(block))
        ending: dict[str, Any] = {"finish_reason": "stop", "stop_token": block[-1]} if last else {}
        events.append(TokenEvent(1, block, sources, logprobs, counts, started=turn == 1, **ending))
    return events


def asking(text: TextTools) -> Request:
    ids = text.template.encode_chat([{"role": "user", "content": "x"}])
    return Request(id=1, prompt_ids=tuple(ids), sampling=SamplingParams(max_tokens=500))


# ---- the real engine


def test_an_all_accept_drafter_changes_nothing(channels: TextTools) -> None:
    """64 tokens and more on a TABLE target, K = 8: an accepted block holds the end of one part and the start of the next."""
    thought, said = list(range(33, 65)), [*range(65, 91), *b"bcdegh"]
    script = [*thought, END, START, ord("o"), CHANNEL, *b"final", MESSAGE, *said, IM_END]
    prompt = (START, *b"assistant", CHANNEL, *b"analysis", MESSAGE, ord("~"))
    vocabulary = channels.tokenizer.vocab_size
    decoder = table_decoder(script_table([ord("~"), *script], vocab=vocabulary))

    def events(speculation: Any) -> list[TokenEvent]:
        drafter = ScriptDrafter(answers_of({prompt: script}), (1,) * 8, vocab=vocabulary)
        engine = make_engine(decoder, [drafter], eos_ids=(IM_END,))
        engine.add(greedy_request(1, prompt, 100, **speculation))
        found = []
        while engine.has_work():
            found += engine.step()
        return found

    request = greedy_request(1, prompt, 100)
    drafted = events({})
    blocks = [event.token_ids for event in drafted]
    assert max(map(len, blocks)) == BLOCK
    assert sum(event.counts.accepted for event in drafted) > 50
    assert any(END in block and (MESSAGE in block or CHANNEL in block) for block in blocks)
    right = Seen(bytes(said).decode(), bytes(thought).decode(), "stop", tuple(script), len(thought))
    assert listen(drafted, channels, request) == listen(events({"speculation": OFF}), channels, request) == right


# ---- blocks cut at random

SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=12)
TEXT = st.text(st.sampled_from("ab \n\u4f60\u00e9<>|STOP\U0001f642"), max_size=12)
NAMES = st.sampled_from(["analysis", "final", "commentary", "commentary to=f", "final x"])
SOUP = st.lists(
    st.sampled_from([*range(FIRST_CONTROL, FIRST_CONTROL + 7), *HALVES.values(), *b"ab \n<STOP>", 256, 257, 0xF0]), max_size=60
)


@settings(max_examples=150, deadline=None)
@given(parts=st.lists(st.tuples(NAMES, TEXT), min_size=1, max_size=5), sizes=SIZES)
def test_channels_in_any_blocks(channels: TextTools, parts: list[tuple[str, str]], sizes: list[int]) -> None:
    encode = channels.tokenizer.encode
    ids: list[int] = []
    for index, (name, text) in enumerate(parts):
        ids += [*((END, START, *encode("assistant")) if index else ()), CHANNEL, *encode(name), MESSAGE, *encode(text)]
    seen = listen(in_blocks([*ids, IM_END], sizes), channels, asking(channels))
    assert seen.said == "".join(text for name, text in parts if name.startswith("final"))
    assert seen.thought == "".join(text for name, text in parts if not name.startswith("final"))
    assert seen.ids == (*ids, IM_END)
    assert seen.reasoning_tokens == sum(len(encode(text)) for name, text in parts if not name.startswith("final"))


@settings(max_examples=150, deadline=None)
@given(thought=TEXT, said=TEXT, sizes=SIZES)
def test_thinking_in_any_blocks(thinking: TextTools, thought: str, said: str, sizes: list[int]) -> None:
    encode = thinking.tokenizer.encode
    ids = [THINK, *encode(thought), ANSWER, *encode(said), IM_END]
    seen = listen(in_blocks(ids, sizes), thinking, asking(thinking))
    assert (seen.said, seen.thought, seen.ids) == (said.lstrip("\n"), thought.lstrip("\n"), tuple(ids))


@settings(max_examples=300, deadline=None)
@given(soup=SOUP, sizes=SIZES, stops=st.sampled_from([(), ("STOP",), ("a", "b ")]), thinks=st.booleans())
def test_nonsense_in_any_blocks(
    channels: TextTools, thinking: TextTools, soup: list[int], sizes: list[int], stops: tuple[str, ...], thinks: bool
) -> None:
    """Marks in any order, halves of characters, stop strings: the same as token by token, and no control token in the text."""
    text = thinking if thinks else channels
    ids, request = [*soup, IM_END], asking(text)
    seen = listen(in_blocks(ids, sizes), text, request, stops)
    assert seen == listen(in_blocks(ids, [1]), text, request, stops)
    for word in ("<|", "\ufffd", "im_start", "endoftext"):
        assert word not in seen.said + seen.thought


def test_a_control_token_ends_a_channels_name(channels: TextTools) -> None:
    """As in `<|channel|>final<|constrain|>json<|message|>`."""
    ids = [CHANNEL, *b"final", 256, *b"json", MESSAGE, *b"{}", IM_END]
    for size in range(1, BLOCK + 1):
        seen = listen(in_blocks(ids, [size]), channels, asking(channels))
        assert (seen.said, seen.thought) == ("{}", "")


def test_what_is_longer_than_a_header_is_shown_at_once(channels: TextTools) -> None:
    generation = Generation(asking(channels), TextStream(channels.tokenizer), None, lambda: None, lambda g: None, Metrics())
    generation.on_event(TokenEvent(1, tuple(b"not a header"), started=True))
    held = generation.take()
    generation.on_event(TokenEvent(1, tuple(b", but text")))
    shown = generation.take()
    assert held is not None
    assert shown is not None
    assert (held.text, shown.text) == ("", "not a header, but text")


# ---- the faults, put in


class PerStep(Generation):
    """Gives all text of a step to the channel in which the step ends."""

    def _add_tokens(self, event: TokenEvent) -> tuple[int, bool]:
        result = super()._add_tokens(event)
        count, channel = len(event.token_ids), self._text.channel
        parts = self._piece.parts
        parts[len(parts) - count :] = [Part(part.text, part.drafter, channel) for part in parts[len(parts) - count :]]
        return result


class LastOfStep(Generation):
    """Shows no more than the last token of a step."""

    def _add_tokens(self, event: TokenEvent) -> tuple[int, bool]:
        result = super()._add_tokens(event)
        parts = self._piece.parts
        for index in range(len(parts) - len(event.token_ids), len(parts) - 1):
            parts[index] = parts[index]._replace(text="")
        return result


@pytest.mark.parametrize("fault", [PerStep, LastOfStep])
def test_the_faults_are_caught(channels: TextTools, fault: type[Generation]) -> None:
    encode = channels.tokenizer.encode
    ids = [CHANNEL, *encode("analysis"), MESSAGE, *encode("thinking"), END, START, *encode("assistant")]
    ids += [CHANNEL, *encode("final"), MESSAGE, *encode("the answer"), IM_END]
    caught = set()
    for size in range(1, BLOCK + 1):
        right = listen(in_blocks(ids, [size]), channels, asking(channels))
        wrong = listen(in_blocks(ids, [size]), channels, asking(channels), kind=fault)
        assert (right.said, right.thought) == ("the answer", "thinking")
        if (wrong.said, wrong.thought) != (right.said, right.thought):
            caught.add(size)
    assert 1 not in caught  # the fault does not show where a step is one token
    assert {7, 8, BLOCK} <= caught
