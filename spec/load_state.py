"""What was learnt under one load, and what a step costs beside the target's pass. Knows milliseconds and counts; refuses to
know nodes, tokens and drafters' insides.
"""

from __future__ import annotations

from spec.cost_table import CostTable, Mean
from spec.guard import Guard, Speed, Worth

_PRIOR_STEPS = 24.0  # plain steps that lambda starts from
_SETTLED = 4  # steps of a kind before its cost means anything
_KEPT = 8  # steps for which the costs of the next rows are not looked up again
_PRICED = 12  # nodes of one sequence that are priced one by one
_RATE = 0.05


class Overheads:
    """Milliseconds of a step outside the target's pass, drafting included, by what was done in it."""

    __slots__ = ("_asked", "_idle", "_tree")

    def __init__(self) -> None:
        self._idle, self._asked, self._tree = Mean(), Mean(), Mean()

    def record(self, ms: float, *, drafted: bool, nodes: int) -> None:
        """`drafted`: somebody was asked; `nodes`: drafts that were verified."""
        (self._tree if nodes else self._asked if drafted else self._idle).add(ms, _RATE)

    def total(self, unknown: float = 0.0) -> float:
        """What asking and a tree cost, whatever its size; `unknown` before that was seen."""
        if min(self._idle.count, self._tree.count) < _SETTLED:
            return unknown
        return _apart(self._idle, self._tree)

    @property
    def asking(self) -> float:
        """What asking costs where nothing comes of it; 0 where that hardly happens."""
        return _apart(self._idle, self._asked)

    @property
    def verifying(self) -> float:
        """What merging, accepting and learning from a tree adds to that."""
        return max(0.0, self.total() - self.asking)


def _apart(less: Mean, more: Mean) -> float:
    if min(less.count, more.count) < _SETTLED:
        return 0.0
    return max(0.0, more.value - less.value)


class LoadState:
    """Of one load: decoding sequences by power of two."""

    __slots__ = (
        "_kept",
        "_rows",
        "askers",
        "guard",
        "marginal",
        "nodes",
        "overheads",
        "passed",
        "plain_steps",
        "speed",
        "steps",
        "worth",
    )

    def __init__(self, views: int = 1) -> None:
        self.askers = max(1.0, views / 4)  # sequences asked about in a step in which anybody is, lately
        self.guard = Guard()
        self.overheads = Overheads()
        self.speed = Speed()  # tokens per sequence and plain-step time: how many times plain
        self.speed.count = self.speed.tokens = self.speed.time = _PRIOR_STEPS
        self.nodes = 2.0  # admitted per sequence, lately
        self.marginal = -1.0  # milliseconds that the node after the last one admitted was worth, lately; -1 = not known
        self.steps = 0
        self.passed = 0  # plain steps since the last one that was recorded
        self.worth: dict[str, Worth] = {}
        self._rows: tuple[float, tuple[float, ...]] = (0.0, ())
        self._kept = (-1, -1, -1)  # rows, views, step until which `_rows` holds

    def row_costs(self, costs: CostTable, rows: int, views: int, keys: float) -> tuple[float, tuple[float, ...]]:
        """Milliseconds of the cheapest row anybody could be given now, and of one sequence's next rows, its neighbours drafting
        as usual. A sequence holds so many keys. Looked up every few steps: the table moves slowly."""
        if self._kept[0] == rows and self._kept[1] == views and self.steps < self._kept[2]:
            return self._rows
        self._kept = (rows, views, self.steps + _KEPT)
        width = max(1, views // 4)
        first = sum(costs.row_ms(rows, width, keys))
        last = sum(costs.row_ms(rows + int(self.nodes * views), width, keys))
        own = costs.row_ms(rows + int(self.nodes * (views - 1)), _PRICED, keys)
        self._rows = (min(first, last) / width, tuple(own))
        return self._rows
