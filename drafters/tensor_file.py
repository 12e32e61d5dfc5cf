"""One safetensors file of a trained drafter: tensors by name, each checked for shape, type and finite values as it is taken.
Knows the container; refuses to know what the tensors mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch
from safetensors import SafetensorError, safe_open

from spec.errors import ModelFileError


@dataclass(frozen=True, slots=True)
class TensorFile:
    """Everything in the file, on one device. Every complaint is a ModelFileError that names the file and the tensor."""

    path: Path
    metadata: dict[str, str]
    tensors: dict[str, torch.Tensor]

    @staticmethod
    def open(path: Path, device: str = "cpu") -> TensorFile:
        try:
            with safe_open(path, framework="pt", device=device) as file:
                return TensorFile(path, dict(file.metadata() or {}), {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ModelFileError(f"{path}: not a readable safetensors file: {error}") from error

    def saying(self, most: int) -> TensorFile:
        """The file cut to `most` of the tokens it can say (`token_ids`, and `output` by rows); 0, or a file without such a list: as it is.

        Those with the lowest ids stay, in their order: byte-pair vocabularies are numbered in the order in which their tokens were
        made, the frequent ones first. What such a drafter cannot say it cannot propose; the answer is the same.
        """
        ids, output = self.tensors.get("token_ids"), self.tensors.get("output")
        if most < 1 or ids is None or ids.dim() != 1 or ids.numel() <= most:
            return self
        kept = ids.argsort()[:most].sort().values
        changed = {"token_ids": ids[kept]}
        if output is not None and output.dim() == 2 and output.shape[0] == ids.numel():
            changed["output"] = output[kept]
        return replace(self, tensors=self.tensors | changed)

    @property
    def format(self) -> str:
        return self.metadata.get("format", "")

    def refuse(self, problem: str) -> NoReturn:
        raise ModelFileError(f"{self.path}: {problem}")

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A float tensor of that shape, in the file's type."""
        tensor = self.tensors.get(name)
        if tensor is None:
            self.refuse(f"tensor {name} is missing")
        if tuple(tensor.shape) != shape:
            self.refuse(f"tensor {name} has shape {list(tensor.shape)}; {list(shape)} was expected for this target")
        if not tensor.is_floating_point():
            self.refuse(f"tensor {name} is {tensor.dtype}; a float type was expected")
        if not bool(torch.isfinite(tensor).all()):
            self.refuse(f"tensor {name} holds values that are not finite")
        return tensor

    def vector(self, name: str, size: int) -> torch.Tensor:
        """[size] float32"""
        return self.take(name, (size,)).float()

    def rows(self, name: str) -> int:
        """Rows of a matrix whose height the file chooses."""
        tensor = self.tensors.get(name)
        if tensor is None:
            self.refuse(f"tensor {name} is missing")
        return tensor.shape[0] if tensor.dim() else 0

    def token_ids(self, vocab_size: int, name: str = "token_ids") -> list[int]:
        """Distinct ids of the target's tokens."""
        ids = self.tensors.get(name)
        if ids is None:
            self.refuse(f"tensor {name} is missing")
        if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64) or ids.numel() == 0:
            self.refuse(f"tensor {name} is {ids.dtype} {list(ids.shape)}; a list of int32 or int64 was expected")
        found: list[int] = ids.tolist()
        if min(found) < 0 or max(found) >= vocab_size or len(set(found)) != len(found):
            self.refuse(f"{name} must be distinct ids of the target's {vocab_size} tokens")
        return found

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number of the metadata."""
        text = self.metadata.get(name)
        if text is None:
            if default is None:
                self.refuse(f"metadata {name} is missing")
            return default
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0.0 < value < float("inf"):
            self.refuse(f"metadata {name} is {text!r}; a positive number was expected")
        return value

    def count(self, name: str) -> int:
        """A positive whole number of the metadata."""
        value = self.number(name)
        if value != int(value):
            self.refuse(f"metadata {name} is {self.metadata[name]!r}; a whole number was expected")
        return int(value)
