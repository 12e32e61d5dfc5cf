"""One GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): checked header, lazy metadata, mapped tensor bytes.

Knows the container: counts, keys, types, offsets. Refuses to know architectures, tokenizers and what the bytes of a block
mean. Nothing in the header is trusted: every count, length and offset is checked against the file's size before use, so a
broken file is one `ModelFileError` that names the file and the field, in bounded time and memory.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from spec.errors import ModelFileError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
# Far above any real file of the supported families, low enough that a hostile header costs well under a second.
MAX_TENSORS = 1 << 16
MAX_KEYS = 1 << 14
MAX_NAME_BYTES = 1 << 12
MAX_TEXT_BYTES = 1 << 24
MAX_STRINGS = 1 << 22  # strings of all arrays together
MAX_DIMS = 4

# ggml tensor types: id -> (name, elements in a block, bytes of a block)
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}

_STRING, _ARRAY, _BOOL = 8, 9, 7
# metadata value type id -> (struct code, numpy dtype)
_SCALARS: dict[int, tuple[str, str]] = {
    0: ("<B", "<u1"),
    1: ("<b", "<i1"),
    2: ("<H", "<u2"),
    3: ("<h", "<i2"),
    4: ("<I", "<u4"),
    5: ("<i", "<i4"),
    6: ("<f", "<f4"),
    _BOOL: ("<?", "|b1"),
    10: ("<Q", "<u8"),
    11: ("<q", "<i8"),
    12: ("<d", "<f8"),
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies. `shape` is outermost first ([out, in]), unlike the file's own order."""

    name: str
    type: str  # a name of TENSOR_TYPES
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    nbytes: int


class LazyArray(Sequence[Any]):
    """A metadata array that is decoded when it is read: `list(array)`, `array[i]`, or `numpy()` for numbers.

    Valid as long as the file object lives. Raises ModelFileError on text that is not UTF-8.
    """

    def __init__(self, file: GGUFFile, key: str, element_type: int, count: int, offset: int) -> None:
        self._file, self._key = file, key
        self._type, self._count, self._offset = element_type, count, offset
        self._values: list[Any] | None = None

    @property
    def is_text(self) -> bool:
        return self._type == _STRING

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._decoded()[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._decoded())

    def numpy(self) -> np.ndarray[Any, Any]:
        """[count] of the file's own number type, a view of the mapped file."""
        if self.is_text:
            raise ModelFileError(f"{self._file.path}: {self._key} is an array of text; numbers were expected")
        return np.frombuffer(self._file.buffer, _SCALARS[self._type][1], self._count, self._offset)

    def _decoded(self) -> list[Any]:
        if self._values is None:
            self._values = (
                self._file.text_array(self._key, self._count, self._offset) if self.is_text else self.numpy().tolist()
            )
        return self._values


class GGUFFile:
    """An open GGUF file. `metadata` maps key -> int, float, bool, str or LazyArray; `tensors` maps name -> TensorInfo.

    The mapping is private copy-on-write: writing to a tensor's array never reaches the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            with self.path.open("rb") as handle:
                self.size = handle.seek(0, 2)
                if self.size < 24:
                    raise self._error("header", f"the file has {self.size} bytes; a GGUF header takes at least 24")
                self.buffer = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise ModelFileError(f"{self.path}: cannot be read: {error.strerror or error}") from None
        self._position = 0
        self._strings = 0
        tensor_count, key_count = self._read_counts()
        for _ in range(key_count):
            self._read_pair()
        self.alignment = self._read_alignment()
        infos = [self._read_tensor_info() for _ in range(tensor_count)]
        self.header_bytes = self._position
        self._place(infos)

    def tensor_data(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """uint8 [rows..., bytes of one row], a view of the mapped file; the type's name says how to read the bytes."""
        info = self.tensors[name]
        flat = np.frombuffer(self.buffer, np.uint8, info.nbytes, info.offset)
        return flat.reshape(*info.shape[:-1], -1)

    def text_array(self, key: str, count: int, offset: int) -> list[str]:
        """Decode `count` length-prefixed strings at `offset`, whose lengths were checked when the header was read."""
        buffer, values = self.buffer, []
        try:
            for _ in range(count):
                start = offset + 8
                offset = start + _U64.unpack_from(buffer, offset)[0]
                values.append(buffer[start:offset].decode())
        except UnicodeDecodeError:
            raise self._error(key, f"entry {len(values)} is not UTF-8 text") from None
        return values

    def _error(self, field: str, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {field}: {problem}")

    def _take(self, count: int, field: str) -> int:
        """Step over `count` bytes and return where they start."""
        start = self._position
        if count > self.size - start:
            raise self._error(field, f"{count} bytes at offset {start} reach past the end of the file ({self.size} bytes)")
        self._position = start + count
        return start

    def _u32(self, field: str) -> int:
        return int(_U32.unpack_from(self.buffer, self._take(4, field))[0])

    def _u64(self, field: str) -> int:
        return int(_U64.unpack_from(self.buffer, self._take(8, field))[0])

    def _text(self, field: str, limit: int) -> str:
        length = self._u64(f"{field} length")
        if length > limit:
            raise self._error(field, f"text of {length} bytes; at most {limit} are read")
        start = self._take(length, field)
        try:
            return self.buffer[start : start + length].decode()
        except UnicodeDecodeError:
            raise self._error(field, "not UTF-8 text") from None

    def _read_counts(self) -> tuple[int, int]:
        magic = bytes(self.buffer[self._take(4, "magic") : 4])
        if magic != MAGIC:
            raise self._error("magic", f"{magic!r}; a GGUF file starts with {MAGIC!r}")
        version = self._u32("version")
        if version not in VERSIONS:
            hint = " (a big-endian file)" if version and version & 0xFFFF == 0 else ""
            raise self._error("version", f"{version}{hint}; versions {VERSIONS[0]} and {VERSIONS[1]} are supported")
        tensors, keys = self._u64("tensor_count"), self._u64("metadata_kv_count")
        for field, count, limit in (("tensor_count", tensors, MAX_TENSORS), ("metadata_kv_count", keys, MAX_KEYS)):
            if count > limit:
                raise self._error(field, f"{count}; at most {limit} are read")
        return tensors, keys

    def _read_pair(self) -> None:
        key = self._text("metadata key", MAX_NAME_BYTES)
        if key in self.metadata:
            raise self._error(f"{key[:80]!r}", "the key appears twice")
        self.metadata[key] = self._read_value(key, self._u32(f"type of {key[:80]!r}"))

    def _read_value(self, key: str, type_id: int) -> Any:
        field = repr(key[:80])
        if type_id == _STRING:
            return self._text(field, MAX_TEXT_BYTES)
        if type_id in _SCALARS:
            code = _SCALARS[type_id][0]
            return struct.unpack_from(code, self.buffer, self._take(struct.calcsize(code), field))[0]
        if type_id != _ARRAY:
            raise self._error(field, f"unknown value type {type_id}")
        element, count = self._u32(f"{field} element type"), self._u64(f"{field} length")
        start = self._position
        if element == _STRING:
            self._skip_strings(field, count)
        elif element in _SCALARS:
            self._take(count * np.dtype(_SCALARS[element][1]).itemsize, field)
        else:
            raise self._error(field, f"an array of element type {element}; arrays of text, numbers and flags are supported")
        return LazyArray(self, key, element, count, start)

    def _skip_strings(self, field: str, count: int) -> None:
        self._strings += count
        if self._strings > MAX_STRINGS:
            raise self._error(field, f"an array of {count} strings; at most {MAX_STRINGS} in a file are read")
        buffer, position, last, read = self.buffer, self._position, self.size - 8, _U64.unpack_from
        for index in range(count):
            if position > last:
                raise self._error(field, f"entry {index} of {count} lies past the end of the file ({self.size} bytes)")
            position += 8 + read(buffer, position)[0]
        if position > self.size:
            raise self._error(field, f"the last of {count} entries reaches past the end of the file ({self.size} bytes)")
        self._position = position

    def _read_alignment(self) -> int:
        value = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or isinstance(value, bool) or not 8 <= value <= 1 << 16 or value & (value - 1):
            raise self._error("general.alignment", f"{value!r}; it must be a power of two from 8 to 65536")
        return value

    def _read_tensor_info(self) -> TensorInfo:
        """`offset` of the result is still relative to the data section; `_place` makes it absolute."""
        name = self._text("tensor name", MAX_NAME_BYTES)
        field = f"tensor {name[:80]!r}"
        dims = self._u32(f"{field} n_dims")
        if not 1 <= dims <= MAX_DIMS:
            raise self._error(field, f"n_dims is {dims}; it must be 1 to {MAX_DIMS}")
        shape = tuple(self._u64(f"{field} dimensions") for _ in range(dims))
        type_id, offset = self._u32(f"{field} type"), self._u64(f"{field} offset")
        if type_id not in TENSOR_TYPES:
            raise self._error(field, f"unknown tensor type {type_id}")
        type_name, block, block_bytes = TENSOR_TYPES[type_id]
        if min(shape) < 1 or shape[0] % block:
            raise self._error(
                field, f"dimensions {list(shape)}; all must be positive, the first a multiple of {block} ({type_name})"
            )
        return TensorInfo(name, type_name, shape[::-1], offset, math.prod(shape) // block * block_bytes)

    def _place(self, infos: list[TensorInfo]) -> None:
        """Make offsets absolute; check alignment, bounds, names and overlaps."""
        data = -(-self.header_bytes // self.alignment) * self.alignment
        for info in infos:
            field = f"tensor {info.name[:80]!r}"
            if info.name in self.tensors:
                raise self._error(field, "the name appears twice")
            if info.offset % self.alignment:
                raise self._error(field, f"offset {info.offset} is not a multiple of the alignment {self.alignment}")
            if data + info.offset + info.nbytes > self.size:
                need = f"{info.nbytes} bytes at offset {info.offset} of the data"
                raise self._error(field, f"{need} reach past the end of the file ({self.size} bytes); is the file truncated?")
            self.tensors[info.name] = TensorInfo(info.name, info.type, info.shape, data + info.offset, info.nbytes)
        end, before = 0, ""
        for info in sorted(self.tensors.values(), key=lambda info: info.offset):
            if info.offset < end:
                raise self._error(f"tensor {info.name[:80]!r}", f"its bytes overlap those of {before[:80]!r}")
            end, before = info.offset + info.nbytes, info.name
