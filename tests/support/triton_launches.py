"""Which Triton kernels a test run launched, and with how many different shapes: what a suite that ran in the interpreter covered."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

Launch = tuple[str, str, tuple[Any, ...]]  # op, kernel, what its arguments look like


class Launches:
    """Records every launch from `start` on."""

    def __init__(self) -> None:
        self.seen: set[Launch] = set()
        self.count = 0
        self.interpreted = False

    def start(self) -> None:
        """Wrap the one method through which Triton launches, in both of its kernel classes."""
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction

        for kind in (InterpretedFunction, JITFunction):
            kind.run = self._recorded(kind.run, kind is InterpretedFunction)

    def _recorded(self, run: Callable[..., Any], interpreted: bool) -> Callable[..., Any]:
        def launch(function: Any, *args: Any, **options: Any) -> Any:
            op = function.fn.__module__.removeprefix("kernels.").removesuffix(".triton")
            shapes = tuple((tuple(a.shape), str(a.dtype)) for a in args if isinstance(a, torch.Tensor))
            constants = tuple(sorted((k, str(v)) for k, v in options.items() if k.isupper()))
            self.seen.add((op, function.fn.__name__, (shapes, constants)))
            self.count += 1
            self.interpreted |= interpreted
            return run(function, *args, **options)

        return launch

    def lines(self) -> list[str]:
        """A line per op, and the sum."""
        ops = sorted({op for op, _, _ in self.seen})
        table = []
        for op in ops:
            mine = [launch for launch in self.seen if launch[0] == op]
            table.append(f"{op:22} {len({k for _, k, _ in mine}):3} kernels {len(mine):6} shapes")
        where = "in the interpreter, no GPU" if self.interpreted else "on a GPU"
        kernels = len({(op, kernel) for op, kernel, _ in self.seen})
        total = f"Triton {where}: {len(ops)} ops, {kernels} kernels, {len(self.seen)} kernel x shape, {self.count} launches"
        return [*table, total]


LAUNCHES = Launches()  # one test run has one count


def report(write: Callable[[str], None]) -> None:
    if LAUNCHES.count and "triton" in sys.modules:
        for line in LAUNCHES.lines():
            write(line)
