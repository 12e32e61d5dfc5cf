"""Talking to the model through the page: streaming, stopping, several turns, editing, retrying, what is drawn of speculation."""

from __future__ import annotations

import re
from typing import Any

from chat_page import ChatPage
from playwright.sync_api import BrowserContext, expect
from serving import Running

LONG = 12_000  # tokens: nobody waits for the end


def over_http(server: Running, text: str, **options: Any) -> str:
    """What the model says without page and socket."""
    body = {"messages": [{"role": "user", "content": text}], **options}
    answer: str = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    return answer


def test_answer_streams(chat: ChatPage, server: Running) -> None:
    chat.set_up(Longest=60, Temperature=1, Seed=7)
    said = chat.ask("Hello")
    assert said == over_http(server, "Hello", max_tokens=60, temperature=1, seed=7)
    assert len([m for m in chat.received if m["type"] == "delta"]) > 5  # it came bit by bit
    expect(chat.foot).to_contain_text("60 tokens · ")
    expect(chat.foot).to_contain_text("cut at the length limit")
    expect(chat.page.locator("#announce")).to_have_text(said.strip())  # once, for screen readers
    expect(chat.box).to_be_focused()


def test_stop_button(chat: ChatPage) -> None:
    chat.set_up(Longest=LONG)
    chat.send("Hello")
    chat.wait_words(10)
    expect(chat.answer).to_have_attribute("aria-busy", "true")
    expect(chat.foot.get_by_role("button")).to_have_count(0)  # nothing to copy or retry yet
    expect(chat.button("Edit this message")).to_be_hidden()
    expect(chat.button("Send")).to_be_hidden()
    chat.button("Stop").click()
    said = chat.wait_answer()
    expect(chat.foot).to_contain_text("stopped")
    expect(chat.button("Send")).to_be_visible()
    expect(chat.box).to_be_focused()
    assert chat.received[-1]["finish_reason"] == "cancelled"
    assert said == "".join(m["text"] for m in chat.received if m["type"] == "delta")


def test_several_turns(chat: ChatPage) -> None:
    chat.set_up(Longest=20, Temperature=0)
    first, second = chat.ask("One"), chat.ask("Two")
    third = chat.ask("Three")
    texts = [m["content"] for m in chat.chats()[-1]["messages"]]
    assert texts == ["One", first, "Two", second, "Three"]
    assert [m["role"] for m in chat.chats()[-1]["messages"]] == ["user", "assistant"] * 2 + ["user"]
    expect(chat.log.get_by_role("article")).to_have_count(6)
    assert third.startswith("shores shores")
    expect(chat.page.get_by_role("list").get_by_role("button", name="One", exact=True)).to_have_attribute(
        "aria-current", "true"
    )


def test_tint_and_figures(chat: ChatPage) -> None:
    chat.set_up(Longest=200, Temperature=1, Seed=3)
    speed, length = chat.page.get_by_label("tokens a second"), chat.page.get_by_label("tokens a pass", exact=True)
    expect(length).to_have_text("–")
    chat.send("Hello")
    chat.page.wait_for_function("() => parseFloat(document.querySelector('#length').value) > 1")
    expect(chat.button("Stop")).to_be_visible()  # the figures are live
    said = chat.wait_answer()
    drafts = chat.body.locator(".draft.d0")
    accepted = chat.received[-1]["speculation"]["accepted"]
    assert 0 < drafts.count() <= accepted
    expect(drafts.first).to_have_attribute("title", "drafted by suffix")
    assert len("".join(drafts.all_text_contents())) < len(said)  # some of it is the model's own
    expect(length).to_have_text(f"{chat.received[-1]['speculation']['acceptance_length']:.2f}")
    expect(speed).to_have_text(re.compile(r"^\d+$"))
    assert chat.page.locator("#strip").evaluate(
        "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((v) => v > 0)"
    )

    background = "node => getComputedStyle(node).backgroundColor"
    tint = chat.page.get_by_role("checkbox", name="Show accepted drafts")
    expect(tint).to_be_checked()
    assert drafts.first.evaluate(background) != "rgba(0, 0, 0, 0)"
    expect(chat.page.locator("#legend").get_by_text("suffix")).to_be_visible()
    tint.uncheck()
    assert drafts.first.evaluate(background) == "rgba(0, 0, 0, 0)"
    expect(chat.page.locator("#legend").get_by_text("suffix")).to_be_hidden()
    assert chat.text() == said
    chat.page.reload()
    expect(tint).not_to_be_checked()
    assert chat.body.locator(".draft").count() == drafts.count() > 0


def test_speculation_off_and_paced(chat: ChatPage) -> None:
    """The same seed gives the same text with and without drafts, and spread out in time."""
    chat.set_up(Longest=80, Temperature=1, Seed=5, Drafting="off")
    plain = chat.ask("Hello")
    assert chat.chats()[-1]["speculation"]["mode"] == "off"
    assert chat.received[-1]["speculation"]["drafted"] == 0
    assert chat.body.locator(".draft").count() == 0
    chat.set_up(Drafting="auto", Most=4, Smooth=True)
    chat.button("New conversation").click()
    assert chat.ask("Hello") == plain
    request = chat.chats()[-1]
    assert request["speculation"] == {"mode": "auto", "rule": "exact", "max_nodes": 4}
    assert request["pace"] is True
    assert chat.body.locator(".draft").count() > 0


def test_figures_count_passes_not_deltas(chat: ChatPage) -> None:
    """Deltas of a slow reader hold several passes, deltas of smooth streaming a part of one."""
    tally = chat.page.evaluate("""async () => {
        const { Tally } = await import("/meter.js");
        const tally = new Tally();
        const deltas = [[1, 0], [4, 3], [1, 1], [1, 1], [1, 0], [6, 4], [2, 2], [3, 2]];
        deltas.forEach(([tokens, accepted], i) => tally.add({ tokens, accepted }, 100 * i));
        return { passes: tally.passes, length: tally.length, speed: tally.speed };
    }""")
    assert tally["passes"] == [[1, 0], [4, 3], [3, 2], [3, 2], [3, 2], [5, 4]]
    assert tally["length"] == 19 / 6
    assert round(tally["speed"], 3) == round(18 / 0.7, 3)


def test_system_prompt_and_cleared_settings(chat: ChatPage) -> None:
    chat.set_up(System="Speak of the sea.", Longest=8, Temperature=0, Top_k=3)
    chat.ask("Hello")
    request = chat.chats()[-1]
    assert request["messages"][0] == {"role": "system", "content": "Speak of the sea."}
    assert (request["max_tokens"], request["temperature"], request["top_k"]) == (8, 0, 3)
    chat.set_up(System="", Top_k="")
    chat.ask("Again")
    assert [m["role"] for m in chat.chats()[-1]["messages"]] == ["user", "assistant", "user"]
    assert "top_k" not in chat.chats()[-1]


def test_edit(chat: ChatPage) -> None:
    chat.set_up(Longest=12, Temperature=0)
    chat.ask("One")
    chat.ask("Two")
    chat.button("Edit this message").first.click()
    expect(chat.box).to_have_value("One")
    expect(chat.box).to_be_focused()
    expect(chat.note).to_contain_text("Editing an earlier message")
    chat.page.keyboard.press("Escape")  # nothing was lost
    expect(chat.box).to_have_value("")
    expect(chat.note).to_be_hidden()
    expect(chat.log.get_by_role("article")).to_have_count(4)
    chat.button("Edit this message").first.click()
    chat.ask("Uno")
    assert [m["content"] for m in chat.chats()[-1]["messages"]] == ["Uno"]
    expect(chat.log.get_by_role("article")).to_have_count(2)
    expect(chat.note).to_be_hidden()


def test_retry_and_copy(chat: ChatPage, context: BrowserContext) -> None:
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    chat.set_up(Longest=40, Temperature=1)
    said = {chat.ask("Hello")}
    for _ in range(5):  # seeds are drawn anew
        chat.button("Retry this message").click()
        said.add(chat.wait_answer())
    assert len(said) > 1
    assert [m["content"] for m in chat.chats()[-1]["messages"]] == ["Hello"]
    expect(chat.log.get_by_role("article")).to_have_count(2)
    copy = chat.foot.get_by_role("button", name="Copy this message")
    copy.click()
    expect(copy).to_have_text("Copied")
    assert chat.page.evaluate("navigator.clipboard.readText()") == chat.text()


def test_error_is_shown_and_can_be_retried(chat: ChatPage) -> None:
    """Settings the page would not let anybody write, as an older version could have kept them."""
    chat.page.evaluate("localStorage.setItem('forespeak.settings', JSON.stringify({temperature: 9, max_tokens: 10}))")
    chat.page.reload()
    chat.send("Hello")
    problem = "temperature is 9.0; it must be between 0 and 2"
    expect(chat.foot.locator(".problem")).to_have_text(problem)
    expect(chat.page.get_by_role("alert")).to_have_text(problem)
    chat.set_up(Temperature=0)
    chat.button("Retry this message").click()
    assert chat.wait_answer().startswith("shores")
    expect(chat.foot.locator(".problem")).to_have_count(0)


def test_settings_out_of_range_cannot_be_saved(chat: ChatPage) -> None:
    chat.button("Settings").click()
    dialog = chat.page.get_by_role("dialog", name="Settings")
    field = dialog.get_by_label("Temperature")
    field.fill("3")
    field.press("Enter")
    expect(dialog).to_be_visible()
    assert field.evaluate("node => node.matches(':invalid')")
    dialog.get_by_role("button", name="Cancel").click()
    expect(dialog).to_be_hidden()
    chat.set_up(Longest=4)
    chat.ask("Hello")
    assert "temperature" not in chat.chats()[-1]


def test_hostile_text_stays_text(chat: ChatPage) -> None:
    chat.set_up(Longest=4)
    text = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    chat.ask(text)
    assert chat.log.locator("img, script").count() == 0
    expect(chat.log.get_by_role("article", name="You").locator(".body")).to_have_text(text)


def test_other_conversation_while_one_is_answered(chat: ChatPage) -> None:
    chat.set_up(Longest=LONG)
    chat.send("Long")
    chat.wait_words(5)
    chat.button("New conversation").click()
    expect(chat.button("Send")).to_be_visible()
    chat.set_up(Longest=8, Temperature=0)
    assert chat.ask("Short").startswith("shores")
    chat.page.get_by_role("list").get_by_role("button", name="Long").first.click()
    words = chat.text().count(" ")
    chat.wait_words(words + 5)  # it went on meanwhile and goes on here
    chat.button("Stop").click()
    expect(chat.foot).to_contain_text("stopped")
