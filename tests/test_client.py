"""server.client against a real server: chat, cancel, going on over a broken line, refusals."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Running, running, toy_settings, toy_text, wait_for
from wire_cutter import WireCutter, wire_cutter
from words import words_settings

from server.client import Answer, Client, ClientError
from server.limits import Limits
from server.serve import ServeOptions

ROOT = Path(__file__).resolve().parents[1]
HELLO = [{"role": "user", "content": "Hello"}]
OPTIONS: dict[str, Any] = {"temperature": 1, "seed": 4, "max_tokens": 400}
ENDLESS = OPTIONS | {"max_tokens": 12_000}
KEY = "a-key-for-tests"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(words_settings(tmp_path_factory.mktemp("words"), tree_shape="chain:4")) as run:
        yield run


@pytest.fixture(scope="module")
def expected(server: Running) -> str:
    return over_http(server, **OPTIONS)


@pytest.fixture
def wire(server: Running) -> Iterator[WireCutter]:
    with wire_cutter(server.port) as made:
        yield made


def over_http(server: Running, **options: Any) -> str:
    answer: str = server.http.post("/v1/chat/completions", json={"messages": HELLO, **options}).json()["choices"][0]["message"][
        "content"
    ]
    return answer


def run(body: Callable[[], Awaitable[None]], seconds: float = 60) -> None:
    async def limited() -> None:
        async with asyncio.timeout(seconds):
            await body()

    asyncio.run(limited())


class States:
    """What a client says of its connection, to wait for."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self._changed = asyncio.Event()

    def __call__(self, state: str, why: str) -> None:
        self.seen.append((state, why))
        self._changed.set()

    async def until(self, state: str, count: int = 1) -> None:
        while [seen for seen, _ in self.seen].count(state) < count:
            self._changed.clear()
            await self._changed.wait()


async def collect(answer: Answer, into: list[dict[str, Any]]) -> None:
    async for delta in answer:
        into.append(delta)


async def until_words(answer: Answer, deltas: list[dict[str, Any]], count: int) -> None:
    async for delta in answer:
        deltas.append(delta)
        if answer.text.count(" ") >= count:
            return


def test_chat(server: Running, expected: str) -> None:
    async def body() -> None:
        async with Client(server.ws_url) as client:
            assert client.hello["model"] == "words"
            answer = await client.chat(HELLO, **OPTIONS)
            deltas: list[dict[str, Any]] = []
            await collect(answer, deltas)
            done = await answer.result()
            assert "".join(delta["text"] for delta in deltas) == answer.text == expected
            assert [delta["seq"] for delta in deltas] == list(range(1, len(deltas) + 1))
            assert done["finish_reason"] == "length"
            assert done["usage"]["completion_tokens"] == 400
            assert done["speculation"]["accepted"] == sum(delta["accepted"] for delta in deltas) > 0
            assert answer.started is not None
            assert answer.started["prompt_tokens"] == done["usage"]["prompt_tokens"]

    run(body)


def test_many_at_once(server: Running) -> None:
    async def body() -> None:
        async with Client(server.ws_url) as client:
            answers = [await client.chat(HELLO, temperature=1, seed=seed, max_tokens=30) for seed in range(8)]
            texts = await asyncio.gather(*(answer.read() for answer in answers))
        assert texts == [over_http(server, temperature=1, seed=seed, max_tokens=30) for seed in range(8)]

    run(body)


def test_cancel(server: Running) -> None:
    async def body() -> None:
        async with Client(server.ws_url) as client:
            answer = await client.chat(HELLO, **ENDLESS)
            await until_words(answer, [], 5)
            await answer.cancel()
            await answer.cancel()  # once is enough
            done = await answer.result()
            assert done["finish_reason"] == "cancelled"
            assert done["usage"]["completion_tokens"] < 12_000
            assert await (await client.chat(HELLO, max_tokens=4)).read()
            await answer.cancel()  # it is over

    run(body)
    wait_for(lambda: server.server.num_running == 0)


def test_errors_of_the_server(server: Running) -> None:
    async def body() -> None:
        async with Client(server.ws_url) as client:
            answer = await client.chat(HELLO, temperature=9)
            with pytest.raises(ClientError, match="temperature is 9") as caught:
                await collect(answer, [])
            assert (caught.value.code, caught.value.param) == ("invalid_value", "temperature")
            with pytest.raises(ClientError, match="takes 1048576") as caught:
                await (await client.chat([{"role": "user", "content": "x" * 2**21}])).read()
            assert caught.value.code == "message_too_big"
            with pytest.raises(ClientError) as caught:
                await (await client.resume("resp_none", 3)).read()
            assert caught.value.code == "unknown_response"
            assert await (await client.chat(HELLO, max_tokens=4)).read()  # none of them cost the connection

    run(body)


def test_goes_on_after_every_cut(server: Running, wire: WireCutter, expected: str) -> None:
    async def body() -> None:
        states = States()
        async with Client(wire.ws_url, on_state=states) as client:
            answer = await client.chat(HELLO, **OPTIONS)
            deltas: list[dict[str, Any]] = []
            for words in (5, 20, 40):
                await until_words(answer, deltas, words)
                wire.cut()
            await collect(answer, deltas)
            assert "".join(delta["text"] for delta in deltas) == answer.text == expected
            assert [delta["seq"] for delta in deltas] == list(range(1, len(deltas) + 1))
            assert [state for state, _ in states.seen].count("open") >= 2

    run(body)


def test_asked_while_the_line_is_down(wire: WireCutter, expected: str) -> None:
    async def body() -> None:
        states = States()
        async with Client(wire.ws_url, on_state=states) as client:
            running = await client.chat(HELLO, **ENDLESS)
            await until_words(running, [], 3)
            wire.cut(refuse=True)
            await states.until("lost")
            answer = await client.chat(HELLO, **OPTIONS)
            never = await client.chat(HELLO, **ENDLESS)
            await never.cancel()
            assert (await never.result())["finish_reason"] == "cancelled"  # nobody was asked
            await running.cancel()  # the server hears of it later
            wire.mend()
            assert await answer.read() == expected
            assert (await running.result())["finish_reason"] == "cancelled"

    run(body)


def test_answers_do_not_wait_for_ever(wire: WireCutter) -> None:
    async def body() -> None:
        async with Client(wire.ws_url, patience=0.0) as client:
            answer = await client.chat(HELLO, **ENDLESS)
            await until_words(answer, [], 3)
            wire.cut(refuse=True)
            with pytest.raises(ClientError, match="did not come back") as caught:
                await answer.read()
            assert caught.value.code == "disconnected"
            wire.mend()
            assert await (await client.chat(HELLO, max_tokens=4)).read()  # the client itself never gave up
            assert answer.response_id is not None
            again = await client.resume(answer.response_id, answer.seq)  # nor has the server
            await again.cancel()
            assert (await again.result())["finish_reason"] == "cancelled"

    run(body)


def test_another_client_takes_an_answer_over(server: Running, expected: str) -> None:
    async def body() -> None:
        async with Client(server.ws_url) as first, Client(server.ws_url) as second:
            answer = await first.chat(HELLO, **OPTIONS)
            deltas: list[dict[str, Any]] = []
            await until_words(answer, deltas, 5)
            assert answer.response_id is not None
            taken = await second.resume(answer.response_id, deltas[-1]["seq"])
            before = "".join(delta["text"] for delta in deltas)
            assert before + await taken.read() == expected
            with pytest.raises(ClientError) as caught:
                await answer.result()
            assert caught.value.code == "resumed_elsewhere"

    run(body)


def test_leaving_ends_what_still_runs(server: Running) -> None:
    async def body() -> None:
        async with Client(server.ws_url) as client:
            answer = await client.chat(HELLO, **ENDLESS | {"resumable": False})
            await until_words(answer, [], 3)
        with pytest.raises(ClientError) as caught:
            await collect(answer, [])
        assert caught.value.code == "closed"
        with pytest.raises(ClientError):
            await client.chat(HELLO)

    run(body)
    wait_for(lambda: server.server.num_running == 0)


def test_snapshot_when_too_much_was_lost(tmp_path: Path) -> None:
    options = ServeOptions(limits=Limits(ring_frames=4))
    with running(toy_settings("step_ms=2"), toy_text(tmp_path), options) as server, wire_cutter(server.port) as wire:
        expected = over_http(server, **OPTIONS)

        async def body() -> None:
            async with Client(wire.ws_url) as client:
                answer = await client.chat(HELLO, **OPTIONS)
                deltas: list[dict[str, Any]] = []
                await until_words(answer, deltas, 2)
                wire.silence()
                total = "forespeak:generation_tokens_total"
                await asyncio.to_thread(wait_for, lambda: server.metric(total) == 2 * OPTIONS["max_tokens"])
                wire.cut()
                await collect(answer, deltas)
                assert answer.text == expected
                assert [delta["type"] for delta in deltas].count("snapshot") == 1

        run(body)


def test_keys(tmp_path: Path) -> None:
    (tmp_path / "keys.txt").write_text(f"{KEY}\n")
    settings = toy_settings(api_key_file=str(tmp_path / "keys.txt"))
    with running(settings, toy_text(tmp_path / "tokenizer")) as server:

        async def body() -> None:
            async with Client(server.ws_url, KEY) as client:
                assert await (await client.chat(HELLO, max_tokens=4)).read()
            for key, why in ((None, "it needs an API key"), ("a-wrong-key", "this API key is not known")):
                with pytest.raises(ClientError, match=why) as caught:
                    await Client(server.ws_url, key).__aenter__()
                assert caught.value.code == "refused"

        run(body, seconds=8)  # less than the server's patience with a client that says nothing


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("ws://127.0.0.1:9/v1/ws", "unreachable"),
        ("http://127.0.0.1:9/v1/ws", "bad_url"),
        ("nonsense", "bad_url"),
        ("ws://[::1/v1/ws", "bad_url"),
        ("ws://127.0.0.1:99999/v1/ws", "bad_url"),
    ],
)
def test_nobody_there(url: str, code: str) -> None:
    async def body() -> None:
        with pytest.raises(ClientError) as caught:
            await Client(url).__aenter__()
        assert caught.value.code == code
        assert url in str(caught.value)

    run(body)


def test_wrong_path(server: Running) -> None:
    async def body() -> None:
        with pytest.raises(ClientError) as caught:
            await Client(server.ws_url + "x").__aenter__()
        assert caught.value.code == "refused"

    run(body)


def test_server_goes_away_and_comes_back(tmp_path: Path) -> None:
    """Drained with close code 1012: the client tries again and finds the next server at the same address."""
    text = toy_text(tmp_path)
    with running(toy_settings(), text) as server, wire_cutter(server.port) as wire:

        async def body() -> None:
            states = States()
            async with Client(wire.ws_url, on_state=states) as client:
                assert await (await client.chat(HELLO, max_tokens=4)).read()
                server.stop()
                await states.until("lost")
                assert ("lost", "the server is shutting down") in states.seen
                assert [notice["code"] for notice in client.notices] == ["draining"]
                with running(toy_settings(), text) as successor:
                    wire.point_to(successor.port)
                    assert await (await client.chat(HELLO, max_tokens=4)).read()

        run(body)


def test_example(server: Running) -> None:
    command = [sys.executable, str(ROOT / "docs/examples/ask.py"), "One", "Two", "--url", server.ws_url, "--max-tokens", "40"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=True)
    for question in ("One", "Two"):
        assert f"[{question}] has begun" in ran.stdout
        assert re.search(rf"{question}\nshores shores .*\n\(length, \d+ of 40 tokens were drafted\)", ran.stdout)
