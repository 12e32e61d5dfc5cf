"""Tool calls in chat completions' JSON. One reader per choice; knows the parser's events and OpenAI's fields only."""

from __future__ import annotations

from typing import Any

from server.tool_events import CallArguments, CallStart, Text, ToolEvent
from server.tool_parser import reader_for
from server.tools import Tools


class CallReader:
    """Turns text into message deltas, and keeps the whole: `content` and `calls` are complete after `finish`."""

    def __init__(self, tools: Tools) -> None:
        self.content = ""
        self.calls: list[dict[str, Any]] = []
        self._parser = reader_for(tools.format, tools.parallel)

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Deltas {"content"} or {"tool_calls"} of new text."""
        return [self._delta(event) for event in self._parser.feed(text) if self._speaks(event)]

    def finish(self) -> list[dict[str, Any]]:
        return [self._delta(event) for event in self._parser.finish() if self._speaks(event)]

    def reason(self, finish_reason: str) -> str:
        """`stop` after a call is `tool_calls`."""
        return "tool_calls" if self.calls and finish_reason == "stop" else finish_reason

    def message(self) -> dict[str, Any]:
        """Content and calls of the whole message."""
        if not self.calls:
            return {"content": self.content}
        return {"content": self.content or None, "tool_calls": self.calls}

    @staticmethod
    def _speaks(event: ToolEvent) -> bool:
        return isinstance(event, Text | CallStart | CallArguments)

    def _delta(self, event: ToolEvent) -> dict[str, Any]:
        if isinstance(event, Text):
            self.content += event.text
            return {"content": event.text}
        if isinstance(event, CallStart):
            self.calls.append({"id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}})
            call = {"id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}}
            return {"tool_calls": [{"index": event.index, **call}]}
        assert isinstance(event, CallArguments)
        self.calls[event.index]["function"]["arguments"] += event.text
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
