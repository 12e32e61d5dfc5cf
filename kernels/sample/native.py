"""sample in C++: threshold selection over the vocabulary, no sort. Calls as the reference's; rows are shared by the team."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.native import NativeLibrary, require
from kernels.native.tensors import address


@dataclass(frozen=True)
class NativeSample:
    """The two calls of the contract on a team of `threads`. `isa` picks an instruction set by name (tests)."""

    threads: int = 1
    isa: str | None = None

    def sample(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        uniforms: torch.Tensor,
    ) -> torch.Tensor:
        """Token ids [R] int32."""
        ids = torch.empty(logits.shape[0], dtype=torch.int32)
        pointer = address(uniforms, torch.float64, "uniforms")
        self._call(require(), logits, temperature, top_k, top_p, min_p, pointer, ids.data_ptr(), None)
        return ids

    def probabilities(
        self, logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
    ) -> torch.Tensor:
        """The processed distribution [R, V] float32."""
        out = torch.empty(logits.shape)
        self._call(require(), logits, temperature, top_k, top_p, min_p, None, None, out.data_ptr())
        return out

    def _call(
        self,
        library: NativeLibrary,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        uniforms: int | None,
        ids: int | None,
        out: int | None,
    ) -> None:
        rows, vocab = logits.shape
        for name, values in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p), ("min_p", min_p)):
            if values.shape[0] != rows:
                raise ValueError(f"{name} has {values.shape[0]} values for {rows} rows")
        library.c.fs_sample(
            library.isa(self.isa),
            library.team(self.threads).handle,
            address(logits, torch.float32, "logits"),
            rows,
            vocab,
            address(temperature, torch.float32, "temperature"),
            address(top_k, torch.int32, "top_k"),
            address(top_p, torch.float32, "top_p"),
            address(min_p, torch.float32, "min_p"),
            uniforms,
            ids,
            out,
        )
