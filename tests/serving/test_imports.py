"""The server process is light: it imports no torch, no transformers and no engine, so that it starts at once and stays small."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "transformers", "triton", "numpy", "llguidance", "opentelemetry", "kernels", "drafters", "spec.engine")
PROGRAM = f"""
import sys
import server.serve, server.engine_process, server.engine_main
print([name for name in {HEAVY!r} if name in sys.modules])
"""


def test_server_process_imports_nothing_heavy() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
