"""Broken and hostile headers (SE-04): every mutant is one clear line, fast, without an excursion in memory or a signal."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import write_rand_checkpoint, write_rand_gguf

from spec.errors import ForespeakError, ModelFileError
from spec.models import load_model
from spec.models.gguf_file import GGUFFile


class Header:
    """A GGUF header taken apart just enough to change one field of it. Little-endian, version 3."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)
        self.keys: dict[str, int] = {}  # name -> offset of its value type
        position = 24
        for _ in range(struct.unpack_from("<Q", data, 16)[0]):
            (length,) = struct.unpack_from("<Q", data, position)
            name = data[position + 8 : position + 8 + length].decode()
            position += 8 + length
            self.keys[name] = position
            position = self._after(position)
        self.first_tensor = position  # offset of the first tensor info

    def _after(self, position: int) -> int:
        (kind,) = struct.unpack_from("<I", self.data, position)
        sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
        position += 4
        if kind == 8:
            return position + 8 + struct.unpack_from("<Q", self.data, position)[0]
        if kind != 9:
            return position + sizes[kind]
        element, count = struct.unpack_from("<IQ", self.data, position)
        position += 12
        if element != 8:
            return position + count * sizes[element]
        for _ in range(count):
            position += 8 + struct.unpack_from("<Q", self.data, position)[0]
        return position

    def put(self, offset: int, layout: str, *values: object) -> bytes:
        struct.pack_into(layout, self.data, offset, *values)
        return bytes(self.data)

    def swap(self, old: bytes, new: bytes) -> bytes:
        assert self.data.count(old) == 1
        return bytes(self.data.replace(old, new))

    @property
    def dims(self) -> int:
        """Offset of n_dims of the first tensor; its dimensions, type and offset follow."""
        return self.first_tensor + 8 + struct.unpack_from("<Q", self.data, self.first_tensor)[0]

    def second_tensor(self) -> int:
        count = struct.unpack_from("<I", self.data, self.dims)[0]
        return self.dims + 4 + 8 * count + 12


def renamed_second_tensor(h: Header) -> bytes:
    """Gives the second tensor the first one's name (both lengths happen to be adjusted by cutting the file anew)."""
    name = bytes(h.data[h.first_tensor : h.dims])
    second = h.second_tensor()
    length = 8 + struct.unpack_from("<Q", h.data, second)[0]
    return bytes(h.data[:second]) + name + bytes(h.data[second + length :])


KEY = "llama.block_count"
GGUF_MUTANTS: dict[str, tuple[Callable[[Header], bytes], str]] = {
    "wrong magic": (lambda h: h.put(0, "<4s", b"GGML"), "magic"),
    "version 1": (lambda h: h.put(4, "<I", 1), "version: 1;"),
    "version 4": (lambda h: h.put(4, "<I", 4), "version: 4;"),
    "big endian": (lambda h: h.put(4, ">I", 3), "a big-endian file"),
    "tensor count 2**60": (lambda h: h.put(8, "<Q", 1 << 60), "tensor_count"),
    "tensor count one too many": (lambda h: h.put(8, "<Q", struct.unpack_from("<Q", h.data, 8)[0] + 1), "tensor"),
    "key count 2**63": (lambda h: h.put(16, "<Q", 1 << 63), "metadata_kv_count"),
    "first key of 2**63 bytes": (lambda h: h.put(24, "<Q", 1 << 63), "metadata key"),
    "text of 2**63 bytes": (lambda h: h.put(h.keys["general.architecture"] + 4, "<Q", 1 << 63), "general.architecture"),
    "text of 2**64 - 1 bytes": (lambda h: h.put(h.keys["general.architecture"] + 4, "<Q", (1 << 64) - 1), "general.architecture"),
    "unknown value type": (lambda h: h.put(h.keys[KEY], "<I", 77), "unknown value type 77"),
    "array of arrays": (lambda h: h.put(h.keys["tokenizer.ggml.tokens"] + 4, "<I", 9), "tokenizer.ggml.tokens"),
    "array of 2**62 numbers": (lambda h: h.put(h.keys["tokenizer.ggml.token_type"] + 8, "<Q", 1 << 62), "tokenizer.ggml.token_type"),
    "array of 2**40 strings": (lambda h: h.put(h.keys["tokenizer.ggml.tokens"] + 8, "<Q", 1 << 40), "tokenizer.ggml.tokens"),
    "array of 2**21 strings": (lambda h: h.put(h.keys["tokenizer.ggml.tokens"] + 8, "<Q", 1 << 21), "tokenizer.ggml.tokens"),
    "a token of 2**63 bytes": (lambda h: h.put(h.keys["tokenizer.ggml.tokens"] + 16, "<Q", 1 << 63), "tokenizer.ggml.tokens"),
    "strings read as numbers": (lambda h: h.put(h.keys["tokenizer.ggml.tokens"] + 4, "<I", 12), ""),
    "a size of another type": (lambda h: h.put(h.keys[KEY], "<If", 6, 2.0), "llama.block_count: 2.0"),
    "no layers": (lambda h: h.put(h.keys[KEY] + 4, "<I", 0), "llama.block_count: 0"),
    "2**32 - 1 layers": (lambda h: h.put(h.keys[KEY] + 4, "<I", (1 << 32) - 1), "llama.block_count: 4294967295"),
    "no key/value heads": (lambda h: h.put(h.keys["llama.attention.head_count_kv"] + 4, "<I", 0), "llama.attention.head_count_kv: 0"),
    "an epsilon of NaN": (lambda h: h.put(h.keys["llama.attention.layer_norm_rms_epsilon"] + 4, "<f", float("nan")), "epsilon: nan"),
    "n_dims 99": (lambda h: h.put(h.dims, "<I", 99), "n_dims is 99"),
    "n_dims 0": (lambda h: h.put(h.dims, "<I", 0), "n_dims is 0"),
    "a dimension of 2**63": (lambda h: h.put(h.dims + 4, "<Q", 1 << 63), "tensor 'output.weight'"),
    "dimensions whose product wraps": (lambda h: h.put(h.dims + 4, "<QQ", 1 << 32, 1 << 32), "tensor 'output.weight'"),
    "a dimension of 0": (lambda h: h.put(h.dims + 4, "<Q", 0), "all must be positive"),
    "another shape": (lambda h: h.put(h.dims + 4, "<QQ", 48, 1024), "tensor 'output.weight': shape [1024, 48]"),
    "unknown tensor type": (lambda h: h.put(h.dims + 20, "<I", 4242), "unknown tensor type 4242"),
    "a removed tensor type": (lambda h: h.put(h.dims + 20, "<I", 4), "unknown tensor type 4"),
    "a type of other size": (lambda h: h.put(h.dims + 20, "<I", 28), "overlap"),
    "offset 2**40": (lambda h: h.put(h.dims + 24, "<Q", 1 << 40), "past the end of the file"),
    "offset + size wraps": (lambda h: h.put(h.dims + 24, "<Q", (1 << 64) - 32), "past the end of the file"),
    "an odd offset": (lambda h: h.put(h.dims + 24, "<Q", 7), "not a multiple of the alignment"),
    "overlapping tensors": (lambda h: h.put(h.second_tensor() - 8, "<Q", 32), "overlap"),
    "duplicate tensor names": (renamed_second_tensor, "the name appears twice"),
    "a tensor renamed": (lambda h: h.swap(b"blk.1.ffn_up.weight", b"blk.9.ffn_up.weight"), "tensor 'blk.1.ffn_up.weight': missing"),
    "a name that is not UTF-8": (lambda h: h.put(h.first_tensor + 8, "<B", 0xFF), "tensor name: not UTF-8 text"),
    "cut in the data": (lambda h: bytes(h.data[:-1000]), "is the file truncated?"),
    "cut in the header": (lambda h: bytes(h.data[:900]), "past the end of the file"),
    "empty": (lambda h: b"", "header"),
    "magic only": (lambda h: b"GGUF", "header"),
    "NaN weights": (lambda h: bytes(h.data[:-64]) + struct.pack("<16f", *[float("nan")] * 16), "NaN"),
}  # fmt: skip


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_rand_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf").read_bytes()


def refusal(path: Path) -> str:
    start = time.monotonic()
    with pytest.raises(ModelFileError) as caught:
        load_model(path)
    assert time.monotonic() - start < 5
    message = str(caught.value)
    assert message.startswith(str(path if path.is_file() else path / ""))
    assert "\n" not in message
    assert len(message) < len(str(path)) + 400
    return message


@pytest.mark.parametrize("name", GGUF_MUTANTS)
def test_gguf_mutants(name: str, gguf_bytes: bytes, tmp_path: Path) -> None:
    mutate, expected = GGUF_MUTANTS[name]
    path = tmp_path / "mutant.gguf"
    path.write_bytes(mutate(Header(gguf_bytes)))
    assert expected in refusal(path)


@pytest.mark.parametrize("value", [0, 3, 1 << 31])
def test_alignment(value: int, gguf_bytes: bytes, tmp_path: Path) -> None:
    """An inserted general.alignment key: the pair goes in front of all others."""
    key = b"general.alignment"
    pair = struct.pack("<Q", len(key)) + key + struct.pack("<II", 4, value)
    count = struct.unpack_from("<Q", gguf_bytes, 16)[0] + 1
    path = tmp_path / "mutant.gguf"
    path.write_bytes(gguf_bytes[:16] + struct.pack("<Q", count) + pair + gguf_bytes[24:])
    assert "general.alignment" in refusal(path)


def test_a_key_twice(gguf_bytes: bytes, tmp_path: Path) -> None:
    pair = struct.pack("<Q", len(KEY)) + KEY.encode() + struct.pack("<II", 4, 2)
    count = struct.unpack_from("<Q", gguf_bytes, 16)[0] + 1
    path = tmp_path / "mutant.gguf"
    path.write_bytes(gguf_bytes[:16] + struct.pack("<Q", count) + pair + gguf_bytes[24:])
    assert f"'{KEY}': the key appears twice" in refusal(path)


def test_random_damage_to_a_gguf_header_never_escapes(gguf_bytes: bytes, tmp_path: Path) -> None:
    """Whatever single bytes of the header say, loading works or raises our own error."""
    header = GGUFFile(_written(tmp_path / "m.gguf", gguf_bytes)).header_bytes
    rng = random.Random(5)
    messages = []
    for _ in range(150):
        data = bytearray(gguf_bytes)
        for _ in range(rng.choice((1, 1, 3))):
            # half the damage near the counts and sizes, which are few among the many bytes of token text
            place = (
                rng.randrange(header)
                if rng.random() < 0.5
                else rng.choice((rng.randrange(64), header - 1 - rng.randrange(1200)))
            )
            data[place] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        try:
            load_model(_written(tmp_path / "m.gguf", bytes(data)))
        except ForespeakError as error:
            messages.append(str(error))
    assert len(messages) > 50, "a blind test: the damage is not noticed"
    assert not [message for message in messages if "\n" in message]


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


# --- safetensors -----------------------------------------------------------------------------------------------------

FIRST = "model.embed_tokens.weight"
SECOND = "model.norm.weight"


def entry(**fields: object) -> Callable[[dict[str, dict[str, object]]], None]:
    return lambda header: header[FIRST].update(fields)


def moved(start: int, stop: int) -> Callable[[dict[str, dict[str, list[int]]]], None]:
    def change(header: dict[str, dict[str, list[int]]]) -> None:
        begin, end = header[SECOND]["data_offsets"]
        header[SECOND]["data_offsets"] = [begin + start, end + stop]

    return change


HEADER_MUTANTS: dict[str, tuple[Callable[..., None], str]] = {
    "overlapping offsets": (moved(-4, -4), "overlaps"),
    "reversed offsets": (lambda h: h[SECOND]["data_offsets"].reverse(), "two ascending positions"),
    "negative offsets": (entry(data_offsets=[-8, 0]), "data_offsets [-8, 0]"),
    "offsets past the end": (entry(data_offsets=[0, 1 << 60]), "past the end of the file"),
    "offsets of floats": (entry(data_offsets=[0.0, 4.0]), "data_offsets [0.0, 4.0]"),
    "three offsets": (entry(data_offsets=[0, 4, 8]), "data_offsets [0, 4, 8]"),
    "shape x dtype is not bytes": (entry(shape=[512, 97]), "does not take"),
    "dimensions whose product wraps": (entry(shape=[1 << 32, 1 << 32, 1 << 32]), "does not take"),
    "negative shape": (entry(shape=[-512, -96]), "shape [-512, -96]"),
    "shape of text": (entry(shape="512x96"), "shape '512x96'"),
    "nine dimensions": (entry(shape=[1] * 9), "at most 8 sizes"),
    "unknown dtype": (entry(dtype="F4"), "dtype 'F4'"),
    "dtype of another kind": (entry(dtype=["F32"]), "dtype ['F32']"),
    "an integer matrix": (entry(dtype="I32"), "dtype I32 is not supported"),
    "no dtype": (lambda h: h[FIRST].pop("dtype"), "dtype None"),
    "an entry of null": (lambda h: h.update({FIRST: None}), "None; an object with dtype"),
    "a tensor less": (lambda h: h.pop("model.layers.0.mlp.up_proj.weight"), "leaves a hole"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_rand_checkpoint(tmp_path / "m")


def take_apart(file: Path) -> tuple[dict[str, dict[str, object]], bytes]:
    data = file.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def put_together(file: Path, header: bytes, data: bytes) -> None:
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)


@pytest.mark.parametrize("name", HEADER_MUTANTS)
def test_safetensors_header_mutants(name: str, folder: Path) -> None:
    mutate, expected = HEADER_MUTANTS[name]
    file = folder / "model.safetensors"
    header, data = take_apart(file)
    mutate(header)
    put_together(file, json.dumps(header).encode(), data)
    assert expected in refusal(folder)


RAW_MUTANTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "header length 2**60": (lambda d: struct.pack("<Q", 1 << 60) + d[8:], "header length: 1152921504606846976"),
    "header length 2**63": (lambda d: struct.pack("<Q", 1 << 63) + d[8:], "header length"),
    "header length of the file": (lambda d: struct.pack("<Q", len(d) - 8) + d[8:], "header"),
    "header length 0": (lambda d: struct.pack("<Q", 0) + d[8:], "header"),
    "nested too deeply": (lambda d: struct.pack("<Q", 1 << 20) + b"[" * (1 << 20), "nested too deeply"),
    "not JSON": (lambda d: struct.pack("<Q", 8) + b"{'a': 1}", "not usable JSON"),
    "a list": (lambda d: struct.pack("<Q", 2) + b"[]", "a JSON list; an object was expected"),
    "a number of 5000 digits": (lambda d: struct.pack("<Q", 5006) + b'{"a":' + b"9" * 5000 + b"}", "not usable JSON"),
    "not UTF-8": (lambda d: struct.pack("<Q", 8) + b'{"\xff": 1}', "not usable JSON"),
    "a name twice": (lambda d: struct.pack("<Q", 17) + b'{"a": {},"a": {}}', "the key 'a' appears twice"),
    "no tensors": (lambda d: struct.pack("<Q", 2) + b"{}", f"tensor '{FIRST}': missing"),
    "truncated": (lambda d: d[:-1], "is the file truncated?"),
    "a tail": (lambda d: d + b"x", "but the header describes"),
    "empty": (lambda d: b"", "header"),
    "a pickle": (lambda d: b"\x80\x02" + b"ctorch._utils\n_rebuild" * 40, "header length"),
}  # fmt: skip


@pytest.mark.parametrize("name", RAW_MUTANTS)
def test_safetensors_raw_mutants(name: str, folder: Path) -> None:
    mutate, expected = RAW_MUTANTS[name]
    file = folder / "model.safetensors"
    file.write_bytes(mutate(file.read_bytes()))
    assert expected in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"a": 1, "a": 2}', b"[" * 100_000, b" " * (5 << 20)])
def test_broken_config_files(name: str, content: bytes, folder: Path) -> None:
    (folder / name).write_bytes(content)
    assert name in refusal(folder)


def test_an_unaligned_header_is_legal(folder: Path) -> None:
    """The data may begin at any byte; floats are then copied out rather than read in place."""
    expected = load_model(folder).weights.layers[1].down.values.clone()  # type: ignore[union-attr]
    header, data = take_apart(folder / "model.safetensors")
    text = json.dumps(header).encode()
    put_together(folder / "model.safetensors", text + b" " * (3 - len(text) % 4), data)
    assert torch.equal(load_model(folder).weights.layers[1].down.values, expected)  # type: ignore[union-attr]


def test_a_folder_where_a_file_should_be(tmp_path: Path, folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    assert "config.json" in refusal(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file(folder: Path) -> None:
    (folder / "model.safetensors").chmod(0)
    assert "cannot be read" in refusal(folder)


def test_hostile_counts_cost_little_memory(gguf_bytes: bytes, tmp_path: Path) -> None:
    """The worst mutants in a fresh process, which may hold 64 MiB more than one that only imports the loader."""
    paths = []
    for name in ("array of 2**21 strings", "tensor count 2**60", "a token of 2**63 bytes", "dimensions whose product wraps"):
        paths.append(_written(tmp_path / f"{len(paths)}.gguf", GGUF_MUTANTS[name][0](Header(gguf_bytes))))
    # a large sparse file of zeros: 4 million empty strings are announced and there
    zeros = bytearray(gguf_bytes[: Header(gguf_bytes).keys["tokenizer.ggml.tokens"] + 16])
    struct.pack_into("<Q", zeros, len(zeros) - 8, 1 << 22)
    paths.append(_written(tmp_path / "zeros.gguf", bytes(zeros)))
    os.truncate(paths[-1], 200 << 20)
    code = (
        "import resource, sys; from pathlib import Path; from spec.errors import ModelFileError; from spec.models import load_model\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "for path in sys.argv[1:]:\n"
        "    try: load_model(Path(path))\n"
        "    except ModelFileError: continue\n"
        "    raise SystemExit(f'{path} was loaded')\n"
        "print((peak() - before) // 1024)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, paths)], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(done.stdout) < 64
