"""The drafters that exist, over the engine's own pages: text stays the same and their caches stay true."""

from __future__ import annotations

import gc
from functools import cache

import msgspec
import pytest
import torch
import toy
from engine_kit import KeepAll, Runner, greedy_request, make_engine, prompts_of, quick, quick_rand, run

from drafters.model import ModelDrafter
from drafters.suffix import SuffixDrafter
from kernels.batch import KVTensors
from kernels.decoder import Decoder
from spec.drafter import Drafter
from spec.engine import Engine
from spec.pages import PagePool
from spec.request import Request, SamplingParams
from spec.shapes import ShapeSpeculator
from spec.speculator import Speculator

COUNT = 16
SHAPE, WEIGHTS = toy.rand_weights(layers=2)


@cache
def decoder() -> Decoder:
    return quick(SHAPE, WEIGHTS)


@cache
def twin(kind: str) -> Decoder:
    """The target itself, a noisy twin of it, one with its two best tokens exchanged, and an unrelated model."""
    if kind == "noisy":
        return quick(SHAPE, toy.noisy(WEIGHTS))
    if kind == "swapped":
        return toy.swapped(decoder())
    return quick_rand(seed=99, layers=1) if kind == "unrelated" else decoder()


@cache
def golden(prompt: tuple[int, ...], count: int = COUNT) -> tuple[int, ...]:
    return tuple(toy.greedy(decoder(), prompt, count))


def engine_with(kind: str, speculator: Speculator, *, num_pages: int = 96, page_size: int = 4, **settings: int) -> Engine:
    pool = PagePool(num_pages)
    draft = twin(kind)
    shape = draft.shape
    store = KVTensors.allocate(shape.layers, num_pages, shape.kv_heads, shape.head_dim, page_size, torch.float32)
    store.k.fill_(float("nan"))
    store.v.fill_(float("nan"))
    model: Drafter = ModelDrafter("model", draft, store, pool)
    return make_engine(
        decoder(), [model], speculator=speculator, num_pages=num_pages, page_size=page_size, pool=pool, **settings
    )


@pytest.mark.parametrize("shape", ["chain:4", "4x3"])
@pytest.mark.parametrize("kind", ["itself", "noisy", "swapped", "unrelated"])
def test_a_draft_model_changes_no_text(kind: str, shape: str) -> None:
    prompts = prompts_of([1, 6, 18], seed=1)
    answers = run(engine_with(kind, ShapeSpeculator(shape)), [greedy_request(i, p, COUNT) for i, p in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        assert tuple(answers[i].token_ids) == golden(prompt)
        assert answers[i].drafted > 0
        if kind == "itself":
            assert len(answers[i].steps) <= 1 + -(-(COUNT - 1) // (2 if shape == "wide" else 4)), "a whole path is accepted"
        if kind == "swapped" and shape != "chain:4":
            assert answers[i].accepted >= COUNT // 3, "the second sibling is the right one"


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_prefix_hit_is_a_hit_for_the_draft_model_too(page_size: int) -> None:
    """SD-12: five pages three times, another prompt between; nothing is NaN and acceptance does not suffer."""
    prompt, other = prompts_of([5 * page_size, 13], seed=2)
    for kind in ("itself", "noisy"):
        engine = engine_with(kind, ShapeSpeculator("chain:4"), page_size=page_size, num_pages=384 // page_size)
        runner = Runner(engine)
        for number in range(3):
            runner.add(greedy_request(number, prompt, COUNT), greedy_request(10 + number, other, COUNT))
            runner.finish()
        answers = runner.answers
        for number in range(3):
            assert tuple(answers[number].token_ids) == golden(prompt)
            assert tuple(answers[10 + number].token_ids) == golden(other)
        assert answers[0].cached_tokens == 0 < answers[1].cached_tokens
        first = answers[0].accepted
        assert first > 0
        assert all(abs(answers[number].accepted - first) <= 0.1 * first for number in (1, 2))
        assert engine.stats()["drafter_faults"] == {"model": 0}


@pytest.mark.parametrize("kind", ["itself", "noisy"])
def test_preemption_and_eviction_leave_the_draft_model_s_keys_true(kind: str) -> None:
    """Pages go round and round a small pool; a stale draft key would show in the acceptance of the target by itself."""
    prompts = prompts_of([6, 9, 12, 5, 20, 8], seed=3)
    engine = engine_with(kind, ShapeSpeculator("chain:4"), num_pages=20, context=64)
    runner = Runner(engine)
    for turn in range(2):
        runner.add(*[greedy_request(10 * turn + i, p, COUNT) for i, p in enumerate(prompts)])
        runner.finish()
    assert engine.stats()["preemptions"] > 0
    for number, answer in runner.answers.items():
        assert tuple(answer.token_ids) == golden(prompts[number % 10])
    if kind == "itself":
        stats = engine.stats()
        assert stats["spec_decode_num_accepted_tokens"]["model"] >= 0.99 * stats["spec_decode_num_draft_tokens"]["model"]


@pytest.mark.parametrize("length", [61, 30])
def test_a_draft_model_with_a_shorter_context_only_stops_drafting(length: int) -> None:
    """SD-05, second half: the draft model's positions end in the middle of the answer, or at the prompt's end."""
    short_shape, short_weights = toy.rand_weights(layers=2, max_position=64)
    prompt = prompts_of([length], seed=5)[0]
    pool = PagePool(48)
    store = KVTensors.allocate(short_shape.layers, 48, short_shape.kv_heads, short_shape.head_dim, 4, torch.float32)
    draft = ModelDrafter("short", quick(short_shape, short_weights), store, pool)
    engine = make_engine(
        decoder(), [draft], speculator=ShapeSpeculator("chain:4"), pool=pool, num_pages=48, context=128, max_tree_nodes=8
    )
    answer = run(engine, [greedy_request(1, prompt, 48)])[1]
    assert tuple(answer.token_ids) == golden(prompt, 48)
    assert answer.drafted > 0
    assert engine.stats()["drafter_faults"] == {"short": 0}


def test_copying_accepts_what_repeats() -> None:
    """A text that repeats itself (the table's loop) is copied from the request's own answer."""
    loop = list(range(100, 108))
    table = toy.script_table([*loop])
    table[loop[-1], loop[0]] = 20.0
    target = quick(*toy.table_weights(table))
    engine = make_engine(target, [SuffixDrafter()], speculator=ShapeSpeculator("chain:4"))
    answer = run(engine, [greedy_request(1, [100], 60)])[1]
    assert answer.token_ids == [loop[(i + 1) % 8] for i in range(60)]
    assert answer.accepted > 30
    assert set(answer.sources) == {"", "suffix"}


def test_every_drafter_together() -> None:
    prompts = prompts_of([3, 17, 9], seed=4)
    for speculator in (ShapeSpeculator("mixed"), KeepAll()):
        pool = PagePool(96)
        models: list[Drafter] = [SuffixDrafter()]
        for kind in ("noisy", "unrelated"):
            shape = twin(kind).shape
            store = KVTensors.allocate(shape.layers, 96, shape.kv_heads, shape.head_dim, 4, torch.float32)
            models.append(ModelDrafter(kind, twin(kind), store, pool))
        engine = make_engine(decoder(), models, speculator=speculator, pool=pool)
        answers = run(engine, [greedy_request(i, p, COUNT) for i, p in enumerate(prompts)])
        assert [tuple(answers[i].token_ids) for i in range(3)] == [golden(p) for p in prompts]
        assert not any(engine.stats()["drafter_faults"].values())


@pytest.mark.parametrize("shape", ["chain:4", "2x4"])
@pytest.mark.parametrize("drafter", ["suffix", "itself", "noisy", "unrelated"])
def test_a_prompt_of_one_word_over_and_over_changes_no_text(drafter: str, shape: str) -> None:
    """SD-01: copying always finds something to offer, right or wrong."""
    prompt = (17, 230, 5) * 16
    if drafter == "suffix":
        engine = make_engine(decoder(), [SuffixDrafter()], speculator=ShapeSpeculator(shape), num_pages=96, page_size=4)
    else:
        engine = engine_with(drafter, ShapeSpeculator(shape))
    answer = run(engine, [greedy_request(0, prompt, 32)])[0]
    assert tuple(answer.token_ids) == golden(prompt, 32)
    assert answer.drafted > 0


@pytest.mark.parametrize(
    "options", [SamplingParams(COUNT, temperature=0.0), SamplingParams(COUNT, temperature=0.8, seed=3, top_p=0.9)]
)
def test_steps_leave_nothing_to_the_garbage_collector(options: SamplingParams) -> None:
    """Its passes over young objects cost a tenth of a step each, those over old ones twenty steps."""
    engine = engine_with("noisy", ShapeSpeculator("4x3"))
    prompts = prompts_of([6, 9], seed=4)

    def answer(first: int) -> None:
        sampling = msgspec.structs.replace(options, max_tokens=COUNT, ignore_eos=True)
        run(engine, [Request(first + i, p, sampling) for i, p in enumerate(prompts)])

    answer(1)
    gc.collect()
    gc.disable()
    try:
        answer(11)
        assert gc.collect() == 0
    finally:
        gc.enable()
