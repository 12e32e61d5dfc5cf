"""What a model drafter holds of its sequences during one call. Knows trees, committed tokens and states; refuses to know passes and prices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drafters.filled import Draft
from drafters.growth import Growth, Node
from drafters.node_inputs import State
from spec.drafter import SequenceView


class Growing:
    """A sequence being drafted for in this call."""

    __slots__ = ("chain", "draft", "growth", "place", "room", "root", "view")

    def __init__(self, place: int, view: SequenceView, draft: Draft, growth: Growth, room: int) -> None:
        self.place = place
        self.view = view
        self.draft = draft
        self.growth = growth
        self.room = room  # slots after the root
        self.root: State | None = None
        self.chain: list[Node] = []  # nodes whose keys lie right after the root, each the child of the one before


def state_above(g: Growing, node: Node) -> State:
    found: State | None = g.root if node.parent is None else node.parent.state
    if found is None:
        raise ValueError("a node was to be run before its parent")
    return found


@dataclass(frozen=True, slots=True)
class Span:
    """Committed tokens `draft.valid` .. `stop - 1` of a sequence, to be run as a chain; the last one scored or not."""

    view: SequenceView
    draft: Draft
    stop: int
    scored: bool

    @property
    def tokens(self) -> list[int]:
        return self.view.token_ids[self.draft.valid : self.stop]


def due(growing: Sequence[Growing], most: int) -> list[tuple[Growing, Span]]:
    """At most `most` committed tokens to run now, shortest backlog first."""
    left = most
    if len(growing) > 1:
        growing = sorted(growing, key=lambda g: (len(g.view.token_ids) - g.draft.valid, g.place))
    found: list[tuple[Growing, Span]] = []
    for g in growing:
        length = len(g.view.token_ids)
        stop = min(length, g.draft.valid + left)
        if stop == g.draft.valid:
            break
        left -= stop - g.draft.valid
        found.append((g, Span(g.view, g.draft, stop, stop == length)))
    return found
