"""Trained heads as a drafter: guesses from the target's own last hidden state, without a model or a KV store of its own.
Knows hidden states by sequence; refuses to know the target and how heads were trained.

The hidden state comes with `observe`: it is the one that said the root. From there the tree grows best first, one batched
pass over all sequences at a time, like the draft model's, each pass bought only when it pays. Nodes are certain (top of the
scores), never drawn: under the rejection rule they count as point masses, which is right for any score.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from drafters.draws import choices
from drafters.growth import Growth, Node, PassClock, worthwhile
from drafters.head_models import HeadModel, LinearMaker, LinearOp, load_heads, torch_linear
from kernels.decoder import DecoderShape, DecoderWeights
from kernels.linear import BLOCK, DenseWeight, Weight
from spec.drafter import Budget, Outcome, SequenceView
from spec.models.blocks import quantise
from spec.tree import NOTHING, Proposal

log = logging.getLogger(__name__)

_MAX_FAULTS = 3


class HeadsTarget(Protocol):
    """What is asked of the target the heads are for."""

    @property
    def shape(self) -> DecoderShape: ...
    @property
    def weights(self) -> DecoderWeights: ...


class _Growing:
    """A sequence being drafted for: its tree, and the state of every node that has children (-1 = the root)."""

    __slots__ = ("growth", "place", "states", "view")

    def __init__(self, place: int, view: SequenceView, growth: Growth) -> None:
        self.place = place
        self.view = view
        self.growth = growth
        self.states: dict[int, torch.Tensor] = {}


class HeadsDrafter:
    """The `Drafter` protocol over any HeadModel."""

    def __init__(
        self,
        model: HeadModel,
        *,
        name: str = "heads",
        fan: int = 4,
        width: int = 4,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`fan`: children scored per node. `width`: nodes of one sequence expanded per pass. `clock`: seconds."""
        self.name = name
        self._model = model
        self._fan = fan
        self._width = width
        self._clock = clock
        self._passes = PassClock()
        self._hidden: dict[int, tuple[int, torch.Tensor]] = {}  # tokens of the sequence then, state [H] that said the last
        self._faults = 0

    @classmethod
    def load(
        cls, path: Path, target: HeadsTarget, *, make_linear: LinearMaker | None = None, device: str = "cpu"
    ) -> HeadsDrafter:
        """Heads from a file for this target. Raises ModelFileError. `make_linear` None: the native 8-bit product where it runs."""
        maker = make_linear or (native_linear() if device == "cpu" else torch_linear)
        shape = target.shape
        model = load_heads(
            path,
            hidden=shape.hidden,
            vocab_size=shape.vocab_size,
            embedding=target.weights.embedding,
            make_linear=maker,
            device=device,
        )
        return cls(model)

    # --- the protocol -------------------------------------------------------------------------------------------------

    def open(self, view: SequenceView) -> None:
        """Nothing to do: the hidden state of the step that opened the sequence follows with `observe`."""

    def observe(self, outcomes: Sequence[Outcome], hidden: torch.Tensor) -> None:
        """Keep the state at the last accepted node of each sequence that goes on."""
        rows, kept = [], []
        for outcome in outcomes:
            if outcome.next_id is None or outcome.finished:
                continue
            root = outcome.first_node + outcome.num_nodes - 1 - len(outcome.tree)
            rows.append(root + (outcome.path[-1] + 1 if outcome.path else 0))
            kept.append(outcome.view)
        if not kept:
            return
        states = hidden[rows].float()  # a copy: `hidden` is only lent
        for view, state in zip(kept, states, strict=True):
            self._hidden[view.seq_id] = (len(view.token_ids), state)

    def close(self, seq_id: int) -> None:
        self._hidden.pop(seq_id, None)

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Proposal]:
        if self._faults >= _MAX_FAULTS:
            return [NOTHING] * len(views)
        try:
            with torch.inference_mode():
                return self._propose(views, budgets)
        except Exception:
            self._faults += 1
            log.exception("heads %s failed (%d of %d) and draft nothing", self.name, self._faults, _MAX_FAULTS)
            return [NOTHING] * len(views)

    # --- drafting -----------------------------------------------------------------------------------------------------

    def _propose(self, views: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Proposal]:
        proposals = [NOTHING] * len(views)
        growing = []
        for place, (view, budget) in enumerate(zip(views, budgets, strict=True)):
            known = self._hidden.get(view.seq_id)
            if known is not None and known[0] == len(view.token_ids) and budget.wants(self.name):
                growing.append(_Growing(place, view, Growth(self.name, budget, self._fan)))
        if not growing:
            return proposals
        price = budgets[growing[0].place].pass_price
        picks: list[tuple[float, _Growing, Node | None]] = [(g.growth.promise(None), g, None) for g in growing]
        while True:
            picks.sort(key=lambda item: -item[0])
            count = worthwhile([gain for gain, _, _ in picks], lambda rows: price(self._passes.estimate(rows)))
            if not count:
                break
            self._pass([(g, node) for _, g, node in picks[:count]])
            picks = [
                (gain, g, node)
                for g in growing
                for gain, node in g.growth.next_to_expand(self._width)
                if self._model.depths is None or node.depth < self._model.depths
            ]
        for g in growing:
            proposals[g.place] = g.growth.proposal()
        return proposals

    def _pass(self, picks: list[tuple[_Growing, Node | None]]) -> None:
        """Score the children of every picked node."""
        began = self._clock()
        before, tokens, depths = [], [], []
        for g, node in picks:
            if node is None:
                before.append(self._hidden[g.view.seq_id][1])
                tokens.append(g.view.token_ids[-1])
                depths.append(0)
            else:
                before.append(g.states[-1 if node.parent is None else node.parent.index])
                tokens.append(node.token)
                depths.append(node.depth)
        states = self._model.advance(torch.stack(before), tokens)
        scores = self._model.scores(states, depths)
        found = choices(scores, [g.view for g, _ in picks], depths, self._fan, self.name, draw=False)
        names = self._model.token_ids
        for (g, node), state, best in zip(picks, states, found, strict=True):
            if g.view.seq_id not in self._hidden:
                continue
            if best is None:  # not numbers: this sequence is not drafted for until its next hidden state
                g.growth.nodes.clear()
                del self._hidden[g.view.seq_id]
                continue
            g.states[-1 if node is None else node.index] = state
            ids = best.token_ids if names is None else [names[column] for column in best.token_ids]
            g.growth.add_children(node, ids, best.confidence)
        self._passes.record(len(picks), (self._clock() - began) * 1e3)


def native_linear(threads: int | None = None, bits: int = 8) -> LinearMaker:
    """Products by the C++ kernels over weights in blocks of `bits`; torch's where they cannot run.

    `threads` None: as many as torch uses.
    """
    from kernels.linear.native import PackedMatrix
    from kernels.native import load

    if load() is None:
        return torch_linear
    team = threads or torch.get_num_threads()

    def make(weight: Weight) -> LinearOp:
        if isinstance(weight, DenseWeight) and weight.in_features % BLOCK == 0:
            weight = quantise(weight.values.float(), bits, weight.bias)
        packed = PackedMatrix(weight)
        return lambda x: packed.linear(x.contiguous(), team)

    return make
