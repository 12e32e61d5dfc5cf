"""A grammar that runs into one of its parser's limits in the middle of an answer: the same end with speculation off and on."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import toy
from checkpoint_tokenizer import IM_END, VOCABULARY, build_tokenizer
from engine_kit import OFF, ORACLE, SHAPES, Answer, KeepAll, ScriptDrafter, answers_of, prompts_of, run
from llguidance import LLParserLimits

from kernels.batch import KVTensors
from kernels.decoder import Decoder
from kernels.linear import DenseWeight
from spec.config import EngineConfig
from spec.engine import Engine
from spec.grammar import GrammarCompiler
from spec.request import GrammarSpec, Request, SamplingParams, SpeculationPolicy
from spec.target import TargetModel

A, B = b"ab"
PROMPTS = prompts_of([4, 7, 5], seed=5)
AMBIGUOUS = GrammarSpec("grammar", 'start: s\ns: s s | "a" | "b" | "ab"')  # the parser keeps every way to read the text
COUNT = 30


@cache
def decoder() -> Decoder:
    """RAND with a liking for a and b."""
    shape, weights = toy.rand_weights(layers=1)
    assert isinstance(weights.lm_head, DenseWeight)
    liking = torch.zeros(VOCABULARY)
    liking[[A, B]] = 3.0
    return toy.decoder(shape, replace(weights, lm_head=replace(weights.lm_head, bias=liking)))


def answers(
    limits: LLParserLimits | None, policy: SpeculationPolicy, drafter: ScriptDrafter | None = None
) -> dict[int, Answer]:
    shape, pages, size = decoder().shape, 96, 4
    store = KVTensors.allocate(shape.layers, pages, shape.kv_heads, shape.head_dim, size, torch.float32)
    config = EngineConfig(num_pages=pages, page_size=size, context=64)
    compiler = GrammarCompiler(build_tokenizer().to_str(), (IM_END,), VOCABULARY, limits)
    drafters = [drafter] if drafter is not None else []
    engine = Engine(config, TargetModel(decoder(), store), drafters, KeepAll(), (IM_END,), compiler)
    grammars = (AMBIGUOUS, None, AMBIGUOUS)
    requests = [
        Request(
            i,
            prompt,
            SamplingParams(COUNT, temperature=0.9, seed=i, min_tokens=COUNT, grammar=grammar, logprobs=1),
            policy,
        )
        for i, (prompt, grammar) in enumerate(zip(PROMPTS, grammars, strict=True))
    ]
    return run(engine, requests)


@pytest.mark.parametrize("shape", ["chain", "bushy"])
@pytest.mark.parametrize("limits", [{"max_items_in_row": 22}, {"step_max_items": 60}], ids=["at a token", "at a mask"])
def test_a_limit_ends_the_answer_where_plain_decoding_ends_it(limits: dict[str, int], shape: str) -> None:
    whole = answers(None, OFF)
    plain = answers(LLParserLimits(**limits), OFF)
    truth = answers_of({PROMPTS[i]: answer.token_ids for i, answer in whole.items()})
    drafted = answers(LLParserLimits(**limits), SpeculationPolicy(), ScriptDrafter(truth, SHAPES[shape], ORACLE))
    for i in (0, 2):
        assert whole[i].finish_reason == "length"
        assert (plain[i].finish_reason, plain[i].error_code) == ("error", "grammar_failed")
        assert 2 < len(plain[i].token_ids) < COUNT
        assert plain[i].token_ids == whole[i].token_ids[: len(plain[i].token_ids)]
        assert drafted[i].error_code == "grammar_failed"
        assert drafted[i].token_ids == plain[i].token_ids
        assert drafted[i].logprobs == plain[i].logprobs
        assert len(drafted[i].logprobs) == len(drafted[i].token_ids)
        assert drafted[i].accepted > 2  # not blind: the failing step had accepted drafts before it
    assert drafted[1].token_ids == plain[1].token_ids == whole[1].token_ids  # nobody else notices
