"""What the log holds: one line per answer with figures, no words of anybody, unless asked."""

from __future__ import annotations

import json
import logging

import pytest
from serving import Running, running, toy_settings

from server.logs import JsonFormatter, PlainFormatter, event
from server.ports import TextTools

SECRET = "a-secret-nobody-should-read"


def ask(server: Running) -> str:
    body = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 5}
    return str(server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize("asked", [False, True])
def test_prompts_are_logged_only_when_asked(text: TextTools, caplog: pytest.LogCaptureFixture, asked: bool) -> None:
    with caplog.at_level(logging.INFO), running(toy_settings(log_prompts=asked), text) as server:
        ask(server)
        server.http.post("/v1/chat/completions", content="{bad " + SECRET)
        server.http.post("/v1/chat/completions", json={"messages": [{"role": SECRET, "content": SECRET}]})
    answers = [record for record in caplog.records if record.message == "answer"]
    assert [record.__dict__["fields"]["tokens"] for record in answers] == [5]
    written = "\n".join(PlainFormatter().format(record) for record in caplog.records)
    assert (SECRET in written) is asked


def test_formats() -> None:
    logger = logging.getLogger("test_formats")
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    event(logger, "answer", tokens=3, reason="stop")
    line = json.loads(JsonFormatter().format(records[0]))
    assert (line["message"], line["tokens"], line["reason"], line["level"]) == ("answer", 3, "stop", "info")
    assert PlainFormatter().format(records[0]).endswith("answer tokens=3 reason=stop")
