"""`forespeak plan`: what weights and conversations take in memory, and how many conversations fit. Works offline, without weights.

Parses, calls and prints; the arithmetic is in `server.planning`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from server.planning.facts import ModelFacts
from server.planning.library import read_facts, shipped_names
from server.planning.memory import KV_TYPES, WEIGHTS, chat_bytes, chats, devices_for, growing_bytes, token_bytes, weight_bytes
from server.settings import DEFAULT_MODEL, parse_bytes, parse_count
from spec.errors import ConfigError

LENGTHS = (2048, 8192, 32768, 131072)
MEAN_OF_LONGEST = 16  # a chat holds a sixteenth of the longest on average, unless --mean-chat says otherwise
LONGEST = 131072  # what --context is at most when it is left out

Model = Annotated[
    str, typer.Argument(help="a shipped name (--list), a config.json or its folder, a GGUF file, or a pulled model")
]
Memory = Annotated[str, typer.Option("--memory", help="memory of one device")]
Devices = Annotated[int | None, typer.Option("--devices", min=1, help="how many  [default: the fewest that hold the weights]")]
KVMemory = Annotated[str | None, typer.Option("--kv-memory", help="memory for conversations, whatever the weights leave")]
Spare = Annotated[float, typer.Option("--spare", min=0.0, max=0.9, help="share kept for activations and the runtime")]
Context = Annotated[str | None, typer.Option("--context", help="longest chat in tokens  [default: the model's, at most 128k]")]
MeanChat = Annotated[
    str | None,
    typer.Option("--mean-chat", help=f"mean chat in tokens, prefix included  [default: context / {MEAN_OF_LONGEST}]"),
]
Prefix = Annotated[
    str | None, typer.Option("--prefix", help="tokens all chats begin with  [default: half the mean, at most 1k]")
]
Weights = Annotated[str | None, typer.Option("--weights", help=f"{', '.join(WEIGHTS)} or stored  [default: as published]")]
KV = Annotated[str, typer.Option("--kv-type", help=", ".join(KV_TYPES))]
Draft = Annotated[str | None, typer.Option("--draft", help="comma list of draft models that are served beside it")]
PageSize = Annotated[int, typer.Option("--page-size", min=1, max=256, help="tokens in a KV page")]


@dataclass(frozen=True, slots=True)
class Order:
    """What was asked, in plain numbers."""

    memory: int
    devices: int | None
    kv_memory: int | None
    spare: float
    longest: int
    mean: int
    prefix: int
    weights: tuple[str, ...]  # a type for each model, the target's first
    kv: str
    page: int


def plan(
    model: Model = DEFAULT_MODEL,
    memory: Memory = "80GB",
    devices: Devices = None,
    kv_memory: KVMemory = None,
    context: Context = None,
    mean_chat: MeanChat = None,
    prefix: Prefix = None,
    weights: Weights = None,
    kv_type: KV = "bf16",
    draft: Draft = None,
    page_size: PageSize = 16,
    spare: Spare = 0.05,
    cache_dir: Annotated[str, typer.Option("--cache-dir", help="where pulled models are")] = "",
    list_: Annotated[bool, typer.Option("--list", help="print the shipped names")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Say how much memory weights and conversations take and how many conversations fit. Needs no weights and no network."""
    if list_:
        print("\n".join(shipped_names()))
        return
    cache = Path(cache_dir).expanduser() if cache_dir else Path.home() / ".cache" / "forespeak"
    models = [read_facts(name.strip(), cache) for name in [model, *(draft or "").split(",")] if name.strip()]
    for name, value, known in (("--kv-type", kv_type, KV_TYPES), ("--weights", weights or "bf16", {**WEIGHTS, "stored": None})):
        if value not in known:
            raise ConfigError(f"{name} is {value}; it must be one of {', '.join(known)}")
    if weights == "stored" and models[0].stored_bytes is None:
        raise ConfigError(f"--weights stored: no weight files of {model} are here; choose one of {', '.join(WEIGHTS)}")
    longest = parse_count(context) if context else min(models[0].context, LONGEST)
    mean = parse_count(mean_chat) if mean_chat else max(1, longest // MEAN_OF_LONGEST)
    shared = parse_count(prefix) if prefix else min(1024, mean // 2)
    if not 0 <= shared < mean <= longest:
        raise ConfigError(f"a prefix of {shared} tokens, chats of {mean} and at most {longest}: they must rise in this order")
    chosen = tuple(weights or ("stored" if facts.stored_bytes is not None else facts.stored_type) for facts in models)
    kv_bytes = None if kv_memory is None else parse_bytes(kv_memory)
    order = Order(parse_bytes(memory), devices, kv_bytes, spare, longest, mean, shared, chosen, kv_type, page_size)
    report = make_report(models, order)
    if as_json:
        print(json.dumps(report))
    else:
        show(report, models, order)


def make_report(models: Sequence[ModelFacts], order: Order) -> dict[str, Any]:
    """Everything the tables say, in bytes and tokens."""
    target = models[0]
    stored = [] if target.stored_bytes is None else ["stored"]
    weights = {name: weight_bytes(target, name) for name in [*WEIGHTS, *stored]}
    held = sum(weight_bytes(facts, kind) for facts, kind in zip(models, order.weights, strict=True))
    devices = order.devices or devices_for(held, order.memory)
    room = order.memory * devices * (1.0 - order.spare) - held if order.kv_memory is None else float(order.kv_memory)
    lengths = sorted({*LENGTHS, order.longest})
    sizes = {"prefix": order.prefix, "page": order.page}
    return {
        "model": target.name,
        "family": target.family,
        "parameters": target.total,
        "active_parameters": target.active,
        "drafts": {facts.name: facts.total for facts in models[1:]},
        "weights": order.weights[0],
        "draft_weights": dict(zip((facts.name for facts in models[1:]), order.weights[1:], strict=True)),
        "weight_bytes": held,
        "weight_bytes_by_type": weights,
        "kv": {
            kv: {
                "bytes_per_token": sum(token_bytes(facts, kv) for facts in models),
                "growing_bytes_per_token": sum(growing_bytes(facts, kv) for facts in models),
                "chat_bytes": {str(length): chat_bytes(models, kv, length) for length in lengths},
            }
            for kv in KV_TYPES
        },
        "memory": order.memory,
        "devices": devices,
        "kv_memory": max(0, int(room)),
        "kv_type": order.kv,
        "context": order.longest,
        "mean_chat": order.mean,
        "shared_prefix": order.prefix,
        "page_size": order.page,
        "chats": asdict(chats(models, order.kv, room, longest=order.longest, mean=order.mean, **sizes)),
        # Here a chat may be no longer than the column says, and holds the same share of it as above.
        "chats_by_context": {
            str(length): asdict(chats(models, order.kv, room, longest=length, **scaled(order, length))) for length in lengths
        },
    }


def scaled(order: Order, longest: int) -> dict[str, int]:
    """Mean and prefix for another longest chat, in the same proportion."""
    mean = max(2, order.mean * longest // order.longest)
    return {"mean": mean, "prefix": min(order.prefix, mean // 2), "page": order.page}


def size(count: float) -> str:
    """Decimal units, three figures: 75.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB" if count < 1000 else f"{count:,.0f} TB"


def tokens(count: int) -> str:
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)


def show(report: dict[str, Any], models: Sequence[ModelFacts], order: Order) -> None:
    console = Console()
    console = console if console.is_terminal else Console(width=140)
    target = models[0]
    windowed = sum(layer.window is not None for layer in target.layers)
    about = f"{target.total / 1e9:.3g} B parameters"
    if target.active < 0.9 * target.total:
        about += f", {target.active / 1e9:.3g} B of them a token"
    about += f", {len(target.layers)} layers" + (f", {windowed} with a window" if windowed else "")
    console.print(f"[bold]{target.name}[/bold] ({target.family}): {about}", highlight=False)
    table = Table(*report["weight_bytes_by_type"], title="weights")
    table.add_row(*(size(count) for count in report["weight_bytes_by_type"].values()))
    console.print(table)
    lengths = list(report["chats_by_context"])
    names = [f"{tokens(int(length))} tokens" for length in lengths]
    beside = f", draft models {', '.join(report['drafts'])} included" if report["drafts"] else ""
    table = Table("KV type", "a token", "of which grow", *names, title=f"one chat{beside}")
    for kv, row in report["kv"].items():
        each = (f"{row[key] / 1024:.4g} KiB" for key in ("bytes_per_token", "growing_bytes_per_token"))
        table.add_row(kv, *each, *(size(row["chat_bytes"][length]) for length in lengths))
    console.print(table)
    if order.kv_memory is None:
        source = f"{report['devices']} x {size(order.memory)} less {order.spare:.0%} and {size(report['weight_bytes'])} of {' and '.join(dict.fromkeys(order.weights))} weights"
    else:
        source = "as asked"
    console.print(f"memory for chats: {size(report['kv_memory'])} ({source}); KV type {order.kv}", highlight=False)
    counts = report["chats"]
    console.print(
        f"chats of {tokens(order.mean)} tokens on average, at most {tokens(order.longest)}: {counts['reserved']} reserved, "
        f"[bold]{counts['paged']}[/bold] paged, {counts['shared']} with {tokens(order.prefix)} shared tokens",
        highlight=False,
    )
    table = Table("chats that fit", *(f"at most {name}" for name in names), title="the same by longest chat")
    for key, label in (("reserved", "reserved"), ("paged", "paged"), ("shared", "paged, shared prefix")):
        table.add_row(label, *(str(report["chats_by_context"][length][key]) for length in lengths))
    console.print(table)
