"""`forespeak tune` around the predictor: what is recorded, the file that is written, advice for a running server, the command end to end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_rand_checkpoint
from typer.testing import CliRunner

from server.cli import app
from server.compose import load_parts, make_engine
from server.local import run_requests
from server.metrics import Metrics
from server.settings import Settings, load_settings
from server.tuning.config_file import config_text
from server.tuning.live import advise, read_figures
from server.tuning.measure import Sample, draft_costs, middle, step_curves
from server.tuning.plot import by_load_svg, by_load_text
from server.tuning.predict import Choice, predict
from server.tuning.record import DraftSample, Recorder, StepCost, metered
from server.tuning.search import LoadPoint
from server.tuning.session import Session
from server.tuning.traces import Curve, DraftCost, Machine, StepCurves
from spec.calibration import Calibration
from spec.cost_table import CostTable
from spec.errors import ForespeakError
from spec.request import Request, SamplingParams
from spec.shapes import ShapeSpeculator


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rand_checkpoint(tmp_path_factory.mktemp("model") / "rand")


def settings_for(model: Path, cache: Path) -> Settings:
    return Settings(
        model=str(model),
        backend="reference",
        threads=1,
        kv_memory=8 << 20,
        cache_dir=str(cache),
        drafters="suffix",
        tree_shape="chain:4",
    )


def requests() -> list[Request]:
    prompts = [(3, 4, 5, 3, 4, 5, 3, 4), tuple(range(5, 15)), (7,) * 12]
    return [
        Request(id=i, prompt_ids=ids, sampling=SamplingParams(max_tokens=60, temperature=0.0)) for i, ids in enumerate(prompts)
    ]


def test_a_recording_is_the_plain_answer_with_an_offer_at_every_position(model: Path, tmp_path: Path) -> None:
    parts = load_parts(settings_for(model, tmp_path))
    plain = run_requests(make_engine(parts, "none"), requests())
    recorder = Recorder(Calibration())
    run = metered(make_engine(parts, speculator=lambda *_: recorder), requests(), 1)
    traces = recorder.traces(run.completions)
    assert [list(trace.answer) for trace in traces] == [completion.token_ids for completion in plain]
    assert all(completion.drafted == 0 for completion in run.completions)
    # Predicted from the recording, a fixed chain takes as many passes as the engine needs that really drafts.
    drafting = run_requests(make_engine(parts), requests())
    level = Curve(((0.0, 0.1),))
    machine = Machine(CostTable(), level, StepCurves(level), StepCurves(level), {"suffix": DraftCost(level)}, {16: 1.0})
    found = predict(traces, machine, Choice(("suffix",)), 1, lambda: ShapeSpeculator("chain:4"))
    passes = sum(len(c.step_sizes) - 1 for c in drafting)
    assert found.accepted == sum(c.accepted for c in drafting) > 0
    assert found.steps == passes
    assert found.drafted == pytest.approx(sum(c.drafted for c in drafting), rel=0.1)  # the end of an answer is not foreseen


def test_step_costs_are_of_decoding_steps_and_add_up_to_less_than_the_run(model: Path, tmp_path: Path) -> None:
    parts = load_parts(settings_for(model, tmp_path))
    run = metered(make_engine(parts, "none"), requests(), 2)
    assert {cost.sequences for cost in run.costs} == {1, 2}
    assert all(cost.nodes == 0 and cost.drafters == 0.0 and cost.verify > 0.0 for cost in run.costs)
    assert sum(cost.verify + cost.other for cost in run.costs) <= run.seconds
    drafting = metered(make_engine(parts), requests(), 1)
    assert sum(cost.nodes for cost in drafting.costs) > 0


def test_draft_costs_rise_with_depth_and_sequences() -> None:
    samples = [DraftSample(1, {"x": depth}, {"x": 1.0 + depth}) for depth in (1, 2, 4) for _ in range(5)]
    samples += [DraftSample(3, {"x": depth}, {"x": 2.0 * (1.0 + depth)}) for depth in (1, 2) for _ in range(5)]
    cost = draft_costs(samples)["x"]
    assert [cost.ms(depth, 1) for depth in (1, 2, 3, 4)] == [2.0, 3.0, 4.0, 5.0]
    assert cost.ms(0, 1) < 0.1  # a look is not a pass
    assert cost.ms(2, 3) == pytest.approx(6.0)
    assert middle([1.0] * 9 + [100.0]) == 1.0
    assert middle([]) == 0.0


def test_step_costs_become_a_line_and_a_factor() -> None:
    table = CostTable()  # a pass over r rows takes 1 + 0.1 (r - 1)
    steps = [
        StepCost(n, 0, 2.0 * table.pass_ms(n, 0, n) / 1e3, 0.0, (0.5 + 0.1 * n) / 1e3) for n in (1, 2, 4) for _ in range(20)
    ]
    curves = step_curves([Sample(steps, 1.0), Sample([], 3.0)], table, 0.0)
    assert [curves.overhead.at(n) for n in (1, 4, 32)] == pytest.approx([0.6, 0.9, 3.7])
    assert [curves.cold.at(n) for n in (1, 4, 32)] == pytest.approx([2.0, 2.0, 2.0])
    # Twice as fast a machine would have taken half of it.
    assert step_curves([Sample(steps, 0.5)], table, 0.0).cold.at(2) == pytest.approx(1.0)
    nothing = step_curves([], table, 0.0)
    assert (nothing.overhead.at(4), nothing.cold.at(4)) == (0.0, 1.0)


def test_the_written_config_is_read_back_as_the_same_settings(tmp_path: Path) -> None:
    settings = Settings(
        model='a "quoted" name', drafters="suffix,heads:x.safetensors", page_size=32, allowed_origins=("http://a",)
    )
    file = tmp_path / "tuned.toml"
    file.write_text(config_text(settings, ["one line", "and another"]))
    assert load_settings(file, {}) == settings
    assert file.read_text().startswith("# one line\n# and another\n")
    assert "chunk_tokens = 256" in file.read_text()  # what was tuned is said even where it is the default


def metrics(**counts: float) -> Metrics:
    found = Metrics()
    found.on_stats({"kv_pages_live": 10, "kv_pages_free": 90} | counts)
    return found


def advice(found: Metrics) -> dict[str, str]:
    return {item.setting: item.change for item in advise(read_figures(found.render().decode()))}


def test_a_quiet_server_needs_no_advice() -> None:
    assert advice(metrics()) == {}
    with pytest.raises(ValueError, match="no Forespeak server"):
        read_figures("# TYPE up gauge\nup 1\n")


def test_advice_on_memory_and_places() -> None:
    assert advice(metrics(preemptions=3)) == {"kv_memory": "more, or a lower max_sequences"}
    assert advice(metrics(num_requests_waiting=5)) == {"max_sequences": "higher"}
    assert advice(metrics(num_requests_waiting=5, kv_pages_live=95, kv_pages_free=5)) == {"kv_memory": "more"}
    full = metrics(prefix_cache_queries=10_000, prefix_cache_hits=5_000, kv_pages_live=40, kv_pages_cached=60, kv_pages_free=0)
    assert advice(full) == {"kv_memory": "more"}


def test_advice_on_drafters_and_chunks() -> None:
    found = metrics()
    for _ in range(1200):
        found.on_tokens(2, 0.01)
        found.on_draft({"suffix": 2, "heads": 2}, ["suffix"], 2)
    assert advice(found) == {"drafters": "suffix", "max_tree_nodes": "lower"}
    for _ in range(40):
        found.on_tokens(1, 1.0)
    assert advice(found)["chunk_tokens"] == "half"


def test_advice_on_the_size_of_trees_is_relative_and_needs_enough_drafts() -> None:
    """The server does not say how large its trees may be, so a number could be the one it has."""

    def deep(drafts: int) -> Metrics:
        found = metrics()
        for _ in range(drafts):
            found.on_tokens(15, 0.01)
            found.on_draft({"suffix": 14}, ["suffix"] * 14, 14)
        return found

    assert advice(deep(600)) == {"max_tree_nodes": "higher"}
    assert advice(deep(400)) == {}


def test_the_drawings_show_every_load(tmp_path: Path) -> None:
    points = [LoadPoint(1, 100.0, 150.0), LoadPoint(16, 400.0, 380.0)]
    text = by_load_text(points, "suffix")
    assert "x 1.50" in text
    assert "x 0.95" in text
    pytest.importorskip("matplotlib")
    by_load_svg(points, "suffix", tmp_path / "plot.svg")
    assert "<svg" in (tmp_path / "plot.svg").read_text()


def test_confirming_begins_no_further_repeat_once_time_is_up(model: Path, tmp_path: Path) -> None:
    parts = load_parts(settings_for(model, tmp_path))
    session = Session(parts, requests()[:1], [1], "suffix", Calibration())
    notes: list[str] = []
    found = session.confirm([session.usual], 1, 9, notes.append, lambda: True)
    assert (found.repeats, len(notes)) == (1, 2)
    assert found.rates[0] > 0.0
    assert session.confirm([session.usual], 1, 2, notes.append).repeats == 2


def run_tune(cache: Path, *arguments: str) -> Any:
    small = ["--backend", "reference", "--threads", "1", "--kv-memory", "8MiB", "--cache-dir", str(cache)]
    return CliRunner().invoke(app, ["tune", *small, *arguments])


def test_tune_measures_predicts_confirms_and_writes_a_config_that_serve_takes(model: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "tuned.toml"
    prompts.write_text("\n".join(json.dumps({"prompt": text}) for text in ("aaaa aaaa aaaa", "one two one two")))
    work = ["--prompts", str(prompts), "--max-tokens", "12", "--concurrency", "2", "--repeats", "1", "--out", str(out)]
    result = run_tune(
        tmp_path / "cache", str(model), *work, "--minutes", "0.1", "--drafters", " suffix "
    )  # as in "suffix, heads"
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["predictions"] >= 2
    assert {entry["load"] for entry in report["confirmed"]} == {2}
    assert all(entry["measured"] > 0 and entry["predicted"] > 0 for entry in report["confirmed"])
    assert [point["concurrency"] for point in report["by_load"]] == [1, 2, 4, 8, 16, 32]
    assert (report["repeats"], report["minutes"]) == (1, 0.1)
    written = load_settings(out, {})
    assert written.model == str(model)
    assert written.drafters == (",".join(report["choice"]["drafters"]) or "none")
    assert written.page_size == report["choice"]["page_size"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--drafters", "none", "--prompts", "FILE"], "--drafters none leaves nothing to tune"),
        ([], "give --prompts FILE"),
        (["--out", "nowhere/tuned.toml", "--prompts", "FILE"], "--out nowhere/tuned.toml: its folder does not exist"),
        (["--plot", ".", "--prompts", "FILE"], "--plot .: this is a folder"),
        (["--live", "http://127.0.0.1:9"], "cannot read http://127.0.0.1:9"),
    ],
)
def test_what_cannot_be_tuned_is_refused_in_one_line(model: Path, tmp_path: Path, arguments: list[str], said: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "aaaa"}')
    result = run_tune(tmp_path / "cache", str(model), *(str(file) if word == "FILE" else word for word in arguments))
    assert isinstance(result.exception, ForespeakError)
    assert str(result.exception).startswith(said)
    assert "\n" not in str(result.exception)


def test_a_plot_without_matplotlib_is_refused_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run_tune("no-such-model", "--prompts", str(tmp_path / "missing"), "--plot", str(tmp_path / "plot.svg"))
    assert isinstance(result.exception, ForespeakError)
    assert str(result.exception).startswith("--plot needs matplotlib")
