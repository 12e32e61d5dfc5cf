"""Training from nothing on tiny models: the answers' file, what is learned from, exact continuation, and files that draft."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_rand_checkpoint, write_table_checkpoint
from safetensors.torch import load_file
from typer.testing import CliRunner

from drafters.training import run
from drafters.training.answers import Conversation, read_answers
from drafters.training.batches import epoch_plan, make_batch
from drafters.training.corpus import is_held_out, loops, make_corpus
from drafters.training.frequent import choose_tokens
from drafters.training.journal import read_journal
from drafters.training.networks import choose_anchors
from drafters.training.objective import SoftCrossEntropy
from drafters.training.order import Order, Places, parse_order
from drafters.training.plot import curves
from drafters.training.teacher import Teacher
from server.cli import app
from server.commands.train import Dialogue, always_tokens
from server.compose import Parts, load_parts, make_engine
from server.settings import Settings
from spec.errors import ConfigError

CYCLE = list(range(33, 97))  # the tokens that the table model goes round in
KINDS: dict[str, dict[str, Any]] = {
    "attention": {"what": "heads", "kind": "attention"},
    "recurrent": {"what": "heads", "kind": "recurrent", "width": 128, "learning_rate": 1e-2},
    "student": {"what": "student", "layers": 1, "hidden_loss": 0.5},
    "student-shared": {"what": "student", "layers": 1, "share_output": True},
}


class Killed(Exception):
    """Stands for a kill: nothing is saved on the way out."""


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    path = write_rand_checkpoint(tmp_path_factory.mktemp("model") / "rand", layers=2, hidden=64, intermediate=96, q_heads=2)
    return parts_of(path)


def parts_of(path: Path) -> Parts:
    parts = load_parts(Settings(model=str(path), kv_memory=16 << 20, threads=1, cache_dir=str(path.parent / "cache")))
    torch.set_num_threads(1)
    return parts


def target_of(parts: Parts) -> run.Target:
    return run.Target(
        model=parts.model,
        decoder=parts.decoder,
        make_engine=lambda: make_engine(parts, "none"),
        speaker=lambda: Dialogue(parts.tokenizer),
        kv_dtype=parts.kv_dtype,
        device="cpu",
        always=always_tokens(parts.tokenizer),
    )


def order_of(out: Path, **flags: Any) -> Order:
    small = {"steps": 8, "batch_tokens": 128, "checkpoint_steps": 3, "evaluate_steps": 4, "held_out": 0.2, "depths": 3}
    return parse_order(small | {"what": "heads", "out": str(out)} | flags)


def quiet(stage: str, share: float, facts: Mapping[str, float]) -> None:
    pass


def never() -> bool:
    return False


def conversations(count: int = 24, seed: int = 0, answer: int = 16) -> list[Conversation]:
    g = torch.Generator().manual_seed(seed)
    found = []
    for i in range(count):
        ids = torch.randint(0, 256, (5 + answer + i % 5,), generator=g).tolist()
        found.append(Conversation((257, *ids[:4]), tuple(ids[4:]), i % 2 == 0))
    return found


def write_lines(path: Path, items: list[Conversation]) -> Path:
    lines = [{"prompt_ids": c.prompt_ids, "answer_ids": c.answer_ids, "greedy": c.greedy} for c in items]
    path.write_bytes(gzip.compress("\n".join(json.dumps(line) for line in lines).encode()))
    return path


def weights(path: Path) -> dict[str, torch.Tensor]:
    """Of a checkpoint: float32, moments included."""
    return load_file(path)


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


# --- answers ----------------------------------------------------------------------------------------------------------


def test_a_cut_file_of_answers_continues_as_if_nothing_had_happened(tmp_path: Path, parts: Parts) -> None:
    flags = {"answers": 10, "writers": 4, "answer_tokens": 12, "user_tokens": 6}
    whole, cut = order_of(tmp_path / "whole.safetensors", **flags), order_of(tmp_path / "cut.safetensors", **flags)
    target = target_of(parts)
    assert run.write(target, whole, quiet, never)

    chunks = 0

    def stop() -> bool:
        return chunks > 0

    def count(stage: str, share: float, facts: Mapping[str, float]) -> None:
        nonlocal chunks
        chunks += 1

    assert not run.write(target, cut, count, stop)
    path = Places(cut).answers
    before = read_answers(path)
    assert 0 < len(before.conversations) < 10
    torn = gzip.compress(b'{"prompt_ids": [1, 2], "answer_ids": [3, 4, 5, 6]}\n' * 50)
    path.write_bytes(path.read_bytes() + torn[:-9])
    assert len(read_answers(path).conversations) == len(before.conversations)
    assert run.write(target, cut, quiet, never)
    assert path.read_bytes() == Places(whole).answers.read_bytes()

    found = read_answers(path).conversations
    assert len(found) >= 10
    assert {c.greedy for c in found} == {True, False}
    prefix = Dialogue(parts.tokenizer).user_prefix
    assert all(c.prompt_ids[: len(prefix)] == prefix for c in found)


def test_answers_of_another_target_are_refused(tmp_path: Path, parts: Parts) -> None:
    order = order_of(tmp_path / "h.safetensors", answers=2, writers=2, answer_tokens=8, user_tokens=4)
    run.write(target_of(parts), order, quiet, never)
    with pytest.raises(ConfigError, match="another temperature"):
        run.write(target_of(parts), order_of(tmp_path / "h.safetensors", answers=4, answer_tokens=8, user_tokens=4, temperature=0.5),
                  quiet, never)  # fmt: skip
    bad = write_lines(tmp_path / "bad.jsonl.gz", [Conversation((1, 2), (3, 99_999))])
    with pytest.raises(ConfigError, match="another model's"):
        run.train(target_of(parts), order_of(tmp_path / "x.safetensors", data=str(bad)), quiet, never)


def test_plain_lines_are_read_and_the_wrong_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt_ids": [1], "answer_ids": [2, 3]}\n\n{"prompt_ids": [1], "answer_ids": []}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl:3"):
        read_answers(path)
    path.write_text('{"prompt_ids": [1], "answer_ids": [2, 3]}\n')
    assert read_answers(path).conversations == [Conversation((1,), (2, 3))]


def test_the_target_does_not_keep_answers_that_loop(tmp_path: Path) -> None:
    """Two tokens that follow each other for ever: nothing that is written is worth keeping."""
    table = torch.full((512, 512), -10.0)
    table[:, 40] = 20.0
    table[40, 40], table[40, 41] = -10.0, 20.0
    parts = parts_of(write_table_checkpoint(tmp_path / "loop", table))
    order = order_of(tmp_path / "h.safetensors", answers=2, writers=16, answer_tokens=60, user_tokens=4)
    run.write(target_of(parts), order, quiet, never)
    assert read_answers(Places(order).answers).conversations == []


# --- what is learned from ---------------------------------------------------------------------------------------------


def test_loops() -> None:
    assert loops([1, 2] * 11)
    assert loops([*range(30), *range(5, 25)])
    assert not loops([*range(30), *range(5, 24)])
    assert not loops(list(range(200)))


def test_a_corpus_has_no_loops_no_doubles_and_a_part_held_out() -> None:
    items = conversations(60)
    loop = Conversation((1, 2), (7,) * 50)
    again = Conversation(items[0].prompt_ids, (1, 2, 3))
    same_answer = Conversation((9, 9), items[1].answer_ids)
    corpus = make_corpus([*items, loop, again, same_answer], share=0.2, vocab_size=512, context=512)
    assert (corpus.loops, corpus.doubles) == (1, 2)
    assert len(corpus.train) + len(corpus.held_out) == 60
    assert 4 <= len(corpus.held_out) <= 22
    assert {c.prompt_ids for c in corpus.train}.isdisjoint(c.prompt_ids for c in corpus.held_out)
    grown = make_corpus([*conversations(40, seed=5), *items], share=0.2, vocab_size=512, context=512)
    assert set(corpus.held_out) <= set(grown.held_out)


def test_held_out_answers_do_not_move_the_weights(tmp_path: Path, parts: Parts) -> None:
    items = conversations()
    other = [
        Conversation(c.prompt_ids, tuple(255 - i for i in c.answer_ids), c.greedy) if is_held_out(c, 0.2) else c for c in items
    ]
    assert 0 < sum(a != b for a, b in zip(items, other, strict=True)) < len(items)
    found = []
    for name, data in (("a", items), ("b", other)):
        order = order_of(tmp_path / f"{name}.safetensors", data=str(write_lines(tmp_path / f"{name}.gz", data)))
        found.append((weights_after(parts, order), run_figures(order)))
    (a, figures_a), (b, figures_b) = found
    assert_same(a, b)
    assert figures_a != figures_b


def weights_after(parts: Parts, order: Order) -> dict[str, torch.Tensor]:
    assert run.train(target_of(parts), order, quiet, never).finished
    return weights(Places(order).checkpoint)


def run_figures(order: Order) -> list[Any]:
    return [line["held_out"] for line in read_journal(Places(order).log) if "held_out" in line]


def test_every_conversation_once_an_epoch_in_an_order_of_its_own() -> None:
    lengths = [10 + 3 * (i % 17) for i in range(100)]
    plans = [epoch_plan(lengths, 200, 0, epoch) for epoch in (0, 1, 0)]
    assert plans[0] == plans[2] != plans[1]
    for plan in plans:
        assert sorted(i for batch in plan for i in batch) == list(range(100))
        assert all(len(batch) * max(lengths[i] for i in batch) <= 200 for batch in plan)


def test_the_frequent_tokens_hold_the_share_asked_for_and_those_always_in() -> None:
    items = [Conversation((1,), tuple([5] * 90 + [6] * 9 + [7]))]
    chosen = choose_tokens(items, [400, 3], 512, 4, 0.9)
    assert chosen.token_ids.tolist() == [3, 5, 6, 400]
    assert chosen.coverage == pytest.approx(0.99)
    assert len(choose_tokens(items, [3], 512, 0, 0.9).token_ids) == 256
    with pytest.raises(ConfigError, match="always in"):
        choose_tokens(items, [1, 2, 3], 512, 2, 0.9)


def test_the_teacher_says_what_the_engine_says(parts: Parts) -> None:
    """Its states and choices in a padded batch are those of each conversation alone, bit for bit on the CPU."""
    items = conversations(5)
    teacher = Teacher(parts.decoder, parts.model.weights, torch.arange(0, 512, 3), kv_dtype=parts.kv_dtype)
    together = teacher.teach(make_batch(items), choices=True)
    at = 0
    for row, item in enumerate(items):
        alone = teacher.teach(make_batch([item]), choices=True)
        n = len(item)
        assert torch.equal(together.hidden[row, :n], alone.hidden[0, :n])
        assert together.best is not None
        assert alone.best is not None
        assert torch.equal(together.best[at : at + len(alone.best)], alone.best)
        at += len(alone.best)
    full = torch.softmax(together.hidden[together.wanted] @ teacher.output.T, dim=-1)
    torch.testing.assert_close(together.aim, full)


def test_the_lean_loss_has_the_gradients_of_the_plain_one() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(300, 16, generator=g, requires_grad=True)
    w = (torch.randn(40, 16, generator=g) * 40).requires_grad_()  # scores past what exp can hold
    aim = torch.softmax(torch.randn(300, 40, generator=g), dim=-1)
    plain = -(aim * torch.log_softmax(x @ w.T, dim=-1)).sum(-1).mean()
    lean = SoftCrossEntropy.apply(x, w, aim)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(lean, plain)
    expected = torch.autograd.grad(3 * plain, (x, w))
    for found, wanted in zip(torch.autograd.grad(3 * lean, (x, w)), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_anchors_are_wanted_positions() -> None:
    wanted = torch.tensor([[False, True, True, True, True], [False, False, False, True, False]])
    for generator in (None, torch.Generator().manual_seed(0)):
        anchors = choose_anchors(wanted, 0.5, generator)
        assert anchors.position.shape == (2, 2)
        assert wanted.gather(1, anchors.position)[anchors.useful].all()
        assert anchors.useful.tolist() == [[True, True], [False, True]] or anchors.useful[1].sum() == 1


# --- continuing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_killed_ends_with_the_weights_of_an_unbroken_one(tmp_path: Path, parts: Parts, kind: str) -> None:
    data = str(write_lines(tmp_path / "data.gz", conversations()))
    whole = order_of(tmp_path / "whole.safetensors", data=data, **KINDS[kind])
    expected = weights_after(parts, whole)
    broken = order_of(tmp_path / "broken.safetensors", data=data, **KINDS[kind])
    for fatal in (2, 5, 7):  # before the first checkpoint, between two, after one

        def kill(stage: str, share: float, facts: Mapping[str, float], fatal: int = fatal) -> None:
            if facts.get("step") == fatal:
                raise Killed

        with pytest.raises(Killed):
            run.train(target_of(parts), broken, kill, never)
    assert_same(weights_after(parts, broken), expected)
    assert_same(load_file(Places(broken).out), load_file(Places(whole).out))
    logs = [
        [{k: v for k, v in line.items() if k != "minutes"} for line in read_journal(Places(order).log) if "facts" not in line]
        for order in (whole, broken)
    ]
    assert logs[0] == logs[1]


def test_a_stopped_run_goes_on_and_a_finished_one_can_be_extended(tmp_path: Path, parts: Parts) -> None:
    data = str(write_lines(tmp_path / "data.gz", conversations()))
    order = order_of(tmp_path / "h.safetensors", data=data)
    steps = 0

    def count(stage: str, share: float, facts: Mapping[str, float]) -> None:
        nonlocal steps
        steps += stage == "training"

    outcome = run.train(target_of(parts), order, count, lambda: steps >= 4)
    assert (outcome.finished, outcome.steps) == (False, 4)
    assert run.train(target_of(parts), order, count, never).steps == 8
    assert run.train(target_of(parts), order, quiet, never).finished
    longer = order_of(tmp_path / "h.safetensors", data=data, steps=10)
    assert run.train(target_of(parts), longer, quiet, never).steps == 10
    with pytest.raises(ConfigError, match="another learning_rate"):
        run.train(target_of(parts), order_of(tmp_path / "h.safetensors", data=data, learning_rate=0.01), quiet, never)
    assert run.train(
        target_of(parts), order_of(tmp_path / "h.safetensors", data=data, seed=1), quiet, never, restart=True
    ).finished


def test_sigkill(tmp_path: Path, parts: Parts) -> None:
    """The command itself, killed without warning and started again, ends with the weights of an unbroken run."""
    data = write_lines(tmp_path / "data.gz", conversations())

    def command(name: str) -> list[str]:
        options = f"--data {data} --steps 40 --batch-tokens 128 --threads 1 --kv-memory 16MiB --checkpoint-steps 2"
        place = ["--out", str(tmp_path / f"{name}.safetensors"), "--cache-dir", str(tmp_path / "cache")]
        return ["train", "heads", parts.settings.model, *place, *options.split(), "--held-out", "0.2"]

    broken = [sys.executable, "-m", "server.cli", *command("broken")]
    child = subprocess.Popen(broken, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    checkpoint = tmp_path / "broken.checkpoint.safetensors"
    try:
        deadline = time.monotonic() + 120
        while not checkpoint.exists() and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)  # another process is watched
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert checkpoint.exists()
    assert not (tmp_path / "broken.safetensors").exists()
    for name in ("broken", "whole"):
        result = CliRunner().invoke(app, command(name))
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout.splitlines()[-1])["finished"]
    assert_same(load_file(checkpoint), load_file(tmp_path / "whole.checkpoint.safetensors"))


# --- files that draft -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Taught:
    parts: Parts
    path: Path
    model: Path


@pytest.fixture(scope="module", params=KINDS)
def taught(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Taught:
    """Trained to the end on a model that goes round in a cycle of 64 tokens, which is easy to learn."""
    folder = tmp_path_factory.mktemp(f"taught-{request.param}")
    table = torch.zeros(512, 512)
    table[:, CYCLE[0]] = 20.0  # whatever stands before an answer leads into the cycle
    for a, b in zip(CYCLE, CYCLE[1:] + CYCLE[:1], strict=True):
        table[a, CYCLE[0]], table[a, b] = 0.0, 20.0
    parts = parts_of(write_table_checkpoint(folder / "cycle", table))
    items = [
        Conversation((257, start), tuple(CYCLE[(start - CYCLE[0] + i) % 64] for i in range(1, 30)), start % 2 == 0)
        for start in CYCLE
    ]
    data = str(write_lines(folder / "data.gz", items))
    flags: dict[str, Any] = (
        {"learning_rate": 4e-3} | KINDS[request.param] | {"data": data, "steps": 48, "batch_tokens": 512, "vocabulary": 256}
    )
    order = order_of(folder / "out.safetensors", **flags)
    run.train(target_of(parts), order, quiet, never)
    return Taught(parts, Path(order.out), folder / "cycle")


def test_what_can_be_learned_is_learned(taught: Taught) -> None:
    journal = read_journal(taught.path.with_name("out.log.jsonl"))
    judged = [line["held_out"] for line in journal if "held_out" in line]
    assert min(judged[-1]["top_1"][:3]) > 0.95, judged[-1]  # as deep as it was trained
    if "student" not in str(taught.path):  # which begins as a copy of this small model
        losses = [line["loss"] for line in journal if "loss" in line]
        assert judged[0]["top_1"][0] < 0.5
        assert losses[-1] < losses[0]


def test_the_file_drafts(taught: Taught) -> None:
    """Loaded by name as a server would, it guesses what the target says, and the text does not change."""
    kind = "student" if "student" in str(taught.path) else "heads"
    arguments = ["generate", str(taught.model), "--prompt", "!", "--max-tokens", "24", "--json", "--threads", "1"]
    arguments += ["--kv-memory", "64MiB", "--cache-dir", str(taught.path.parent / "cache"), "--tree-shape", "chain:4"]
    lines = {}
    for drafters in ("none", f"{kind}:{taught.path}"):
        result = CliRunner().invoke(app, [*arguments, "--drafters", drafters])
        assert result.exit_code == 0, result.output
        lines[drafters] = json.loads(result.stdout.splitlines()[-1])
    plain, drafted = lines.values()
    assert plain["token_ids"] == drafted["token_ids"]
    assert drafted["speculation"]["acceptance_length"] > 2.5


def test_weights_are_half_precision_and_say_whose_they_are(taught: Taught) -> None:
    from safetensors import safe_open

    with safe_open(taught.path, framework="pt") as file:
        facts = file.metadata()
        dtypes = {name: file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
    assert dtypes.pop("token_ids") == torch.int32
    assert ("output" in dtypes) == ("shared" not in str(taught.path))
    assert set(dtypes.values()) == {torch.float16}
    assert facts["target"] == taught.parts.model.name
    assert facts["format"].startswith("forespeak.")


def test_curves_and_card(taught: Taught, tmp_path: Path) -> None:
    log = taught.path.with_name("out.log.jsonl")
    bench = tmp_path / "bench.txt"
    figures = {
        "acceptance_length": 2.5,
        "acceptance_per_position": [0.9, 0.5],
        "by_category": {"qa": {"acceptance_length": 1.75}},
        "drafters": "heads",
        "speedup_over_plain": 1.4,
    }
    bench.write_text(f"a table\n{json.dumps(figures)}\n")
    svg, card = tmp_path / "x.svg", tmp_path / "x.md"
    assert CliRunner().invoke(app, ["train", "plot", str(log), "--out", str(svg)]).exit_code == 0
    assert CliRunner().invoke(app, ["train", "card", str(log), "--bench", str(bench), "--out", str(card)]).exit_code == 0
    drawing = svg.read_text()
    assert drawing.count("<polyline") >= 2
    assert "position 1" in drawing
    text = card.read_text()
    assert "| qa | 1.75 |" in text
    assert "0.900, 0.500" in text
    assert taught.parts.model.name in text
    assert taught.path.with_name("out.md").exists()
    assert taught.path.with_name("out.svg").read_text() == drawing


def test_an_empty_log_still_draws() -> None:
    assert curves([], "nothing").startswith("<svg")


# --- orders -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"depths": 0}, "--depths is 0"),
        ({"kind": "medusa"}, "kind"),
        ({"out": "x.bin"}, "safetensors"),
        ({"colour": 1}, "colour"),
        ({"learning_rate": float("nan")}, "--learning-rate"),
    ],
)
def test_a_bad_order_is_refused_by_name(tmp_path: Path, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_order({"what": "heads", "out": str(tmp_path / "x.safetensors"), "steps": 1} | flags)


def test_without_a_budget_a_run_takes_an_hour() -> None:
    assert parse_order({"what": "heads", "out": "x.safetensors"}).minutes == 60
    assert parse_order({"what": "heads", "out": "x.safetensors", "tokens": 5}).minutes is None


def test_the_command_writes_its_own_answers_and_trains(tmp_path: Path, parts: Parts) -> None:
    out = tmp_path / "h.safetensors"
    options = "--answers 6 --answer-tokens 12 --steps 2 --batch-tokens 256 --threads 1 --kv-memory 16MiB --kind recurrent"
    arguments = [
        "train",
        "heads",
        parts.settings.model,
        "--out",
        str(out),
        *options.split(),
        "--cache-dir",
        str(tmp_path / "c"),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout.splitlines()[-1])
    assert facts["finished"]
    assert facts["bytes"] == out.stat().st_size
    assert len(read_answers(tmp_path / "h.answers.jsonl.gz").conversations) >= 6
