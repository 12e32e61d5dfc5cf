"""/forespeak.js as other people's pages use it: on a blank page, through a line that breaks, and from another origin."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect
from serving import Running, running, toy_settings, toy_text, wait_for
from wire_cutter import WireCutter, wire_cutter

from server.limits import Limits
from server.serve import ServeOptions

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
OPTIONS = {"temperature": 1, "seed": 4, "max_tokens": 500}
HELLO = [{"role": "user", "content": "Hello"}]

# What follows runs in the page: `client`, and `collect(answer)` that takes an answer to its end.
PRELUDE = """async (options) => {
  const { connect, ForespeakError } = await import("/forespeak.js");
  window.ForespeakError = ForespeakError;
  window.states = [];
  window.client = connect(options);
  client.addEventListener("state", ({ detail }) => states.push(detail));
  window.collect = async (answer) => {
    const result = { text: "", deltas: [], error: null, done: null };
    try {
      for await (const delta of answer) {
        result.text = delta.replace ? delta.text : result.text + delta.text;
        result.deltas.push(delta);
      }
      result.done = await answer.done;
    } catch (error) {
      result.error = { code: error.code, message: error.message, param: error.param, typed: error instanceof ForespeakError };
    }
    return result;
  };
}"""


@pytest.fixture(scope="module")
def expected(server: Running) -> str:
    body = {"messages": HELLO, **OPTIONS}
    answer: str = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    return answer


@pytest.fixture
def wire(server: Running) -> Iterator[WireCutter]:
    with wire_cutter(server.port) as made:
        yield made


def blank(context: BrowserContext, url: str, **options: Any) -> Page:
    """A page with nothing of ours on it but the module."""
    page = context.new_page()
    page.goto(url + "/health")
    page.evaluate(PRELUDE, options)
    return page


def start(page: Page, **options: Any) -> None:
    """Ask, and collect in the background."""
    request = {"messages": HELLO, **OPTIONS, **options}
    page.evaluate("(request) => { window.answer = client.chat(request); window.result = collect(answer); }", request)


def result(page: Page) -> dict[str, Any]:
    found: dict[str, Any] = page.evaluate("() => result")
    return found


def wait_words(page: Page, count: int) -> None:
    page.wait_for_function("(count) => answer.text.split(' ').length > count", arg=count)


def test_chat(context: BrowserContext, server: Running, expected: str) -> None:
    page = blank(context, server.url)
    start(page)
    got = result(page)
    assert got["text"] == expected == page.evaluate("() => answer.text")
    assert got["done"]["finish_reason"] == "length"
    assert got["done"]["usage"]["completion_tokens"] == 500
    assert got["done"]["speculation"]["accepted"] == sum(delta["accepted"] for delta in got["deltas"]) > 0
    assert [delta["seq"] for delta in got["deltas"]] == list(range(1, len(got["deltas"]) + 1))
    for delta in got["deltas"]:
        assert "".join(text for text, _ in delta.get("pieces", [[delta["text"], ""]])) == delta["text"]
    assert page.evaluate("() => client.hello.model") == "words"
    assert [s["state"] for s in page.evaluate("() => states")][-1] == "open"


def test_many_at_once(context: BrowserContext, server: Running) -> None:
    page = blank(context, server.url)
    got = page.evaluate(
        """(messages) => Promise.all([...Array(6).keys()].map((seed) =>
          collect(client.chat({ messages, seed, temperature: 1, max_tokens: 40 }))))""",
        HELLO,
    )
    for seed, one in enumerate(got):
        body = {"messages": HELLO, "seed": seed, "temperature": 1, "max_tokens": 40}
        assert one["text"] == server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("how", ["cancel", "signal"])
def test_cancel(context: BrowserContext, server: Running, expected: str, how: str) -> None:
    page = blank(context, server.url)
    page.evaluate(
        """(request) => {
          window.controller = new AbortController();
          window.answer = client.chat(request, { signal: controller.signal });
          window.result = collect(answer);
        }""",
        {"messages": HELLO, **OPTIONS, "max_tokens": 12_000},
    )
    wait_words(page, 5)
    page.evaluate("() => answer.cancel()" if how == "cancel" else "() => controller.abort()")
    got = result(page)
    assert got["done"]["finish_reason"] == "cancelled"
    assert got["done"]["usage"]["completion_tokens"] < 12_000
    assert got["text"].startswith(expected[:20])


def test_errors(context: BrowserContext, server: Running) -> None:
    page = blank(context, server.url)
    got = page.evaluate("(messages) => collect(client.chat({ messages, temperature: 9 }))", HELLO)
    error = got["error"]
    assert error.pop("message").startswith("temperature is 9")
    assert error == {"code": "invalid_value", "param": "temperature", "typed": True}
    got = page.evaluate("() => collect(client.chat({ messages: [{ role: 'user', content: 'x'.repeat(2 << 20) }] }))")
    assert got["error"]["code"] == "message_too_big"  # never sent: the server would have closed the socket
    got = page.evaluate("() => collect(client.resume('resp_none', 3))")
    assert got["error"]["code"] == "unknown_response"
    assert [s["state"] for s in page.evaluate("() => states")] == ["open"]
    got = page.evaluate("() => { const answer = client.chat({ messages: [] }); client.close(); return collect(answer); }")
    assert got["error"]["code"] == "closed"
    got = page.evaluate("() => collect(client.chat({ messages: [] }))")
    assert got["error"]["code"] == "closed"


def test_resumes_after_a_cut(context: BrowserContext, wire: WireCutter, expected: str) -> None:
    page = blank(context, wire.url)
    start(page)
    for words in (5, 25):
        wait_words(page, words)
        wire.cut()
        page.wait_for_function("(count) => states.filter((s) => s.state === 'open').length >= count", arg=2 + (words == 25))
    got = result(page)
    assert got["text"] == expected
    seqs = [delta["seq"] for delta in got["deltas"]]
    assert seqs == list(range(1, len(seqs) + 1))  # nothing lost, nothing twice


def test_backs_off_and_asks_again(context: BrowserContext, wire: WireCutter, expected: str) -> None:
    """What was asked while there is no server begins when there is one; attempts come at growing distances."""
    page = blank(context, wire.url)
    page.wait_for_function("() => client.state === 'open'")
    wire.cut(refuse=True)
    page.wait_for_function("() => states.filter((s) => s.retryInMs).length >= 3")
    pauses = [s["retryInMs"] for s in page.evaluate("() => states") if s.get("retryInMs")]
    for attempt, pause in enumerate(pauses):
        assert 0.5 <= pause / (250 * 2**attempt) <= 1.5
    start(page)
    never = page.evaluate("(messages) => { const a = client.chat({ messages }); a.cancel(); return collect(a); }", HELLO)
    assert never["done"]["finish_reason"] == "cancelled"
    wire.mend()
    page.evaluate("() => client.reconnect()")
    assert result(page)["text"] == expected


def test_cancelled_while_the_line_is_down(context: BrowserContext, wire: WireCutter) -> None:
    page = blank(context, wire.url)
    start(page, max_tokens=12_000)
    wait_words(page, 5)
    wire.cut(refuse=True)
    page.wait_for_function("() => client.state === 'closed'")
    page.evaluate("() => answer.cancel()")
    wire.mend()
    page.evaluate("() => client.reconnect()")
    assert result(page)["done"]["finish_reason"] == "cancelled"


def test_silent_line_is_given_up(context: BrowserContext, wire: WireCutter, expected: str) -> None:
    """A dead connection that nobody closed, as after a change of networks."""
    page = blank(context, wire.url, heartbeatMs=500)
    start(page)
    wait_words(page, 5)
    wire.silence()
    assert result(page)["text"] == expected
    assert "the server does not answer" in [s.get("reason") for s in page.evaluate("() => states")]


def test_snapshot_when_too_much_was_lost(context: BrowserContext, tmp_path: Path) -> None:
    """More frames went into a dead line than the server keeps: the whole text comes again."""
    options = ServeOptions(limits=Limits(ring_frames=4))
    with running(toy_settings("step_ms=2"), toy_text(tmp_path), options) as server, wire_cutter(server.port) as wire:
        body = {"messages": HELLO, **OPTIONS, "max_tokens": 400}
        expected = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        page = blank(context, wire.url)
        start(page, max_tokens=400)
        wait_words(page, 2)
        wire.silence()
        wait_for(lambda: server.metric("forespeak:generation_tokens_total") == 800)
        wire.cut()
        got = result(page)
        assert got["text"] == expected == page.evaluate("() => answer.text")
        assert [delta["replace"] for delta in got["deltas"] if "replace" in delta] == [True]


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """The examples folder on an origin of its own, as the example says to serve it."""
    handler = functools.partial(QuietHandler, directory=str(EXAMPLES))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as web:
        thread = threading.Thread(target=web.serve_forever)
        thread.start()
        yield f"http://localhost:{web.server_port}"
        web.shutdown()
        thread.join()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


def test_example_page_on_another_origin(context: BrowserContext, elsewhere: str, tmp_path: Path) -> None:
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    with running(toy_settings(allowed_origins=(elsewhere,)), toy_text(tmp_path)) as server:
        page.goto(f"{elsewhere}/page.html?server={server.url}")
        state = page.get_by_role("status")
        expect(state).to_have_text("connected to toy")
        page.get_by_role("textbox", name="Message").fill("Hello")
        page.keyboard.press("Enter")
        expect(state).to_contain_text("300 tokens, ")
        assert page.locator("mark").count() > 0
        assert complaints == []


def test_origins_not_listed_are_refused(context: BrowserContext, elsewhere: str, server: Running) -> None:
    page = context.new_page()
    page.goto(f"{elsewhere}/page.html?server={server.url}")
    got = page.evaluate(
        """(url) => new Promise((resolve) => {
          const socket = new WebSocket(url);
          socket.onclose = (event) => resolve([event.code, event.reason]);
        })""",
        server.ws_url,
    )
    assert got == [1008, "this Origin may not use this server"]
