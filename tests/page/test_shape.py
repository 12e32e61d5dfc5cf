"""What the page is like for hands, eyes and ears: keyboard, names and roles, narrow and wide windows, both themes, its policy."""

from __future__ import annotations

import re
from itertools import combinations

import pytest
from chat_page import ChatPage
from playwright.sync_api import Browser, BrowserContext, Locator, expect
from serving import Running

NO_BREAK = "supercalifragilistic" * 12
LEAST_CONTRAST = 4.5  # WCAG 2.2, level AA, text of normal size


def test_keyboard_only(chat: ChatPage) -> None:
    """Every step without a mouse: settings, a message of two lines, stopping, the list, tinting, deleting."""
    page, press = chat.page, chat.page.keyboard.press

    def tab_to(target: Locator, key: str = "Tab") -> None:
        for _ in range(40):
            if target.evaluate("node => node === document.activeElement"):
                return
            press(key)
        raise AssertionError(f"{target} cannot be reached with {key}")

    expect(chat.box).to_be_focused()
    tab_to(chat.button("Settings"), "Shift+Tab")
    press("Enter")
    dialog = page.get_by_role("dialog", name="Settings")
    tab_to(dialog.get_by_label("Longest answer"))
    page.keyboard.type("12000")
    press("Enter")
    expect(dialog).to_be_hidden()
    expect(chat.button("Settings")).to_be_focused()

    tab_to(chat.box)
    page.keyboard.type("first line")
    press("Shift+Enter")
    page.keyboard.type("second line")
    press("Enter")
    chat.wait_words(5)
    assert chat.chats()[-1]["messages"][-1]["content"] == "first line\nsecond line"
    press("Enter")  # an empty box sends nothing
    press("Escape")
    expect(chat.foot).to_contain_text("stopped")
    expect(chat.box).to_be_focused()
    assert len(chat.chats()) == 1

    page.keyboard.type("again")
    press("Enter")
    chat.wait_words(5)
    tab_to(chat.button("Stop"))
    press("Space")
    expect(chat.foot).to_contain_text("stopped")
    expect(chat.box).to_be_focused()

    tab_to(page.get_by_role("checkbox", name="Show accepted drafts"), "Shift+Tab")
    press("Space")
    expect(page.get_by_role("checkbox", name="Show accepted drafts")).not_to_be_checked()
    tab_to(chat.button("New conversation").first, "Shift+Tab")
    press("Enter")
    expect(chat.box).to_be_focused()
    expect(chat.log.get_by_role("article")).to_have_count(0)
    tab_to(chat.button("first line second line", exact=True), "Shift+Tab")
    press("Enter")
    expect(chat.log.get_by_role("article")).to_have_count(4)
    tab_to(chat.button("Delete first line second line"), "Shift+Tab")
    press("Enter")
    tab_to(chat.button("Undo"))
    press("Enter")
    expect(chat.log.get_by_role("article")).to_have_count(4)


def test_the_log_scrolls_by_key(chat: ChatPage) -> None:
    chat.set_up(Longest=60)
    chat.ask("\n".join("line" for _ in range(60)))
    end = chat.log.evaluate("node => node.scrollTop")
    assert end > 0  # it followed the text
    chat.log.focus()
    chat.page.keyboard.press("Home")
    chat.page.wait_for_function("() => document.querySelector('#log').scrollTop === 0")


def test_names_and_roles(chat: ChatPage) -> None:
    chat.set_up(Longest=30, Temperature=0)
    chat.ask("Hello")
    page = chat.page
    expect(page.get_by_role("heading", level=1)).to_contain_text("Forespeak")
    expect(page.get_by_role("complementary", name="Conversations")).to_be_visible()
    expect(page.get_by_role("group", name="Speculation")).to_be_visible()
    expect(page.get_by_role("img", name="Tokens each of the last passes brought")).to_be_visible()
    expect(chat.log).to_have_attribute("aria-live", "off")  # a stream of fragments is not for reading out
    expect(page.locator("html")).to_have_attribute("lang", "en")
    expect(page.get_by_role("link", name="Skip to the message box")).to_have_count(1)
    chat.button("Settings").click()
    nameless = page.evaluate("""() => [...document.querySelectorAll('button, input, textarea, select, canvas, output')].filter((node) =>
        !(node.getAttribute('aria-label') || node.labels?.length && node.labels[0].textContent.trim() || node.textContent.trim())
    ).map((node) => node.outerHTML)""")
    assert nameless == []
    twice = page.evaluate("""() => {
        const ids = [...document.querySelectorAll('[id]')].map((node) => node.id);
        return ids.filter((id, i) => ids.indexOf(id) !== i);
    }""")
    assert twice == []


@pytest.mark.parametrize("width", [360, 768, 1920])
def test_no_sideways_scrolling(browser: Browser, server: Running, width: int) -> None:
    context = browser.new_context(viewport={"width": width, "height": 640}, has_touch=width == 360)
    chat = ChatPage(context, server.url)
    chat.open()
    chat.set_up(Longest=60, Temperature=1)
    chat.ask(NO_BREAK)
    chat.button("Edit this message").click()  # the note is there too
    fits = "() => document.documentElement.scrollWidth <= innerWidth && document.body.scrollWidth <= innerWidth"
    wide = """() => [...document.querySelectorAll('#main *')].filter((node) => node.getBoundingClientRect().right > innerWidth + 1)
        .map((node) => node.outerHTML)"""
    assert chat.page.evaluate(fits)
    assert chat.page.evaluate(wide) == []
    log = chat.log.evaluate("node => node.scrollWidth <= node.clientWidth")
    assert log
    chat.button("Settings").click()
    dialog = chat.page.get_by_role("dialog")
    assert dialog.evaluate("node => node.scrollWidth <= node.clientWidth && node.getBoundingClientRect().width <= innerWidth")
    expect(dialog.get_by_role("button", name="Save")).to_be_in_viewport()
    assert chat.complaints == []
    context.close()


def test_drawer_on_narrow_screens(browser: Browser, server: Running) -> None:
    context = browser.new_context(viewport={"width": 360, "height": 640})
    chat = ChatPage(context, server.url)
    chat.open()
    chat.set_up(Longest=4)
    chat.ask("Hello")
    drawer = chat.page.get_by_role("complementary", name="Conversations")
    opener = chat.button("Conversations", exact=True)
    expect(drawer).to_be_hidden()
    opener.click()
    expect(drawer).to_be_visible()
    expect(chat.button("Close the list")).to_be_focused()
    expect(opener).to_have_attribute("aria-expanded", "true")
    assert chat.page.locator("#main").evaluate("node => node.inert")  # Tab stays in the drawer
    chat.page.keyboard.press("Escape")
    expect(drawer).to_be_hidden()
    expect(opener).to_be_focused()
    opener.click()
    drawer.get_by_role("button", name="New conversation").first.click()
    expect(drawer).to_be_hidden()
    expect(chat.box).to_be_focused()
    context.close()


def luminance(colour: str) -> float:
    """Of rgb(...), by WCAG's formula."""
    channels = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


PAIRS = [("--text", f"--{b}") for b in ("bg", "panel", "user", "note", "d0", "d1", "d2", "d3", "d4")]
PAIRS += [("--muted", "--bg"), ("--muted", "--panel"), ("--muted", "--user"), ("--error", "--bg"), ("--on-accent", "--accent")]
COLOUR = """(name) => {
    const probe = document.createElement('i');
    probe.className = 'probe';
    document.body.append(probe);
    probe.style.setProperty('color', `var(${name})`);
    const colour = getComputedStyle(probe).color;
    probe.remove();
    return colour;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_themes(browser: Browser, server: Running, scheme: str) -> None:
    context = browser.new_context(color_scheme=scheme)  # type: ignore[arg-type]
    chat = ChatPage(context, server.url)
    chat.open()
    colours = {name: chat.page.evaluate(COLOUR, name) for pair in PAIRS for name in pair}
    assert (luminance(colours["--bg"]) > 0.5) is (scheme == "light")
    assert chat.page.evaluate("() => getComputedStyle(document.body).backgroundColor") == colours["--bg"]
    weak = {pair: contrast(colours[pair[0]], colours[pair[1]]) for pair in PAIRS}
    assert {pair: value for pair, value in weak.items() if value < LEAST_CONTRAST} == {}
    drafts = [colours[f"--d{i}"] for i in range(5)]
    assert all(one != other for one, other in combinations(drafts, 2))
    context.close()


def test_strip_is_sharp_on_dense_screens(browser: Browser, server: Running) -> None:
    context = browser.new_context(device_scale_factor=3)
    chat = ChatPage(context, server.url)
    chat.open()
    chat.page.wait_for_function("() => { const c = document.querySelector('#strip'); return c.width === 3 * c.clientWidth; }")
    context.close()


def test_policy_lets_nothing_foreign_in(chat: ChatPage) -> None:
    """No script from markup, no other host. The watched page reports what its policy stopped."""
    chat.page.evaluate("""() => {
        const script = document.createElement('script');
        script.textContent = 'window.injected = true';
        document.body.append(script);
    }""")
    refused = chat.page.evaluate("() => fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')")
    assert refused == "refused"
    assert chat.page.evaluate("() => window.injected") is None
    stopped = " ".join(chat.complaints)
    assert "script-src-elem" in stopped
    assert "connect-src" in stopped
    chat.complaints.clear()


def test_everything_comes_from_the_server(context: BrowserContext, server: Running) -> None:
    chat = ChatPage(context, server.url)
    urls: list[str] = []
    chat.page.on("request", lambda request: urls.append(request.url))
    chat.open()
    assert len(urls) >= 8
    assert all(url.startswith(server.url) for url in urls)
