"""One text run through a decoder in every way the engine may run it: the bits of each token's scores must not move.

`check_invariance(decoder)` runs a token sequence alone (one token a step) and then in chunks, in trees with accepted rows
moved, in a mixed batch, on other page sizes and scattered pages, in a store whose unused slots are NaN.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from toy import Row, new_store, step_inputs

from kernels.batch import KVTensors
from kernels.decoder import Decoder
from kernels.kv_slots.reference import move as reference_move
from kernels.kv_slots.reference import write as reference_write

Move = Callable[[torch.Tensor, torch.Tensor, KVTensors], None]
Scores = tuple[torch.Tensor, torch.Tensor]  # hidden [T, hidden], logits [T, vocab]


class Runner:
    """One sequence on a poisoned store with shuffled pages; every call adds tokens and returns their scores."""

    def __init__(self, decoder: Decoder, length: int, page_size: int, seed: int, dtype: torch.dtype, neighbour: bool) -> None:
        self.decoder = decoder
        self.page_size = page_size
        self.random = random.Random(seed)
        count = -(-(length + 64) // page_size)
        ids = list(range(2 * count + 3))
        self.random.shuffle(ids)
        self.pages, self.other_pages = ids[:count], ids[count : 2 * count]
        self.store = new_store(decoder.shape, len(ids), page_size, dtype, fill=float("nan"))
        self.kv_len = 0
        self.neighbour = neighbour
        self.other_kv = 0
        self.other_written: set[int] = set()

    def run(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> Scores:
        """Scores of all nodes; commits nothing (`commit` does)."""
        rows = [Row(tokens, self.pages, self.kv_len, parents)]
        if self.neighbour:
            rows = self._with_neighbour(rows[0])
        inputs = step_inputs(rows, self.page_size)
        out = self.decoder.forward(inputs, self.store, need_logits=True)
        assert out.logits is not None
        first = 0 if rows[0].pages is self.pages else len(rows[0].tokens)
        mine = slice(first, first + len(tokens))
        assert out.argmax.dtype == torch.int32
        assert torch.equal(out.argmax[mine].long(), out.logits[mine].argmax(-1))
        return out.hidden[mine], out.logits[mine]

    def _with_neighbour(self, row: Row) -> list[Row]:
        size = self.random.randint(1, 9)
        tokens = [self.random.randrange(self.decoder.shape.vocab_size) for _ in range(size)]
        parents = None if self.random.random() < 0.5 else [-1] + [self.random.randrange(i) for i in range(1, size)]
        other = Row(tokens, self.other_pages, self.other_kv, parents)
        self.other_kv = (self.other_kv + 1) % 20
        for index in range(self.other_kv):  # whatever the neighbour's committed keys are, they are numbers
            page, offset = self.other_pages[index // self.page_size], index % self.page_size
            if index not in self.other_written:
                self.other_written.add(index)
                half = torch.full((1, self.store.k.shape[2], self.decoder.shape.head_dim), 0.5)
                at = torch.tensor([page * self.page_size + offset])
                for layer in range(self.store.k.shape[0]):
                    reference_write(half, half, at, self.store.k[layer], self.store.v[layer])
        return [other, row] if self.random.random() < 0.5 else [row, other]

    def slot(self, index: int) -> int:
        return self.pages[index // self.page_size] * self.page_size + index % self.page_size

    def commit(self, nodes: Sequence[int], move: Move) -> None:
        """Keep these row nodes (ascending, root first), as the engine does: move their rows to the front of the window."""
        pairs = [(self.slot(self.kv_len + n), self.slot(self.kv_len + i)) for i, n in enumerate(nodes) if n != i]
        if pairs:
            src, dst = zip(*pairs, strict=True)
            move(torch.tensor(src, dtype=torch.int32), torch.tensor(dst, dtype=torch.int32), self.store)
        self.kv_len += len(nodes)


def tree_around(path: Sequence[int], vocab: int, rng: random.Random, limit: int = 64) -> tuple[list[int], list[int], list[int]]:
    """(tokens, parents, nodes of `path`): the path hidden among wrong branches, parents before children."""
    tokens, parents, nodes = [path[0]], [-1], [0]
    for true in path[1:]:
        room = max(0, limit - len(tokens) - (len(path) - len(nodes)))
        for _ in range(rng.randint(0, min(3, room))):
            parents.append(rng.randrange(len(tokens)))
            tokens.append(rng.randrange(vocab))
        parents.append(nodes[-1])
        nodes.append(len(tokens))
        tokens.append(true)
    return tokens, parents, nodes


def alone(decoder: Decoder, text: Sequence[int], page_size: int = 16, dtype: torch.dtype = torch.float32) -> Scores:
    runner = Runner(decoder, len(text), page_size, 0, dtype, neighbour=False)
    parts = []
    for token in text:
        parts.append(runner.run([token]))
        runner.commit([0], reference_move)
    return torch.cat([h for h, _ in parts]), torch.cat([x for _, x in parts])


def chunked(runner: Runner, text: Sequence[int], sizes: Sequence[int]) -> Scores:
    parts, start = [], 0
    while start < len(text):
        size = sizes[len(parts) % len(sizes)]
        part = text[start : start + size]
        parts.append(runner.run(part))
        runner.commit(range(len(part)), reference_move)
        start += len(part)
    return torch.cat([h for h, _ in parts]), torch.cat([x for _, x in parts])


def in_trees(runner: Runner, text: Sequence[int], move: Move, longest: int = 6) -> Scores:
    parts: list[Scores] = []
    start = 0
    while start < len(text):
        path = text[start : start + runner.random.randint(1, longest)]
        tokens, parents, nodes = tree_around(path, runner.decoder.shape.vocab_size, runner.random)
        hidden, logits = runner.run(tokens, parents)
        parts.append((hidden[nodes], logits[nodes]))
        runner.commit(nodes, move)
        start += len(path)
    return torch.cat([h for h, _ in parts]), torch.cat([x for _, x in parts])


def check_invariance(
    decoder: Decoder,
    length: int = 45,
    page_sizes: Sequence[int] = (1, 4, 16, 32),
    move: Move = reference_move,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Asserts plain equality of hidden states and logits of every token, however the text is run."""
    rng = random.Random(7)
    text = [rng.randrange(decoder.shape.vocab_size) for _ in range(length)]
    want = alone(decoder, text, 16, dtype)
    assert not want[1].isnan().any(), "an unused slot was read"
    for page_size in page_sizes:
        for neighbour in (False, True):
            for name, run in (
                ("one chunk", lambda r: chunked(r, text, [len(text)])),
                ("chunks", lambda r: chunked(r, text, [7, 1, 16, 5])),
                ("trees", lambda r: in_trees(r, text, move)),
                ("long trees", lambda r: in_trees(r, text, move, longest=30)),
            ):
                got = run(Runner(decoder, length, page_size, page_size, dtype, neighbour))
                where = f"{name}, page size {page_size}, {'with' if neighbour else 'without'} a neighbour"
                for label, a, b in (("hidden", want[0], got[0]), ("logits", want[1], got[1])):
                    assert not b.isnan().any(), f"an unused slot was read: {where}"
                    wrong = (a != b).any(dim=-1).nonzero().flatten().tolist()
                    assert not wrong, f"{label} of tokens {wrong[:5]} moved: {where}"
