"""Which package may import which, read from the source: type-only, lazy and conditional imports count."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# package -> packages of ours it may import; server.compose and what it composes have rules of their own below
ARROWS = {
    "kernels": {"kernels"},
    "spec": {"spec", "kernels"},
    "drafters": {"drafters", "spec", "kernels"},
    "server": {"server", "spec", "kernels"},
}
PACKAGES = {*ARROWS, "bench", "tests"}
COMPOSITION_ROOT = "server.compose"  # the only module of the server that may name drafters


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str, module: str, is_package: bool) -> set[str]:
    """Dotted names a module imports, anywhere in its text; `from a import b` gives a.b; import_module("a") counts."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            above = parts[: len(parts) + is_package - node.level] if node.level else []
            base = [*above, *([node.module] if node.module else [])]
            found |= {".".join([*base, alias.name]) for alias in node.names}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                found.add(node.args[0].value)
    return found


def forbidden(source: str, module: str, is_package: bool = False) -> list[str]:
    package = module.split(".")[0]
    allowed = set(ARROWS[package])
    if module == COMPOSITION_ROOT:
        allowed.add("drafters")
    return sorted(
        f"{module} imports {name}"
        for name in imports(source, module, is_package)
        if name.split(".")[0] in PACKAGES and name.split(".")[0] not in allowed
    )


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", ARROWS)
def test_arrows(package: str) -> None:
    assert sources(package)
    wrong = [w for p in sources(package) for w in forbidden(p.read_text(), module_name(p), p.name == "__init__.py")]
    assert wrong == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("kernels.linear.reference", "from spec.tree import DraftTree"),
        ("spec.engine", "def f():\n    import server.wire"),
        ("spec.engine", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from drafters import suffix"),
        ("spec.engine", "from importlib import import_module\nx = import_module('drafters.suffix')"),
        ("drafters.suffix", "import server"),
        ("server.session", "from drafters.suffix import Suffix"),
        ("server.session", "import bench.report"),
        ("spec.a.b", "from ... import drafters\nfrom ...drafters import suffix"),
    ],
)
def test_the_reader_sees_every_kind_of_import(module: str, line: str) -> None:
    assert forbidden(line, module)


def test_only_the_composition_root_names_drafters() -> None:
    assert forbidden("from drafters.suffix import Suffix", COMPOSITION_ROOT) == []
    assert forbidden("from drafters.suffix import Suffix", "server.cli")


def test_relative_imports_resolve() -> None:
    assert imports("from . import x", "spec.a", False) == {"spec.x"}
    assert imports("from .y import x", "spec", True) == {"spec.y.x"}
    assert imports("from ..y import x", "spec.a.b", False) == {"spec.y.x"}
    assert imports("from ... import x", "spec.a.b", False) == {"x"}


def test_kernels_init_is_a_docstring_only() -> None:
    """Hugging Face publishes a package of the same import name, and transformers probes for it."""
    body = ast.parse((ROOT / "kernels" / "__init__.py").read_text()).body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)
    assert isinstance(body[0].value, ast.Constant)


def test_no_test_folder_takes_a_package_name() -> None:
    folders = {p.name for p in (ROOT / "tests").rglob("*") if p.is_dir()}
    assert not folders & set(ARROWS)
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_transformers_model_classes_import_beside_our_kernels() -> None:
    code = (
        "import kernels, transformers\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "c = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,"
        " num_key_value_heads=1, vocab_size=8)\n"
        "LlamaForCausalLM(c)\n"
        "print(kernels.__file__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == ROOT / "kernels" / "__init__.py"
