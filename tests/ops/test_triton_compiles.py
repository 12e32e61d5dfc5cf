"""Every Triton kernel compiles for a real GPU, also where there is none: the interpreter accepts more than the compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_kernel_compiles_for_sm_90() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'support'}"
    script = ROOT / "tests" / "support" / "compile_triton.py"
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = {line.split()[0] for line in done.stdout.splitlines()}
    defined = {
        line.removeprefix("def ").split("(")[0]
        for path in (ROOT / "kernels").rglob("triton.py")
        for line in path.read_text().splitlines()
        if line.startswith("def _") and line.split("(")[0].endswith("_kernel")
    }
    assert compiled == defined
