"""What a drafter does about its own trouble: an empty answer, one log line, and silence after a few. Knows counts; refuses to know
what failed. A drafter's trouble costs speed, never correctness.
"""

from __future__ import annotations

import logging

MAX_FAULTS = 3

log = logging.getLogger(__name__)


class Faults:
    """Faults of one drafter. Call `note` inside an except block."""

    __slots__ = ("_count", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._count = 0

    @property
    def given_up(self) -> bool:
        return self._count >= MAX_FAULTS

    def note(self) -> None:
        self._count += 1
        log.exception("%s failed (%d of %d) and drafts nothing", self._what, self._count, MAX_FAULTS)
