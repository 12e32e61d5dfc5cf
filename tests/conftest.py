"""Suite-wide set-up: one torch thread, Triton's interpreter where there is no GPU, marked tests skipped with a reason."""

from __future__ import annotations

import os

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()

# Triton decides at decoration time whether a kernel is compiled or interpreted, so this precedes every kernel import.
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"

# Toy tensors are far below the size at which threads pay, and the tests may share the machine.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_CUDA:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; torch sees none")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)
