"""The whole house on a tiny random checkpoint: real engine process, real tokenizer, real sockets.

What the toy engine cannot show: speculation, grammars, prefix pages, and that answers survive the death of the real thing.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from checkpoints import write_rand_checkpoint
from serving import Running, running, wait_for

from server.settings import Settings
from spec.request import PHASES

CHAT = "/v1/chat/completions"
REPETITIVE = [{"role": "user", "content": "one two three one two three one two three one two"}]
ALICE, BOB = "alice-key-0001", "bob-key-000002"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("real")
    (folder / "keys").write_text(f"{ALICE}\n{BOB}\n")
    settings = Settings(
        model=str(write_rand_checkpoint(folder / "rand")), port=0, backend="reference", weights="float32", kv_memory=2**24,
        drafters="suffix", tree_shape="chain:4", threads=1, cache_dir=str(folder / "cache"), api_key_file=str(folder / "keys"),
    )  # fmt: skip
    with running(settings) as run:
        run.http.headers["Authorization"] = f"Bearer {ALICE}"
        yield run


def ask(real: Running, **fields: Any) -> Any:
    body = {"messages": REPETITIVE, "max_tokens": 32, "temperature": 0} | fields
    response = real.http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 5}], ids=["greedy", "seeded"])
def test_speculation_changes_nothing_but_the_steps(real: Running, sampling: dict[str, Any]) -> None:
    off = ask(real, speculation={"mode": "off"}, logprobs=True, top_logprobs=3, **sampling)
    ask(real, **sampling)  # the copying drafter has seen the answer now
    on = ask(real, logprobs=True, top_logprobs=3, **sampling)
    assert on["choices"] == off["choices"]
    assert off["speculation"]["drafted"] == 0
    assert on["speculation"]["accepted"] > 0
    assert on["speculation"]["steps"] < off["speculation"]["steps"]
    assert sum(on["speculation"]["accepted_per_position"]) == on["speculation"]["accepted"]
    entries = on["choices"][0]["logprobs"]["content"]
    assert len(entries) == 32
    assert any(entry["logprob"] < -0.01 for entry in entries)
    if sampling["temperature"] == 0:
        assert all(entry["bytes"] == entry["top_logprobs"][0]["bytes"] for entry in entries)


def test_phases_of_steps_are_told_to_clients_and_to_prometheus(real: Running) -> None:
    def spent() -> tuple[dict[str, float], float]:
        phases = {phase: real.metric("forespeak:step_phase_seconds_total", phase=phase) for phase in PHASES}
        return phases, real.metric("forespeak:step_seconds_sum")

    before, steps_before = spent()
    answer = ask(real, max_tokens=64, ignore_eos=True)
    after, steps_after = spent()
    told = answer["timings"]["phases_ms"]
    assert list(told) == list(PHASES)
    assert told["verify"] > told["commit"] > 0.0
    took = {phase: 1e3 * (after[phase] - before[phase]) for phase in PHASES}
    assert sum(took.values()) == pytest.approx(1e3 * (steps_after - steps_before))
    for phase in PHASES:  # it ran alone, and all its steps but a prompt's chunks brought tokens
        assert 0.0 < told[phase] <= took[phase] + 0.001
    assert sum(told.values()) >= answer["timings"]["decode_ms"] * 0.5


def test_n_choices(real: Running) -> None:
    answer = ask(real, n=3, temperature=1.0, seed=1, ignore_eos=True)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(set(texts)) == 3
    assert answer["usage"]["completion_tokens"] == 96
    assert ask(real, n=3, temperature=1.0, seed=1, ignore_eos=True)["choices"] == answer["choices"]


def test_json_schema(real: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
    format = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
    texts = {
        ask(real, response_format=format, max_tokens=64, **more)["choices"][0]["message"]["content"]
        for more in ({}, {"speculation": {"mode": "off"}})
    }
    [text] = texts
    assert isinstance(json.loads(text)["a"], bool)
    refused = real.http.post(CHAT, json={"messages": REPETITIVE, "response_format": {"type": "regex", "regex": "(((("}})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "response_format"


def test_context_edge(real: Running) -> None:
    for length, status in ((511, 200), (512, 400)):
        response = real.http.post("/v1/completions", json={"prompt": [97] * length, "temperature": 0})
        assert response.status_code == status
    answer = real.http.post("/v1/completions", json={"prompt": [97] * 500, "temperature": 0}).json()
    assert answer["usage"]["total_tokens"] <= 512


def test_stop_string_counts_end_at_the_same_token(real: Running) -> None:
    whole = ask(real, logprobs=True)
    text = whole["choices"][0]["message"]["content"]
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    for more in ({}, {"speculation": {"mode": "off"}}):
        cut = ask(real, stop=stop, logprobs=True, **more)
        assert cut["choices"][0]["message"]["content"] == text[: text.index(stop)]
        assert cut["choices"][0]["finish_reason"] == "stop"
        count = cut["usage"]["completion_tokens"]
        assert cut["choices"][0]["logprobs"]["content"] == whole["choices"][0]["logprobs"]["content"][:count]


def test_keys_share_nothing(real: Running) -> None:
    body = {
        "messages": [{"role": "user", "content": "a long question of one tenant, which fills several pages"}],
        "max_tokens": 3,
    }

    def cached(key: str) -> int:
        answer = real.http.post(CHAT, json=body | {"temperature": 0}, headers={"Authorization": f"Bearer {key}"}).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    first, second, other = cached(ALICE), cached(ALICE), cached(BOB)
    assert (first, other) == (0, 0)
    assert second > 0
    assert second % 16 == 0
    assert cached(BOB) == second


def test_every_answer_alone_and_together(real: Running) -> None:
    """Neighbours in the batch, whoever they are, change nothing; and nobody gets another's secret."""
    secrets = [f"canary-{i:04x}-{i * 7919:05d}" for i in range(8)]

    def answer(index: int) -> str:
        key = (ALICE, BOB)[index % 2]
        body = {
            "messages": [{"role": "user", "content": f"remember {secrets[index]} {secrets[index]}"}],
            "max_tokens": 24,
            "temperature": 0,
        }
        response = real.http.post(CHAT, json=body, headers={"Authorization": f"Bearer {key}"})
        return str(response.json()["choices"][0]["message"]["content"])

    alone = [answer(index) for index in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(answer, range(8)))
    assert together == alone
    for index, text in enumerate(together):
        assert not any(secret in text for other, secret in enumerate(secrets) if other != index)


def test_cancelled_answers_give_their_pages_back(real: Running) -> None:
    for _ in range(5):
        with real.http.stream("POST", CHAT, json={"messages": REPETITIVE, "stream": True, "max_tokens": 400}) as response:
            next(response.iter_lines())
    headers = {"Authorization": f"Bearer {ALICE}"}
    wait_for(lambda: 'forespeak:kv_pages{state="live"} 0.0' in real.http.get("/metrics", headers=headers).text, 5)
    text = real.http.get("/metrics", headers=headers).text
    pages = [float(line.split()[-1]) for line in text.splitlines() if line.startswith("forespeak:kv_pages{")]
    models = real.http.get("/v1/models").json()["data"][0]
    assert sum(pages) * 16 >= models["context_length"]


def test_real_engine_dies_and_the_answer_goes_on(real: Running) -> None:
    request: Any = {"model": "rand", "messages": REPETITIVE, "max_tokens": 300, "temperature": 0.8, "seed": 12}
    request["extra_body"] = {"ignore_eos": True, "speculation": {"mode": "off"}}
    with openai.OpenAI(base_url=real.url + "/v1", api_key=ALICE, max_retries=0) as client:
        expected = client.chat.completions.create(**request)
        parts, killed = [], threading.Event()
        for chunk in client.chat.completions.create(**request, stream=True):
            if not chunk.choices:
                continue
            parts.append(chunk.choices[0].delta.content or "")
            if len(parts) == 5 and not killed.is_set():
                os.kill(real.engine_pid(), signal.SIGKILL)
                killed.set()
    assert "".join(parts) == expected.choices[0].message.content
    assert "forespeak:engine_restarts_total 1.0" in real.http.get("/metrics").text
    wait_for(lambda: real.http.get("/ready").status_code == 200, 60)


def test_model_file_that_is_broken_is_refused_before_anything_runs(tmp_path: Path) -> None:
    from server.serve import load_text
    from spec.errors import ForespeakError

    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\0" * 64)
    with pytest.raises(ForespeakError):
        load_text(Settings(model=str(tmp_path / "broken.gguf"), cache_dir=str(tmp_path)))
