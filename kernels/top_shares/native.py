"""top_shares in C++: rows are shared by the team."""

from __future__ import annotations

import torch

from kernels.native import require
from kernels.native.tensors import address


class NativeTopShares:
    """The call of the contract on a team of `threads`. `isa` picks an instruction set by name (tests)."""

    def __init__(self, threads: int = 1, isa: str | None = None) -> None:
        library = require()
        self._call = library.c.fs_top_shares
        self._isa = library.isa(isa)
        self._team = library.team(threads)

    def __call__(
        self, logits: torch.Tensor, k: int, temperature: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids [R, k] int32, shares [R, k] float32). Raises ValueError on sizes that do not fit."""
        rows, vocab = logits.shape
        if not 1 <= k <= vocab:
            raise ValueError(f"the {k} best of {vocab} tokens were asked for")
        if temperature is not None and temperature.shape[0] != rows:
            raise ValueError(f"temperature has {temperature.shape[0]} values for {rows} rows")
        ids = torch.empty(rows, k, dtype=torch.int32)
        shares = torch.empty(rows, k)
        self._call(
            self._isa,
            self._team.handle,
            address(logits, torch.float32, "logits"),
            rows,
            vocab,
            k,
            None if temperature is None else address(temperature, torch.float32, "temperature"),
            ids.data_ptr(),
            shares.data_ptr(),
        )
        return ids, shares
