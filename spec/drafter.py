"""The interface drafters implement. The engine owns it; it names no drafter.

A drafter never schedules, allocates pages, sees text, or raises because it could not draft: it returns `NOTHING`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from spec.request import SamplingParams, SpeculationPolicy
from spec.tree import DraftTree, Proposal

UNKNOWN = -1.0  # a confidence not known yet: `Budget.chance` answers with the mean over what was seen


class SequenceView(Protocol):
    """Read-only face of a sequence. Valid only during the call it was passed to; lists must not be changed."""

    @property
    def seq_id(self) -> int: ...
    @property
    def token_ids(self) -> list[int]: ...  # prompt and answer, committed; the last one is the pending root
    @property
    def prompt_len(self) -> int: ...
    @property
    def num_kv(self) -> int: ...  # leading tokens whose keys the target has committed
    @property
    def page_ids(self) -> list[int]: ...  # pages of positions 0.., reserved for this step's window too
    @property
    def tenant(self) -> str: ...
    @property
    def sampling(self) -> SamplingParams: ...
    @property
    def policy(self) -> SpeculationPolicy: ...
    @property
    def grammar(self) -> object | None: ...  # spec.grammar.GrammarState at the root; None = no grammar


@dataclass(frozen=True, slots=True)
class ChanceTable:
    """`Budget.chance` of one drafter as plain numbers: `factor` times spec.calibration's table, at most 1. Valid during the call."""

    values: array[float]  # "d"
    factor: float


@dataclass(frozen=True, slots=True)
class Budget:
    """What one sequence may draft now. Expected tokens are the currency.

    `price`: a node is worth verifying iff its path chance (product of chances from the root) is at least this.
    `pass_price(ms)`: expected extra tokens that one more drafting pass of `ms` milliseconds must bring.
    `chance(drafter, depth, rank, confidence)`: the calibrated chance that such a node is accepted given its parent;
    0 = such a node will not be verified, whatever it is (a shape, a request's choice of drafters, a drafter switched off).
    """

    max_nodes: int  # hard limit on nodes (root not counted), 0 = do not draft
    max_depth: int  # hard limit on depth, from max_tokens and the context edge
    price: float
    pass_price: Callable[[float], float]
    chance: Callable[[str, int, int, float], float]
    entry: float = (
        0.0  # the chance from which on a first node pays for itself and for its share of what asking and any tree cost
    )
    prices: tuple[float, ...] = ()  # what the sequence's 1st, 2nd, ... node costs, the last one holding on; () = `price`
    table: Callable[[str], ChanceTable | None] | None = None  # of a drafter; None where chances are no table

    def wants(self, drafter: str) -> bool:
        """Whether this drafter should draft at all; asked before any work is done."""
        return self.max_nodes > 0 and self.max_depth > 0 and self.chance(drafter, 1, 0, UNKNOWN) > 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one sequence in one step; passed to every drafter after commit.

    `first_node` is the row's first node in the step's [N] tensors. Row node 0 is the root (or the chunk's first token).
    """

    view: SequenceView
    tree: DraftTree
    path: tuple[int, ...]  # accepted nodes as indices into `tree`, root side first
    next_id: int | None  # None: a prefill chunk that did not reach the prompt's end
    first_node: int
    num_nodes: int
    finished: bool


class Drafter(Protocol):
    """`watches`: it must be told of every step of the sequences it serves. False: steps in which nobody drafts and no sequence
    ends may pass without a word, and then cost it nothing."""

    name: str
    watches: bool

    def open(self, view: SequenceView) -> None:
        """A sequence starts decoding (again, after a preemption)."""

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Proposal]:
        """One proposal per view. Must not keep references to the views."""

    def observe(self, outcomes: Sequence[Outcome], hidden: torch.Tensor) -> None:
        """`hidden` [N, hidden] float32 of the step, after the target's final norm; valid only during the call."""

    def close(self, seq_id: int) -> None:
        """The sequence left (finished, cancelled or preempted). Unknown ids are ignored."""


class Glancing(Drafter, Protocol):
    """A drafter that can tell at next to no cost that it has nothing to offer. Where all of them say so the step is plain decoding.

    `sure`: where it hopes it has something to offer as a rule, so a question that came to nothing says nothing of the sequence."""

    sure: bool

    def hopes(self, views: Sequence[SequenceView]) -> Sequence[int]:
        """Which of the views (their indices) may bring anything when asked about now. Asked before anything else in a step; a wrong
        answer costs speed only."""


class Watching(Drafter, Protocol):
    """A drafter that watches and can be told of plain steps in few words, some of them at once."""

    def watch(self, views: Sequence[SequenceView], steps: Sequence[torch.Tensor], behind: int) -> None:
        """Told instead of `observe` of steps in which nothing was drafted, every row was a view's last token and each got one more: row
        i of steps[j] is the state that said view i's. `behind`: tokens of each view that came after the last of those steps. The states are
        valid only during the call."""
