"""Trained heads as a drafter: guesses from the target's own last hidden state, without a model or a KV store of its own.
Knows hidden states by sequence; refuses to know the target and how heads were trained.

The hidden state comes with `observe`: it is the one that said the root. From there the tree grows best first, one batched
pass over all sequences at a time, like the draft model's, each pass bought only when it pays. Nodes are certain (top of the
scores), never drawn: under the rejection rule they count as point masses, which is right for any score.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from drafters.draws import TopShares, best_of, choices, wanted
from drafters.faults import Faults
from drafters.growth import Growth, Node, PassClock, grow, worthwhile
from drafters.head_models import HeadModel, LinearMaker, LinearOp, load_heads, torch_linear
from drafters.layer_models import Target
from drafters.tensor_file import TensorFile
from kernels.linear import BLOCK, DenseWeight, Weight
from kernels.top_shares.reference import top_shares
from spec.drafter import Budget, Outcome, SequenceView
from spec.models.blocks import quantise
from spec.tree import NOTHING, Proposal


class _Growing:
    """A sequence being drafted for: its tree and the state at its root. A node's `state` is set once it has children."""

    __slots__ = ("growth", "place", "root", "sound", "view")

    def __init__(self, place: int, view: SequenceView, growth: Growth, root: torch.Tensor) -> None:
        self.place = place
        self.view = view
        self.growth = growth
        self.root = root  # the target's hidden state, then the root's own
        self.sound = True


class HeadsDrafter:
    """The `Drafter` protocol over any HeadModel."""

    watches = True

    def __init__(
        self,
        model: HeadModel,
        *,
        name: str = "heads",
        fan: int = 4,
        width: int = 4,
        top: TopShares = top_shares,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`fan`: children scored per node. `width`: nodes of one sequence expanded per pass. `clock`: seconds."""
        self.name = name
        self._model = model
        self._fan = fan
        self._width = width
        self._top = top
        self._clock = clock
        self._passes = PassClock()
        self._hidden: dict[int, tuple[int, torch.Tensor]] = {}  # tokens of the sequence then, state [H] that said the last
        self._faults = Faults(f"drafter {name}")

    @classmethod
    def load(
        cls,
        path: Path,
        target: Target,
        *,
        make_linear: LinearMaker | None = None,
        device: str = "cpu",
        top: TopShares = top_shares,
        vocabulary: int = 0,
    ) -> HeadsDrafter:
        """Heads from a file for this target. Raises ModelFileError. `make_linear` None: the native 8-bit product where it runs.
        `vocabulary`: most tokens they may say, 0 = all of the file."""
        maker = make_linear or (native_linear() if device == "cpu" else torch_linear)
        return cls(load_heads(TensorFile.open(path, device).saying(vocabulary), target, make_linear=maker), top=top)

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

    def watch(self, views: Sequence[SequenceView], steps: Sequence[torch.Tensor], behind: int) -> None:
        """The last of the steps is all that counts."""
        for view, state in zip(views, steps[-1].float().clone(), strict=True):
            self._hidden[view.seq_id] = (len(view.token_ids) - behind, state)

    def close(self, seq_id: int) -> None:
        self._hidden.pop(seq_id, None)

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Proposal]:
        if self._faults.given_up:
            return [NOTHING] * len(views)
        try:
            with torch.inference_mode():
                return self._propose(views, budgets)
        except Exception:
            self._faults.note()
            return [NOTHING] * len(views)

    # --- drafting -----------------------------------------------------------------------------------------------------

    def _propose(self, views: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Proposal]:
        proposals = [NOTHING] * len(views)
        deepest = None if self._model.depths is None else self._model.depths - 1
        growing = []
        for place, (view, budget) in enumerate(zip(views, budgets, strict=True)):
            known = self._hidden.get(view.seq_id)
            if known is not None and known[0] == len(view.token_ids) and budget.wants(self.name):
                growing.append(_Growing(place, view, Growth(self.name, budget, self._fan, deepest), known[1]))
        if not growing:
            return proposals
        price = budgets[growing[0].place].pass_price
        roots = sorted([(g.growth.promise(None), g.place, g) for g in growing], key=lambda item: (-item[0], item[1]))
        count = worthwhile([gain for gain, _, _ in roots], lambda rows: price(self._passes.estimate(rows)))
        if count:
            self._pass([(g, None) for _, _, g in roots[:count]])
            grow(growing, self._width, price, self._passes, self._pass)
        for g in growing:
            proposals[g.place] = g.growth.proposal()
        return proposals

    def _pass(self, picks: Sequence[tuple[_Growing, Node | None]]) -> None:
        """Score the children of every picked node (None = the root)."""
        began = self._clock()
        before, tokens, depths = [], [], []
        for g, node in picks:
            above = None if node is None else node.parent
            before.append(g.root if above is None else above.state)
            tokens.append(g.view.token_ids[-1] if node is None else node.token)
            depths.append(0 if node is None else node.depth)
        states = self._model.advance(torch.stack(before), tokens)
        scores = self._model.scores(states, depths)
        views = [g.view for g, _ in picks]
        count, temperatures = wanted(views, self._fan, scores.shape[1], draw=False)
        best = best_of(scores, count, temperatures, self._top)
        found = choices(best, views, depths, self._fan, self.name, draw=False, names=self._model.token_ids)
        for (g, node), state, children in zip(picks, states, found, strict=True):
            if children is None or not g.sound:  # not numbers: this sequence is not drafted for until its next hidden state
                g.sound = False
                g.growth.clear()
                self._hidden.pop(g.view.seq_id, None)
                continue
            if node is None:
                g.root = state
            else:
                node.state = state
            g.growth.add_children(node, children.token_ids, children.confidence)
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
