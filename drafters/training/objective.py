"""What training minimises and what evaluation counts, the same for every network. Knows guesses; refuses to know who makes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from drafters.training.networks import Anchors, Network, choose_anchors
from drafters.training.teacher import Lesson

DISCOUNT = 0.8  # a guess one token further counts this much of it
TOPS = (1, 2, 4)
_ROWS = 256  # scores held at once: rows x vocabulary


class SoftCrossEntropy(torch.autograd.Function):
    """Mean over rows of -sum_k p_k log softmax(x W^T)_k, for a target distribution p [n, K].

    The scores [n, K] are never held as a whole: both gradients are made on the way forward, some rows at a time, from
    d/dscores = softmax - p. x [n, H] and W [K, H] float32 or of p's type; the result is float32.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, aim: torch.Tensor) -> torch.Tensor:
        low_x, low_w = x.to(aim.dtype), weight.to(aim.dtype)
        grad_x, grad_w = torch.empty_like(low_x), torch.zeros_like(weight, dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float64, device=x.device)
        for start in range(0, len(x), _ROWS):
            rows, p = low_x[start : start + _ROWS], aim[start : start + _ROWS]
            scores = (rows @ low_w.T).float()
            scores -= scores.amax(-1, keepdim=True)
            total -= (scores * p).sum().double()
            scores.exp_()
            mass = scores.sum(-1, keepdim=True)
            total += (mass.log() * p.float().sum(-1, keepdim=True)).sum().double()
            error = scores.div_(mass).sub_(p).to(aim.dtype)
            grad_x[start : start + _ROWS] = error @ low_w
            if ctx.needs_input_grad[1]:
                grad_w += error.T @ rows
        count = max(len(x), 1)
        ctx.save_for_backward(grad_x.float() / count, grad_w / count)
        return (total / count).float()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        grad_x, grad_w = ctx.saved_tensors
        return grad_x * grad_outputs[0], grad_w * grad_outputs[0] if ctx.needs_input_grad[1] else None, None


def loss_of(
    network: Network, lesson: Lesson, depths: int, anchors: float, generator: torch.Generator, hidden_loss: float = 0.0
) -> torch.Tensor:
    """Sum over depths d of DISCOUNT^(d-1) x soft cross-entropy, a scalar; plus `hidden_loss` x the squared distance of the first
    guess's states to the target's, in units of the target's mean square."""
    chosen = choose_anchors(lesson.wanted, anchors, generator)
    total = torch.zeros((), device=lesson.hidden.device)
    for depth, guess in enumerate(network.guesses(lesson, depths, chosen)):
        if not len(guess.place):
            continue
        aim = lesson.aim[guess.place]
        piece: torch.Tensor = SoftCrossEntropy.apply(guess.states.float(), network.output, aim)  # type: ignore[no-untyped-call]
        total = total + DISCOUNT**depth * piece
        if hidden_loss and depth == 0:
            goal = lesson.hidden[lesson.wanted].float()
            distance = (guess.states.float() - goal).square().mean() / goal.square().mean()
            total = total + hidden_loss * distance
    return total


@dataclass(slots=True)
class Tally:
    """Sums over judged guesses, one place a depth."""

    count: list[int] = field(default_factory=list)
    hits: list[list[int]] = field(default_factory=list)  # target's choice among the best 1, 2, 4
    overlap: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)

    def add(self, depth: int, count: int, hits: list[int], overlap: float, entropy: float) -> None:
        while len(self.count) <= depth:
            self.count.append(0)
            self.hits.append([0] * len(TOPS))
            self.overlap.append(0.0)
            self.entropy.append(0.0)
        self.count[depth] += count
        self.hits[depth] = [a + b for a, b in zip(self.hits[depth], hits, strict=True)]
        self.overlap[depth] += overlap
        self.entropy[depth] += entropy

    def merge(self, other: Tally) -> None:
        for depth, count in enumerate(other.count):
            self.add(depth, count, other.hits[depth], other.overlap[depth], other.entropy[depth])

    def figures(self) -> dict[str, list[float]]:
        """Shares by depth. top_n: the target's own choice is among the n best; overlap: sum of min(p, q), the chance that a draw
        from one is a draw from the other (Leviathan et al. 2023); loss: soft cross-entropy."""
        counts = [max(count, 1) for count in self.count]
        named = {f"top_{n}": [hits[i] / c for hits, c in zip(self.hits, counts, strict=True)] for i, n in enumerate(TOPS)}
        named["overlap"] = [value / c for value, c in zip(self.overlap, counts, strict=True)]
        named["loss"] = [value / c for value, c in zip(self.entropy, counts, strict=True)]
        return {name: [round(value, 4) for value in values] for name, values in named.items()}


def measure(network: Network, lesson: Lesson, token_ids: torch.Tensor, depths: int, tally: Tally) -> None:
    """Judge every wanted position of a lesson that has the target's choices. `token_ids` [K]: of the scores' columns.

    A guess of depth d is made where the d - 1 before it were right, so its share is the acceptance rate at position d.
    """
    if lesson.best is None:
        raise ValueError("the lesson has no choices of the target")
    everywhere: Anchors = choose_anchors(lesson.wanted, 1.0, None)
    with torch.no_grad():
        low = network.output.to(lesson.aim.dtype)
        for depth, guess in enumerate(network.guesses(lesson, depths, everywhere)):
            for start in range(0, len(guess.place), _ROWS):
                place = guess.place[start : start + _ROWS]
                log_q = torch.log_softmax((guess.states[start : start + _ROWS] @ low.T).float(), dim=-1)
                aim = lesson.aim[place].float()
                ranked = token_ids[log_q.topk(min(TOPS[-1], log_q.shape[-1])).indices] == lesson.best[place, None]
                hits = [int(ranked[:, :n].any(-1).sum()) for n in TOPS]
                overlap = float(torch.minimum(aim, log_q.exp()).sum())
                tally.add(depth, len(place), hits, overlap, float(-(aim * log_q).sum()))
