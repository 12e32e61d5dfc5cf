"""Keys apart under everything at once: speculation, preemption, prefix cache, more work than the engine holds. Real engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from checkpoints import write_rand_checkpoint
from serving import Running, running, wait_for

from server.limits import Limits
from server.serve import ServeOptions
from server.settings import Settings

KEYS = {name: f"{name}-key-000001" for name in ("alice", "bob", "carol")}
PER_KEY = 5
CHAT = "/v1/chat/completions"
# Most of it is the same for everybody, so that pages could be shared by mistake.
QUESTION = "please repeat after me, again and again and again and again and again: "


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Room for two or three of the conversations below, so that sequences are preempted; every key has a limit of its own."""
    folder = tmp_path_factory.mktemp("tight")
    (folder / "keys").write_text("\n".join(KEYS.values()))
    settings = Settings(
        model=str(write_rand_checkpoint(folder / "rand")), port=0, backend="reference", weights="float32", kv_memory=400 * 1024,
        drafters="suffix", tree_shape="chain:4", threads=1, cache_dir=str(folder / "cache"), api_key_file=str(folder / "keys"),
        page_size=8, max_sequences=6,
    )  # fmt: skip
    with running(settings, options=ServeOptions(limits=Limits(requests_per_key=24))) as run:
        yield run


def ask(server: Running, key: str, content: str, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 64, "temperature": 0, "ignore_eos": True} | fields
    response = server.http.post(CHAT, json=body, headers={"Authorization": f"Bearer {KEYS[key]}"}, timeout=120)
    return response.json() if response.status_code == 200 else response


def counter(server: Running, name: str, **labels: str) -> float:
    server.http.headers["Authorization"] = f"Bearer {KEYS['alice']}"
    return server.metric("forespeak:" + name, **labels)


def test_canaries_stay_with_their_requests(tight: Running) -> None:
    """Everybody's answer is the one it gets alone and plain, and nobody's answer or token holds another's secret."""
    canaries = {(key, index): f"canary{key}{index * 7919 + 104729}" for key in KEYS for index in range(PER_KEY)}

    def answer(who: tuple[str, int], **fields: Any) -> Any:
        return ask(tight, who[0], QUESTION + f"{canaries[who]} {canaries[who]}", logprobs=True, top_logprobs=3, **fields)

    alone = {who: answer(who, speculation={"mode": "off"})["choices"][0] for who in canaries}
    preempted, hits = counter(tight, "preemptions_total"), counter(tight, "prefix_cache_hits_total")
    with ThreadPoolExecutor(len(canaries)) as pool:
        together = dict(zip(canaries, pool.map(answer, canaries), strict=True))
    assert counter(tight, "preemptions_total") > preempted
    assert counter(tight, "prefix_cache_hits_total") > hits
    assert sum(one["speculation"]["accepted"] for one in together.values()) > 0
    for who, one in together.items():
        assert one["choices"][0] == alone[who]
        said = str(one)
        assert not any(secret in said for other, secret in canaries.items() if other != who)
        other_keys = [canaries[other][:12] for other in canaries if other[0] != who[0]]
        assert not any(secret in said for secret in other_keys)


def test_a_flood_of_one_key_does_not_starve_another(tight: Running) -> None:
    """Deficit round robin over tokens: two late requests of one key are done long before most of another's flood, whose own limit
    the other key does not feel."""
    refusals: list[Any] = []

    def timed(key: str, index: int) -> tuple[float, str]:
        while isinstance(answer := ask(tight, key, f"question {index} of the flood", max_tokens=48), httpx.Response):
            refusals.append((key, answer))
            time.sleep(0.05)
        assert answer["usage"]["completion_tokens"] == 48
        return time.monotonic(), key

    with ThreadPoolExecutor(28) as pool:
        flood = [pool.submit(timed, "alice", index) for index in range(26)]
        wait_for(lambda: refusals)  # all it may have at once is there; a gauge could have risen and fallen unseen
        late = [pool.submit(timed, "bob", index) for index in range(2)]
        ends = [key for _, key in sorted(future.result() for future in [*flood, *late])]
    assert {key for key, _ in refusals} == {"alice"}
    assert all((r.status_code, r.json()["error"]["code"]) == (429, "rate_limit_exceeded") for _, r in refusals)
    assert all(int(refusal.headers["retry-after"]) >= 1 for _, refusal in refusals)
    assert max(place for place, key in enumerate(ends) if key == "bob") < 21, ends  # first come, first served: 27


def test_other_keys_hits_do_not_show(tight: Running) -> None:
    """`cached_tokens` tells a key about its own requests only; both halves, so that a cache that is off does not pass."""
    content = "a question which is long enough for some pages of eight tokens each, asked by more than one key"
    cached = [
        ask(tight, key, content, max_tokens=2)["usage"]["prompt_tokens_details"]["cached_tokens"]
        for key in ("alice", "alice", "bob", "carol", "bob")
    ]
    assert cached[0] == cached[2] == cached[3] == 0, "the template's beginning alone fills no page"
    assert cached[1] == cached[4] > 0
