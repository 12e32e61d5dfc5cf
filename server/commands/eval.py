"""`forespeak eval`: perplexity of the model as it is served against its weights dequantised to float32.

One line for people, one JSON object last. Exit code 1 when the served model is worse by more than --within allows.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kernels.batch import KVTensors
from server.compose import Parts, load_parts, thread_count
from server.corpus import docstrings
from server.quality import PAGE, Comparison, compare
from server.settings import Settings
from spec.errors import ConfigError
from spec.target import TargetModel

LONGEST_TEXT = 64 << 20  # bytes of a --text file


def run(settings: Settings, text: Path | None, limit: int, window: int, within: float, reference: bool) -> int:
    """Print the figures; 1 when perplexity rose by more than `within` percent."""
    words = _read(text, limit) if text else docstrings(limit)
    parts = load_parts(settings)
    token_ids = parts.tokenizer.encode(words)
    if len(token_ids) < 2:
        raise ConfigError("the text has fewer than two tokens")
    window = min(window, parts.model.context, len(token_ids))
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=Console(stderr=True)
    ) as progress:
        task = progress.add_task("loading the reference" if reference else "reading", total=len(token_ids))
        other = _target(load_parts(_plain(settings)), window) if reference else None
        progress.update(task, description="reading")
        torch.set_num_threads(thread_count(settings))  # the native kernels left torch with one
        found = compare(
            _target(parts, window), other, token_ids, window=window, on_chunk=lambda count: progress.advance(task, count)
        )
    print(_line(parts, found, window))
    digest = hashlib.sha256(words.encode()).hexdigest()
    source = str(text) if text else f"docstrings of Python {sys.version.split()[0]}"
    report = _report(parts, found, window) | {
        "text": source,
        "characters": len(words),
        "text_sha256": digest,
        "argv": sys.argv[1:],
    }
    print(msgspec.json.encode(report).decode())
    if reference and not found.change * 100 <= within:
        print(f"perplexity is more than {within:g} % above the reference's", file=sys.stderr)
        return 1
    return 0


def _read(path: Path, limit: int) -> str:
    try:
        if path.stat().st_size > LONGEST_TEXT:
            raise ConfigError(f"{path}: more than {LONGEST_TEXT >> 20} MiB of text")
        return path.read_text(encoding="utf-8")[:limit]
    except OSError as error:
        raise ConfigError(f"cannot read the text {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text") from error


def _plain(settings: Settings) -> Settings:
    """The same weights dequantised; keys, values and sums in float32, by the same family of kernels."""
    return msgspec.structs.replace(settings, weights="float32", quantise=None, kv_type="float32")


def _target(parts: Parts, window: int) -> TargetModel:
    shape = parts.model.shape
    pages = -(-window // PAGE)
    device = parts.settings.device
    store = KVTensors.allocate(shape.layers, pages, shape.kv_heads, shape.head_dim, PAGE, parts.kv_dtype, device)
    return TargetModel(parts.decoder, store)


def _line(parts: Parts, found: Comparison, window: int) -> str:
    tested, reference = found.tested, found.reference
    text = f"{parts.model.name}: perplexity {tested.perplexity:.4f} over {tested.tokens} tokens in windows of {window}"
    if reference.tokens:
        text += f", {reference.perplexity:.4f} in float32: {found.change:+.2%}"
        text += f"; the likeliest token is the same in {found.same / tested.tokens:.1%}"
    return text


def _report(parts: Parts, found: Comparison, window: int) -> dict[str, object]:
    tested, reference = found.tested, found.reference
    report: dict[str, object] = {
        "model": parts.model.name,
        "backend": parts.backend.name,
        "weights": parts.settings.weights,
        "quantise": parts.settings.quantise,
        "kv_type": parts.kv_type,
        "perplexity": round(tested.perplexity, 5),
        "tokens": tested.tokens,
        "window": window,
        "seconds": round(tested.seconds, 1),
    }
    if reference.tokens:
        report |= {
            "reference_perplexity": round(reference.perplexity, 5),
            "change_percent": round(found.change * 100, 4),
            "same_likeliest": round(found.same / tested.tokens, 4),
            "divergence": round(found.divergence / tested.tokens, 6),
            "reference_seconds": round(reference.seconds, 1),
        }
    return report
