"""The `forespeak` command. Parses, calls, prints; every command's work is elsewhere and imported only when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from server.settings import DEFAULT_MODEL, Settings, load_settings
from spec.errors import ForespeakError

app = typer.Typer(
    name="forespeak",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A streaming chat server whose every step is a speculation: same text, fewer passes of the model.",
)

Model = Annotated[
    str | None, typer.Argument(help=f"alias, GGUF file, safetensors folder or hub id  [default: {DEFAULT_MODEL}]")
]
Config = Annotated[Path | None, typer.Option("--config", help="TOML file with the same names as these flags")]
Device = Annotated[str | None, typer.Option("--device", help="cpu or cuda")]
Backend = Annotated[str | None, typer.Option("--backend", help="auto, native, reference or triton")]
Weights = Annotated[str | None, typer.Option("--weights", help="native (as stored), float32 or bfloat16")]
Quantise = Annotated[str | None, typer.Option("--quantise", help="q8 or q4: make 8 or 4-bit weights of a 16-bit checkpoint")]
Drafters = Annotated[
    str | None,
    typer.Option("--drafters", help="auto, none, or a comma list of suffix, heads[:PATH], model:PATH, student[:PATH]"),
]
Threads = Annotated[int | None, typer.Option("--threads", help="compute threads, 0 = one per core")]
KVMemory = Annotated[str | None, typer.Option("--kv-memory", help="memory of the KV cache, for example 2GiB")]
Context = Annotated[str | None, typer.Option("--context", help="longest conversation in tokens, for example 8k")]
PageSize = Annotated[int | None, typer.Option("--page-size", help="tokens in a KV page")]
ChunkTokens = Annotated[int | None, typer.Option("--chunk-tokens", help="prompt tokens a step may carry")]
TreeShape = Annotated[
    str | None, typer.Option("--tree-shape", help="a fixed draft tree such as chain:4 or 4x2 instead of the price rule")
]
MaxNodes = Annotated[int | None, typer.Option("--max-tree-nodes", help="most drafted nodes a sequence may verify in a step")]
Prompts = Annotated[Path | None, typer.Option("--prompts", help="prompt file, one JSON object a line")]
Count = Annotated[int | None, typer.Option("-n", min=1, help="number of prompts, spread over the categories")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="longest answer in tokens")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, max=2.0)]
Seed = Annotated[int | None, typer.Option("--seed", min=0)]
CacheDir = Annotated[
    str | None, typer.Option("--cache-dir", help="weights, tokenizers and packed matrices  [default: ~/.cache/forespeak]")
]


def _settings(config: Path | None, **flags: Any) -> Settings:
    return load_settings(config, flags)


@app.command()
def serve(
    model: Model = None,
    config: Config = None,
    host: Annotated[str | None, typer.Option(help="another address than loopback needs --api-key-file")] = None,
    port: Annotated[int | None, typer.Option()] = None,
    device: Device = None,
    drafters: Drafters = None,
    kv_memory: KVMemory = None,
    context: Context = None,
    max_sequences: Annotated[int | None, typer.Option("--max-sequences", help="conversations answered at once")] = None,
    api_key_file: Annotated[Path | None, typer.Option("--api-key-file", help="one key a line, NAME:KEY or KEY")] = None,
    allowed_origin: Annotated[
        list[str] | None, typer.Option("--allowed-origin", help="another web origin that may connect")
    ] = None,
    page_size: PageSize = None,
    threads: Threads = None,
    drain_seconds: Annotated[
        float | None, typer.Option("--drain-seconds", help="time answers get to finish at shutdown")
    ] = None,
    chunk_tokens: ChunkTokens = None,
    seed: Seed = None,
    backend: Backend = None,
    weights: Weights = None,
    quantise: Quantise = None,
    tree_shape: TreeShape = None,
    max_tree_nodes: MaxNodes = None,
    metrics_prefix: Annotated[str | None, typer.Option("--metrics-prefix", help="first part of every metric's name")] = None,
    log_json: Annotated[bool | None, typer.Option("--log-json", help="log one JSON object a line")] = None,
    log_prompts: Annotated[bool | None, typer.Option("--log-prompts", help="let prompts and answers into the log")] = None,
    cache_dir: CacheDir = None,
) -> None:
    """Serve a model: chat page, WebSocket and OpenAI-compatible HTTP."""
    from server.serve import serve as run_server

    flags = {k: v for k, v in locals().items() if k not in ("config", "run_server", "allowed_origin", "api_key_file")}
    flags["api_key_file"] = str(api_key_file) if api_key_file else None
    flags["allowed_origins"] = tuple(allowed_origin) if allowed_origin else None
    raise typer.Exit(run_server(_settings(config, **flags)))


@app.command()
def chat(
    url: Annotated[str, typer.Option("--url", help="the server's WebSocket")] = "ws://127.0.0.1:8000/v1/ws",
    api_key_file: Annotated[Path | None, typer.Option("--api-key-file", help="file holding the key")] = None,
    system: Annotated[str | None, typer.Option("--system", help="system prompt")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1)] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", min=0.0, max=2.0)] = None,
    seed: Seed = None,
) -> None:
    """Chat in the terminal. Accepted drafts are coloured; /stats shows figures; Ctrl-C stops the answer only."""
    from server.chat import run_chat

    raise typer.Exit(run_chat(url, api_key_file, system, max_tokens, temperature, seed))


@app.command()
def generate(
    model: Model = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="one prompt, as a user message")] = None,
    prompts: Prompts = None,
    n: Count = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    drafters: Drafters = None,
    json: Annotated[bool, typer.Option("--json", help="one JSON object a prompt")] = False,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1)] = 1,
    config: Config = None,
    device: Device = None,
    backend: Backend = None,
    weights: Weights = None,
    quantise: Quantise = None,
    threads: Threads = None,
    kv_memory: KVMemory = None,
    context: Context = None,
    page_size: PageSize = None,
    tree_shape: TreeShape = None,
    cache_dir: CacheDir = None,
) -> None:
    """Answer prompts once, without a server."""
    from server.commands import generate as command

    settings = _settings(
        config, model=model, drafters=drafters, device=device, backend=backend, weights=weights, quantise=quantise, threads=threads,
        kv_memory=kv_memory, context=context, page_size=page_size, tree_shape=tree_shape, cache_dir=cache_dir,
    )  # fmt: skip
    raise typer.Exit(command.run(settings, prompt, prompts, n, max_tokens, temperature, seed, json, concurrency))


@app.command()
def verify(
    model: Model = None,
    prompts: Prompts = None,
    n: Count = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    all_: Annotated[bool, typer.Option("--all", help="also every tree shape, page size, batch and cache state")] = False,
    drafters: Drafters = None,
    config: Config = None,
    device: Device = None,
    backend: Backend = None,
    weights: Weights = None,
    threads: Threads = None,
    kv_memory: KVMemory = None,
    context: Context = None,
    cache_dir: CacheDir = None,
) -> None:
    """Check that speculation changes no token: every prompt with speculation off and with each drafter."""
    from server.commands import verify as command

    settings = _settings(
        config, model=model, drafters=drafters, device=device, backend=backend, weights=weights, threads=threads,
        kv_memory=kv_memory, context=context, cache_dir=cache_dir,
    )  # fmt: skip
    raise typer.Exit(command.run(settings, prompts, n, max_tokens, temperature, seed, all_))


@app.command()
def bench(
    model: Model = None,
    prompts: Prompts = None,
    n: Count = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    drafters: Drafters = None,
    concurrency: Annotated[str, typer.Option("--concurrency", help="comma list of streams at once")] = "1",
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="whole runs, medians are reported")] = 1,
    config: Config = None,
    device: Device = None,
    backend: Backend = None,
    weights: Weights = None,
    quantise: Quantise = None,
    threads: Threads = None,
    kv_memory: KVMemory = None,
    context: Context = None,
    page_size: PageSize = None,
    tree_shape: TreeShape = None,
    max_tree_nodes: MaxNodes = None,
    cache_dir: CacheDir = None,
) -> None:
    """Measure speed and acceptance beside plain decoding; the last line is one JSON object."""
    from server.commands import bench as command

    streams = [int(item) for item in concurrency.split(",") if item.strip().isdigit() and int(item) > 0]
    if not streams:
        raise typer.BadParameter("write a comma list of positive numbers, for example 1,4,16", param_hint="--concurrency")
    settings = _settings(
        config, model=model, drafters=drafters, device=device, backend=backend, weights=weights, quantise=quantise, threads=threads,
        kv_memory=kv_memory, context=context, page_size=page_size, tree_shape=tree_shape, max_tree_nodes=max_tree_nodes,
        cache_dir=cache_dir,
    )  # fmt: skip
    raise typer.Exit(command.run(settings, prompts, n, max_tokens, temperature, seed, streams, repeats))


@app.command()
def pull(model: Annotated[str, typer.Argument(help="alias or hub id")] = DEFAULT_MODEL, cache_dir: CacheDir = None) -> None:
    """Fetch and verify a model's weights."""
    from server.commands import models as command

    raise typer.Exit(command.pull_model(_settings(None, model=model, cache_dir=cache_dir)))


@app.command()
def models(cache_dir: CacheDir = None) -> None:
    """List the models that are here."""
    from server.commands import models as command

    raise typer.Exit(command.list_all(_settings(None, cache_dir=cache_dir)))


def main() -> None:
    """Console entry. Exit codes: 0 fine, 1 the check failed, 2 bad usage or input, 3 the engine failed."""
    try:
        app()
    except ForespeakError as error:
        print(f"forespeak: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
