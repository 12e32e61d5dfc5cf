"""Comparison with other engines: who cannot take part is named with the reason, only one works at a time, ratios are of the best."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import pytest
from checkpoints import write_rand_checkpoint
from rich.console import Console
from rich.progress import Progress

from server.commands.compare import ToldProgress
from server.compose import Parts, load_parts
from server.peers import environments, measure, report
from server.peers.catalog import PEERS, Arm, Peer
from server.peers.compare import OUR_AUTO, OUR_PLAIN, Findings, Order, compare, named
from server.peers.contest import Answer
from server.peers.environments import PeerUnavailable, prepare
from server.peers.measure import SingleStream
from server.peers.process import PeerProcess
from server.settings import Settings
from spec.errors import ConfigError

DRIVER = Path(__file__).parent / "support" / "toy_peer.py"
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], [20, 21, 22, 23]]


def toy(name: str, *arms: Arm, requirements: tuple[str, ...] = ()) -> Peer:
    return Peer(name, name, requirements, DRIVER, arms or (Arm("plain", many=True),))


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    folder = write_rand_checkpoint(tmp_path_factory.mktemp("model"))
    settings = Settings(model=str(folder), cache_dir=str(folder / "cache"), threads=1, kv_memory=2**24, tree_shape="chain:2")
    return load_parts(settings)


@pytest.fixture(scope="module")
def findings(parts: Parts, tmp_path_factory: pytest.TempPathFactory) -> Findings:
    """One small comparison with peers of every sort of trouble."""
    peers = (
        toy("good", Arm("plain", {"garbage": True}, many=True), Arm("drafting", speculates=True)),
        toy("looping", Arm("plain", {"same": True})),
        toy("short", Arm("plain", {"short": True})),
        toy("mortal", Arm("plain", {"dies_after": 3})),
        toy("picky", Arm("plain", {"refuses": True})),
        toy("bogus", requirements=("./no-such-package-1.0-py3-none-any.whl",)),
    )
    root = tmp_path_factory.mktemp("peers")
    order = Order(peers, root, max_tokens=8, repeats=2, streams=2, threads=1, lengths=(40,), stream_tokens=4)
    with Progress(console=Console(file=io.StringIO())) as progress:
        return compare(order, parts, PROMPTS, progress)


def test_every_peer_that_cannot_take_part_is_named_with_the_reason(findings: Findings) -> None:
    assert findings.unavailable.keys() == {"bogus", "picky, plain", "mortal, plain"}
    assert findings.unavailable["bogus"].startswith("installing failed: ERROR")
    assert "no-such-package" in findings.unavailable["bogus"]
    assert findings.unavailable["picky, plain"] == "ValueError: this model is not for me"
    assert findings.unavailable["mortal, plain"] == "its process ended: out of patience"


def test_a_peer_that_fails_half_way_takes_nobody_with_it(findings: Findings) -> None:
    everybody = {(repeat, i) for repeat in range(2) for i in range(len(PROMPTS))}
    for name in (OUR_PLAIN, OUR_AUTO, "good, plain", "good, drafting"):
        assert findings.single[name].answers.keys() == everybody
    assert 0 < len(findings.single["mortal, plain"].answers) < len(everybody)


def test_everybody_makes_the_tokens_that_our_plain_answer_has(findings: Findings) -> None:
    plain = findings.single[OUR_PLAIN].answers
    for name in (OUR_AUTO, "good, plain", "looping, plain"):
        for key, answer in findings.single[name].answers.items():
            assert len(answer.token_ids) == len(plain[key].token_ids)
    for key, answer in findings.single[OUR_AUTO].answers.items():
        assert answer.token_ids == plain[key].token_ids


def test_answers_that_are_no_answers_are_seen(findings: Findings) -> None:
    sane = {name: found.sane for name, found in findings.sanity.items() if name != "mortal, plain"}
    assert sane == {
        OUR_PLAIN: True, OUR_AUTO: True, "good, plain": True, "good, drafting": True, "looping, plain": False, "short, plain": False,
    }  # fmt: skip


def test_the_line_for_machines_holds_every_ratio_and_the_table_every_peer(findings: Findings) -> None:
    line = report.as_json(findings, 2)
    by_prompt = {"one_stream_plain_by_prompt", "one_stream_auto_by_prompt"}
    assert line["ratios"].keys() - by_prompt == {"one_stream_plain", "one_stream_auto", "prompt_processing_40", "many_streams"}
    assert line["unavailable"] == findings.unavailable
    assert line["contestants"]["good, plain"]["prompt_tokens_per_second"] == {"40": 40.0}
    assert line["contestants"]["good, plain"]["streams_tokens_per_second"] == 4.0
    console = Console(file=io.StringIO(), width=200)
    console.print(report.table(findings, 2))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(name in text for name in findings.single)


def stream(decode: float, keys: list[tuple[int, int]], tokens: int = 11) -> SingleStream:
    return SingleStream({key: Answer(tuple(range(tokens)), 0.1, decode) for key in keys})


def test_a_ratio_counts_the_answers_both_gave_and_is_the_median_over_repeats() -> None:
    keys = [(repeat, i) for repeat in range(3) for i in range(2)]
    ours = SingleStream({key: Answer(tuple(range(11)), 0.1, 1.0 if key[1] == 0 else 100.0) for key in keys})
    theirs = stream(2.0, [(0, 0), (1, 0), (2, 0)])
    theirs.answers[2, 0] = Answer(tuple(range(11)), 0.1, 50.0)
    assert ours.over(theirs) == pytest.approx(2.0)
    assert ours.usually_over(theirs) == pytest.approx(2.0)
    assert theirs.rate() == pytest.approx(30 / 54)


def test_ratios_are_over_the_best_sane_peer() -> None:
    keys, good, bad = [(0, 0)], measure.Sanity(True, True, 3, 1), measure.Sanity(True, False, 0, 0)
    found = Findings(
        single={
            OUR_PLAIN: stream(1.0, keys), OUR_AUTO: stream(0.5, keys), "a, plain": stream(3.0, keys), "b, plain": stream(2.0, keys),
            "b, drafting": stream(1.5, keys), "mad, plain": stream(0.01, keys),
        },
        prefill={OUR_PLAIN: {512: 300.0}, "a, plain": {512: 100.0}, "b, plain": {512: 200.0}},
        many={OUR_AUTO: [90.0, 100.0, 500.0], "a, plain": [10.0, 50.0, 60.0]},
        sanity={"a, plain": good, "b, plain": good, "b, drafting": good, "mad, plain": bad},
        speculates={"a, plain": False, "b, plain": False, "b, drafting": True, "mad, plain": False},
    )  # fmt: skip
    wanted = {"one_stream_plain": 2.0, "one_stream_auto": 3.0, "prompt_processing_512": 1.5, "many_streams": 2.0}
    wanted |= {"one_stream_plain_by_prompt": 2.0, "one_stream_auto_by_prompt": 3.0}
    assert report.ratios(found) == pytest.approx(wanted)
    assert report.as_json(found, 3)["missed"] == ["one_stream_plain", "prompt_processing_2048", "many_streams"]


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0]


def test_a_peer_stands_still_while_others_work(tmp_path: Path) -> None:
    process = PeerProcess(Path(sys.executable), DRIVER, tmp_path / "log")
    try:
        process.ask({"op": "load", "options": {}}, 30)
        process.pause()
        deadline = time.monotonic() + 10
        while state_of(process.pid) != "T" and time.monotonic() < deadline:
            pass
        assert state_of(process.pid) == "T"
        with pytest.raises(PeerUnavailable, match="no reply within 0 s"):
            process.ask({"op": "answer", "prompts": [[1]], "tokens": [2]}, 0.2)
        process.resume()
        assert len(process.ask({"op": "answer", "prompts": [[1]], "tokens": [3]}, 30)["answers"][0]["token_ids"]) in (2, 3)
    finally:
        process.close()


def test_an_environment_is_made_once_and_again_when_its_pins_change(tmp_path: Path) -> None:
    peer = toy("toy")
    said: list[str] = []
    python = prepare(peer, tmp_path, said.append)
    marker = python.parent / "marker"
    marker.touch()
    assert prepare(peer, tmp_path) == python
    assert marker.exists()
    (tmp_path / "toy" / "stamp").write_text("other pins", encoding="utf-8")
    prepare(peer, tmp_path)
    assert not marker.exists()


def test_an_installation_that_hangs_is_ended_with_all_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installer = tmp_path / "python"
    installer.write_text('#!/bin/sh\necho "$$"\nsleep 60 &\necho "$!"\nwait\n')
    installer.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(installer))
    monkeypatch.setattr(environments, "INSTALL_SECONDS", 0.5)
    said: list[str] = []
    began = time.monotonic()
    with pytest.raises(PeerUnavailable, match=r"installing took longer than 0\.5 s"):
        prepare(toy("toy"), tmp_path, said.append)
    assert time.monotonic() - began < 30
    deadline = time.monotonic() + 10  # until whoever adopted them has seen them end
    while any(alive(int(pid)) for pid in said) and time.monotonic() < deadline:
        pass
    assert len(said) == 2
    assert not any(alive(int(pid)) for pid in said)


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and state_of(pid) != "Z"


def test_names_of_peers_are_checked_before_anything_is_installed() -> None:
    assert [peer.name for peer in named(" vllm, llama.cpp ,vllm")] == ["vllm", "llama.cpp"]
    with pytest.raises(
        ConfigError, match=r"no peer named 'ollama'; the known ones are llama\.cpp, openvino, transformers, vllm"
    ):
        named("llama.cpp,ollama")
    with pytest.raises(ConfigError, match="name at least one peer"):
        named(" , ")


@pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS)
def test_peers_are_pinned_and_their_drivers_are_there(peer: Peer) -> None:
    assert all("==" in requirement for requirement in peer.requirements)
    assert peer.driver.is_file()
    assert any(arm.single and not arm.speculates for arm in peer.arms)
    assert any(arm.many for arm in peer.arms)


def test_a_log_is_told_what_begins(capsys: pytest.CaptureFixture[str]) -> None:
    with ToldProgress(console=Console(file=io.StringIO())) as progress:
        task = progress.add_task("start")
        for text in ("loading A", "one stream: A", "one stream: B", "one stream: A", None, "16 streams: A"):
            progress.update(task, advance=1, description=text)
    assert capsys.readouterr().err.splitlines() == ["loading A", "one stream", "16 streams"]
