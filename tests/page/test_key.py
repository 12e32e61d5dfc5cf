"""A server that asks for an API key: the browser's own dialog for the page's files, the page's for the socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chat_page import ChatPage
from playwright.sync_api import Browser, expect
from serving import Running, running, toy_settings, toy_text

from server.limits import Limits
from server.serve import ServeOptions

KEY = "a-key-for-tests"


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("locked")
    (folder / "keys.txt").write_text(f"me:{KEY}\n")
    settings = toy_settings("step_ms=10", api_key_file=str(folder / "keys.txt"))
    patient = ServeOptions(limits=Limits(auth_seconds=300))  # nobody learns from its patience's end that a key is needed
    with running(settings, toy_text(folder / "tokenizer"), patient) as run:
        yield run


def opened(browser: Browser, server: Running) -> ChatPage:
    """The page behind the browser's own question for name and password."""
    context = browser.new_context(http_credentials={"username": "any", "password": KEY})
    chat = ChatPage(context, server.url)
    chat.page.goto(server.url)
    return chat


def test_page_asks_for_the_key(browser: Browser, locked: Running) -> None:
    chat = opened(browser, locked)
    dialog = chat.page.get_by_role("dialog", name="Settings")
    key = dialog.get_by_label("API key")
    expect(chat.note).to_contain_text("This server needs an API key.")  # at once, not when the server's patience ends
    expect(key).to_be_focused()
    key.fill("a-wrong-key")
    key.press("Enter")
    expect(chat.note).to_contain_text("This API key was refused.")
    expect(chat.link).to_have_text("refused")
    key.fill(KEY)
    key.press("Enter")
    expect(dialog).to_be_hidden()
    expect(chat.link).to_have_text("connected")
    expect(chat.note).to_be_hidden()
    chat.set_up(Longest=8)
    assert len(chat.ask("Hello")) >= 6

    assert KEY not in chat.page.url
    assert KEY not in chat.page.evaluate("() => JSON.stringify(localStorage)")
    chat.page.reload()  # the tab knows it
    expect(chat.link).to_have_text("connected")
    expect(dialog).to_be_hidden()
    assert chat.complaints == []
    chat.page.context.close()


def test_running_answer_survives_until_the_key_is_there(browser: Browser, locked: Running) -> None:
    """A tab that was restored without its key can fetch the answer once it is given."""
    chat = opened(browser, locked)
    chat.page.evaluate("(key) => sessionStorage.setItem('forespeak.key', key)", KEY)
    chat.page.reload()
    expect(chat.link).to_have_text("connected")
    chat.set_up(Longest=300, Temperature=0)
    chat.send("Hello")
    chat.wait_words(3)
    chat.page.evaluate("() => sessionStorage.clear()")
    chat.page.reload()
    expect(chat.note).to_contain_text("needs an API key")
    key = chat.page.get_by_role("dialog").get_by_label("API key")
    key.fill(KEY)
    key.press("Enter")
    expect(chat.foot).to_contain_text("300 tokens")
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 300, "temperature": 0}
    headers = {"authorization": f"Bearer {KEY}"}
    expected = locked.http.post("/v1/chat/completions", json=body, headers=headers).json()
    assert chat.text() == expected["choices"][0]["message"]["content"]
    chat.page.context.close()


def test_asking_without_a_key_can_be_repaired(browser: Browser, locked: Running) -> None:
    chat = opened(browser, locked)
    expect(chat.note).to_contain_text("needs an API key")
    chat.page.keyboard.press("Escape")
    chat.send("Hello")
    expect(chat.foot.locator(".problem")).to_have_text("this server needs an API key")
    chat.note.get_by_role("button", name="Enter key").click()
    key = chat.page.get_by_role("dialog").get_by_label("API key")
    expect(key).to_be_focused()
    key.fill(KEY)
    key.press("Enter")
    expect(chat.link).to_have_text("connected")
    chat.set_up(Longest=8)
    chat.button("Retry this message").click()
    assert len(chat.wait_answer()) >= 6
    expect(chat.log.get_by_role("article")).to_have_count(2)
    chat.page.context.close()
