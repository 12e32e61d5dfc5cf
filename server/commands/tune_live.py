"""`forespeak tune --live URL`: read a running server's figures and say what to change there. Changes nothing."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import httpx
import msgspec

from server.chat import read_key
from server.commands.common import table_console
from server.tuning.live import Figures, advise, read_figures
from spec.errors import ConfigError

TIMEOUT = 10.0  # seconds


def run(url: str, api_key_file: Path | None) -> int:
    """Print figures and advice, and one JSON line; returns 0."""
    base = url.rstrip("/").removesuffix("/v1")
    headers = {"authorization": f"Bearer {read_key(api_key_file)}"} if api_key_file else {}
    try:
        with httpx.Client(base_url=base, headers=headers, timeout=TIMEOUT) as client:
            models = _get(client, "/v1/models").json()["data"]
            figures = read_figures(_get(client, "/metrics").text)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"cannot read {base}: {error or type(error).__name__}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{base} does not answer as a Forespeak server: {error}") from error
    advice = advise(figures)
    console = table_console()
    names = ", ".join(str(model["id"]) for model in models)
    console.print(f"{names} at {base}: {summary(figures)}", highlight=False)
    for item in advice:
        setting = f"{item.setting}: {item.change}" if item.setting else item.change
        console.print(f"- [bold]{setting}[/bold]  ({item.why})", highlight=False)
    if not advice:
        console.print("nothing to change", highlight=False)
    print(msgspec.json.encode({"url": base, "advice": [asdict(item) for item in advice]}).decode())
    return 0


def _get(client: httpx.Client, path: str) -> httpx.Response:
    answer = client.get(path)
    if answer.status_code == 401:
        raise ConfigError("the server wants a key: give --api-key-file")
    answer.raise_for_status()
    return answer


def summary(figures: Figures) -> str:
    """The state in one line."""
    drafts = figures.labelled.get("spec_decode_num_draft_tokens_total", {})
    accepted = figures.labelled.get("spec_decode_num_accepted_tokens_total", {})
    each = [f"{name} {accepted.get(name, 0.0) / count:.0%} of {count:.0f}" for name, count in drafts.items() if count]
    return (
        f"{figures.get('num_requests_running'):.0f} running, {figures.get('num_requests_waiting'):.0f} waiting, "
        f"{figures.get('kv_cache_usage_perc'):.0%} of pages in use, {figures.get('generation_tokens_total'):.0f} tokens delivered, "
        f"gap p50 {figures.quantile('inter_token_latency_seconds', 0.5) * 1e3:.1f} ms, "
        f"first token p50 {figures.quantile('time_to_first_token_seconds', 0.5) * 1e3:.0f} ms; "
        f"nodes accepted: {', '.join(each) or 'none drafted'}"
    )
