"""Many requests at once on a real engine with 64 pages, over HTTP and WebSockets: answers, pages and /metrics stay true."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import websockets.sync.client as ws_client
from checkpoints import write_rand_checkpoint
from engine_kit import has_native
from prometheus_client.parser import text_string_to_metric_families
from serving import Running, running, wait_for

from server.settings import Settings

PAGES, PAGE_SIZE = 64, 16
TEXT = "/v1/completions"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(server: Running) -> Samples:
    """A scrape, read by the strict parser; pages add up in every one of them."""
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    found = {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}
    assert not any(math.isnan(value) for value in found.values())
    pages = {state: found["forespeak:kv_pages", (("state", state),)] for state in ("live", "cached", "free")}
    assert sum(pages.values()) == PAGES, pages
    return found


def value(found: Samples, name: str, **labels: str) -> float:
    return found.get((f"forespeak:{name}", tuple(labels.items())), 0.0)


def drained(server: Running) -> bool:
    found = samples(server)
    return (
        value(found, "kv_pages", state="live")
        == value(found, "num_requests_running")
        == value(found, "num_requests_waiting")
        == 0
    )


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Samples]]:
    """The server and its first scrape, before anything was asked."""
    folder = tmp_path_factory.mktemp("load")
    draft = write_rand_checkpoint(folder / "draft", noise=0.02, lm_head_gain=2.0)
    bytes_per_page = 2 * (2 + 2) * 2 * 32 * 4 * PAGE_SIZE  # K and V, layers of target and draft model, heads, channels, float32
    settings = Settings(
        model=str(write_rand_checkpoint(folder / "rand", lm_head_gain=2.0)), port=0, weights="float32", threads=1, page_size=PAGE_SIZE,
        backend="native" if has_native() else "reference", drafters=f"suffix,model:{draft}", tree_shape="mixed", max_sequences=12,
        kv_memory=PAGES * bytes_per_page, cache_dir=str(folder / "cache"),
    )  # fmt: skip
    with running(settings) as run:
        yield run, samples(run)


@pytest.fixture
def real(started: tuple[Running, Samples]) -> Running:
    return started[0]


def random_prompt(chance: random.Random, length: int) -> list[int]:
    return [chance.randrange(32, 127) for _ in range(length)]


def test_a_fresh_server_reports_zeros(started: tuple[Running, Samples]) -> None:
    """MX-02: a scrape before the first request, of an engine that really counts."""
    _, first = started
    assert value(first, "kv_pages", state="free") == PAGES
    counted = ("prompt_tokens_total", "generation_tokens_total", "spec_decode_num_drafts_total", "preemptions_total")
    for name in (
        *counted,
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "kv_cache_usage_perc",
        "num_requests_running",
    ):
        assert ("forespeak:" + name, ()) in first
        assert value(first, name) == 0


@pytest.mark.parametrize("mode", ["off", "auto"])
def test_recomputation_is_no_hit_and_a_repeat_is(real: Running, mode: str) -> None:
    """MX-02: 50 random prompts through a tiny pool, then one twice."""
    chance = random.Random(mode)
    before = samples(real)
    prompts = [random_prompt(chance, 60) for _ in range(50)]

    def ask(prompt: list[int], count: int = 90) -> Any:
        body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "speculation": {"mode": mode}}
        return real.http.post(TEXT, json=body).json()

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, prompts))
    wait_for(lambda: drained(real))
    after = samples(real)
    rise = {name: value(after, name) - value(before, name) for name in ("preemptions_total", "prefix_cache_hits_total")}
    assert rise["preemptions_total"] > 0, "the pool was too large"
    assert rise["prefix_cache_hits_total"] == 0
    assert all(answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0 for answer in answers)
    assert value(after, "prefix_cache_queries_total") - value(before, "prefix_cache_queries_total") == 50 * 60
    assert value(after, "generation_tokens_total") - value(before, "generation_tokens_total") == 50 * 90
    drafted = sum(answer["speculation"]["drafted"] for answer in answers)
    counted = [sum(v for k, v in found.items() if k[0].endswith("num_draft_tokens_total")) for found in (before, after)]
    assert counted[1] - counted[0] == drafted
    assert (drafted > 0) == (mode == "auto")
    repeated = random_prompt(chance, 60)
    cached = [ask(repeated, 4)["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
    assert cached == [0, 59 // PAGE_SIZE * PAGE_SIZE]
    wait_for(lambda: value(samples(real), "prefix_cache_hits_total") - value(after, "prefix_cache_hits_total") == cached[1])
    last = samples(real)
    assert all(last[key] >= old for key, old in before.items() if key[0].endswith(("_total", "_count", "_bucket")))


@pytest.mark.parametrize("mode", ["off", "auto"])
def test_pages_come_back_from_finished_cut_and_refused_requests(real: Running, mode: str) -> None:
    """KV-01: 300 requests, of which a third finish, a third are cut by their client at any point and a third are refused."""
    chance = random.Random(5)
    plans = [(number, random_prompt(chance, chance.randint(8, 40)), chance.randint(0, 6)) for number in range(300)]
    policy = {"mode": mode}
    results: list[int] = []
    refusals: list[dict[str, Any]] = [
        {"prompt": [97] * 600},
        {"temperature": 9},
        {"logit_bias": {"9999": 1}},
        {"prompt": []},
    ]

    def one(plan: tuple[int, list[int], int]) -> None:
        number, prompt, cut = plan
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "speculation": policy}
        if number % 3 == 0:
            status = real.http.post(TEXT, json=body).status_code
            assert status == 200
            results.append(number)
        elif number % 3 == 1:
            refused = real.http.post(TEXT, json=body | refusals[number // 3 % len(refusals)])
            assert refused.status_code == 400
        elif number % 2:
            with real.http.stream("POST", TEXT, json=body | {"stream": True, "max_tokens": 300}) as response:
                lines = response.iter_lines()
                for _ in range(cut):
                    next(lines)
        else:
            cut_socket(number, cut)

    def cut_socket(number: int, frames: int) -> None:
        with ws_client.connect(real.ws_url) as ws:
            message = {"role": "user", "content": f"number {number} is a question of its own {number * 7919}"}
            chat = {
                "type": "chat",
                "id": 1,
                "messages": [message],
                "max_tokens": 300,
                "ignore_eos": True,
                "speculation": policy,
            }
            ws.send(json.dumps(chat))
            for _ in range(frames):
                if json.loads(ws.recv(timeout=20))["type"] == "done":
                    break  # a slow reader found it whole

    with ThreadPoolExecutor(16) as pool:  # more than run at once, so some are cut while they are queued
        futures = [pool.submit(one, plan) for plan in plans]
        while not all(future.done() for future in futures):
            samples(real)  # pages add up all the time
        for future in futures:
            future.result()
    assert sorted(results) == list(range(0, 300, 3))  # those of the end too: cached pages give way
    wait_for(lambda: drained(real))
    found = samples(real)
    assert value(found, "kv_pages", state="cached") > PAGES // 2
    assert value(found, "request_success_total", finished_reason="cancelled") > 30
    assert real.http.get("/health").status_code == 200


def test_seeded_and_unseeded_requests_of_all_kinds_in_one_batch(real: Running) -> None:
    """SD-13: a one-token prompt, one shorter than any window, one that repeats itself, one that does not; 20 rounds shuffled."""
    chance = random.Random(6)
    kinds: dict[str, tuple[list[int], float]] = {
        "one token": ([97], 0.0),
        "short": ([98, 99], 0.8),
        "repeating": ([*b"abcd"] * 12, 0.0),
        "all different": (random.Random(7).sample(range(32, 127), 40), 0.8),
    }
    cases = [(name, seeded) for name in kinds for seeded in (True, False)]

    def ask(case: tuple[str, bool], mode: str = "auto") -> Any:
        (prompt, temperature), more = kinds[case[0]], {"seed": 7} if case[1] else {}
        body = {
            "prompt": prompt,
            "max_tokens": 20,
            "temperature": temperature,
            "ignore_eos": True,
            "speculation": {"mode": mode},
        }
        response = real.http.post(TEXT, json=body | more)
        assert response.status_code == 200, response.text
        return response.json()

    def text(answer: Any) -> str:
        return str(answer["choices"][0]["text"])

    alone = {case: text(ask(case, "off")) for case in cases if case[1] or kinds[case[0]][1] == 0.0}
    assert len(alone) == 6
    drafted = dict.fromkeys(kinds, 0)
    unseeded: dict[str, set[str]] = {"short": set(), "all different": set()}
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            order = chance.sample(cases, len(cases))
            for case, answer in zip(order, pool.map(ask, order), strict=True):
                if case in alone:
                    assert text(answer) == alone[case], case
                else:
                    unseeded[case[0]].add(text(answer))
                drafted[case[0]] += answer["speculation"]["drafted"]
    assert all(len(texts) > 15 for texts in unseeded.values()), "no seed is drawn for everybody"
    assert min(drafted.values()) > 0
    assert drafted["repeating"] > 100
