"""A safetensors folder: checked headers, the index as the truth, mapped tensors. Knows the container, refuses to know layers.

Format: 8 bytes little-endian header length, a JSON object of name -> {dtype, shape, data_offsets}, then the data. Only the
file that the index names for a tensor is ever read for it; strays and stale copies in other files are invisible.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from spec.models.config import fail, shown
from spec.models.hf_config import parse_json_object, read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
HEADER_BYTES = 1 << 24
INDEX_BYTES = 1 << 24
MAX_DIMS = 8
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# What quantised matrices are made of. A byte of exponent has no torch type that computes; it is read as a byte.
CODES = {
    "I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.uint8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    name: str
    dtype: str  # a name of DTYPE_BYTES
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    nbytes: int


class SafetensorsFile:
    """One open file. The mapping is private copy-on-write: writing to a tensor never reaches the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as handle:
                self.size = handle.seek(0, 2)
                if self.size < 10:
                    fail(path, "header", f"the file has {self.size} bytes; the shortest header takes 10")
                self.buffer = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            fail(path, "file", f"cannot be read: {error.strerror or error}")
        (length,) = struct.unpack_from("<Q", self.buffer)
        if length > HEADER_BYTES or length > self.size - 8:
            fail(path, "header length", f"{length}; at most {min(HEADER_BYTES, self.size - 8)} are possible here")
        self.header_bytes = 8 + length
        header = parse_json_object(path, "header", bytes(self.buffer[8 : self.header_bytes]))
        header.pop("__metadata__", None)
        self.tensors = {name: self._entry(name, value) for name, value in header.items()}
        self._check_cover()

    def tensor(self, name: str) -> torch.Tensor:
        """A view of the mapped file, in the stored float type. The caller has checked the name."""
        return self._view(name, FLOATS)

    def stored(self, name: str) -> torch.Tensor:
        """The same for floats and for the codes of quantised matrices."""
        return self._view(name, FLOATS | CODES)

    def _view(self, name: str, known: dict[str, torch.dtype]) -> torch.Tensor:
        entry = self.tensors[name]
        if entry.dtype not in known:
            fail(self.path, f"tensor {shown(name)}", f"dtype {entry.dtype} is not supported; supported: {', '.join(known)}")
        dtype = known[entry.dtype]
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=dtype)
        if entry.offset % dtype.itemsize:  # legal, but no float can be read there in place
            raw = torch.frombuffer(self.buffer, dtype=torch.uint8, count=entry.nbytes, offset=entry.offset)
            return raw.clone().view(dtype).reshape(entry.shape)
        count = entry.nbytes // dtype.itemsize
        return torch.frombuffer(self.buffer, dtype=dtype, count=count, offset=entry.offset).reshape(entry.shape)

    def _entry(self, name: str, value: Any) -> StoredTensor:
        field = f"tensor {shown(name)}"
        if not isinstance(value, dict):
            fail(self.path, field, f"{shown(value)}; an object with dtype, shape and data_offsets was expected")
        dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
        if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
            fail(self.path, field, f"dtype {shown(dtype)}; known: {', '.join(DTYPE_BYTES)}")
        if not _naturals(shape) or len(shape) > MAX_DIMS:
            fail(self.path, field, f"shape {shown(shape)}; at most {MAX_DIMS} sizes of 0 or more were expected")
        if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            fail(self.path, field, f"data_offsets {shown(offsets)}; two ascending positions were expected")
        begin, end = offsets
        if end > self.size - self.header_bytes:
            fail(
                self.path,
                field,
                f"data_offsets {shown(offsets)} reach past the end of the file ({self.size} bytes); is the file truncated?",
            )
        if math.prod(shape) * DTYPE_BYTES[dtype] != end - begin:
            fail(self.path, field, f"shape {shown(shape)} of {dtype} does not take the {end - begin} bytes of its data_offsets")
        return StoredTensor(name, dtype, tuple(shape), self.header_bytes + begin, end - begin)

    def _check_cover(self) -> None:
        """Tensors lie one after the other and fill the file, as the format demands: no overlap, no hole, no tail."""
        end = self.header_bytes
        for entry in sorted(self.tensors.values(), key=lambda entry: (entry.offset, entry.nbytes)):
            if entry.offset != end:
                kind = "overlaps the tensor before it" if entry.offset < end else "leaves a hole before it"
                fail(self.path, f"tensor {shown(entry.name)}", f"data_offsets {kind}")
            end += entry.nbytes
        if end != self.size:
            fail(self.path, "file", f"{self.size} bytes, but the header describes {end}")


def _naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


class SafetensorsFolder:
    """All tensors of a checkpoint: `files` are the open files in name order, `place[name]` says which holds a tensor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / INDEX_NAME
        self.truth = index if index.is_file() else _single(folder)
        if self.truth != index:
            only = SafetensorsFile(self.truth)
            self.files: tuple[SafetensorsFile, ...] = (only,)
            self.place = dict.fromkeys(only.tensors, only)
            return
        weight_map = read_json(index, INDEX_BYTES).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            fail(index, "weight_map", f"{shown(weight_map)}; an object of tensor -> file was expected")
        for name, value in weight_map.items():
            # a plain file name: an index must not reach out of its folder
            if not isinstance(value, str) or not value.endswith(".safetensors") or Path(value).name != value or "\\" in value:
                fail(index, f"weight_map {shown(name)}", f"{shown(value)}; the name of a .safetensors file was expected")
        opened: dict[str, SafetensorsFile] = {}
        for value in sorted(set(weight_map.values())):
            if not (folder / value).is_file():
                fail(folder / value, "file", f"missing, but {INDEX_NAME} names it; is the download complete?")
            opened[value] = SafetensorsFile(folder / value)
        self.files = tuple(opened.values())
        self.place = {name: opened[value] for name, value in weight_map.items()}
        for name, file in self.place.items():
            if name not in file.tensors:
                fail(file.path, f"tensor {shown(name)}", f"missing, but {INDEX_NAME} says it is in this file")


def _single(folder: Path) -> Path:
    """The one file of a checkpoint without an index."""
    if (folder / SINGLE_NAME).is_file():
        return folder / SINGLE_NAME
    found = sorted(folder.glob("*.safetensors"))
    if len(found) > 1:
        fail(folder / INDEX_NAME, "file", f"missing, but the folder has {len(found)} .safetensors files")
    if not found:
        pickles = sorted(path for path in folder.iterdir() if path.suffix in PICKLES)
        if pickles:
            fail(pickles[0], "file", "pickle checkpoints can run code and are refused; convert it to safetensors")
        fail(folder, SINGLE_NAME, f"missing, and so is {INDEX_NAME}")
    return found[0]
