"""A real server over the tiny model of words, and pages in headless Chromium that must end without a complaint of the browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from chat_page import ChatPage
from playwright.sync_api import Browser, BrowserContext, expect, sync_playwright
from serving import Running, running
from words import words_settings

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SECONDS = 20  # the most a test waits for one thing, on a machine that does others too
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs a browser."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.browser)
            if CHROMIUM is None:
                item.add_marker(
                    pytest.mark.skip(reason="no Chromium on the PATH; install Debian's chromium to run the page's tests")
                )


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    # A fixed shape: whether drafts pay on a model this small is a matter of how busy the machine is.
    with running(words_settings(tmp_path_factory.mktemp("words"), tree_shape="chain:4")) as run:
        yield run


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # Not for the whole session: while it lives, no other test of this thread can run an event loop.
    expect.set_options(timeout=SECONDS * 1000)
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield made
        made.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    made = browser.new_context(viewport={"width": 1000, "height": 700})
    made.set_default_timeout(SECONDS * 1000)
    yield made
    made.close()


@pytest.fixture
def chat(server: Running, context: BrowserContext) -> Iterator[ChatPage]:
    """The page, open and connected. A console message of a warning or an error fails the test."""
    page = ChatPage(context, server.url)
    page.open()
    yield page
    assert page.complaints == []
