"""linear in C++, one matrix at a time. The decoder calls the same code without this wrapper."""

from __future__ import annotations

import torch

from kernels.linear import Weight
from kernels.native import NativeError, require
from kernels.native.tensors import address, weight_data


class PackedMatrix:
    """One matrix in the order the kernels read it. The weight given may be dropped afterwards."""

    def __init__(self, weight: Weight) -> None:
        self._library = require()
        self.out_features, self.in_features = weight.out_features, weight.in_features
        handle = self._library.c.fs_matrix_create(weight_data(weight))
        if handle is None:
            raise NativeError("the matrix could not be packed: its sizes are impossible or memory is short")
        self._handle: int = handle

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle is not None:
            self._library.c.fs_matrix_destroy(handle)

    @property
    def nbytes(self) -> int:
        """Bytes read by one pass over the matrix, padding included."""
        return int(self._library.c.fs_matrix_bytes(self._handle))

    def linear(self, x: torch.Tensor, threads: int = 1, isa: str | None = None) -> torch.Tensor:
        """y [N, out] float32 = x [N, in] float32 @ W^T + bias."""
        if x.dim() != 2 or x.shape[1] != self.in_features:
            raise ValueError(f"x is {list(x.shape)}; expected [rows, {self.in_features}]")
        y = torch.empty(x.shape[0], self.out_features)
        team = self._library.team(threads)
        source = address(x, torch.float32, "x")
        self._library.c.fs_linear(self._library.isa(isa), team.handle, self._handle, source, x.shape[0], y.data_ptr())
        return y

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` [N] of the matrix as float32 [N, in]."""
        out = torch.empty(ids.shape[0], self.in_features)
        for i, row in enumerate(ids.tolist()):
            if not 0 <= row < self.out_features:
                raise IndexError(f"row {row} of a matrix of {self.out_features} rows")
            self._library.c.fs_matrix_row(self._handle, row, out[i].data_ptr())
        return out


def linear(x: torch.Tensor, weight: Weight, threads: int = 1, isa: str | None = None) -> torch.Tensor:
    """The op of the contract; packs the weight on every call, so only for tests and one-off products."""
    return PackedMatrix(weight).linear(x, threads, isa)


def quantize_rows(x: torch.Tensor, isa: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [N, in] float32 -> codes int16 [N, in], step a float32 [N]."""
    rows, width = x.shape
    if width % 32 != 0:
        raise ValueError(f"rows of {width} values do not divide into blocks of 32")
    library = require()
    codes, step = torch.empty(rows, width, dtype=torch.int16), torch.empty(rows)
    source = address(x, torch.float32, "x")
    library.c.fs_quantise(library.isa(isa), source, rows, width, codes.data_ptr(), step.data_ptr())
    return codes, step
