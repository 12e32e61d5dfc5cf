"""The instruction sets as sources: every machine's list is whole, and every set of lanes has the same operations. Compiles nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kernels.native.toolchain import ROOT, units

NATIVE = ROOT / "kernels/native"
LANES = sorted((NATIVE / "include").glob("lanes_*.h"))
FUNCTION = re.compile(r"^inline (?:__attribute__\(\(always_inline\)\) )?(\w+) (\w+)\((.*?)\) \{", re.MULTILINE)
OWN_HELPERS = {"from_bits", "half_to_float"}  # of the portable set

SETS = {
    "x86_64": ["portable", "avx2", "avx512", "amx"],
    "AMD64": ["portable", "avx2", "avx512", "amx"],
    "aarch64": ["portable", "neon", "dotprod"],
    "arm64": ["portable", "neon", "dotprod"],
    "riscv64": ["portable"],
}


def operations(header: Path) -> set[str]:
    """Each function with the types it takes and gives, names of parameters left out."""
    found = FUNCTION.findall(header.read_text())
    types = [(result, name, re.sub(r" ?\w+(?=,|$)", "", parameters)) for result, name, parameters in found]
    return {f"{result} {name}({parameters})" for result, name, parameters in types if name not in OWN_HELPERS}


@pytest.mark.parametrize("header", LANES, ids=lambda path: path.stem)
def test_lanes_have_the_same_operations(header: Path) -> None:
    portable = operations(NATIVE / "include/lanes_portable.h")
    assert "F fma(F, F, F)" in portable
    assert portable - operations(header) == set()
    for constant in ("kLineShift = ", "kSumSets = ", "#define FS_ROW_TILE "):
        assert header.read_text().count(constant) == 1, constant


@pytest.mark.parametrize("machine", SETS)
def test_a_machine_gets_its_own_sets(machine: str) -> None:
    chosen = {
        flag.removeprefix("-DFS_ISA="): unit for unit in units(machine) for flag in unit.flags if flag.startswith("-DFS_ISA=")
    }
    assert list(chosen) == SETS[machine]
    foreign = "-march=" if "x86" in machine or "AMD" in machine else "-mavx"
    assert not any(flag.startswith(foreign) for unit in units(machine) for flag in unit.flags)


@pytest.mark.parametrize("machine", SETS)
def test_every_set_can_be_chosen(machine: str) -> None:
    entry, ops = (NATIVE / "entry.cpp").read_text(), (NATIVE / "include/ops.h").read_text()
    (have,) = (unit.flags for unit in units(machine) if unit.name == "entry")
    for name in SETS[machine]:
        assert f"const Ops* ops_{name}();" in ops
        assert f"        ops_{name}()," in entry
        assert f'strcmp(name, "{name}") == 0' in entry
        assert name == "portable" or f"-DFS_HAVE_{name.upper()}" in have
