"""`forespeak generate`: answer prompts once, text or one JSON object a line."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from server.commands.common import chosen_prompts, requests_of
from server.compose import load_parts, make_engine
from server.local import Completion, run_requests
from server.settings import Settings


def run(
    settings: Settings,
    prompt: str | None,
    prompts: Path | None,
    n: int | None,
    max_tokens: int,
    temperature: float,
    seed: int | None,
    as_json: bool,
    concurrency: int,
) -> int:
    """Returns the exit code: 0, or 1 when any prompt ended in an error."""
    chosen = chosen_prompts(prompt, prompts, n)
    parts = load_parts(settings)
    engine = make_engine(parts)
    failed = 0

    def show(completion: Completion) -> None:
        nonlocal failed
        item = chosen[completion.request.id]
        text = parts.tokenizer.decode(completion.token_ids)
        if completion.finish_reason == "error":
            failed += 1
        if as_json:
            line = {
                "id": item.id,
                "category": item.category,
                "text": text,
                "token_ids": completion.token_ids,
                "finish_reason": completion.finish_reason,
                "usage": completion.usage(),
                "speculation": completion.speculation(),
                "timings": completion.timings(),
            }
            if completion.error:
                line["error"] = completion.error
            print(msgspec.json.encode(line).decode(), flush=True)
        elif completion.error:
            print(f"forespeak: prompt {item.id}: {completion.error}", file=sys.stderr)
        else:
            print(f"--- {item.id}\n{text}" if len(chosen) > 1 else text, flush=True)

    try:
        run_requests(engine, requests_of(parts, chosen, max_tokens, temperature, seed), concurrency, on_finish=show)
    finally:
        engine.close()
    return 1 if failed else 0
