"""What a draft decoder is fed beside tokens: nothing, or the target's hidden states. Knows positions and rows of states; refuses to
know trees, pages and prices.

The token at position j comes with the state of position j - 1. The target's states arrive with `observe` and are only kept until the
pass that consumes them, so a drafter that is not asked for drafts pays for one copy a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from spec.drafter import Outcome

State = tuple[torch.Tensor, int]  # a pass's hidden states [N, H] and the row that is meant
Span = tuple[int, int, int]  # sequence, first token, number of tokens


class NodeInputs(Protocol):
    """One kind of input of a draft decoder."""

    most_pending: int  # states kept per sequence before the drafter works them off unasked

    def observe(self, outcomes: Sequence[Outcome], hidden: torch.Tensor) -> None:
        """Keep of the target's states what will be wanted. `hidden` is only lent."""

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
    """The target's hidden states by sequence, as runs of consecutive positions. A state nobody was told is zeros.

    Keys of drafted tokens were made of the drafter's own states, so none survives: committed tokens are run again.
    """

    def __init__(self, width: int, device: torch.device, most_pending: int = 4096) -> None:
        self.most_pending = most_pending
        self._width = width
        self._device = device
        self._runs: dict[int, list[tuple[int, torch.Tensor]]] = {}  # first position, states [n, width]

    def observe(self, outcomes: Sequence[Outcome], hidden: torch.Tensor) -> None:
        for outcome in outcomes:
            if outcome.finished:
                continue
            known = outcome.num_nodes - len(outcome.tree)
            first, path = outcome.first_node, outcome.path
            count = known + len(path)
            if not path or path[-1] == len(path) - 1:  # what was kept lies side by side
                states = hidden[first : first + count].clone()
            else:
                rows = [*range(first, first + known), *(first + known + node for node in path)]
                states = hidden[rows]
            view = outcome.view
            self._runs.setdefault(view.seq_id, []).append((view.num_kv - count, states))

    def pending(self, seq_id: int) -> int:
        runs = self._runs.get(seq_id)
        return runs[-1][0] + runs[-1][1].shape[0] - runs[0][0] if runs else 0

    def survivors(self, matched: int) -> int:
        return 0

    def committed(self, spans: Sequence[Span]) -> torch.Tensor | None:
        parts: list[torch.Tensor] = []
        for seq_id, first, count in spans:
            self._gather(parts, self._runs.get(seq_id, ()), first - 1, first - 1 + count)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _gather(self, parts: list[torch.Tensor], runs: Sequence[tuple[int, torch.Tensor]], at: int, stop: int) -> None:
        """States of positions at .. stop - 1."""
        for start, states in runs:
            end = start + states.shape[0]
            if end <= at or start >= stop:
                continue
            if start > at:
                parts.append(torch.zeros(start - at, self._width, device=self._device))
                at = start
            upto = min(end, stop)
            parts.append(states if at == start and upto == end else states[at - start : upto - start])
            at = upto
        if at < stop:
            parts.append(torch.zeros(stop - at, self._width, device=self._device))

    def drafted(self, parents: Sequence[State]) -> torch.Tensor | None:
        if len(parents) == 1:
            states, row = parents[0]
            return states[row : row + 1]
        return torch.stack([states[row] for states, row in parents])

    def settle(self, seq_id: int, valid: int) -> None:
        runs = self._runs.get(seq_id)
        while runs and runs[0][0] + runs[0][1].shape[0] < valid - 1:  # the last token may be run again
            del runs[0]

    def close(self, seq_id: int) -> None:
        self._runs.pop(seq_id, None)
