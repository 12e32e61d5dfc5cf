"""What outlives a reload, a lost line and a closed conversation."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from chat_page import ChatPage
from playwright.sync_api import BrowserContext, WebSocketRoute, expect
from serving import Running, running, toy_settings, toy_text
from wire_cutter import wire_cutter

LONG = 2_400  # tokens: some seconds, so that a second tab opens in mid-answer
OPTIONS = {"max_tokens": LONG, "temperature": 1, "seed": 11}


@pytest.fixture(scope="module")
def undisturbed(server: Running) -> str:
    """What the model says to OPTIONS when nobody interferes."""
    body = {"messages": [{"role": "user", "content": "Hello"}], **OPTIONS}
    answer: str = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    return answer


def start_long(chat: ChatPage) -> None:
    """An answer to OPTIONS, well begun."""
    chat.set_up(Longest=LONG, Temperature=1, Seed=11)
    chat.send("Hello")
    chat.wait_words(20)
    expect(chat.button("Stop")).to_be_visible()


def resumes(chat: ChatPage) -> list[dict[str, Any]]:
    return [message for message in chat.sent if message["type"] == "resume"]


def test_reload_in_mid_answer(chat: ChatPage, undisturbed: str) -> None:
    start_long(chat)
    chat.page.reload()
    before = chat.text()
    assert undisturbed.startswith(before)
    assert 0 < len(before) < len(undisturbed)
    assert chat.wait_answer() == undisturbed
    [resume] = resumes(chat)
    assert resume["after_seq"] > 0  # only what was missing came again
    expect(chat.foot).to_contain_text(f"{LONG} tokens")
    chat.page.reload()
    assert chat.text() == undisturbed
    assert len(resumes(chat)) == 1  # it is over


def test_reload_before_the_first_word(context: BrowserContext, server: Running, undisturbed: str) -> None:
    """All that the page knows by then is the answer's id."""
    held = True

    def hold_deltas(line: WebSocketRoute) -> None:
        far = line.connect_to_server()
        far.on_message(lambda frame: None if held and '"type":"delta"' in str(frame) else line.send(frame))

    chat = ChatPage(context, server.url)
    chat.page.route_web_socket("**/v1/ws", hold_deltas)
    chat.open()
    chat.set_up(Longest=LONG, Temperature=1, Seed=11)
    chat.send("Hello")
    chat.page.wait_for_function("() => Object.values(localStorage).some((text) => text.includes('pending'))")
    held = False
    chat.page.reload()
    assert chat.wait_answer() == undisturbed


def test_left_before_the_answer_began(context: BrowserContext, server: Running) -> None:
    chat = ChatPage(context, server.url)
    chat.page.route_web_socket("**/v1/ws", lambda line: None)  # nobody is there
    chat.page.goto(server.url)
    chat.send("Hello")
    chat.page.wait_for_function("() => Object.values(localStorage).some((text) => text.includes('Hello'))")
    chat.page.reload()
    expect(chat.foot.locator(".problem")).to_have_text("The page was left before this answer began.")
    expect(chat.button("Retry this message")).to_be_visible()


def test_line_cut_in_mid_answer(context: BrowserContext, server: Running, undisturbed: str) -> None:
    with wire_cutter(server.port) as wire:
        chat = ChatPage(context, wire.url)
        chat.open()
        start_long(chat)
        wire.cut(refuse=True)
        expect(chat.note).to_contain_text("The connection is lost, trying again. Running answers will go on.")
        expect(chat.link).to_have_text(re.compile("reconnecting|connecting"))
        wire.mend()
        chat.note.get_by_role("button", name="Try now").click()
        assert chat.wait_answer() == undisturbed
        expect(chat.note).to_be_hidden()
        expect(chat.link).to_have_text("connected")
        assert len(resumes(chat)) == 1
        assert all("ERR_" in complaint for complaint in chat.complaints)  # what Chromium says of a failed connection


def test_conversations_are_kept_and_deleted(chat: ChatPage) -> None:
    conversations = chat.page.get_by_role("complementary", name="Conversations")
    chat.set_up(Longest=8, Temperature=0)
    said = chat.ask("First")
    chat.button("New conversation").first.click()
    chat.ask("Second")
    chat.page.reload()
    expect(conversations.get_by_role("listitem")).to_have_text([re.compile("^Second"), re.compile("^First")])
    conversations.get_by_role("button", name="First", exact=True).click()
    expect(chat.body).to_have_text(said)

    conversations.get_by_role("button", name="Delete First").click()
    expect(conversations.get_by_role("listitem")).to_have_count(1)
    expect(chat.log.get_by_role("article").first.locator(".body")).to_have_text("Second")
    chat.note.get_by_role("button", name="Undo").click()
    expect(chat.body).to_have_text(said)
    conversations.get_by_role("button", name="Delete First").click()
    conversations.get_by_role("button", name="Delete Second").click()
    chat.page.reload()
    expect(chat.log).to_contain_text("Ask something")
    expect(conversations.get_by_role("listitem")).to_have_count(1)
    expect(conversations).to_contain_text("New conversation")


def test_deleting_stops_the_answer(chat: ChatPage) -> None:
    chat.set_up(Longest=12_000)
    chat.send("Hello")
    chat.wait_words(5)
    chat.button("Delete Hello").click()
    chat.set_up(Longest=4)
    chat.ask("Next")
    ends = [m for m in chat.received if m["type"] == "done"]
    assert [m["finish_reason"] for m in ends] == ["cancelled", "length"]


def test_two_tabs(chat: ChatPage, context: BrowserContext, server: Running) -> None:
    """Neither overwrites the other's conversations, and both see what happens."""
    chat.set_up(Longest=8, Temperature=0)
    other = ChatPage(context, server.url)
    other.open()
    chat.ask("Here")
    expect(other.button("Here", exact=True)).to_be_visible()
    other.page.reload()  # the settings of the first tab
    other.button("New conversation").first.click()
    other.ask("There")
    expect(chat.button("There", exact=True)).to_be_visible()
    chat.page.reload()
    names = chat.page.get_by_role("list").get_by_role("button", name=re.compile("ere$")).filter(has_not_text="✕")
    expect(names).to_have_text(["There", "Here"])
    chat.button("There", exact=True).click()
    expect(chat.body).to_have_text(other.text())
    assert other.complaints == []


def test_second_tab_takes_a_running_answer_over(
    chat: ChatPage, context: BrowserContext, server: Running, undisturbed: str
) -> None:
    start_long(chat)
    other = ChatPage(context, server.url)
    other.open()
    expect(chat.note).to_contain_text("goes on in another tab")
    assert other.wait_answer() == undisturbed
    expect(chat.body).to_have_text(undisturbed.strip())  # told through storage
    expect(chat.foot).to_contain_text(f"{LONG} tokens")


def test_broken_storage_starts_empty(chat: ChatPage) -> None:
    broken = {"forespeak.conversation.x": "{", "forespeak.conversation.y": json.dumps({"id": 5}), "forespeak.settings": "[1,"}
    chat.page.evaluate("(items) => Object.entries(items).forEach(([k, v]) => localStorage.setItem(k, v))", broken)
    chat.page.reload()
    chat.set_up(Longest=4)
    chat.ask("Hello")


def test_full_storage(chat: ChatPage) -> None:
    """The oldest conversations make room."""
    fill = """() => {
      const messages = [{ role: 'user', content: 'x'.repeat(500_000) }];
      for (let i = 0; i < 3; i++)
        localStorage.setItem(`forespeak.conversation.${i}`, JSON.stringify({ id: `${i}`, title: `Old ${i}`, updated: i, messages }));
      for (let size = 1 << 22, n = 0; size; n++) {
        try { localStorage.setItem(`rest${n}`, 'x'.repeat(size)); } catch { size >>= 1; }
      }
    }"""
    chat.page.evaluate(fill)
    chat.page.reload()
    chat.button("New conversation").first.click()
    chat.set_up(Longest=4)
    chat.ask("Hello")
    chat.page.reload()
    expect(chat.button("Hello", exact=True)).to_be_visible()
    expect(chat.button("Old 2", exact=True)).to_be_visible()
    expect(chat.button("Old 0", exact=True)).to_have_count(0)


def test_engine_killed_in_mid_answer(context: BrowserContext, tmp_path: Path) -> None:
    """The page tells of the pause, and the answer goes on."""
    with running(toy_settings("step_ms=10"), toy_text(tmp_path)) as server:
        body = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 300}
        expected = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        chat = ChatPage(context, server.url)
        chat.open()
        chat.set_up(Longest=300, Temperature=0)
        chat.send("Hello")
        chat.wait_words(3)
        os.kill(server.engine_pid(), signal.SIGKILL)
        expect(chat.note).to_contain_text("the engine is being restarted")
        assert chat.wait_answer() == expected
        expect(chat.note).to_be_hidden()
        assert chat.complaints == []


def test_page_before_the_model_is_loaded(context: BrowserContext, tmp_path: Path) -> None:
    with running(toy_settings("load_ms=4000"), toy_text(tmp_path), ready=False) as server:
        chat = ChatPage(context, server.url)
        chat.open()
        if server.http.get("/ready").status_code != 200:
            expect(chat.note).to_contain_text("The model is still loading.")
        server.wait_ready()
        expect(chat.note).to_be_hidden()
        chat.set_up(Longest=8)
        chat.ask("Hello")
        assert chat.complaints == []
