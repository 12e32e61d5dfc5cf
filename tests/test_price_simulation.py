"""The price rule on the simulated clock, against the best fixed budget there is and against plain decoding.

The rival knows the true chances and is picked with hindsight. All machines, loads and acceptances: python -m bench.price_simulation.
"""

from __future__ import annotations

import pytest

from bench import price_simulation
from bench.price_simulation import MACHINES, OF_BEST, OF_PLAIN, Line, Machine, Noise, World, compare, fixed_speeds, fixed_trees

QUIET = Noise(spread=0.05, stalls=0.01)
CPU, SLOW_DRAFTER, GPU = MACHINES
STEPS = {1: 900, 4: 400, 16: 200, 64: 120}
# the CPU everywhere; on the GPU, whose trees are large and take long to simulate, each load at least once
CELLS = [(CPU, streams, a) for streams in STEPS for a in (0.2, 0.4, 0.6, 0.8, 0.9)] + [
    (GPU, streams, a) for streams, some in {1: (0.2, 0.6), 4: (0.4, 0.8), 16: (0.2, 0.6), 64: (0.6,)}.items() for a in some
]
# And where it once fell short: bad luck taken for a bad text, the cost of long contexts guessed from a short one.
CELLS += [(SLOW_DRAFTER, 1, 0.2), (SLOW_DRAFTER, 1, 0.4), (GPU, 16, 0.5), (GPU, 64, 0.3), (GPU, 64, 0.4), (GPU, 64, 0.9)]


def name(value: object) -> str:
    return value.name if isinstance(value, Machine) else str(value)


@pytest.mark.parametrize(("machine", "streams", "acceptance"), CELLS, ids=name)
def test_it_is_as_good_as_the_best_fixed_budget(machine: Machine, streams: int, acceptance: float) -> None:
    line = compare(machine, streams, acceptance, steps=STEPS[streams], noise=QUIET)
    assert line.of_best > OF_BEST, line
    assert line.of_plain >= OF_PLAIN, line


def test_the_rival_chooses_by_true_chances() -> None:
    """Scores are over-confident to different degrees, but told the truth a fixed budget takes the best nodes there are."""
    world = World(0.6)
    for stream, position in ((0, 0), (0, 1), (3, 70)):
        chances, scores = world.chances(stream, position), world.scores(stream, position)
        assert [world.chance(rank, score) for rank, score in enumerate(scores)] == pytest.approx(chances)
    trees, kinds = fixed_trees(world), [sorted(world.of_kind(kind), reverse=True) for kind in (0, 1)]
    for nodes in (1, 2, 3):  # one level deep the best is the sum of the best chances
        assert [tree.tokens for tree in trees[nodes, 1]] == pytest.approx([1.0 + sum(chances[:nodes]) for chances in kinds])
    means = {budget: sum(tree.tokens for tree in places) / len(places) for budget, places in trees.items()}
    assert all(
        means[nodes, depth] >= means[smaller, depth]
        for nodes, depth in means
        for smaller, same in means
        if same == depth and smaller < nodes
    )


def test_the_rival_pays_for_a_batched_pass_where_any_stream_needs_it() -> None:
    """Three nodes, three deep: half of the places want a third pass. One stream pays for it half the time, sixteen always."""
    trees = fixed_trees(World(0.5))[3, 3]
    share = sum(len(tree.passes) > 2 for tree in trees) / len(trees)
    assert 0.2 < share < 0.8
    dear = Machine("dear passes", ((1, 1.0), (2, 1.0)), 1000.0, 0.0)
    for streams, passes in ((1, sum(len(tree.passes) for tree in trees) / len(trees)), (64, 3.0)):
        tokens = streams * sum(tree.tokens for tree in trees) / len(trees)
        assert fixed_speeds(World(0.5), dear, streams)[3, 3] == pytest.approx(tokens / (1000.0 * passes), rel=0.02)


@pytest.mark.parametrize(("of_best", "of_plain", "code"), [(0.98, 1.2, 0), (0.96, 1.2, 1), (0.98, 0.99, 1)])
def test_a_cell_below_a_bound_is_the_exit_status(
    of_best: float, of_plain: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def one(machine: Machine, streams: int, acceptance: float, **_: object) -> Line:
        best, plain = (of_best, of_plain) if (streams, acceptance) == (16, 0.5) else (1.0, 1.0)
        return Line(machine.name, streams, acceptance, 1.0 / plain, 1.0 / best, 1, 1, 1.0)

    monkeypatch.setattr(price_simulation, "compare", one)
    assert price_simulation.main(["--quick", "--machine", "cpu"]) == code
    assert ("missed: cpu, 16 streams, acceptance 0.5" in capsys.readouterr().out) == bool(code)
