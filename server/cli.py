"""The `forespeak` command. Parses, calls, prints; every command's work is elsewhere and imported only when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from server.commands.plan import plan
from server.commands.train_flags import app as train
from server.flags import ENGINE, SERVER, takes
from server.settings import Settings
from spec.errors import ForespeakError

app = typer.Typer(
    name="forespeak",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A streaming chat server whose every step is a speculation: same text, fewer passes of the model.",
)

app.add_typer(train, name="train")
app.command()(plan)

# Flags of more than one command that are no settings; those that are stand in `server.flags`.
Prompts = Annotated[Path | None, typer.Option("--prompts", help="prompt file, one JSON object a line")]
Count = Annotated[int | None, typer.Option("-n", min=1, help="number of prompts, spread over the categories")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="longest answer in tokens")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, max=2.0)]
Seed = Annotated[int | None, typer.Option("--seed", min=0)]


@app.command()
@takes(*ENGINE, *SERVER)
def serve(settings: Settings) -> None:
    """Serve a model: chat page, WebSocket and OpenAI-compatible HTTP."""
    from server.serve import serve as run_server

    raise typer.Exit(run_server(settings))


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
@takes(*ENGINE)
def generate(
    settings: Settings,
    prompt: Annotated[str | None, typer.Option("--prompt", help="one prompt, as a user message")] = None,
    prompts: Prompts = None,
    n: Count = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    json: Annotated[bool, typer.Option("--json", help="one JSON object a prompt")] = False,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1)] = 1,
) -> None:
    """Answer prompts once, without a server."""
    from server.commands import generate as command

    raise typer.Exit(command.run(settings, prompt, prompts, n, max_tokens, temperature, seed, json, concurrency))


@app.command()
@takes(*ENGINE)
def verify(
    settings: Settings,
    prompts: Prompts = None,
    n: Count = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    all_: Annotated[bool, typer.Option("--all", help="also every tree shape, page size, batch and cache state")] = False,
) -> None:
    """Check that speculation changes no token: every prompt with speculation off and with each drafter."""
    from server.commands import verify as command

    raise typer.Exit(command.run(settings, prompts, n, max_tokens, temperature, seed, all_))


@app.command()
@takes(*ENGINE)
def bench(
    settings: Settings,
    prompts: Prompts = None,
    n: Count = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    concurrency: Annotated[str | None, typer.Option("--concurrency", help="closed loop: comma list of users at once")] = None,
    rate: Annotated[str | None, typer.Option("--rate", help="open loop: comma list of conversations a second")] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="whole runs, medians are reported")] = 1,
    turns: Annotated[str, typer.Option("--turns", help="first, or all: the user's later turns as well")] = "first",
    warm_up: Annotated[int, typer.Option("--warm-up", min=0, help="conversations before anything counts")] = 2,
    limit: Annotated[str, typer.Option("--limit", help="what counts as goodput, for example ttft=500,tpot=50 (ms)")] = "",
    without: Annotated[
        str, typer.Option("--without", help="the baseline lacks these techniques: speculation, prefix-cache, kv-cache, ...")
    ] = "speculation",
    html: Annotated[Path | None, typer.Option("--html", help="write a report with plots")] = None,
    url: Annotated[
        str | None, typer.Option("--url", help="a server instead: http://... (OpenAI's API) or ws://.../v1/ws")
    ] = None,
    api: Annotated[str, typer.Option("--api", help="with --url http://...: chat or completions")] = "chat",
    api_key_file: Annotated[Path | None, typer.Option("--api-key-file", help="with --url: file holding the key")] = None,
    compare: Annotated[
        str | None,
        typer.Option("--compare", help="other engines instead: llama.cpp,openvino,transformers,vllm or some of them"),
    ] = None,
    peers_dir: Annotated[Path | None, typer.Option("--peers-dir", help="with --compare: where their environments are")] = None,
) -> None:
    """Measure speed, latency and acceptance beside plain decoding; the last line is one JSON object."""
    if compare is not None:
        from server.commands.compare import run as run_compare

        loads = {
            "--concurrency": concurrency,
            "--rate": rate,
            "--seed": seed,
            "--html": html,
            "--url": url,
            "--limit": limit or None,
        }
        unused = [flag for flag, value in loads.items() if value is not None]
        if unused:
            raise typer.BadParameter(f"--compare runs its own loads and takes no {unused[0]}", param_hint=unused[0])
        raise typer.Exit(run_compare(settings, compare, prompts, n, max_tokens, repeats, peers_dir=peers_dir))
    from server.commands.bench import command, parse

    order = parse.order(
        prompts=prompts, n=n, max_tokens=max_tokens, temperature=temperature, seed=seed, concurrency=concurrency, rate=rate,
        repeats=repeats, turns=turns, warm_up=warm_up, limit=limit, without=without, html=html, url=url, api=api,
        api_key_file=api_key_file,
    )  # fmt: skip
    raise typer.Exit(command.run(settings, order))


@app.command()
@takes(*ENGINE)
def tune(
    settings: Settings,
    prompts: Prompts = None,
    n: Count = None,
    max_tokens: MaxTokens = 96,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    concurrency: Annotated[str, typer.Option("--concurrency", help="comma list of loads to tune for")] = "1,4",
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="runs that confirm a configuration, medians count")] = 3,
    minutes: Annotated[
        float,
        typer.Option(
            "--minutes",
            min=0.1,
            help="recording is not cut short; searching takes at most 0.4 of it, repeats stop when it is up",
        ),
    ] = 10.0,
    out: Annotated[Path, typer.Option("--out", help="the config that is written, for serve --config")] = Path("tuned.toml"),
    plot: Annotated[Path | None, typer.Option("--plot", help="write the speed by load as SVG")] = None,
    live: Annotated[str | None, typer.Option("--live", help="a running server's address: say what to change there")] = None,
    api_key_file: Annotated[Path | None, typer.Option("--api-key-file", help="file holding the key, for --live")] = None,
) -> None:
    """Find the drafters, their vocabulary, budget, chunk and page size that suit this machine and these prompts, and write them as a config."""
    if live is not None:
        from server.commands import tune_live

        raise typer.Exit(tune_live.run(live, api_key_file))
    from server.commands import tune as command
    from server.commands.bench.parse import numbers

    loads = [int(load) for load in numbers("--concurrency", concurrency, whole=True)]
    raise typer.Exit(command.run(settings, prompts, n, max_tokens, temperature, seed, loads, repeats, minutes, out, plot))


@app.command(name="eval")
@takes(*ENGINE)
def evaluate(
    settings: Settings,
    text: Annotated[
        Path | None, typer.Option("--text", help="a text file  [default: the standard library's docstrings]")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=100, help="characters of the text that are read")] = 100_000,
    window: Annotated[int, typer.Option("--window", min=2, help="tokens read in one piece")] = 1024,
    within: Annotated[float, typer.Option("--within", min=0.0, help="percent the perplexity may rise")] = 0.5,
    reference: Annotated[bool, typer.Option(help="compare with the weights in float32, which is slow")] = True,
) -> None:
    """Perplexity of the model as served, against the same weights in float32."""
    from server.commands import eval as command

    raise typer.Exit(command.run(settings, text, limit, window, within, reference))


@app.command()
@takes("model", "cache_dir", config=False)
def pull(settings: Settings) -> None:
    """Fetch and verify a model's weights."""
    from server.commands import models as command

    raise typer.Exit(command.pull_model(settings))


@app.command()
@takes("cache_dir", config=False)
def models(settings: Settings) -> None:
    """List the models that are here."""
    from server.commands import models as command

    raise typer.Exit(command.list_all(settings))


def main() -> None:
    """Console entry. Exit codes: 0 fine, 1 the check failed, 2 bad usage or input, 3 the engine failed."""
    try:
        app()
    except ForespeakError as error:
        print(f"forespeak: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
