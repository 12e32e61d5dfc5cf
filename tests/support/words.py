"""A tiny model that speaks words, for tests of whoever reads the text: pages, clients, terminals.

Its table knows WORDS only. After a word comes a space, after a space one of the words: at temperature 0 always the first, at
temperature 1 a seed decides. Inside a word the next token is certain, so lookup in the text so far drafts well and not always right.
"""

from __future__ import annotations

from pathlib import Path

import torch
from checkpoint_tokenizer import VOCABULARY, token_id
from checkpoints import write_table_checkpoint

from server.settings import Settings

# Every two letters are one token, and no token is in two words.
WORDS = ("shores", "salted", "tunnel", "around", "listen", "rattan", "unless", "honour")
CERTAIN = 30.0
CONTEXT = 16384


def words_table() -> torch.Tensor:
    """[512, 512] logits."""
    table = torch.zeros(VOCABULARY, VOCABULARY)
    words = [[token_id(word[i : i + 2].encode()) for i in range(0, len(word), 2)] for word in WORDS]
    for pieces in words:
        for current, following in zip(pieces, [*pieces[1:], token_id(b" ")], strict=True):
            if table[current].any():
                raise ValueError(f"token {current} would need two successors")
            table[current, following] = CERTAIN
    elsewhere = ~table.any(dim=1)  # after a space, and after whatever ends a prompt
    for rank, pieces in enumerate(words):
        table[elsewhere, pieces[0]] = CERTAIN - rank / 4
    return table


def words_settings(folder: Path, **fields: object) -> Settings:
    """A server's settings for the model, written into `folder`."""
    model = write_table_checkpoint(folder / "words", words_table(), context=CONTEXT)
    values = {
        "port": 0,
        "drafters": "suffix",
        "threads": 1,
        "backend": "reference",
        "kv_memory": 2**28,
        "cache_dir": str(folder / "cache"),
        "drain_seconds": 1.0,
    }
    return Settings(model=str(model), **(values | fields))
