"""`forespeak bench`: what an engine here, or a server anywhere, does under closed and open loops, beside a baseline.

Both lanes answer the same conversations in alternation on the same weights, so that a drifting machine shifts both alike. The
baseline is the same engine without what `--without` names: plain decoding, unless it says otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from server.commands.bench import figures
from server.commands.bench.facts import facts
from server.commands.bench.order import PLAIN, Order
from server.commands.bench.records import Lane, Run, joined
from server.commands.bench.tables import print_result
from server.commands.bench.traffic import Traffic
from server.commands.common import table_console
from server.prompts import Prompt, read_prompts
from server.settings import DEFAULT_MODEL, Settings
from spec.errors import ConfigError

WARM_UP_TOKENS = 32
LanesFor = Callable[[Traffic], Sequence[Lane]]
GROUP = 4  # conversations a user has in one stretch of a lane before the other lane's turn


@dataclass(frozen=True, slots=True)
class Result:
    """One kind of traffic: its runs by lane, a run a repeat, the lane that is judged first; and the figures."""

    traffic: Traffic
    runs: dict[str, list[Run]]
    figures: dict[str, Any]


def run(settings: Settings, order: Order) -> int:
    """Print tables and, last, one JSON line; returns 0, or 1 when nothing at all was answered. Raises ConfigError."""
    if order.html is not None:
        if not order.html.parent.is_dir():
            raise ConfigError(f"--html {order.html}: there is no folder {order.html.parent}")
        from server.commands.bench import page  # says at once when the plotting library is not there

    prompts = dict(enumerate(read_prompts(order.prompts, order.n, order.turns)))
    lanes_for, about = _remote_lanes(settings, order) if order.url is not None else _engine_lanes(settings, order)
    results = measure(order, prompts, lanes_for)
    console = table_console()
    for result in results:
        print_result(console, result.figures)
    found = _json(order, prompts, results, about)
    if order.html is not None:
        try:
            order.html.write_text(page.report(found, {r.traffic.label: r.runs for r in results}), encoding="utf-8")
            console.print(f"report: {order.html}")
        except OSError as error:  # the figures are worth more than the page
            print(f"forespeak: the report cannot be written to {order.html}: {error.strerror}", file=sys.stderr)
    print(msgspec.json.encode(found).decode())
    answered = any(answer.ok for result in results for runs in result.runs.values() for run in runs for answer in run.answers)
    return 0 if answered else 1


# ---- measuring


def measure(order: Order, prompts: dict[int, Prompt], lanes_for: LanesFor, show: bool = True) -> list[Result]:
    """Every kind of traffic in turn. `lanes_for` gives the lanes, the one to judge last and its baseline, if any, first."""
    turns = sum(1 + len(prompt.later) for prompt in prompts.values())
    results = []
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=Console(stderr=True), disable=not show,
    ) as progress:  # fmt: skip
        for traffic in order.traffics():
            lanes = lanes_for(traffic)
            task = progress.add_task(f"{traffic.label}: warming up", total=order.repeats * turns * len(lanes))
            warm = dict(list(prompts.items())[: order.warm_up])
            for lane in lanes if warm else ():
                lane.run(warm, Traffic(users=traffic.users or len(warm)), "warm-up", lambda: None, WARM_UP_TOKENS)
            progress.update(task, description=traffic.label)
            runs = alternate(lanes, prompts, traffic, order.repeats, lambda task=task: progress.advance(task))  # type: ignore[misc]
            ours, base = runs[-1], runs[0] if len(lanes) > 1 else None
            named = {lane.name: run for lane, run in reversed(list(zip(lanes, runs, strict=True)))}
            results.append(Result(traffic, named, _figures(order, lanes[-1].name, traffic, ours, base)))
    return results


def alternate(
    lanes: Sequence[Lane], prompts: dict[int, Prompt], traffic: Traffic, repeats: int, tick: Callable[[], None]
) -> list[list[Run]]:
    """By lane, one run a repeat. Lanes take turns group by group, the order turned round every time.

    In a closed loop a group is a few conversations a user (one, for a single user); an open loop is one group, or its
    arrivals would not be what the rate says.
    """
    numbers = list(prompts)
    users = traffic.users or 1
    size = len(numbers) if traffic.rate is not None else 1 if users == 1 else GROUP * users
    groups = [numbers[start : start + size] for start in range(0, len(numbers), size)]
    runs: list[list[Run]] = [[] for _ in lanes]
    for repeat in range(repeats):
        stretches: list[list[Run]] = [[] for _ in lanes]
        for index, group in enumerate(groups):
            chosen = {number: prompts[number] for number in group}
            order = range(len(lanes)) if (index + repeat) % 2 == 0 else reversed(range(len(lanes)))
            for which in order:
                stretches[which].append(lanes[which].run(chosen, traffic, f"repeat {repeat}", tick))
        for which, found in enumerate(stretches):
            runs[which].append(joined(found))
    return runs


# ---- lanes


def _engine_lanes(settings: Settings, order: Order) -> tuple[LanesFor, dict[str, Any]]:
    """How lanes over engines here are made, and what the JSON line says of them."""
    from server.commands.bench.techniques import everything, without
    from server.commands.bench.workshop import Workshop

    workshop = Workshop(order.sampling, order.seed)
    backend = workshop.parts(settings).backend.name
    about = {"model": settings.model, "drafters": settings.drafters, "backend": backend, "threads": settings.threads}

    def lanes(traffic: Traffic) -> Sequence[Lane]:
        """Engines of their own for every kind of traffic: nothing learnt from the last one."""
        full = everything(settings)
        base = without(full, order.without, traffic.users or settings.max_sequences)
        return [workshop.lane(_baseline_name(order), base), workshop.lane("forespeak", full)]

    return lanes, about


def _remote_lanes(settings: Settings, order: Order) -> tuple[LanesFor, dict[str, Any]]:
    """Our own socket is asked for plain decoding as well; of other servers only what they do is known."""
    from server.commands.bench.remote import Remote, Wire
    from server.commands.bench.wires import openai_wire, socket_wire

    url = order.url or ""
    try:
        parts = urlsplit(url)
        scheme, valid = parts.scheme, bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets or a port that are none
        scheme, valid = "", False
    if not valid or scheme not in ("http", "https", "ws", "wss"):
        raise ConfigError(
            f"--url {url!r}: write http://HOST:PORT for an OpenAI-compatible server or ws://HOST:PORT/v1/ws for ours"
        )
    if order.without != PLAIN:
        raise ConfigError(
            "--without changes engines in this process; of a server with --url only speculation can be switched off"
        )
    model = None if settings.model == DEFAULT_MODEL else settings.model

    def wire(extra: dict[str, Any]) -> Callable[[], AbstractAsyncContextManager[Wire]]:
        if scheme.startswith("ws"):
            return lambda: socket_wire(url, order.key, extra)
        return lambda: openai_wire(url, model, order.key, "completions" if order.api == "completions" else "chat", extra)

    server = Remote("server", wire({}), order.sampling, seed=order.seed)
    if not scheme.startswith("ws"):
        return (lambda traffic: [server]), {"without": None}
    plain = Remote(_baseline_name(order), wire({"speculation": {"mode": "off"}}), order.sampling, seed=order.seed)
    return (lambda traffic: [plain, server]), {}


def _baseline_name(order: Order) -> str:
    return "plain" if order.without == PLAIN else "without " + ", ".join(order.without)


# ---- figures


def _figures(order: Order, name: str, traffic: Traffic, ours: list[Run], base: list[Run] | None) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "concurrency": traffic.users, "rate": traffic.rate} | figures.summary(
        ours, order.limits
    )
    found["baseline"] = None
    found["speedup_over_plain"] = None
    found["by_category"] = figures.by_category(ours, base)
    if base is not None:
        compared = figures.comparison(ours, base)
        found["baseline"] = {"name": _baseline_name(order), **figures.summary(base, order.limits)}
        found["decode_speedup"] = compared["decode_speedup"]
        found["throughput_ratio"] = compared["throughput_ratio"]
        found["identical_to_baseline"] = compared["identical"]
    if base is not None and order.without == PLAIN:
        found |= {
            "plain_decode_tokens_per_second": found["baseline"]["decode_tokens_per_second"],
            "plain_tokens_per_second": found["baseline"]["tokens_per_second"],
            "speedup_over_plain": found["decode_speedup"],
            "identical_to_plain": found["identical_to_baseline"],
        }
        for row in found["by_category"].values():
            row["speedup_over_plain"] = row["speedup"]
    return found


BY_TRAFFIC = ("decode_tokens_per_second", "tokens_per_second", "speedup_over_plain")


def _json(order: Order, prompts: dict[int, Prompt], results: Sequence[Result], about: dict[str, Any]) -> dict[str, Any]:
    """The first traffic's figures, those of every traffic, and what they were measured with."""
    found = dict(results[0].figures)
    for kind, key in (("by_concurrency", "concurrency"), ("by_rate", "rate")):
        rows = [r.figures for r in results if r.figures[key] is not None]
        found[kind] = {f"{row[key]:g}": {name: row[name] for name in BY_TRAFFIC} for row in rows}
    found["traffic"] = [result.figures for result in results]
    found |= {
        "prompts": len(prompts), "turns": order.turns, "max_tokens": order.max_tokens, "temperature": order.temperature,
        "seed": order.seed, "repeats": order.repeats, "without": order.without, "url": order.url,
    }  # fmt: skip
    return found | about | facts()
