"""The count of kernels and shapes that ends a run of these tests."""

from __future__ import annotations

import torch
from device import DEVICE, to_device
from triton_launches import LAUNCHES, report

from kernels.silu_mul.triton import silu_mul


def test_a_launch_is_counted_once_per_shape() -> None:
    def run(width: int) -> int:
        silu_mul(*to_device((torch.ones(2, width), torch.ones(2, width))))
        return len([launch for launch in LAUNCHES.seen if launch[0] == "silu_mul"])

    count, before = LAUNCHES.count, run(1001)
    assert run(1001) == before
    assert run(1003) == before + 1
    assert LAUNCHES.count == count + 3
    lines: list[str] = []
    report(lines.append)
    assert any(line.startswith("silu_mul") for line in lines)
    assert lines[-1].startswith("Triton on a GPU:" if DEVICE == "cuda" else "Triton in the interpreter, no GPU:")
