"""Grammars: masks per node, forks that leave the state alone, forced tokens as drafts, ends, and whose fault an error is."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from acceptance import View, accept_one, generate, rows_of, said, tree, view
from checkpoint_tokenizer import ENDOFTEXT, IM_END, VOCABULARY, build_tokenizer, token_id
from llguidance import LLParserLimits

from drafters.grammar import GrammarDrafter
from spec.accept import accept
from spec.drafter import Budget
from spec.errors import InvariantError, RequestError
from spec.grammar import MAX_SOURCE, GrammarCompiler, GrammarState
from spec.request import GrammarSpec
from spec.tree import EMPTY_TREE, DraftTree

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", "Bob", "a long fixed answer"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "well": {"type": "boolean"},
    },
    "required": ["name", "age", "well"],
    "additionalProperties": False,
}
SPECS = {
    "json_schema": GrammarSpec("json_schema", json.dumps(SCHEMA)),
    "json_object": GrammarSpec("json_object"),
    "regex": GrammarSpec("regex", r"(ab|cde){2,9}[0-9]{3}"),
    "grammar": GrammarSpec("grammar", 'start: "<" item ("," item)* ">"\nitem: /[a-z]{1,3}/ | "(" item ")"'),
}
TABLE = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 2
TOKENIZER = build_tokenizer()


@cache
def compiler(eos_ids: tuple[int, ...] = (IM_END,), vocab_size: int = VOCABULARY) -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER.to_str(), eos_ids, vocab_size)


def start(kind: str, **more: Any) -> GrammarState:
    return compiler(**more).compile(SPECS[kind])


def one_with(state: GrammarState, kind: str = "regex", rule: str = "exact", **options: Any) -> View:
    one = view([0], rule=rule, **options)
    return replace(one, grammar=state, sampling=msgspec.structs.replace(one.sampling, grammar=SPECS[kind]))


def answer(kind: str, drafts: Any = None, limit: int = 400, table: torch.Tensor = TABLE, **options: Any) -> list[int]:
    """Tokens up to and with the end token."""
    one = one_with(start(kind), kind, **options)
    tokens: list[int] = []
    while IM_END not in tokens and len(tokens) < limit:
        drafted = EMPTY_TREE if drafts is None else drafts(one)
        kept = accept_one(table, one, drafted, (IM_END,))
        assert kept.error is None, kept.error
        run = said(drafted, kept)
        run = run[: run.index(IM_END) + 1] if IM_END in run else run
        one.grammar.advance(run)
        one.token_ids += run
        tokens += run
    return tokens


def text_of(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=True)


def bytes_as_tokens(text: str) -> list[int]:
    return [token_id(bytes([byte])) for byte in text.encode()]


def allowed(state: GrammarState, path: list[int] | None = None) -> set[int]:
    cursor = state.cursor()
    for token in path or []:
        cursor.extend(token)
    return set(cursor.mask(VOCABULARY).nonzero().flatten().tolist())


def check_text(kind: str, text: str) -> None:
    if kind == "json_schema":
        value = json.loads(text)
        assert set(value) == set(SCHEMA["required"])
        assert value["name"] in SCHEMA["properties"]["name"]["enum"]
        assert 0 <= value["age"] <= 99
    elif kind == "json_object":
        assert isinstance(json.loads(text), dict)
    elif kind == "regex":
        assert re.fullmatch(SPECS[kind].source, text)
    else:
        assert re.fullmatch(r"<[a-z(),]+>", text)
        assert text.count("(") == text.count(")")


# --- texts -------------------------------------------------------------------------------------------------------------

BOUNDED = ("json_schema", "regex")


@pytest.mark.parametrize("kind", BOUNDED)
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 5}, {"temperature": 1.0, "rule": "rejection"}], ids=str)
def test_an_answer_satisfies_its_grammar_and_then_ends(kind: str, options: dict[str, Any]) -> None:
    tokens = answer(kind, **options)
    assert tokens[-1] == IM_END
    check_text(kind, text_of(tokens))


def test_open_grammars_accept_what_they_describe() -> None:
    for kind, text in (("json_object", '{"a": [1, {"b": null}]}'), ("grammar", "<ab,((c)),d>")):
        state = start(kind)
        check_text(kind, text)
        for token in TOKENIZER.encode(text).ids:
            assert IM_END not in allowed(state)
            assert token in allowed(state)
            state.advance([token])
        assert IM_END in allowed(state)


@pytest.mark.parametrize("kind", BOUNDED)
def test_the_end_is_allowed_exactly_where_the_text_is_complete(kind: str) -> None:
    state = start(kind)
    for token in answer(kind, temperature=1.5, seed=3)[:-1]:
        assert (IM_END in allowed(state)) == state.may_end
        assert ENDOFTEXT not in allowed(state), "a special token is no text"
        state.advance([token])
    assert state.may_end


# --- trees -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BOUNDED)
@pytest.mark.parametrize("options", [{}, {"temperature": 1.2, "seed": 8}], ids=["greedy", "drawn"])
def test_drafts_never_change_a_constrained_text(kind: str, options: dict[str, Any]) -> None:
    plain = answer(kind, **options)
    chance = random.Random(4)

    def forced(one: View) -> DraftTree:
        return tree(one.grammar.forced()[:8])

    def right(one: View) -> DraftTree:
        return tree([*plain[len(one.token_ids) - 1 :][:4], chance.randrange(VOCABULARY)])

    def branching(one: View) -> DraftTree:
        true = plain[len(one.token_ids) - 1 :][:3]
        wrong = [token for token in chance.sample(range(VOCABULARY), 3) if token not in true[:1]]
        return tree([*wrong, *true], [*([-1] * len(wrong)), -1, *range(len(wrong), len(wrong) + len(true) - 1)])

    for drafts in (forced, right, branching):
        assert answer(kind, drafts, **options) == plain
    assert answer(kind, lambda one: tree([*plain[len(one.token_ids) - 1 :], 5, 6][:8]), **options) == plain, "past the end too"


@pytest.mark.parametrize("rule", ["exact", "rejection"])
def test_acceptance_never_moves_the_state(rule: str) -> None:
    state = start("json_schema")
    state.advance(bytes_as_tokens('{"name":'))
    before = allowed(state)
    good = bytes_as_tokens('"Ada"')
    for drafted in (tree(good), tree([7, *good], [-1, -1, 1, 2, 3, 4]), tree([IM_END, IM_END]), tree([*good[:2], 3])):
        one = one_with(state, "json_schema", rule, temperature=1.0)
        accept_one(TABLE, one, drafted)
        assert allowed(state) == before
    state.advance(good)
    assert allowed(state) != before


def test_forks_are_independent() -> None:
    state = start("regex")
    left, right = state.cursor(), state.cursor()
    left.extend(token_id(b"a"))
    assert left.mask(VOCABULARY).nonzero().flatten().tolist() == [token_id(b"b")]
    assert token_id(b"c") in right.mask(VOCABULARY).nonzero()
    twin = start("regex")  # from the cache: the same compiled grammar, a state of its own
    twin.advance(bytes_as_tokens("ab"))
    assert token_id(b"0") not in allowed(state)
    assert state.forced() == ()


def test_a_row_needs_its_state() -> None:
    one = one_with(start("regex"))
    one.grammar = None
    with pytest.raises(InvariantError):
        accept_one(TABLE, one)


# --- forced tokens -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BOUNDED)
def test_forced_tokens_are_the_only_ones_allowed(kind: str) -> None:
    state = start(kind)
    seen = 0
    for token in answer(kind, temperature=1.0, seed=2):
        path: list[int] = []
        for one in state.forced():
            assert allowed(state, path) == {one}
            path.append(one)
        seen += len(path)
        if token != IM_END:
            state.advance([token])
    assert seen >= 3
    assert state.forced() == (IM_END,)


def budget(nodes: int, depth: int = 99) -> Budget:
    return Budget(nodes, depth, 0.0, lambda ms: 0.0, lambda *cell: 1.0)


def test_the_drafter_proposes_a_chain_of_forced_tokens() -> None:
    state = start("json_schema")
    state.advance(bytes_as_tokens('{"name":"Ada","age":7,"'))
    chain = state.forced()
    assert text_of(list(chain)).startswith('well"')
    drafter = GrammarDrafter()
    one, free = one_with(state), view([0])
    offers = drafter.propose([one, free, one, one, one], [budget(63), budget(63), budget(2), budget(63, 3), budget(0)])
    assert [len(offer.token_ids) for offer in offers] == [len(chain), 0, 2, 3, 0]
    assert offers[0].token_ids == chain
    assert offers[0].parents == tuple(range(-1, len(chain) - 1))
    assert set(offers[0].confidence) == {1.0}
    assert accept_one(TABLE, one_with(state, "json_schema", temperature=1.5), tree(chain)).path == tuple(range(len(chain)))


# --- ends --------------------------------------------------------------------------------------------------------------


def complete() -> GrammarState:
    state = start("regex")
    state.advance(bytes_as_tokens("ababab123"))
    assert state.is_complete
    return state


def test_a_complete_grammar_allows_every_end_token_and_nothing_else() -> None:
    state = compiler(eos_ids=(ENDOFTEXT, IM_END)).compile(SPECS["regex"])
    state.advance(bytes_as_tokens("ababab123"))
    assert allowed(state) == {ENDOFTEXT, IM_END}
    assert state.cursor().must_end
    assert state.forced() == ()  # which of the two is the model's choice


def test_min_tokens_gives_way_to_a_complete_grammar() -> None:
    kept = accept_one(TABLE, one_with(complete(), min_tokens=50), EMPTY_TREE, (IM_END,))
    assert (kept.next_id, kept.error) == (IM_END, None)
    open_state = start("grammar")
    open_state.advance(bytes_as_tokens("<ab"))
    kept = accept_one(TABLE, one_with(open_state, min_tokens=50), EMPTY_TREE, (IM_END,))
    assert kept.next_id != IM_END


def test_an_ignored_end_is_repeated() -> None:
    one = one_with(complete(), ignore_eos=True, temperature=1.0)
    assert generate(TABLE, one, 6, lambda now: tree([IM_END, IM_END]), (IM_END,)) == [IM_END] * 6


def test_options_that_contradict_the_grammar_end_the_request_with_a_typed_error() -> None:
    one = one_with(start("regex"), bad_words=tuple((i,) for i in range(VOCABULARY)))
    kept = accept_one(TABLE, one)
    assert kept.error is not None
    assert kept.error.code == "no_token_allowed"


def test_padding_rows_are_never_allowed() -> None:
    state = compiler(vocab_size=VOCABULARY + 40).compile(GrammarSpec("json_object"))
    mask = state.cursor().mask(VOCABULARY + 40)
    assert mask.any()
    assert not mask[VOCABULARY:].any()
    short = compiler(vocab_size=300).compile(GrammarSpec("json_object"))  # a model that scores fewer tokens than there are
    assert short.cursor().mask(300).shape == (300,)


def test_a_resumed_answer_must_fit_the_grammar() -> None:
    state = start("regex")
    state.advance(bytes_as_tokens("abcde"))
    assert allowed(state) == allowed(start("regex"), bytes_as_tokens("abcde"))
    with pytest.raises(RequestError) as caught:
        start("regex").advance(bytes_as_tokens("abx"))
    assert caught.value.code == "grammar_failed"


# --- whose fault -------------------------------------------------------------------------------------------------------

DEEP = "[" * 5000
REFUSED = {
    "not json": (GrammarSpec("json_schema", "{"), "invalid_json_schema"),
    "no schema": (GrammarSpec("json_schema", "[1]"), "invalid_json_schema"),
    "unknown type": (GrammarSpec("json_schema", '{"type": "wat"}'), "invalid_json_schema"),
    "unsupported keyword": (GrammarSpec("json_schema", '{"not": {}}'), "invalid_json_schema"),
    "nothing fits": (GrammarSpec("json_schema", '{"enum": []}'), "invalid_json_schema"),
    "refers to itself": (
        GrammarSpec("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}'),
        "invalid_json_schema",
    ),
    "refers outside": (GrammarSpec("json_schema", '{"$ref": "https://example.com/a.json"}'), "invalid_json_schema"),
    "deep": (GrammarSpec("json_schema", DEEP), "invalid_json_schema"),
    "regex": (GrammarSpec("regex", "(a"), "invalid_grammar"),
    "lark": (GrammarSpec("grammar", "start: nowhere"), "invalid_grammar"),
    "empty lark": (GrammarSpec("grammar", ""), "invalid_grammar"),
    "too long": (GrammarSpec("regex", "a" * (MAX_SOURCE + 1)), "grammar_too_large"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_grammar_is_the_clients_fault(name: str) -> None:
    spec, code = REFUSED[name]
    with pytest.raises(RequestError) as caught:
        compiler().compile(spec)
    assert caught.value.code == code
    assert caught.value.param == "response_format"
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


def test_a_grammar_that_runs_into_a_limit_ends_its_own_request_only() -> None:
    """Past a limit the parser's mask holds end tokens alone, which must not pass for a finished answer."""
    small = GrammarCompiler(TOKENIZER.to_str(), (IM_END,), VOCABULARY, LLParserLimits(max_lexer_states=300))
    hard = small.compile(GrammarSpec("regex", "(.*a.{16}b.*)"))  # a deterministic automaton of 2 ** 16 states
    chance = random.Random(0)
    with pytest.raises(RequestError) as caught:  # noqa: PT012
        for _ in range(300):
            hard.cursor().mask(VOCABULARY)
            hard.advance([chance.choice([token_id(b"a"), token_id(b"b")])])
    assert caught.value.code == "grammar_failed"
    neighbour = one_with(start("regex"), temperature=1.0)
    rows, scores = rows_of(TABLE, [(neighbour, tree([token_id(b"a")])), (one_with(hard, min_tokens=2), tree([1]))])
    fine, failed = accept(rows, scores, eos_ids=(IM_END,))
    assert fine == accept_one(TABLE, neighbour, tree([token_id(b"a")]), (IM_END,))
    assert failed.error is not None
    assert failed.error.code == "grammar_failed"
    # All forks of a grammar grow one automaton. The next request with this grammar does not inherit that it is full.
    small.compile(GrammarSpec("regex", "(.*a.{16}b.*)")).cursor().mask(VOCABULARY)


def test_whitespace_is_bounded() -> None:
    """A model that only ever wants to write a space still finishes its JSON."""
    spaces = torch.zeros(VOCABULARY, VOCABULARY)
    spaces[:, token_id(b" ")] = 9.0
    tokens = answer("json_schema", table=spaces)
    assert tokens[-1] == IM_END
    check_text("json_schema", text_of(tokens))


def test_a_schema_can_choose_its_own_white_space() -> None:
    schema = {**SCHEMA, "x-guidance": {"whitespace_pattern": ""}}
    state = compiler().compile(GrammarSpec("json_schema", json.dumps(schema)))
    assert text_of(list(state.forced())).startswith('{"name":"')


def test_more_grammars_than_are_kept() -> None:
    for i in range(12):
        state = compiler().compile(GrammarSpec("regex", f"x{i}"))
        state.advance(bytes_as_tokens(f"x{i}"))
        assert state.is_complete
