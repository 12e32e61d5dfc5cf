"""A peer that needs no packages, for the tests of the comparison: says the last token again, slower than we are.

Options: `garbage` prints noise where a careless library would, `same` says one token only, `short` gives a token too few,
`dies_after` ends the process in that many answers, `refuses` fails to load.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "server" / "peers" / "drivers"))
import lines

options: dict[str, Any] = {}
answered = 0


def load(request: dict[str, Any]) -> dict[str, Any]:
    options.update(request["options"])
    if options.get("refuses"):
        raise ValueError("this model is not for me\nand here is a second line")
    return {"ok": True, "versions": {"toy": "1"}}


def answer(prompts: list[list[int]], tokens: list[int]) -> dict[str, Any]:
    global answered
    answered += 1
    if answered > options.get("dies_after", 1 << 30):
        print("out of patience", file=sys.stderr, flush=True)
        os._exit(1)
    if options.get("garbage"):
        os.write(1, b"progress: 100 %\n")
    time.sleep(0.002)
    step = 0 if options.get("same") else 1
    count = [n - 1 if options.get("short") else n for n in tokens]
    said = [[(p[-1] + step * i) % 256 for i in range(n)] for p, n in zip(prompts, count, strict=True)]
    return {"seconds": 1.0 * len(prompts), "answers": [lines.result(ids, 0.5, 100.0) for ids in said]}


if __name__ == "__main__":
    lines.serve(load, answer)
