"""Where a tokenizer comes from: a model folder, or a GGUF file converted once and cached as such a folder.

Knows file names and which file declares what. The work itself is `Tokenizer`'s; nothing here imports `transformers`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from server import tokenizer_gguf
from server.template import end_of_turn
from server.vocabulary import Tokenizer, TokenizerFacts
from spec.errors import ModelFileError

__all__ = ["Tokenizer", "TokenizerFacts", "load_tokenizer"]

_KEY_BYTES = 16 << 20  # of a GGUF file that name its cached tokenizer; far more than any tokenizer's metadata takes
_LIMIT_BYTES = 256 << 20
Json = dict[str, Any]
Reader = Callable[[str], str | None]  # file name -> text, None when there is no such file


def load_tokenizer(path: Path, cache_dir: Path | None) -> Tokenizer:
    """The tokenizer of a GGUF file or of a model folder. Raises ModelFileError with one line.

    `cache_dir` keeps conversions of GGUF files, one folder each, named by the digest of what the file begins with.
    """
    if path.is_dir():
        if (path / "tokenizer.json").is_file():
            return _from_files(_folder_reader(path), path.name)
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            raise ModelFileError(f"{path}: there is no tokenizer.json, and {len(files)} GGUF files to take its place")
        path = files[0]
    if not path.is_file():
        raise ModelFileError(f"{path}: no such file or folder")
    folder = cache_dir / _cache_key(path) if cache_dir is not None else None
    if folder is not None and (folder / "tokenizer.json").is_file():
        return _from_files(_folder_reader(folder), path.stem)
    from spec.models.gguf_file import GGUFFile  # pulls in torch, which a start with a cached tokenizer does not need

    gguf = GGUFFile(path)
    texts = {
        name: json.dumps(value, ensure_ascii=False)
        for name, value in tokenizer_gguf.convert(gguf.metadata, str(path)).files.items()
    }
    tokenizer = _from_files(texts.get, path.stem)
    if folder is not None and gguf.header_bytes <= _KEY_BYTES:
        _store(folder, texts)
    return tokenizer


def _cache_key(path: Path) -> str:
    """Digest of the file's size and beginning (header and metadata lie there) and of the converter's version."""
    digest = hashlib.sha256(f"{tokenizer_gguf.FORMAT} {path.stat().st_size}\n".encode())
    with path.open("rb") as file:
        digest.update(file.read(_KEY_BYTES))
    return digest.hexdigest()[:32]


def _store(folder: Path, texts: Mapping[str, str]) -> None:
    """Write all files or none. A cache that cannot be written costs time, not correctness."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".new-"))
    except OSError:
        return
    try:
        for name, text in texts.items():
            (draft / name).write_text(text, encoding="utf-8")
        os.replace(draft, folder)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)  # another process was first, or the disk is full


def _folder_reader(folder: Path) -> Reader:
    def read(name: str) -> str | None:
        path = folder / name
        try:
            if path.stat().st_size > _LIMIT_BYTES:
                raise ModelFileError(f"{path}: larger than {_LIMIT_BYTES >> 20} MiB; this is not a tokenizer's file")
            return path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFileError(f"{path}: cannot be read: {error}") from None

    return read


def _from_files(read: Reader, name: str) -> Tokenizer:
    def read_json(file: str) -> Json:
        text = read(file)
        try:
            value = {} if text is None else json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ModelFileError(f"{name}: {file} is not valid JSON: {error}") from None
        if not isinstance(value, dict):
            raise ModelFileError(f"{name}: {file} holds a {type(value).__name__}; an object was expected")
        return value

    config = read_json("tokenizer_config.json")
    special = read_json("special_tokens_map.json") | config

    def token(key: str) -> str | None:
        value = special.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        return value if isinstance(value, str) else None

    more = special.get("additional_special_tokens") or special.get("extra_special_tokens") or []
    others = [item.get("content") if isinstance(item, dict) else item for item in (more if isinstance(more, list) else [])]
    ends = {*_ids(read_json("generation_config.json")), *_ids(read_json("config.json"))}
    add_bos = config.get("add_bos_token")
    facts = TokenizerFacts(
        name=str(config.get("name") or name),
        bos_token=token("bos_token"),
        eos_token=token("eos_token"),
        unk_token=token("unk_token"),
        pad_token=token("pad_token"),
        other_special=tuple(item for item in others if isinstance(item, str)),
        end_ids=tuple(sorted(ends)),
        add_bos=add_bos if isinstance(add_bos, bool) else None,
        chat_templates=_templates(read, config, read_json("chat_template.json")),
    )
    tokenizer = Tokenizer(read("tokenizer.json") or "", facts)
    end = end_of_turn(tokenizer)
    return tokenizer if end is None else tokenizer.with_ends([end])


def _ids(config: Json) -> list[int]:
    """`eos_token_id` of a config: one id or a list of them; multimodal configs keep it in `text_config`."""
    value = config.get("eos_token_id")
    if value is None and isinstance(config.get("text_config"), dict):
        value = config["text_config"].get("eos_token_id")
    return [item for item in (value if isinstance(value, list) else [value]) if type(item) is int]


def _templates(read: Reader, config: Json, separate: Json) -> dict[str, str]:
    """Name -> source. A chat_template.jinja file wins over chat_template.json, which wins over tokenizer_config.json."""
    source = read("chat_template.jinja") or separate.get("chat_template") or config.get("chat_template")
    if isinstance(source, str):
        return {"default": source}
    named = source if isinstance(source, list) else []
    return {
        item["name"]: item["template"]
        for item in named
        if isinstance(item, dict) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str)
    }
