"""Conversations kept for previous_response_id: newest first, bounded by what they weigh."""

from __future__ import annotations

from typing import Any

from server.histories import Histories


def said(text: str, arguments: str = "") -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": arguments}}}
    return [{"role": "user", "content": text}, {"role": "assistant", "content": "", "tool_calls": [call]}]


def test_the_oldest_go_and_keys_are_apart() -> None:
    kept = Histories(2, 10_000)
    for name in ("1", "2", "3"):
        kept.put("key", name, said(name))
    assert kept.get("key", "1") is None
    assert kept.get("key", "3") == said("3")
    assert kept.get("other", "3") is None


def test_arguments_of_calls_weigh_too() -> None:
    kept = Histories(100, 10_000)
    for number in range(20):
        kept.put("key", str(number), said("x", "y" * 3000))
    assert len(kept) == 3
    kept.put("key", "huge", said("x", "y" * 20_000))
    assert kept.get("key", "huge") is None
