"""What the local commands share: prompts to requests."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from server.compose import Parts
from server.prompts import Prompt, read_prompts
from server.template import ChatTemplate
from spec.errors import ConfigError
from spec.request import Request, SamplingParams, SpeculationPolicy


def table_console() -> Console:
    """A console for tables: as wide as the terminal, wide enough for every column where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def chosen_prompts(prompt: str | None, prompts: Path | None, n: int | None) -> list[Prompt]:
    """The prompts a command was given. Raises ConfigError when there is none, or two sources."""
    if (prompt is None) == (prompts is None):
        raise ConfigError("give either --prompt TEXT or --prompts FILE")
    if prompts is not None:
        return prompts_of(prompts, n)
    return [Prompt("1", "all", ({"role": "user", "content": prompt or ""},))]


def prompts_of(prompts: Path | None, n: int | None) -> list[Prompt]:
    """The same for a command that takes a file only. Raises ConfigError when there is none."""
    if prompts is None:
        raise ConfigError("give --prompts FILE")
    return read_prompts(prompts, n)


def encode(parts: Parts, prompt: Prompt) -> list[int]:
    """Token ids of a prompt, through the model's chat template unless it is raw text."""
    if prompt.text is not None:
        return parts.tokenizer.encode(prompt.text)
    return ChatTemplate(parts.tokenizer).encode_chat(list(prompt.messages))


def requests_of(
    parts: Parts,
    prompts: Sequence[Prompt],
    max_tokens: int,
    temperature: float,
    seed: int | None,
    policy: SpeculationPolicy | None = None,
) -> list[Request]:
    """One request per prompt; without a seed every prompt draws its own."""
    return [
        Request(
            id=i,
            prompt_ids=tuple(encode(parts, prompt)),
            sampling=SamplingParams(
                max_tokens=max_tokens, temperature=temperature, seed=secrets.randbits(63) if seed is None else seed + i
            ),
            speculation=policy or SpeculationPolicy(),
        )
        for i, prompt in enumerate(prompts)
    ]
