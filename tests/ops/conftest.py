"""Counts what the tests of this folder launch and says so in the last lines."""

from __future__ import annotations

import pytest
from triton_launches import LAUNCHES, report


@pytest.fixture(scope="session", autouse=True)
def _count_launches() -> None:
    LAUNCHES.start()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    report(terminalreporter.write_line)
