"""The library compiled for 64-bit ARM and run by an emulator: the same bits as on this machine, from every op and instruction set."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from tape import Player, Tape
from tape_cases import TAPES

from kernels.native import load
from kernels.native.toolchain import ARM, build, find_compiler

CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
LIBRARY = load()
if LIBRARY is None:
    pytest.skip("no native library: no C++ compiler here", allow_module_level=True)
if platform.machine().lower() not in ("x86_64", "amd64"):
    pytest.skip("compares ARM with x86, so it needs an x86 machine", allow_module_level=True)
for program in (CROSS, EMULATOR):
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the first run compiles the library

SETS = ("dotprod", "neon", "portable")
# A processor of the first generation of 64-bit ARM: NEON, and no dot products.
OLD_PROCESSOR = ("-cpu", "cortex-a57")


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Player:
    library, _ = build(compiler=CROSS, machine="aarch64")
    assert library is not None
    libc = subprocess.run([CROSS, "-print-file-name=libc.so.6"], capture_output=True, text=True, check=True).stdout.strip()
    root = Path(libc).resolve().parent.parent  # where the emulated programs find their system's libraries
    return Player.compile(CROSS, library, tmp_path_factory.mktemp("arm"), (EMULATOR, "-L", str(root)))


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Player:
    compiler = find_compiler()
    assert compiler is not None
    assert LIBRARY is not None
    return Player.compile(compiler, LIBRARY.path, tmp_path_factory.mktemp("here"))


@pytest.fixture(scope="module", params=TAPES)
def played(
    request: pytest.FixtureRequest, here: Player, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tape, dict[str, torch.Tensor]]:
    """A tape and what it gives on this machine."""
    tape = TAPES[request.param]()
    return tape, here.play(tape, here.sets()[0], tmp_path_factory.mktemp("played"))


def test_sets_are_chosen_at_run_time(arm: Player) -> None:
    assert set(SETS) == {*ARM, "portable"}
    assert arm.sets() == list(SETS)
    assert arm.sets(*OLD_PROCESSOR) == ["neon", "portable"]


@pytest.mark.parametrize("isa", SETS)
def test_the_same_bits(isa: str, arm: Player, played: tuple[Tape, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    tape, want = played
    for name, got in arm.play(tape, isa, tmp_path).items():
        assert torch.equal(got.view(torch.uint8), want[name].view(torch.uint8)), name
