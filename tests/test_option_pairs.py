"""Every option, alone and with every other one: the answer with speculation is the answer without.

The table is generated (tests/support/option_table.py): all options, all pairs. Ids, text, log probabilities, finish reason, stop
token and counted tokens must be equal, bit for bit. Each option is also shown to change something, or the table would be blind to it.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from checkpoint_tokenizer import IM_END
from engine_kit import (
    NOISY,
    OFF,
    ORACLE,
    SHAPES,
    SWAPPED,
    Clocked,
    RandomTreeDrafter,
    ScriptDrafter,
    Skill,
)
from option_table import BASE, OPTIONS, PAIRS, SCHEMA, A, B, C, Heard, hear, make, options_of, tokenizer, truth_of

import spec.accept
from drafters.grammar import GrammarDrafter
from drafters.suffix import SuffixDrafter
from server.generation import Generation
from spec.accept import Acceptance
from spec.engine import Engine
from spec.grammar import GrammarCursor
from spec.penalties import PathEdits
from spec.request import SpeculationPolicy, TokenEvent
from spec.shapes import ShapeSpeculator

CHANGES_NO_TEXT = {"logprobs", "logprobs 20", "n 2", "n 8"}  # of the first choice
CASES = [(i, options_of(names)) for i, names in enumerate(PAIRS)]


@cache
def plain() -> dict[int, list[Heard]]:
    return hear(make(max_sequences=64), CASES, OFF)


def check(engine: Engine) -> dict[int, list[Heard]]:
    """All pairs on this engine, compared with plain decoding; and no option went without accepted drafts."""
    drafted = hear(engine, CASES, SpeculationPolicy())
    different = [" + ".join(PAIRS[i]) for i, choices in drafted.items() if choices != plain()[i]]
    assert different == []
    everything = [choice for choices in drafted.values() for choice in choices]
    stopped = [choice for choice in everything if choice.finish_reason == "stop" and choice.stop_token is None]
    assert len(stopped) > 10, "stop strings ended answers"
    for name in OPTIONS:
        of_it = [choice for i, names in enumerate(PAIRS) if name in names for choice in drafted[i]]
        assert sum(choice.accepted for choice in of_it) > 5, f"no drafts were accepted with {name}"
    return drafted


@pytest.mark.parametrize(
    ("skill", "shape", "max_sequences"),
    [(ORACLE, "chain", 64), (NOISY, "bushy", 64), (SWAPPED, "2x4", 7)],
    ids=["oracle chain", "noisy bushy", "swapped 2x4, few at once"],
)
def test_speculation_changes_nothing_for_any_pair_of_options(skill: Skill, shape: str, max_sequences: int) -> None:
    drafters = [GrammarDrafter(), ScriptDrafter(truth_of(plain()), SHAPES[shape], skill)]
    drafted = check(make(drafters, max_sequences=max_sequences))
    forced = [choice for choices in drafted.values() for choice in choices if "grammar" in choice.sources]
    assert len(forced) > 20, "forced tokens were accepted"


def test_merged_trees_change_nothing_for_any_pair_of_options() -> None:
    """Three drafters beside the grammar's, joined into one tree of the mixed shape."""
    truth = truth_of(plain())
    drafters = [
        GrammarDrafter(),
        ScriptDrafter(truth, (2, 1, 1), SWAPPED, name="a"),
        ScriptDrafter(truth, (1, 1, 1, 1), NOISY, name="b"),
        RandomTreeDrafter(truth, seed=4, name="c"),
    ]
    drafted = check(make(drafters, speculator=ShapeSpeculator("mixed", 512), max_sequences=64))
    credited = {name for choices in drafted.values() for choice in choices for name in choice.sources}
    assert credited == {"grammar", "a", "b", "c"}


def test_the_price_rule_short_of_pages_changes_nothing_for_any_pair_of_options() -> None:
    """Trees grow and shrink by made-up times, and answers are preempted in the middle."""
    truth = truth_of(plain())
    drafters = [GrammarDrafter(), SuffixDrafter(), ScriptDrafter(truth, (2, 2, 1, 1), NOISY)]
    engine = make(drafters, speculator=Clocked(), num_pages=24, max_sequences=16)
    check(engine)
    assert engine.stats()["preemptions"] > 10
    assert not any(engine.stats()["drafter_faults"].values())


def test_every_option_changes_something() -> None:
    """Each option alone, on the prompts of all pairs it is in, against the bare request."""
    for name in OPTIONS.keys() - CHANGES_NO_TEXT:
        chosen = [i for i, names in enumerate(PAIRS) if name in names]
        bare = hear(make(), [(i, BASE) for i in chosen], OFF)
        alone = hear(make(), [(i, options_of((name,))) for i in chosen], OFF)
        assert any(bare[i] != alone[i] for i in chosen), name


def test_every_option_holds() -> None:
    """What can be read off an answer of any pair."""
    for i, names in enumerate(PAIRS):
        options = options_of(names)
        assert len(plain()[i]) == options.get("n", 1)
        for choice in plain()[i]:
            holds(choice, names)
    eight = next(choices for i, choices in plain().items() if PAIRS[i] == ("n 8",))
    assert len({choice.token_ids for choice in eight}) > 4, "choices have seeds of their own"


def holds(choice: Heard, names: tuple[str, ...]) -> None:
    options = options_of(names)
    ids, constrained = choice.token_ids, "grammar" in options
    if choice.finish_reason == "error":  # a grammar may ask for the very word that is forbidden
        assert (choice.error_code, "bad_words" in names, constrained) == ("no_token_allowed", True, True)
        return
    assert choice.finish_reason in ("stop", "length"), names
    assert choice.counted == len(ids) <= options["max_tokens"]
    assert len(ids) == options["max_tokens"] or choice.finish_reason == "stop"
    assert len(choice.logprobs) == (len(ids) if "logprobs" in options else 0)
    assert all(len(entry.top) == options["logprobs"] for entry in choice.logprobs)
    assert not any(stop in choice.text for stop in options.get("stop", ()))
    if "logit_bias" in names and not constrained:
        assert A not in ids
    if "bad_words" in names:
        assert A not in ids
        assert all(pair != (B, B) for pair in pairwise(ids))
    if choice.stop_token is not None:
        end_ids = {C} if "stop_token_ids" in names else set()
        assert ids[-1] == choice.stop_token
        assert choice.stop_token in end_ids | (set() if "ignore_eos" in names else {IM_END})
        assert not set(ids[:-1]) & end_ids
        assert len(ids) > options.get("min_tokens", 0) or constrained
        if "json_schema" in names and choice.stop_token == IM_END:
            assert json.loads(choice.text)["k"] in SCHEMA["properties"]["k"]["enum"]  # type: ignore[index]
    elif choice.finish_reason == "stop":  # a stop string: the last token completed it
        whole = tokenizer().decode(ids)
        assert any(whole.startswith(choice.text + stop) for stop in options["stop"])
        assert len(tokenizer().decode(ids[:-1])) < len(choice.text) + max(map(len, options["stop"]))


# --- known faults, each invisible as long as a step delivers one token -----------------------------------------------


def edits_per_step(patch: pytest.MonkeyPatch) -> None:
    """Penalties, words and min_tokens of the root at every node."""
    patch.setattr(PathEdits, "extend", lambda edits, token: None)


def mask_per_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GrammarCursor, "extend", lambda cursor, token: None)


def swapped_logprobs(patch: pytest.MonkeyPatch) -> None:
    scored = spec.accept._with_logprobs

    def backwards(*arguments: Any) -> list[Acceptance]:
        return [replace(kept, logprobs=kept.logprobs[::-1]) for kept in scored(*arguments)]

    patch.setattr(spec.accept, "_with_logprobs", backwards)


def stop_per_step(patch: pytest.MonkeyPatch) -> None:
    """Ids and counts go on to the end of the step in which a stop string was completed."""
    cut = Generation._add_tokens

    def whole(generation: Generation, event: TokenEvent) -> tuple[int, bool]:
        count, matched = cut(generation, event)
        generation._piece.token_ids += event.token_ids[count:]
        return len(event.token_ids), matched

    patch.setattr(Generation, "_add_tokens", whole)


def noise_per_step(patch: pytest.MonkeyPatch) -> None:
    """The root's noise at every node."""
    asked, keyed = spec.accept._Walker.query, spec.accept.uniform
    roots: list[int] = []

    def query(walker: Any) -> Any:
        roots[:] = [len(walker.row.view.token_ids)]
        return asked(walker)

    patch.setattr(spec.accept._Walker, "query", query)
    patch.setattr(spec.accept, "uniform", lambda seed, position, *more: keyed(seed, *roots, *more))


SAMPLED = OPTIONS.keys() - {"greedy", "max_tokens"}


@pytest.mark.parametrize(
    ("fault", "shown_by"),
    [
        (edits_per_step, {"repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words", "min_tokens"}),
        (mask_per_step, {"regex", "json_object", "json_schema", "lark"}),
        (swapped_logprobs, {"logprobs", "logprobs 20"}),
        (stop_per_step, {"stop"}),
        (noise_per_step, SAMPLED),
    ],
    ids=lambda value: getattr(value, "__name__", "it"),
)
def test_known_faults_are_caught(fault: Any, shown_by: Collection[str], monkeypatch: pytest.MonkeyPatch) -> None:
    truth = truth_of(plain())
    fault(monkeypatch)
    assert hear(make(max_sequences=64), CASES, OFF) == plain()
    drafted = hear(make([ScriptDrafter(truth, SHAPES["chain"], NOISY)], max_sequences=64), CASES, SpeculationPolicy())
    different = [set(PAIRS[i]) for i in drafted if drafted[i] != plain()[i]]
    assert shown_by <= set().union(*different)
    assert shown_by is SAMPLED or all(names & set(shown_by) for names in different), "and nowhere else"
