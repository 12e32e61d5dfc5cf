"""The page in mid-answer with the default model, when its file is here.

SCREENSHOTS=docs/images ./dev test tests/page/test_screenshots.py writes the pictures of the documentation anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from chat_page import ChatPage
from playwright.sync_api import Browser, expect
from serving import Running, running

from server.settings import DEFAULT_MODEL, Settings

CACHE = Path.home() / ".cache" / "forespeak"
QUESTION = "Write a Python class Stack with push, pop, peek, is_empty and size, then show how to use it."
SECONDS = 240.0  # a start that compiles the kernels first
WORDS = 140  # far enough for text that repeats itself
SHOTS = {
    "page-answer": {"viewport": {"width": 1100, "height": 720}, "color_scheme": "light"},
    "page-dark": {"viewport": {"width": 1100, "height": 720}, "color_scheme": "dark"},
    "page-phone": {
        "viewport": {"width": 360, "height": 740},
        "color_scheme": "light",
        "device_scale_factor": 2,
        "has_touch": True,
    },
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def default_model() -> Iterator[Running]:
    if not list((CACHE / "models" / DEFAULT_MODEL).glob("*.gguf")):
        pytest.skip(f"the default model is not in {CACHE}; `forespeak pull` fetches it")
    with running(Settings(port=0, drain_seconds=1.0), ready=False) as run:
        run.wait_ready(SECONDS)
        yield run


@pytest.mark.parametrize("name", SHOTS)
def test_mid_answer(browser: Browser, default_model: Running, tmp_path: Path, name: str) -> None:
    context = browser.new_context(**SHOTS[name])  # type: ignore[arg-type]
    context.set_default_timeout(60_000)
    chat = ChatPage(context, default_model.url)
    chat.open()
    chat.set_up(Longest=400, Temperature=0)
    chat.send(QUESTION)
    chat.wait_words(WORDS)
    folder = Path(os.environ.get("SCREENSHOTS") or tmp_path)
    picture = chat.page.screenshot(path=folder / f"{name}.png", animations="disabled")
    assert picture.startswith(b"\x89PNG")
    expect(chat.button("Stop")).to_be_visible()  # it was indeed in mid-answer
    expect(chat.body).to_contain_text("class Stack")
    assert chat.body.locator(".draft").count() > 0
    chat.page.keyboard.press("Escape")
    expect(chat.foot).to_contain_text("stopped")
    assert chat.complaints == []
    context.close()
