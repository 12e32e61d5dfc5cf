"""The training loop: budget, learning rate, steps, evaluations, checkpoints. Knows when; refuses to know what a network is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from drafters.training.batches import make_batch, schedule
from drafters.training.checkpoint import Position, restore, save
from drafters.training.corpus import Corpus
from drafters.training.journal import Journal
from drafters.training.networks import Network
from drafters.training.objective import Tally, loss_of, measure
from drafters.training.order import Order
from drafters.training.selfplay import seed_of
from drafters.training.teacher import Teacher

_WARM_UP = 40  # steps until the learning rate is whole
_LAST_RATE = 0.03  # share of the learning rate at the end of the cosine
_CLIP = 1.0
_BETAS = (0.9, 0.95)
_LOG_STEPS = 20
_LONGEST_STEP = 60.0  # seconds: a pause of the process does not use up the budget
_EVALUATED = 5  # depths judged, one more than are usually trained

Progress = Callable[[str, float, Mapping[str, float]], None]


def make_optimiser(network: nn.Module, order: Order) -> torch.optim.AdamW:
    """Adam with decoupled decay (Loshchilov and Hutter 2019), of matrices only."""
    trained = [p for p in network.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": order.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=order.learning_rate, betas=_BETAS)


def used(order: Order, position: Position) -> float:
    """How much of the budget is used, 1 = all: the most used of those given."""
    shares = [0.0]
    if order.steps is not None:
        shares.append(position.step / order.steps)
    if order.tokens is not None:
        shares.append(position.tokens / order.tokens)
    if order.minutes is not None:
        shares.append(position.seconds / (60 * order.minutes) if order.minutes > 0 else 1.0)
    return min(1.0, max(shares))


def rate(order: Order, position: Position) -> float:
    """A short warm-up, then a cosine over the budget (Loshchilov and Hutter 2017)."""
    cosine = 0.5 * (1 + math.cos(math.pi * used(order, position)))
    return order.learning_rate * min(1.0, (position.step + 1) / _WARM_UP) * (_LAST_RATE + (1 - _LAST_RATE) * cosine)


class Loop:
    """One run. `advance` takes it to the end of its budget or to `stop`; weights are in `network` then."""

    def __init__(
        self,
        network: nn.Module,
        teacher: Teacher,
        corpus: Corpus,
        order: Order,
        journal: Journal,
        checkpoint: Path,
        identity: dict[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.network, self.teacher, self.corpus, self.order = network, teacher, corpus, order
        self.optimiser = make_optimiser(network, order)
        self.position = Position()
        self.figures: dict[str, list[float]] = {}
        self._face = cast(Network, network)
        self.journal, self._checkpoint, self._identity, self._clock = journal, checkpoint, identity, clock

    def resume(self) -> None:
        """From the checkpoint, when there is one."""
        if self._checkpoint.exists():
            self.position = restore(self._checkpoint, self.network, self.optimiser, self._identity)

    def advance(self, on_progress: Progress, stop: Callable[[], bool]) -> bool:
        """Whether the budget is used up. The checkpoint is current when this returns."""
        order, position = self.order, self.position
        lengths = [len(c) for c in self.corpus.train]
        batches = schedule(lengths, order.batch_tokens, order.seed, position.epoch, position.place)
        tick = self._clock()
        dirty = False
        while used(order, position) < 1 and not stop():
            if position.step % order.evaluate_steps == 0:
                self.evaluate()
            position.epoch, position.place, members = next(batches)
            self._step(members)
            position.place += 1
            now = self._clock()
            position.seconds += min(now - tick, _LONGEST_STEP)
            tick, dirty = now, True
            self._log()
            if position.step % order.checkpoint_steps == 0:
                self.save()
                dirty = False
            on_progress("training", used(order, position), self._shown())
        if dirty:
            self.save()
        return used(order, position) >= 1

    def evaluate(self) -> dict[str, list[float]]:
        """Judge the held-out conversations and log it."""
        by_kind = judge(self._face, self.teacher, self.corpus, self.order)
        self.figures = by_kind["all"]
        position = self.position
        minutes = round(position.seconds / 60, 3)
        self.journal.write(step=position.step, tokens=position.tokens, minutes=minutes, held_out=self.figures, by_kind=by_kind)
        return self.figures

    def save(self) -> None:
        save(self._checkpoint, self.network, self.optimiser, self.position, self._identity)

    def _step(self, members: list[int]) -> None:
        order, position = self.order, self.position
        batch = make_batch([self.corpus.train[i] for i in members])
        lesson = self.teacher.teach(batch)
        generator = torch.Generator().manual_seed(seed_of(order.seed, position.step, "anchors"))
        for group in self.optimiser.param_groups:
            group["lr"] = rate(order, position)
        loss = loss_of(self._face, lesson, order.chain, order.anchors, generator, order.hidden_loss)
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.network.parameters(), _CLIP)
        self.optimiser.step()
        position.step += 1
        position.tokens += batch.answer_tokens
        position.recent.append(float(loss.detach()))

    def _log(self) -> None:
        position = self.position
        if position.step % _LOG_STEPS and used(self.order, position) < 1:
            return
        self.journal.write(
            step=position.step,
            tokens=position.tokens,
            minutes=round(position.seconds / 60, 3),
            epoch=position.epoch,
            rate=round(rate(self.order, position), 8),
            loss=round(sum(position.recent) / len(position.recent), 5),
        )
        position.recent = []

    def _shown(self) -> dict[str, float]:
        position = self.position
        shown = {"step": float(position.step), "seconds": position.seconds}
        if position.recent:
            shown["loss"] = position.recent[-1]
        for depth, value in enumerate(self.figures.get("top_1", ()), 1):
            shown[f"acceptance {depth}"] = value
        return shown


def judge(network: Network, teacher: Teacher, corpus: Corpus, order: Order) -> dict[str, dict[str, list[float]]]:
    """Figures over all held-out conversations, and over the greedy and the sampled ones where the file tells them apart."""
    depths = _EVALUATED if order.chain > 1 else 1
    tallies = {"all": Tally()}
    for name, kind in (("greedy", True), ("sampled", False), ("unknown", None)):
        members = sorted((c for c in corpus.held_out if c.greedy is kind), key=len)
        tally = Tally()
        at = 0
        while at < len(members):
            size = 1
            while at + size < len(members) and (size + 1) * len(members[at + size]) <= order.batch_tokens:
                size += 1
            lesson = teacher.teach(make_batch(members[at : at + size]), choices=True)
            measure(network, lesson, teacher.token_ids, depths, tally)
            at += size
        tallies["all"].merge(tally)
        if tally.count and kind is not None:
            tallies[name] = tally
    return {name: tally.figures() for name, tally in tallies.items()}
