"""What a draft decoder is fed beside tokens: nothing, or the target's hidden states. Knows positions and rows of states; refuses to
know trees, pages and prices.

The token at position j comes with the state of position j - 1. The target's states arrive with `observe` and are only kept until the
pass that consumes them, so a drafter that is not asked for drafts pays for one copy a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from drafters.state_run import StateRun, row_address
from spec.drafter import Outcome, SequenceView

State = tuple[torch.Tensor, int]  # a pass's hidden states [N, H] and the row that is meant
Span = tuple[int, int, int]  # sequence, first token, number of tokens


class NodeInputs(Protocol):
    """One kind of input of a draft decoder."""

    most_pending: int  # states kept per sequence before the drafter works them off unasked

    def observe(self, outcomes: Sequence[Outcome], hidden: torch.Tensor) -> None:
        """Keep of the target's states what will be wanted. `hidden` is only lent."""

    def watch(self, views: Sequence[SequenceView], steps: Sequence[torch.Tensor], behind: int) -> None:
        """The same of plain steps, see spec.drafter.Watching."""

    def pending(self, seq_id: int) -> int:
        """States kept for this sequence."""

    def survivors(self, matched: int) -> int:
        """How many of the keys of `matched` drafted tokens that were committed are as good as keys made of committed tokens."""

    def committed(self, spans: Sequence[Span]) -> torch.Tensor | None:
        """[N, H] for the tokens of all spans in order, or None where tokens are all there is."""

    def drafted(self, parents: Sequence[State]) -> torch.Tensor | None:
        """[N, H] for drafted nodes, by the state of each one's parent."""

    def settle(self, seq_id: int, valid: int) -> None:
        """The first `valid` tokens have keys: what only they needed may go."""

    def close(self, seq_id: int) -> None: ...


class TokensOnly:
    """A plain language model: a token is all its input."""

    most_pending = 0

    def observe(self, outcomes: Sequence[Outcome], hidden: torch.Tensor) -> None:
        pass

    def watch(self, views: Sequence[SequenceView], steps: Sequence[torch.Tensor], behind: int) -> None:
        pass

    def pending(self, seq_id: int) -> int:
        return 0

    def survivors(self, matched: int) -> int:
        return matched

    def committed(self, spans: Sequence[Span]) -> torch.Tensor | None:
        return None

    def drafted(self, parents: Sequence[State]) -> torch.Tensor | None:
        return None

    def settle(self, seq_id: int, valid: int) -> None:
        pass

    def close(self, seq_id: int) -> None:
        pass


class TargetStates:
    """The target's hidden states by sequence. A state nobody was told is zeros.

    Keys of drafted tokens were made of the drafter's own states, so none survives: committed tokens are run again.
    """

    def __init__(self, width: int, device: torch.device, most_pending: int = 4096) -> None:
        self.most_pending = most_pending
        self._width = width
        self._device = device
        self._runs: dict[int, StateRun] = {}

    def observe(self, outcomes: Sequence[Outcome], hidden: torch.Tensor) -> None:
        address = row_address(hidden)
        for outcome in outcomes:
            if outcome.finished:
                continue
            known, path, view = outcome.num_nodes - len(outcome.tree), outcome.path, outcome.view
            first, run = outcome.first_node, self._run(view.seq_id)
            position = view.num_kv - known - len(path)
            if not path or path[-1] == len(path) - 1:  # what was kept lies side by side
                run.add(position, hidden, first, known + len(path), address)
                continue
            run.add(position, hidden, first, known, address)
            for place, node in enumerate(path, known):
                run.add(position + place, hidden, first + known + node, 1, address)

    def watch(self, views: Sequence[SequenceView], steps: Sequence[torch.Tensor], behind: int) -> None:
        placed = list(enumerate(steps, -behind - len(steps)))
        addresses = [row_address(hidden) for hidden in steps]
        for row, view in enumerate(views):
            run, end = self._run(view.seq_id), view.num_kv
            for (before, hidden), address in zip(placed, addresses, strict=True):
                run.add(end + before, hidden, row, 1, address)

    def _run(self, seq_id: int) -> StateRun:
        found = self._runs.get(seq_id)
        if found is None:
            found = self._runs[seq_id] = StateRun(self._width, self._device)
        return found

    def pending(self, seq_id: int) -> int:
        run = self._runs.get(seq_id)
        return 0 if run is None else len(run)

    def survivors(self, matched: int) -> int:
        return 0

    def committed(self, spans: Sequence[Span]) -> torch.Tensor | None:
        parts = [self._run(seq_id).rows(first - 1, count) for seq_id, first, count in spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def drafted(self, parents: Sequence[State]) -> torch.Tensor | None:
        if len(parents) == 1:
            states, row = parents[0]
            return states[row : row + 1]
        return torch.stack([states[row] for states, row in parents])

    def settle(self, seq_id: int, valid: int) -> None:
        run = self._runs.get(seq_id)
        if run is not None:
            run.forget_before(valid - 2)  # the last token may be run again

    def close(self, seq_id: int) -> None:
        self._runs.pop(seq_id, None)
