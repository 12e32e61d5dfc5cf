"""/metrics: names of the contract, honest zeros, only delivered tokens counted, nothing ever falls."""

from __future__ import annotations

import json
import math
import os
import signal

import pytest
import websockets.sync.client as ws_client
from prometheus_client.parser import text_string_to_metric_families
from serving import Running, running, toy_settings, wait_for

from server.metrics import Metrics
from server.ports import TextTools

USER = [{"role": "user", "content": "hi"}]
NAMES = [
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "kv_pages", "prefix_cache_queries_total"),
    *("prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total", "request_success_total"),
    *("time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket", "e2e_request_latency_seconds_bucket"),
    *("request_queue_time_seconds_bucket", "spec_decode_num_drafts_total", "preemptions_total", "engine_restarts_total"),
    "step_seconds_bucket",
]
LABELLED = [
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
]


def samples(server: Running) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = server.http.get("/metrics").text
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


@pytest.fixture
def fresh(text: TextTools) -> Running:
    with running(toy_settings(), text) as run:
        yield run


def test_fresh_server(fresh: Running) -> None:
    """MX-02: every rate is honest at zero."""
    found = samples(fresh)
    assert {f"forespeak:{name}" for name in NAMES} <= {name for name, _ in found}
    assert not any(math.isnan(value) for value in found.values())
    assert found["forespeak:kv_pages", (("state", "free"),)] == 1024
    assert found["forespeak:kv_cache_usage_perc", ()] == 0
    assert found["forespeak:request_success_total", (("finished_reason", "stop"),)] == 0


def test_counts_are_those_of_the_answers(fresh: Running) -> None:
    """MX-02: only delivered tokens count, gauges return to 0, nothing falls."""
    before = samples(fresh)
    answers = [
        fresh.http.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 21, "seed": i}).json() for i in range(3)
    ]
    answers.append(
        fresh.http.post(
            "/v1/chat/completions", json={"messages": USER, "max_tokens": 21, "stop": list("aeiou "), "seed": 9}
        ).json()
    )
    fresh.http.post("/v1/chat/completions", json={"messages": []})
    with ws_client.connect(fresh.ws_url) as ws:
        ws.recv()
        ws.send(json.dumps({"type": "chat", "id": 1, "messages": USER, "max_tokens": 400}))
        while json.loads(ws.recv())["type"] != "delta":
            pass
        ws.send(json.dumps({"type": "cancel", "id": 1}))
        while (last := json.loads(ws.recv()))["type"] != "done":
            pass
    answers.append(last)
    wait_for(lambda: fresh.metric("forespeak:kv_pages", state="live") == 0, 3)
    after = samples(fresh)
    assert all(after[key] >= value for key, value in before.items() if key[0].endswith(("_total", "_count", "_bucket")))
    assert after["forespeak:generation_tokens_total", ()] == sum(a["usage"]["completion_tokens"] for a in answers)
    assert after["forespeak:prompt_tokens_total", ()] == sum(a["usage"]["prompt_tokens"] for a in answers)
    toy = (("drafter", "toy"),)
    accepted = sum(a["speculation"]["accepted"] for a in answers)
    assert after["forespeak:spec_decode_num_accepted_tokens_total", toy] == accepted > 0
    assert after["forespeak:spec_decode_num_draft_tokens_total", toy] == sum(a["speculation"]["drafted"] for a in answers)
    positions = sum(v for k, v in after.items() if k[0] == "forespeak:spec_decode_num_accepted_tokens_per_pos_total")
    assert positions == accepted
    reasons = {k[1][0][1]: v for k, v in after.items() if k[0] == "forespeak:request_success_total"}
    assert reasons == {"length": 3, "stop": 1, "cancelled": 1, "error": 0}
    assert after["forespeak:num_requests_running", ()] == after["forespeak:num_requests_waiting", ()] == 0
    assert after["forespeak:time_to_first_token_seconds_count", ()] == 5
    assert {f"forespeak:{name}" for name in LABELLED} <= {name for name, _ in after}


def test_prefix_hits_are_the_cached_tokens(fresh: Running) -> None:
    """MX-02: a repeat shows exactly its cached tokens, in usage and in the counter."""
    body = {"messages": [{"role": "user", "content": "some words that are repeated, all of them"}], "max_tokens": 2}
    usages = [fresh.http.post("/v1/chat/completions", json=body).json()["usage"] for _ in range(2)]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached[0] == 0 < cached[1] < usages[1]["prompt_tokens"]
    wait_for(lambda: fresh.metric("forespeak:prefix_cache_hits_total") == cached[1], 3)


def test_counters_survive_a_restart(fresh: Running) -> None:
    """MX-02: counters never fall, not even when the engine begins anew."""
    body = {"messages": USER, "max_tokens": 4}
    fresh.http.post("/v1/chat/completions", json=body)
    wait_for(lambda: fresh.metric("forespeak:prefix_cache_queries_total") > 0, 3)
    queries, tokens = (fresh.metric(f"forespeak:{name}") for name in ("prefix_cache_queries_total", "generation_tokens_total"))
    os.kill(fresh.engine_pid(), signal.SIGKILL)
    wait_for(lambda: fresh.metric("forespeak:engine_restarts_total") == 1, 5)
    fresh.wait_ready()
    assert fresh.metric("forespeak:prefix_cache_queries_total") == queries
    fresh.http.post("/v1/chat/completions", json=body)
    wait_for(lambda: fresh.metric("forespeak:prefix_cache_queries_total") == 2 * queries, 3)
    assert fresh.metric("forespeak:generation_tokens_total") == 2 * tokens


def test_prefix_of_the_names() -> None:
    metrics = Metrics("vllm:")
    metrics.on_draft({"suffix": 3}, ["suffix"], 2)
    text = metrics.render().decode()
    assert 'vllm:spec_decode_num_draft_tokens_total{drafter="suffix"} 3.0' in text
    assert "forespeak" not in text
