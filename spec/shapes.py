"""Fixed tree shapes: how much to draft when no price is asked. Knows widths by depth; refuses to know costs.

Used to verify that no shape changes a text, and by `tune` as the alternatives to the price rule. A shape is data: how many
children a node may have at each depth, and how many nodes there may be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from spec.drafter import Budget, SequenceView
from spec.errors import ConfigError
from spec.merge import Candidate, build, gather
from spec.speculator import Limit, Load, StepRecord
from spec.tree import EMPTY_TREE, MAX_NODES, DraftTree, Proposal


@dataclass(frozen=True, slots=True)
class Shape:
    """`widths[d]` children at most under a node of depth d; `max_nodes` in all, best path chance first."""

    name: str
    widths: tuple[int, ...]
    max_nodes: int


SHAPES: tuple[Shape, ...] = (
    Shape("none", (), 0),
    Shape("chain:1", (1,), 1),
    Shape("chain:4", (1,) * 4, 4),
    Shape("chain:8", (1,) * 8, 8),
    Shape("wide", (8,), 8),
    Shape("2x4", (2, 1, 1, 1), 8),
    Shape("4x3", (4, 1, 1), 12),
    Shape("mixed", (3, 2, 2, 1, 1, 1), 16),
)


def parse_shape(text: str) -> Shape:
    """A shape by name, or `chain:N` (N deep), `wide:N` (N children of the root), `AxB` (A chains of B nodes).

    Raises ConfigError naming what is known.
    """
    for shape in SHAPES:
        if shape.name == text:
            return shape
    kind, _, count = text.partition(":")
    if kind in ("chain", "wide") and count.isdecimal() and 1 <= int(count) <= MAX_NODES:
        n = int(count)
        return Shape(text, (1,) * n if kind == "chain" else (n,), n)
    across, _, deep = text.partition("x")
    if across.isdecimal() and deep.isdecimal():
        a, b = int(across), int(deep)
        if a >= 1 and b >= 1 and a * b <= MAX_NODES:
            return Shape(text, (a,) + (1,) * (b - 1), a * b)
    known = ", ".join(shape.name for shape in SHAPES)
    raise ConfigError(f"tree shape {text!r} is unknown; known are {known}, chain:N, wide:N, AxB, of at most {MAX_NODES} nodes")


def _free(_: float) -> float:
    return 0.0


class ShapeSpeculator:
    """Every drafter is heard, raw scores stand for chances, and the tree is the best that fits the shape."""

    def __init__(self, shape: Shape | str, vocab_size: int | None = None) -> None:
        self.shape = parse_shape(shape) if isinstance(shape, str) else shape
        self._vocab_size = vocab_size
        self._chances: dict[tuple[str, ...] | None, Callable[[str, int, int, float], float]] = {}

    def _chance(self, drafters: tuple[str, ...] | None) -> Callable[[str, int, int, float], float]:
        widths = self.shape.widths

        def chance(drafter: str, depth: int, rank: int, confidence: float) -> float:
            if depth > len(widths) or rank >= widths[depth - 1] or (drafters is not None and drafter not in drafters):
                return 0.0
            # A floor keeps a shape full even where a drafter is unsure: shapes are for testing trees, not for speed.
            return 0.5 if confidence < 0.0 else max(0.02, min(confidence, 1.0))

        return chance

    def budgets(self, views: Sequence[SequenceView], limits: Sequence[Limit], load: Load) -> list[Budget]:
        found = []
        for view, limit in zip(views, limits, strict=True):
            policy = view.policy
            chance = self._chances.get(policy.drafters)
            if chance is None:
                if len(self._chances) > 64:
                    self._chances.clear()
                chance = self._chances[policy.drafters] = self._chance(policy.drafters)
            nodes = min(limit.max_nodes, self.shape.max_nodes, MAX_NODES)
            if policy.max_nodes is not None:
                nodes = min(nodes, policy.max_nodes)
            if policy.mode == "off":
                nodes = 0
            depth = min(limit.max_depth, len(self.shape.widths))
            found.append(Budget(max_nodes=max(0, nodes), max_depth=max(0, depth), price=0.0, pass_price=_free, chance=chance))
        return found

    def admit(
        self, views: Sequence[SequenceView], budgets: Sequence[Budget], proposals: Mapping[str, Sequence[Proposal]]
    ) -> list[DraftTree]:
        return [self._tree(budget, [(name, proposals[name][i]) for name in proposals]) for i, budget in enumerate(budgets)]

    def _tree(self, budget: Budget, offers: list[tuple[str, Proposal]]) -> DraftTree:
        if budget.max_nodes <= 0 or budget.max_depth <= 0:
            return EMPTY_TREE
        found = gather(offers, budget.chance, max_depth=budget.max_depth, vocab_size=self._vocab_size)
        room = {-1: self.shape.widths[0]}  # children a chosen node may still take
        chosen: list[Candidate] = []
        for node in found.best_first():
            parent = -1 if node.parent is None else node.parent.index
            if room.get(parent, 0) <= 0:
                continue
            room[parent] -= 1
            room[node.index] = self.shape.widths[node.depth] if node.depth < len(self.shape.widths) else 0
            chosen.append(node)
            if len(chosen) == budget.max_nodes:
                break
        return build(found, chosen)

    def rests(self, views: Sequence[SequenceView]) -> bool:
        return False

    def passed(self, steps: int, sequences: int, load: Load, target_ms: float, total_ms: float) -> None:
        """A fixed shape learns nothing."""

    def record(self, step: StepRecord) -> None:
        """A fixed shape learns nothing."""
