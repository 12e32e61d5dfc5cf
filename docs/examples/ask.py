"""Ask a running server several things at once over one socket, and print each answer with what speculation did for it.

forespeak serve
python docs/examples/ask.py "Name three rivers." "Write a haiku about rain."      (another server: --url ws://...)
"""

from __future__ import annotations

import argparse
import asyncio
import os

from server.client import Client, ClientError


async def ask(client: Client, question: str, max_tokens: int) -> str:
    answer = await client.chat([{"role": "user", "content": question}], max_tokens=max_tokens, temperature=0)
    async for delta in answer:
        if delta["type"] == "delta" and delta["seq"] == 1:
            print(f"[{question}] has begun")
    done = await answer.result()
    drafted = f"{done['speculation']['accepted']} of {done['usage']['completion_tokens']} tokens were drafted"
    return f"\n{question}\n{answer.text}\n({done['finish_reason']}, {drafted})"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--url", default="ws://127.0.0.1:8000/v1/ws")
    parser.add_argument("--max-tokens", type=int, default=100)
    given = parser.parse_args()
    try:
        async with Client(given.url, key=os.environ.get("FORESPEAK_KEY")) as client:
            for text in await asyncio.gather(*(ask(client, question, given.max_tokens) for question in given.questions)):
                print(text)
    except ClientError as error:
        raise SystemExit(f"{error.code}: {error}") from error


if __name__ == "__main__":
    asyncio.run(main())
