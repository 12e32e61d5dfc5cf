"""The size of a drafter's vocabulary as a setting: what is cut, that no answer changes, and how it is tuned without running it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from checkpoints import write_rand_checkpoint
from safetensors.torch import save_file

from drafters.tensor_file import TensorFile
from server.compose import draft_vocabularies, load_parts, make_engine
from server.local import run_requests
from server.settings import Settings, load_settings
from server.tuning.measure import cut_factors
from server.tuning.predict import Choice
from server.tuning.record import DraftSample, StepCost
from server.tuning.search import Workload, choices, finalists, search, vocabularies
from server.tuning.session import paired
from server.tuning.traces import Curve, DraftCost, Machine, StepCurves, Trace, cut
from server.tuning.turns import Turn, with_steps
from spec.calibration import Calibration
from spec.cost_table import CostTable
from spec.errors import ConfigError
from spec.request import Request, SamplingParams
from spec.tree import NOTHING, Proposal

IDS = (40, 3, 97, 250, 8, 120, 5, 77, 33, 200, 61, 18, 499, 150, 90, 11)


def heads_file(path: Path, hidden: int) -> Path:
    made = torch.Generator().manual_seed(1)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made) * 0.2

    save_file(
        {
            "state_norm": torch.ones(hidden), "token_norm": torch.ones(hidden), "output_norm": torch.ones(hidden),
            "gate": rand(32, 2 * hidden), "up": rand(32, 2 * hidden), "down": rand(hidden, 32),
            "output": rand(len(IDS), hidden) * 8, "token_ids": torch.tensor(IDS, dtype=torch.int32),
        },
        path,
        metadata={"format": "forespeak.heads/1"},
    )  # fmt: skip
    return path


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("model")
    model = str(write_rand_checkpoint(folder / "rand"))
    plain = Settings(
        model=model, backend="reference", threads=1, kv_memory=8 << 20, cache_dir=str(folder / "cache"), drafters="none"
    )
    heads = heads_file(folder / "heads.safetensors", load_parts(plain).model.shape.hidden)
    return Settings(
        model=model, backend="reference", threads=1, kv_memory=8 << 20, cache_dir=str(folder / "cache"),
        drafters=f"heads:{heads}", tree_shape="wide:3",
    )  # fmt: skip


def answers(settings: Settings, vocabulary: int) -> tuple[list[list[int]], int]:
    parts = load_parts(msgspec.structs.replace(settings, draft_vocabulary=vocabulary))
    asked = [
        Request(id=i, prompt_ids=(3 + i, 9, 40), sampling=SamplingParams(max_tokens=8, temperature=0.7, seed=i)) for i in (0, 1)
    ]
    done = run_requests(make_engine(parts), asked)
    return [c.token_ids for c in done], sum(c.drafted for c in done)


def test_the_lowest_ids_stay_in_their_order(settings: Settings) -> None:
    file = TensorFile.open(Path(settings.drafters.partition(":")[2]))
    for most in (1, 5, len(IDS) - 1):
        small = file.saying(most)
        kept = [i for i, token in enumerate(IDS) if token in sorted(IDS)[:most]]
        assert small.tensors["token_ids"].tolist() == [IDS[i] for i in kept]
        assert torch.equal(small.tensors["output"], file.tensors["output"][kept])
        assert small.tensors["gate"] is file.tensors["gate"]
    for most in (0, len(IDS), 1000):
        assert file.saying(most) is file
    bare = TensorFile(file.path, {}, {"output": torch.ones(4, 2)})
    assert bare.saying(2) is bare


def test_no_answer_changes(settings: Settings) -> None:
    plain, _ = answers(msgspec.structs.replace(settings, drafters="none", tree_shape=""), 0)
    drafted = []
    for vocabulary in (0, 7, 1):
        said, count = answers(settings, vocabulary)
        assert said == plain
        drafted.append(count)
    assert drafted[0] > drafted[2] > 0, "a drafter of one token has one child a node"


def test_the_settings_tell_what_can_be_said(settings: Settings) -> None:
    parts = load_parts(settings)
    assert draft_vocabularies(parts, f"suffix,{settings.drafters}") == {"heads": tuple(sorted(IDS))}
    assert draft_vocabularies(parts, "suffix") == {}
    with pytest.raises(ConfigError, match="draft_vocabulary is -1"):
        load_settings(None, {"draft_vocabulary": -1})


# --- tuning ----------------------------------------------------------------------------------------------------------------


def test_what_a_cut_drafter_would_have_offered() -> None:
    whole = Proposal((5, 9, 5, 7), (-1, -1, 1, 0), (0.5,) * 4, (0, 1, 0, 0))
    trace = Trace(3, (5, 5), ({"heads": whole, "suffix": whole}, {}))
    found = cut(trace, {"heads": {5, 7}})
    assert found.offers[0]["heads"] == Proposal((5, 7), (-1, 0), (0.5,) * 2, (0, 0))
    assert found.offers[0]["suffix"] == whole
    assert cut(trace, {"heads": {1}}).offers[0]["heads"] is NOTHING
    assert (found.prompt_tokens, found.answer) == (3, (5, 5))


def test_what_cutting_saves_is_the_middle_over_depths() -> None:
    def samples(ms: float) -> list[DraftSample]:
        return [DraftSample(1, {"heads": depth}, {"heads": ms * depth, "suffix": 1.0}) for depth in (1, 2, 3) for _ in range(4)]

    found = cut_factors(samples(2.0), {8: samples(1.0), 4: samples(3.0), 2: []}, ["heads"])
    assert found == {("heads", 8): 0.5, ("heads", 4): 1.0, ("heads", 2): 1.0}


def test_the_search_finds_the_list_that_is_cheap_and_long_enough() -> None:
    """Answers of tokens below 32: half of the list says them all at half the price, a quarter of it none."""
    chain = Proposal((20,) * 4, (-1, 0, 1, 2), (0.97,) * 4, (0,) * 4)
    trace = Trace(30, (20,) * 81, tuple({"heads": chain} for _ in range(81)))
    costs, now = CostTable(), [0.0]
    costs.measure(lambda rows, context, sequences: 4.0 + 0.1 * rows, max_rows=64, seconds=60.0, clock=lambda: now[0])
    machine = Machine(
        decode=costs, chunk=Curve(((1.0, 4.0), (257.0, 30.0))), plain=StepCurves(Curve(((1.0, 0.5),))),
        drafting=StepCurves(Curve(((1.0, 0.5),))), drafts={"heads": DraftCost(Curve(((0.0, 0.1), (8.0, 8.1))))}, pages={16: 1.0},
        cuts={("heads", 32): 0.5, ("heads", 16): 0.25},
    )  # fmt: skip
    work = Workload([trace] * 2, machine, Calibration(), 64, says={"heads": tuple(range(64))})
    assert vocabularies(work.says) == (32, 16)
    assert {c.draft_vocabulary for c in choices(["suffix"], Choice(), work.says)} == {0}
    ranked = search(work, ["heads"], Choice(), [1])
    best = ranked[0]
    assert best.choice.draft_vocabulary == 32
    assert best.worth > 1.2
    worth = {e.choice.draft_vocabulary: e.worth for e in ranked if e.choice.tree_shape == "chain:4"}
    assert worth[32] > worth[0] > worth[16]
    assert worth[16] <= 1.0
    assert len({(f.choice.drafters, f.choice.max_tree_nodes, f.choice.tree_shape) for f in finalists(ranked, Choice())}) == 3


def test_confirmed_times_are_measured_by_the_first_choice_s_clock() -> None:
    """A stall in one repeat and a slow second half move nothing: twice as slow is twice as slow."""
    plain = [[1.0, 1.1, 9.0], [3.0, 6.0, 6.0]]
    slower = [[2.0, 2.2, 2.0], [6.0, 12.0, 12.0]]
    assert paired(plain, plain) == pytest.approx(1.1 + 6.0)
    assert paired(slower, plain) == pytest.approx(2.0 * (1.1 + 6.0))


def test_steps_with_drafters_never_take_less_than_plain_ones() -> None:
    plain = StepCurves(Curve(((1.0, 0.5), (2.0, 0.6))), Curve(((1.0, 1.0), (4.0, 2.0)), goes_on=False))
    found = StepCurves(Curve(((1.0, 0.2), (2.0, 0.9))), Curve(((1.0, 1.5),), goes_on=False)).at_least(plain)
    assert [found.overhead.at(n) for n in (1, 2)] == pytest.approx([0.5, 0.9])
    assert [found.cold.at(n) for n in (1, 4, 8)] == pytest.approx([1.5, 2.0, 2.0])


def test_every_turn_counts_at_the_pace_of_its_plain_steps() -> None:
    """The second turn ran on a machine half as fast: what drafting costs over plain decoding is the same in both."""

    def turn(slowness: float) -> Turn:
        def cost(ms: float, nodes: int, asked: bool) -> StepCost:
            return StepCost(1, nodes, ms * slowness / 1e3, 0.0, 0.1 * ms * slowness / 1e3, asked)

        return Turn(1, [cost(4.0, 0, False)] * 30, [cost(6.0, 2, True)] * 30 + [cost(5.0, 0, False)] * 30)

    table = CostTable()
    level = StepCurves(Curve(((1.0, 0.0),)))
    machine = with_steps(Machine(table, Curve(((1.0, 1.0),)), level, level), [turn(1.0), turn(2.0), turn(1.0)], 0.0, set())
    assert machine.resting is not None
    once, three = table.pass_ms(1, 0, 1), table.pass_ms(3, 0, 1)
    assert machine.plain.cold.at(1) * once == pytest.approx(4.0)
    assert machine.resting.cold.at(1) * once == pytest.approx(5.0)
    assert machine.drafting.cold.at(1) * three == pytest.approx(6.0)
    assert machine.drafting.overhead.at(1) == pytest.approx(0.6)


def test_a_page_size_costs_what_its_own_steps_take_beside_the_usual_ones_of_their_turn() -> None:
    def cost(ms: float) -> StepCost:
        return StepCost(1, 0, ms / 1e3, 0.0, 0.0, False)

    def turn(slowness: float) -> Turn:
        return Turn(1, [cost(4.0 * slowness)] * 30, pages={64: [cost(5.0 * slowness)] * 30, 8: [cost(3.0 * slowness)] * 30})

    level = StepCurves(Curve(((1.0, 0.0),)))
    machine = Machine(CostTable(), Curve(((1.0, 1.0),)), level, level, pages={16: 1.0})
    found = with_steps(machine, [turn(1.0), turn(3.0), turn(1.0)], 0.0, set()).pages
    assert found == pytest.approx({16: 1.0, 8: 0.75, 64: 1.25})
