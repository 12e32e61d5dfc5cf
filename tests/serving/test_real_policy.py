"""What a request says of speculation and sampling reaches a real engine, over HTTP and over the WebSocket.

The toy engine takes every policy and ignores it; here a copying drafter and a draft model stand behind the server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import pytest
from checkpoints import write_rand_checkpoint
from engine_kit import has_native
from serving import Running, running, ws_answer

import server.service
from server.compose import load_parts, make_engine
from server.settings import Settings
from spec.request import Request, SamplingParams, SpeculationPolicy

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "one two three one two three one two three one two"}]
COUNT = 40


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("policy")
    draft = write_rand_checkpoint(folder / "draft", noise=0.02, lm_head_gain=2.0)
    settings = Settings(
        model=str(write_rand_checkpoint(folder / "rand", lm_head_gain=2.0)), port=0, weights="float32", kv_memory=2**24, threads=1,
        backend="native" if has_native() else "reference", drafters=f"suffix,model:{draft}", tree_shape="mixed",
        cache_dir=str(folder / "cache"),
    )  # fmt: skip
    with running(settings) as run:
        yield run


class Said(NamedTuple):
    text: str
    figures: dict[str, Any]

    @property
    def drafters(self) -> set[str]:
        return {name for name, counts in self.figures["by_drafter"].items() if counts["drafted"]}


def say(real: Running, transport: str, **fields: Any) -> Said:
    body = {"messages": MESSAGES, "max_tokens": COUNT, "temperature": 0.8, "seed": 4, "ignore_eos": True} | fields
    if transport == "http":
        answer = real.http.post(CHAT, json=body).json()
        return Said(answer["choices"][0]["message"]["content"], answer["speculation"])
    frames = ws_answer(real, **body)
    text = "".join(frame["text"] for frame in frames if frame["type"] == "delta")
    return Said(text, frames[-1]["speculation"])


# --- drafters, max_nodes, rule, mode ---------------------------------------------------------------------------------


def check_drafters(real: Running, transport: str) -> None:
    whole = say(real, transport)
    assert whole.drafters == {"suffix", "model"}
    for names in (["suffix"], ["model"], ["suffix", "model"], []):
        one = say(real, transport, speculation={"drafters": names})
        assert one.drafters == set(names)
        assert one.text == whole.text


def check_max_nodes(real: Running, transport: str) -> None:
    whole = say(real, transport)
    passes = whole.figures["steps"] - 1
    assert whole.figures["drafted"] > 5 * passes
    for nodes in (0, 1, 3):
        few = say(real, transport, speculation={"max_nodes": nodes})
        assert few.figures["drafted"] <= nodes * few.figures["steps"]
        assert (few.figures["drafted"] > 0) == (nodes > 0)
        assert few.text == whole.text


def check_rule(real: Running, transport: str) -> None:
    """Another sample of the same law, and at temperature 0 the same text."""
    rejection = {"rule": "rejection"}
    assert say(real, transport).text == say(real, transport, speculation={"rule": "exact"}).text
    drawn = say(real, transport, speculation=rejection)
    assert drawn.figures["drafted"] > 0
    assert drawn.text != say(real, transport).text
    assert say(real, transport, speculation=rejection, temperature=0).text == say(real, transport, temperature=0).text


def check_mode(real: Running, transport: str) -> None:
    off = say(real, transport, speculation={"mode": "off"})
    assert (off.figures["drafted"], off.figures["steps"]) == (0, COUNT)
    on = say(real, transport, speculation={"mode": "auto"})
    assert on.figures["accepted"] > 0
    assert on.figures["steps"] < COUNT
    assert on.text == off.text


CHECKS = {"drafters": check_drafters, "max_nodes": check_max_nodes, "rule": check_rule, "mode": check_mode}


@pytest.mark.parametrize("transport", ["http", "websocket"])
@pytest.mark.parametrize("field", CHECKS)
def test_each_field_of_the_policy_takes_effect(real: Running, field: str, transport: str) -> None:
    CHECKS[field](real, transport)


@pytest.mark.parametrize("field", CHECKS)
def test_a_field_that_is_dropped_is_noticed(real: Running, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutants: one field does not reach the engine."""
    made = server.service.speculation_policy

    def without(*arguments: Any) -> SpeculationPolicy:
        return msgspec.structs.replace(made(*arguments), **{field: getattr(SpeculationPolicy(), field)})

    monkeypatch.setattr(server.service, "speculation_policy", without)
    with pytest.raises(AssertionError):
        CHECKS[field](real, "http")


@pytest.mark.parametrize("n", [2, 8])
def test_choices_are_those_of_their_own_seeds(real: Running, n: int) -> None:
    body = {
        "messages": MESSAGES,
        "max_tokens": 24,
        "temperature": 0.9,
        "seed": 20,
        "n": n,
        "logprobs": True,
        "top_logprobs": 20,
    }
    on, off = (real.http.post(CHAT, json=body | {"speculation": {"mode": mode}}).json() for mode in ("auto", "off"))
    assert on["choices"] == off["choices"]
    assert len({choice["message"]["content"] for choice in on["choices"]}) == n
    assert on["speculation"]["accepted"] > 0 == off["speculation"]["accepted"]
    alone = real.http.post(CHAT, json=body | {"n": 1, "seed": 20 + n - 1}).json()["choices"][0]
    assert alone["logprobs"] == on["choices"][n - 1]["logprobs"]


# --- SD-09: log probabilities in a stream ----------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["http", "websocket"])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8}], ids=["greedy", "seeded"])
def test_streamed_entries_come_in_order(real: Running, sampling: dict[str, Any], transport: str) -> None:
    """Several tokens share a chunk; their entries are all there, in the order of the tokens, with the values of plain decoding."""
    body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 48, "seed": 3, "logprobs": True, "top_logprobs": 3} | sampling
    off = real.http.post(CHAT, json=body | {"speculation": {"mode": "off"}}).json()
    entries: list[Any] = []
    sizes: list[int] = []
    if transport == "http":
        with real.http.stream("POST", CHAT, json=body | {"stream": True}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        part = (choice.get("logprobs") or {}).get("content") or []
                        entries += part
                        sizes.append(len(part))
    else:
        for frame in ws_answer(real, **body):
            if frame["type"] == "delta":
                entries += frame["logprobs"]
                sizes.append(len(frame["logprobs"]))
                assert sizes[-1] == frame["tokens"]
    assert entries == off["choices"][0]["logprobs"]["content"]
    assert max(sizes) > 2, "no chunk held several tokens"
    assert len({entry["logprob"] for entry in entries}) > 24, "equal values would hide a wrong order"


# --- SA-02: degenerate but legal settings ----------------------------------------------------------------------------

GREEDY: list[dict[str, Any]] = [
    {"temperature": 0}, {"temperature": 1e-45}, {"temperature": 1e-5}, {"top_p": 1e-9}, {"top_p": 0}, {"top_k": 1}, {"min_p": 1},
    {"top_k": 1, "top_p": 0.8}, {"min_p": 1, "top_p": 0.1}, {"temperature": 2, "top_k": 1}, {"temperature": 2, "min_p": 1},
]  # fmt: skip
OFF: list[dict[str, Any]] = [{"top_k": 512}, {"top_k": 513}, {"top_k": -1}, {"top_k": 0}, {"top_p": 1}, {"min_p": 0}]


@pytest.mark.parametrize("drafts", ["auto", "off"])
def test_degenerate_settings_and_a_golden_prompt_after_each(real: Running, drafts: str) -> None:
    policy = {"mode": drafts}
    golden = say(real, "http", temperature=0, speculation={"mode": "off"}).text
    bare = say(real, "http", temperature=2.0, speculation={"mode": "off"}).text
    assert bare != golden
    pid = real.engine_pid()
    for options in (*GREEDY, *OFF):
        sampling = {"temperature": 2.0} | options if options in OFF else {"temperature": 1.0} | options
        assert say(real, "http", speculation=policy, **sampling).text == (golden if options in GREEDY else bare), options
        assert say(real, "http", temperature=0).text == golden, f"after {options}"
    assert real.http.get("/health").status_code == 200
    assert real.engine_pid() == pid


@pytest.mark.parametrize("drafters", ["none", "suffix"])
def test_degenerate_settings_in_bfloat16(tmp_path_factory: pytest.TempPathFactory, drafters: str) -> None:
    folder = tmp_path_factory.mktemp("bf16")
    settings = Settings(
        model=str(write_rand_checkpoint(folder / "rand", dtype="bfloat16")), weights="bfloat16", kv_type="bfloat16", threads=1,
        backend="native" if has_native() else "reference", kv_memory=2**24, drafters=drafters, tree_shape="chain:4",
        cache_dir=str(folder / "cache"),
    )  # fmt: skip
    engine = make_engine(load_parts(settings))
    prompt = (*b"one two three one two three one two three one",)
    cases = [
        {"temperature": 0.0},
        *({"temperature": 1.0} | options for options in GREEDY),
    ] * 2  # the second time suffixes are known
    answers: dict[int, list[int]] = {}
    for number, options in enumerate(cases):
        engine.add(Request(number, prompt, SamplingParams(max_tokens=24, seed=9, ignore_eos=True, **options)))
        while engine.has_work():
            for event in engine.step():
                answers.setdefault(number, []).extend(event.token_ids)
                assert event.error is None
    assert all(answer == answers[0] and len(answer) == 24 for answer in answers.values())
    accepted = sum(engine.stats()["spec_decode_num_accepted_tokens"].values())
    assert (accepted > 0) == (drafters != "none")
