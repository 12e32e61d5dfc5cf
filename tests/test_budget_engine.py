"""The price rule in a real engine: whatever it decides from noisy clocks, texts and distributions stay what they are."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
import toy
from engine_kit import Clocked, Runner, greedy_request, make_engine, prompts_of, quick, run

from drafters.model import ModelDrafter
from drafters.suffix import SuffixDrafter
from kernels.batch import KVTensors
from kernels.decoder import Decoder
from spec.budget import PriceSpeculator
from spec.drafter import Drafter
from spec.engine import Engine
from spec.pages import PagePool
from spec.request import Request, SamplingParams, SpeculationPolicy

COUNT = 24
SHAPE, WEIGHTS = toy.rand_weights(layers=2)


@cache
def target() -> Decoder:
    return quick(SHAPE, WEIGHTS)


@cache
def noisy() -> Decoder:
    return quick(SHAPE, toy.noisy(WEIGHTS))


def engine(
    draft: Decoder, speculator: PriceSpeculator, over: Decoder | None = None, drafted: bool = True, num_pages: int = 160
) -> Engine:
    pool = PagePool(num_pages)
    shape = draft.shape
    store = KVTensors.allocate(shape.layers, num_pages, shape.kv_heads, shape.head_dim, 4, torch.float32)
    store.k.fill_(float("nan"))
    drafters: list[Drafter] = [SuffixDrafter(), ModelDrafter("model", draft, store, pool, clock=lambda: 0.0)] if drafted else []
    return make_engine(over or target(), drafters, speculator=speculator, pool=pool, num_pages=num_pages)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_do_not_change_while_the_rule_adapts(temperature: float) -> None:
    """Loads rise and fall, steps probe, pages run out: every answer is the one that plain decoding gives alone."""
    prompts = prompts_of([3, 8, 17, 5, 11, 26, 4, 9], seed=11)

    def requests(first: int, picked: range) -> list[Request]:
        return [greedy_request(first + i, prompts[i], COUNT, temperature=temperature, seed=100 + i) for i in picked]

    plain = engine(noisy(), Clocked(), drafted=False)
    alone = {i: run(plain, requests(0, range(i, i + 1)))[i].token_ids for i in range(len(prompts))}
    rule = Clocked()
    runner = Runner(engine(noisy(), rule, num_pages=40))
    for turn, picked in enumerate((range(1), range(8), range(2, 4), range(1, 8))):
        runner.add(*requests(100 * turn, picked))
        runner.finish()
    drafted = sum(answer.drafted for answer in runner.answers.values())
    accepted = sum(answer.accepted for answer in runner.answers.values())
    assert drafted > accepted > 20  # not blind: drafts were made, some right, some wrong
    assert runner.engine.stats()["preemptions"] > 0
    assert runner.engine.stats()["drafter_faults"] == {"suffix": 0, "model": 0}
    for number, answer in runner.answers.items():
        assert answer.token_ids == alone[number % 100]


def test_the_rule_learns_from_a_real_engine() -> None:
    rule = Clocked()
    run(engine(target(), rule), [greedy_request(i, p, 40) for i, p in enumerate(prompts_of([5, 9, 13], seed=12))])
    cells = rule.calibration.dump()["drafters"]["model"]["by_rank"]
    seen, hits = next((seen, hits) for cell, seen, hits in cells if cell == 0)
    assert seen > 20
    assert hits > 0.95 * seen  # the target drafts for itself: its first choice is always right
    assert rule.costs.pass_ms(1, 0, 1) > 0.0


P = np.array([0.45, 0.3, 0.15, 0.1])
Q = np.array([0.1, 0.3, 0.25, 0.35])


def table(row: np.ndarray) -> torch.Tensor:
    """Whatever came before, the next token is one of four, distributed as `row`."""
    logits = torch.full((64, 64), -60.0)
    logits[:, :4] = torch.tensor(np.log(row), dtype=torch.float32)
    return logits


def test_rejection_keeps_the_distribution_with_drawn_and_copied_nodes_in_one_tree() -> None:
    """Positions are independent, so tokens 2 to 4 of every answer count. Token 1 comes from the prompt's pass."""
    over = quick(*toy.table_weights(table(P)))
    draft = quick(*toy.table_weights(table(Q)))
    rule = Clocked()
    runner = Runner(engine(draft, rule, over))
    policy = SpeculationPolicy(rule="rejection")
    counts = np.zeros(4)
    pairs = np.zeros((4, 4))
    for seed in range(1000, 1020):  # answers that may be copied: those of the exact rule are kept
        sampling = SamplingParams(max_tokens=20, temperature=1.0, seed=seed)
        runner.add(Request(id=seed, prompt_ids=(0, 1, 2, 3), sampling=sampling))
    runner.finish()
    runner.answers.clear()
    for batch in range(12):
        for i in range(50):
            seed = batch * 50 + i
            sampling = SamplingParams(max_tokens=5, temperature=1.0, seed=seed)
            runner.add(Request(id=seed, prompt_ids=(0, 1, 2, 3, 0, 1, seed % 4), sampling=sampling, speculation=policy))
        runner.finish()
    sources: dict[str, int] = {}
    for answer in runner.answers.values():
        for token, source in zip(answer.token_ids[1:], answer.sources[1:], strict=True):
            counts[token] += 1
            sources[source] = sources.get(source, 0) + 1
        for a, b in zip(answer.token_ids[1:], answer.token_ids[2:], strict=False):
            pairs[a, b] += 1
    assert sources.get("model", 0) > 50  # not blind
    assert sources.get("suffix", 0) > 20
    expected = counts.sum() * P
    assert float(((counts - expected) ** 2 / expected).sum()) < 30.7  # chi-square, 3 degrees, false alarm 1e-6
    expected = pairs.sum() * np.outer(P, P)
    assert float(((pairs - expected) ** 2 / expected).sum()) < 58.0  # 15 degrees


def test_a_repeated_seed_is_not_tested_against_its_own_noise() -> None:
    """A client that asks twice with one seed: drafts of the first answer, which that noise made, would bias the second. Every seed
    has its own tenant, so the first answer of the same seed is all that could be copied. The second token of an answer counts: it is
    the first that can be drafted, and in the first answer it came without a draft."""
    runner = Runner(make_engine(quick(*toy.table_weights(table(P))), [SuffixDrafter(max_tenants=16)], num_pages=160))
    policy = SpeculationPolicy(rule="rejection")
    counts = np.zeros(4)
    for batch in range(60):
        for turn in (0, 1):
            for seed in range(batch * 16, batch * 16 + 16):
                sampling = SamplingParams(max_tokens=3, temperature=1.0, seed=seed)
                ids = (10, 11, 12)
                runner.add(Request(id=2 * seed + turn, prompt_ids=ids, sampling=sampling, speculation=policy, tenant=str(seed)))
            runner.finish()
    for number, answer in runner.answers.items():
        if number % 2:
            counts[answer.token_ids[1]] += 1
    expected = counts.sum() * P
    assert float(((counts - expected) ** 2 / expected).sum()) < 30.7  # chi-square, 3 degrees, false alarm 1e-6


def test_requests_that_opt_out_stand_beside_others_that_draft() -> None:
    """Half the requests opt out; the others still draft in the same steps."""
    rule = Clocked()
    prompts = prompts_of([6, 6, 6, 6], seed=13)
    off = SpeculationPolicy(mode="off")
    answers = run(
        engine(target(), rule),
        [greedy_request(i, p, COUNT, speculation=off if i % 2 else SpeculationPolicy()) for i, p in enumerate(prompts)],
    )
    assert [answers[i].drafted > 0 for i in range(4)] == [True, False, True, False]
