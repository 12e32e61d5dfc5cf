"""The chat page as tests use it: by what a person reads and presses, plus the frames its socket carried."""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import BrowserContext, ConsoleMessage, Locator, Page, WebSocket, expect

WATCH_POLICY = """
addEventListener("securitypolicyviolation", (event) => console.error(`policy: ${event.violatedDirective} ${event.blockedURI}`));
"""


class ChatPage:
    """One tab. `complaints` are the console's warnings and errors, and exceptions nobody caught."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.url = url
        self.page: Page = context.new_page()
        self.complaints: list[str] = []
        self.sent: list[dict[str, Any]] = []
        self.received: list[dict[str, Any]] = []
        self.page.add_init_script(WATCH_POLICY)
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("websocket", self._on_socket)

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _on_socket(self, socket: WebSocket) -> None:
        socket.on("framesent", lambda frame: self.sent.append(json.loads(frame)))
        socket.on("framereceived", lambda frame: self.received.append(json.loads(frame)))

    def open(self) -> None:
        self.page.goto(self.url)
        expect(self.link).to_have_text("connected")

    # ---- what is on the page

    @property
    def link(self) -> Locator:
        return self.page.get_by_role("status", name="Connection")

    @property
    def box(self) -> Locator:
        return self.page.get_by_role("textbox", name="Message")

    @property
    def log(self) -> Locator:
        return self.page.get_by_role("log", name="Conversation")

    @property
    def answer(self) -> Locator:
        """The newest answer."""
        return self.log.get_by_role("article", name="Model").last

    @property
    def body(self) -> Locator:
        return self.answer.locator(".body")

    @property
    def foot(self) -> Locator:
        return self.answer.locator(".foot")

    @property
    def note(self) -> Locator:
        return self.page.locator("#note")

    def button(self, name: str, **options: Any) -> Locator:
        return self.page.get_by_role("button", name=name, **options)

    def text(self) -> str:
        """The newest answer as the page has it."""
        return self.body.text_content() or ""

    # ---- what is done

    def send(self, text: str) -> None:
        self.box.fill(text)
        self.box.press("Enter")

    def ask(self, text: str) -> str:
        """Send and wait for the whole answer."""
        self.send(text)
        return self.wait_answer()

    def wait_answer(self) -> str:
        expect(self.button("Stop")).to_be_hidden()
        expect(self.foot.get_by_role("button", name="Copy")).to_be_visible()
        return self.text()

    def wait_words(self, count: int) -> None:
        """Until the newest answer has grown to `count` words."""
        self.page.wait_for_function(
            "count => [...document.querySelectorAll('.message.assistant .body')].at(-1)?.textContent.split(' ').length > count",
            arg=count,
        )

    def set_up(self, **fields: Any) -> None:
        """Fill in the settings dialog by the labels' first words and save it."""
        self.button("Settings").click()
        dialog = self.page.get_by_role("dialog", name="Settings")
        for label, value in fields.items():
            field = dialog.get_by_label(label.replace("_", " "))
            kind = field.evaluate("node => node.type")
            if kind == "checkbox":
                field.set_checked(value)
            elif kind == "select-one":
                field.select_option(value)
            else:
                field.fill(str(value))
        dialog.get_by_role("button", name="Save").click()
        expect(dialog).to_be_hidden()

    def chats(self) -> list[dict[str, Any]]:
        return [message for message in self.sent if message["type"] == "chat"]
