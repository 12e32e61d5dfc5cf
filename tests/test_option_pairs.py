"""Every sampling option, alone and with every other one: the answer with speculation is the answer without.

The table is generated: all options, all pairs. Ids, log probabilities, finish reason and stop token must be equal, bit for bit.
Each option is also shown to change something, or the table would be blind to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
import toy
from checkpoint_tokenizer import IM_END, VOCABULARY, build_tokenizer
from engine_kit import (
    NOISY,
    OFF,
    ORACLE,
    SHAPES,
    SWAPPED,
    Answer,
    KeepAll,
    ScriptDrafter,
    Skill,
    answers_of,
    prompts_of,
    run,
)

from drafters.grammar import GrammarDrafter
from kernels.batch import KVTensors
from kernels.decoder import Decoder
from kernels.linear import DenseWeight
from spec.config import EngineConfig
from spec.drafter import Drafter
from spec.engine import Engine
from spec.grammar import GrammarCompiler
from spec.request import GrammarSpec, Request, SamplingParams, SpeculationPolicy
from spec.target import TargetModel

A, B, C = b"abc"
BASE: dict[str, Any] = {"max_tokens": 16, "temperature": 1.0, "seed": 11}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.4},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.4},
    "min_p": {"min_p": 0.3},
    "seed": {"seed": 2**63 - 1},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "presence_penalty": {"presence_penalty": 1.9},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "logit_bias": {"logit_bias": {A: -100.0, B: 2.0, 400: 1.0}},
    "bad_words": {"bad_words": ((A,), (B, B), (C, B, A))},
    "min_tokens": {"min_tokens": 12},
    "stop_token_ids": {"stop_token_ids": (C,)},
    "ignore_eos": {"ignore_eos": True},
    "logprobs": {"logprobs": 3},
    "max_tokens": {"max_tokens": 3},
    "grammar": {"grammar": GrammarSpec("regex", r"[abc](ab|bc){1,3}[abc]{2}xyz[abc]{0,9}")},
}
CHANGES_NO_TEXT = {"logprobs"}
PAIRS = [(), *((name,) for name in OPTIONS), *combinations(OPTIONS, 2)]
PROMPTS = prompts_of((4 + i % 9 for i in range(len(PAIRS))), seed=3)


@cache
def decoder() -> Decoder:
    """RAND with a liking for a, b, c and the end token, so that stops, words and grammars meet real choices."""
    shape, weights = toy.rand_weights(layers=1, scale_head=2.0)
    assert isinstance(weights.lm_head, DenseWeight)
    liking = torch.zeros(VOCABULARY)
    liking[[A, B, C]] = 5.0
    liking[IM_END] = 5.0
    return toy.decoder(shape, replace(weights, lm_head=replace(weights.lm_head, bias=liking)))


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(build_tokenizer().to_str(), (IM_END,), VOCABULARY)


def options_of(names: tuple[str, ...]) -> SamplingParams:
    """Of two options for one field the later one wins."""
    merged = dict(BASE)
    for name in names:
        merged |= OPTIONS[name]
    return SamplingParams(**merged)


def requests(policy: SpeculationPolicy, pairs: list[tuple[str, ...]] = PAIRS) -> list[Request]:
    return [Request(i, PROMPTS[i], options_of(names), policy) for i, names in enumerate(pairs)]


def engine(drafters: Sequence[Drafter] = (), max_sequences: int = 40) -> Engine:
    shape, pages, size = decoder().shape, 400, 4
    store = KVTensors.allocate(shape.layers, pages, shape.kv_heads, shape.head_dim, size, torch.float32)
    config = EngineConfig(num_pages=pages, page_size=size, context=64, max_sequences=max_sequences)
    return Engine(config, TargetModel(decoder(), store), drafters, KeepAll(), (IM_END,), compiler())


@cache
def plain() -> dict[int, Answer]:
    return run(engine(), requests(OFF))


def same(left: Answer, right: Answer) -> bool:
    fields = ("token_ids", "logprobs", "finish_reason", "stop_token", "error_code")
    return all(getattr(left, name) == getattr(right, name) for name in fields)


@pytest.mark.parametrize(
    ("skill", "shape", "max_sequences"),
    [(ORACLE, "chain", 40), (NOISY, "bushy", 40), (SWAPPED, "2x4", 7)],
    ids=["oracle chain", "noisy bushy", "swapped 2x4, few at once"],
)
def test_speculation_changes_nothing_for_any_pair_of_options(skill: Skill, shape: str, max_sequences: int) -> None:
    truth = answers_of({PROMPTS[i]: answer.token_ids for i, answer in plain().items()})
    drafted = run(
        engine([GrammarDrafter(), ScriptDrafter(truth, SHAPES[shape], skill)], max_sequences), requests(SpeculationPolicy())
    )
    different = [" + ".join(PAIRS[i]) for i, answer in drafted.items() if not same(answer, plain()[i])]
    assert different == []
    assert sum(answer.accepted for answer in drafted.values()) > len(PAIRS), "drafts were accepted"
    assert sum("grammar" in answer.sources for answer in drafted.values()) > 5, "forced tokens were accepted"


def test_every_option_changes_something() -> None:
    """Each option alone, on the prompts of all pairs it is in, against the bare request."""
    for name in OPTIONS.keys() - CHANGES_NO_TEXT:
        chosen = [i for i, names in enumerate(PAIRS) if name in names][:8]
        bare = run(engine(), [Request(i, PROMPTS[i], SamplingParams(**BASE), OFF) for i in chosen])
        alone = run(engine(), [Request(i, PROMPTS[i], options_of((name,)), OFF) for i in chosen])
        assert any(bare[i].token_ids != alone[i].token_ids for i in chosen), name


def test_every_option_holds() -> None:
    """What can be read off an answer of any pair."""
    for i, names in enumerate(PAIRS):
        answer, options = plain()[i], options_of(names)
        ids = answer.token_ids
        assert answer.finish_reason in ("stop", "length"), names
        assert len(ids) <= options.max_tokens
        assert (len(ids) == options.max_tokens) or answer.finish_reason == "stop"
        assert len(answer.logprobs) == (len(ids) if options.logprobs is not None else 0)
        if options.logit_bias and options.grammar is None:
            assert A not in ids
        if options.bad_words:
            assert A not in ids
            assert all((left, right) != (B, B) for left, right in pairwise(ids))
        if answer.finish_reason == "stop":
            end_ids = {C} if "stop_token_ids" in names else set()
            assert ids[-1] in end_ids | (set() if options.ignore_eos else {IM_END})
            assert not set(ids[:-1]) & end_ids
            assert len(ids) > options.min_tokens or options.grammar is not None
