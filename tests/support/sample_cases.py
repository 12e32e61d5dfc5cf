"""Hand tables for the processed distribution, for every implementation of sample."""

from __future__ import annotations

from dataclasses import dataclass

import torch

INF = float("inf")


@dataclass(frozen=True)
class Table:
    """Probabilities p give logits log p (0 gives -inf); `kept` is the distribution after processing."""

    probs: list[float]
    kept: list[float]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


HALVES = [0.5, 0.25, 0.125, 0.125]

TABLES: dict[str, Table] = {
    "plain": Table(HALVES, HALVES),
    "temperature 0": Table([0.2, 0.5, 0.3], [0, 1, 0], temperature=0.0),
    "temperature 1e-45": Table([0.2, 0.5, 0.3], [0, 1, 0], temperature=1e-45),
    "temperature 1e-5": Table([0.2, 0.5, 0.3], [0, 1, 0], temperature=1e-5),
    "temperature 0, tie": Table([0.2, 0.4, 0.4], [0, 1, 0], temperature=0.0),
    "temperature 1e-5, tie stays a tie": Table([0.2, 0.4, 0.4], [0, 0.5, 0.5], temperature=1e-5),
    "temperature 0.5 squares": Table([0.75, 0.25], [0.9, 0.1], temperature=0.5),
    "top_k 2": Table(HALVES, [2 / 3, 1 / 3, 0, 0], top_k=2),
    "top_k 3, tie: lower id": Table(HALVES, [4 / 7, 2 / 7, 1 / 7, 0], top_k=3),
    "top_k beyond the vocabulary": Table(HALVES, HALVES, top_k=5),
    "top_p 0.5 is reached by the first": Table(HALVES, [1, 0, 0, 0], top_p=0.5),
    "top_p 0.51": Table(HALVES, [2 / 3, 1 / 3, 0, 0], top_p=0.51),
    "top_p 0.8, tie: lower id": Table(HALVES, [4 / 7, 2 / 7, 1 / 7, 0], top_p=0.8),
    "top_p 1e-9": Table([0.2, 0.5, 0.3], [0, 1, 0], top_p=1e-9),
    "top_k 1 and top_p 0.8": Table([0.4, 0.35, 0.25], [1, 0, 0], top_k=1, top_p=0.8),
    "top_p counts what top_k left": Table(HALVES, [1, 0, 0, 0], top_k=2, top_p=0.6),
    "min_p 1": Table([0.2, 0.5, 0.3], [0, 1, 0], min_p=1.0),
    "min_p 1, tie": Table([0.2, 0.4, 0.4], [0, 0.5, 0.5], min_p=1.0),
    "min_p 1 and top_p 0.1, tie": Table([0.2, 0.4, 0.4], [0, 1, 0], min_p=1.0, top_p=0.1),
    "min_p 0.3": Table([0.5, 0.2, 0.1, 0.2], [5 / 9, 2 / 9, 0, 2 / 9], min_p=0.3),
    "min_p after temperature": Table([0.75, 0.25], [1, 0], temperature=0.5, min_p=0.2),
    "min_p before top_p": Table([0.4, 0.3, 0.2, 0.1], [4 / 7, 3 / 7, 0, 0], min_p=0.7, top_p=0.6),
    "minus infinity is never drawn": Table([0.0, 0.75, 0.0, 0.25], [0, 0.75, 0, 0.25]),
    "one token is left": Table([0.0, 0.0, 1.0], [0, 0, 1], top_p=0.3),
}


@dataclass(frozen=True)
class Rows:
    """Arguments of sample() without uniforms; every table is a row, padded with -inf."""

    logits: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    def args(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.logits, self.temperature, self.top_k, self.top_p, self.min_p

    def repeat(self, times: int) -> Rows:
        return Rows(*(t.repeat_interleave(times, 0) for t in self.args()))


def rows(tables: list[Table], width: int | None = None, device: str = "cpu") -> Rows:
    width = width or max(len(t.probs) for t in tables)
    logits = torch.full((len(tables), width), -INF)
    for i, table in enumerate(tables):
        logits[i, : len(table.probs)] = torch.tensor(table.probs, dtype=torch.float64).log().float()

    def floats(name: str) -> torch.Tensor:
        return torch.tensor([getattr(t, name) for t in tables], dtype=torch.float32, device=device)

    top_k = torch.tensor([t.top_k for t in tables], dtype=torch.int32, device=device)
    return Rows(logits.to(device), floats("temperature"), top_k, floats("top_p"), floats("min_p"))


def kept(tables: list[Table], width: int | None = None) -> torch.Tensor:
    width = width or max(len(t.probs) for t in tables)
    out = torch.zeros(len(tables), width)
    for i, table in enumerate(tables):
        out[i, : len(table.kept)] = torch.tensor(table.kept)
    return out
