"""Words for the watch over the engine process: its states, its limits, who is told. Plain data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any


class EngineState(Enum):
    LOADING = "loading"  # the first process has not said Ready yet
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"  # given up
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Seconds and counts of the watch over the engine process."""

    ping_seconds: float = 0.5
    doubt_seconds: float = 2.0  # no answer to a ping for this long = not ready for more work
    silence_seconds: float = 3.5  # ... for this long = hung, to be replaced
    loading_silence_seconds: float = 60.0  # a loading process may hold its interpreter for long
    load_seconds: float = 900.0
    step_seconds: float = 300.0  # one step may not take longer, even while pings are answered
    crashes_per_request: int = 3
    failed_loads: int = 3  # in a row, then the client gives up
    backoff_seconds: float = 0.25  # doubled after every failed load
    probation_tokens: int = 8  # a twice-crashed request must deliver these before the next such request joins it


@dataclass(slots=True)
class Hooks:
    """Called on the event loop. None of them may block."""

    on_state: Callable[[EngineState, str], None] = lambda state, message: None
    on_stats: Callable[[dict[str, Any]], None] = lambda values: None
    on_step: Callable[[Sequence[float]], None] = lambda phases: None
