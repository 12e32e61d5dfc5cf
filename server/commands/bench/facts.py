"""What a figure must say of itself: the commit, the arguments, the versions, the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("forespeak", "torch", "transformers", "websockets", "httpx")


def facts() -> dict[str, Any]:
    """Keys commit, argv, versions, machine."""
    return {"commit": commit(), "argv": sys.argv[1:], "versions": versions(), "machine": machine()}


def commit() -> str:
    """The short commit of this checkout with "+" when files differ from it; empty outside a checkout."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """The processor, the cores this process may use, memory, and how busy the machine was (load average of a minute)."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _line("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(_kib("MemTotal") / 2**20, 1),
        "load": round(os.getloadavg()[0], 2),
    }


def _kib(name: str) -> int:
    words = _line("/proc/meminfo", name).split()
    return int(words[0]) if words else 0


def _line(path: str, name: str) -> str:
    """The value of the first line `name: value`; empty when there is none."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith(name)), "")
