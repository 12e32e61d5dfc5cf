"""How the C++ library is built, once. Knows compilers, flags and the cache folder; refuses to know what the kernels compute.

The result lies under ``~/.cache/forespeak/kernels/<digest>/``, where the digest covers the sources, the compiler's version, the
flags and the CPU's features, so a change of any of them builds anew and anything else costs nothing.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_CACHE = Path.home() / ".cache" / "forespeak" / "kernels"
LIBRARY = "libforespeak.so"

COMMON = (
    "-std=c++20",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Wno-uninitialized",
)
GCC_ONLY = ("-Wno-maybe-uninitialized",)
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mpopcnt")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
X86 = {"avx2": _AVX2, "avx512": _AVX512, "amx": (*_AVX512, "-mgfni", "-mamx-tile", "-mamx-int8")}  # ascending
ARM = {"neon": ("-DFS_NEON",), "dotprod": ("-DFS_NEON", "-march=armv8.2-a+dotprod")}
SETS = {"x86_64": X86, "amd64": X86, "aarch64": ARM, "arm64": ARM}  # vector sets by the machine's name as systems spell it


class BuildError(RuntimeError):
    """The compiler refused the sources; the message holds its output."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One translation unit: a source, its own flags and its object's name."""

    source: str
    name: str
    flags: tuple[str, ...] = ()


def find_compiler() -> str | None:
    """The first of the usual C++ compilers on PATH, or None."""
    for name in ("g++", "clang++", "c++"):
        path = shutil.which(name)
        if path is not None:
            return path
    return None


def units(machine: str) -> list[Unit]:
    """Everything to compile for a machine of that name. The portable set is always there; x86 and ARM get their vector sets besides."""
    wide = SETS.get(machine.lower(), {})
    have = tuple(f"-DFS_HAVE_{name.upper()}" for name in wide)
    isa = [Unit("kernels/native/isa.cpp", f"isa_{name}", ("-O3", f"-DFS_ISA={name}", *flags)) for name, flags in wide.items()]
    # The linker keeps the first copy of a function that several objects hold (templates of the standard library), so the objects
    # that need the least come first: no machine is given a copy made for a better one.
    return [
        Unit("kernels/native/entry.cpp", "entry", ("-O2", *have)),
        Unit("kernels/native/pack.cpp", "pack", ("-O3",)),
        Unit("kernels/native/team.cpp", "team", ("-O2",)),
        Unit("kernels/suffix_index/native.cpp", "suffix_index", ("-O2",)),
        Unit("kernels/draft_tree/native.cpp", "draft_tree", ("-O2",)),
        Unit("kernels/native/isa.cpp", "isa_portable", ("-O2", "-DFS_ISA=portable")),
        *isa,
    ]


def sources() -> list[Path]:
    """All files the library is made of, in a fixed order."""
    kernels = ROOT / "kernels"
    return sorted([*kernels.rglob("*.cpp"), *kernels.rglob("*.h")])


def cpu_features() -> str:
    """The CPU's feature list as the system tells it; the machine's name where it does not."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return " ".join(sorted(line.split(":", 1)[1].split()))
    return platform.machine()


def digest(compiler: str, machine: str) -> str:
    """Name of the build: changes with sources, compiler, flags and CPU."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    state = hashlib.sha256()
    for path in sources():
        state.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    state.update("\0".join((version, cpu_features(), repr(COMMON), repr(units(machine)))).encode())
    return state.hexdigest()[:16]


def compile_all(compiler: str, machine: str, folder: Path) -> Path:
    """Compiles and links in `folder`; returns the library. Raises BuildError with the compiler's own words."""
    is_gcc = "clang" not in subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout.lower()
    flags = [*COMMON, *(GCC_ONLY if is_gcc else ()), f"-I{ROOT}", f"-I{ROOT / 'kernels/native/include'}"]
    running = []
    for unit in units(machine):
        command = [compiler, *flags, *unit.flags, "-c", str(ROOT / unit.source), "-o", str(folder / f"{unit.name}.o")]
        running.append((unit, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)))
    failures = []
    for unit, process in running:
        output, _ = process.communicate()
        if process.returncode != 0:
            failures.append(f"{unit.source} ({unit.name}):\n{output}")
    if failures:
        raise BuildError("\n".join(failures))
    library = folder / LIBRARY
    objects = [str(folder / f"{unit.name}.o") for unit in units(machine)]
    link = subprocess.run(
        [compiler, "-shared", "-pthread", *objects, "-o", str(library)], capture_output=True, text=True, check=False
    )
    if link.returncode != 0:
        raise BuildError(link.stderr)
    return library


def build(cache: Path = DEFAULT_CACHE, compiler: str | None = None, machine: str | None = None) -> tuple[Path | None, str]:
    """The library's path (None without a compiler) and one plain line about what happened.

    For this machine and with its own compiler unless the caller names both (a cross compiler and what it compiles for).

    Safe to run in several processes at once: each builds in a folder of its own and renames the result into place.
    Raises BuildError when the compiler refuses the sources.
    """
    compiler = compiler or find_compiler()
    machine = machine or platform.machine()
    if compiler is None:
        return None, "native kernels: no C++ compiler found (g++ or clang++); the slower torch reference will be used"
    target = cache / digest(compiler, machine) / LIBRARY
    if target.exists():
        return target, f"native kernels: ready ({target.parent.name})"
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        os.replace(compile_all(compiler, machine, Path(folder)), target)
    return target, f"native kernels: built ({target.parent.name})"
