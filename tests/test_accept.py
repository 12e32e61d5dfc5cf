"""Acceptance: the walk, the same text for the same seed whatever was drafted, neighbours, logprobs, and what cannot be said."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from accept_cases import WALKS, Walk
from acceptance import accept_one, generate, rows_of, said, scores_of, tree, view

from spec.accept import ScoredRow, accept
from spec.errors import InvariantError
from spec.target import TargetScores
from spec.tree import EMPTY_TREE, DraftTree

VOCAB = 16
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2)) * 1.5
NAN, INF = float("nan"), float("inf")


def random_tree(chance: random.Random, likely: list[int] | None = None, nodes: int = 8) -> DraftTree:
    """Siblings distinct; with `likely`, nodes on the true path carry the true token half of the time."""
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    while len(tokens) < nodes:
        parent = chance.randint(-1, len(tokens) - 1)
        depth = 1 if parent < 0 else depths[parent] + 1
        right = likely is not None and depth <= len(likely) and chance.random() < 0.6
        token = likely[depth - 1] if right and likely else chance.randrange(VOCAB)
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
    return tree(tokens, parents)


# --- the walk ----------------------------------------------------------------------------------------------------------


def scripted(walk: Walk, **options: Any) -> tuple[ScoredRow, torch.Tensor]:
    """A row whose logits name walk.targets; node 0 of the walk is the root."""
    logits = torch.zeros(len(walk.ids), 10)
    logits[torch.arange(len(walk.ids)), torch.tensor(walk.targets)] = 50.0
    drafted = tree(walk.ids[1:], [parent - 1 for parent in walk.parents[1:]])
    return ScoredRow(view([walk.ids[0]], **options), drafted, 0), logits


@pytest.mark.parametrize("options", [{}, {"min_tokens": 1}, {"temperature": 0.01, "seed": 4}], ids=["argmax", "edits", "drawn"])
@pytest.mark.parametrize("name", WALKS)
def test_hand_made_walks(name: str, options: dict[str, Any]) -> None:
    walk = WALKS[name]
    row, logits = scripted(walk, **options)
    kept = accept([row], scores_of(logits))[0]
    assert (list(kept.path), kept.next_id) == ([node - 1 for node in walk.path], walk.next_id)
    assert kept.error is None


def test_all_walks_of_one_step_at_once() -> None:
    """Rows of different length, options and rule share a step and keep their own score rows."""
    rows: list[ScoredRow] = []
    blocks: list[torch.Tensor] = []
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.01}, {"min_tokens": 2}, {"temperature": 0.01, "rule": "rejection"}]
    for i, walk in enumerate(WALKS.values()):
        row, logits = scripted(walk, **kinds[i % len(kinds)])
        rows.append(replace(row, first=sum(block.shape[0] for block in blocks)))
        blocks.append(logits)
    results = accept(rows, scores_of(torch.cat(blocks)))
    for walk, kept in zip(WALKS.values(), results, strict=True):
        assert (list(kept.path), kept.next_id) == ([node - 1 for node in walk.path], walk.next_id)


def test_nothing_to_do() -> None:
    assert accept([], TargetScores(torch.zeros(0, dtype=torch.int32), None, torch.zeros(0, 4))) == []


# --- the same seed, the same text ---------------------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.4, "seed": 2**63 - 1, "top_k": 5},
    {"temperature": 1.0, "seed": 0, "top_p": 0.7, "min_p": 0.02},
    {
        "temperature": 1.1,
        "seed": 3,
        "frequency_penalty": 0.7,
        "logit_bias": {2: 1.5},
        "min_tokens": 6,
        "stop_token_ids": (1, 2),
    },
    {"temperature": 0.0, "presence_penalty": 0.9, "bad_words": ((3, 4), (5,))},
    {"temperature": 0.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_drafts_never_change_the_text(options: dict[str, Any]) -> None:
    one = view([0, 3, 3], 2, **options)
    plain = generate(TABLE, one, 40)
    for seed in range(6):
        chance = random.Random(seed)
        assert generate(TABLE, one, 40, lambda now, c=chance: random_tree(c, plain[len(now.token_ids) - 3 :])) == plain
    assert accept_one(TABLE, one, tree(plain[:4])).path == (0, 1, 2, 3), "the right drafts are accepted"


def test_different_seeds_give_different_texts() -> None:
    texts = {tuple(generate(TABLE, view([0], temperature=1.0, seed=seed), 12)) for seed in range(20)}
    assert len(texts) == 20


def test_a_resumed_answer_goes_on_as_it_would_have() -> None:
    whole = generate(TABLE, view([0, 1], 2, temperature=1.0, seed=5), 20)
    for cut in (1, 7, 19):
        assert generate(TABLE, view([0, 1, *whole[:cut]], 2, temperature=1.0, seed=5), 20 - cut) == whole[cut:]


def test_rows_do_not_depend_on_their_neighbours() -> None:
    chance = random.Random(1)
    pairs = []
    for i in range(24):
        options = OPTIONS[i % len(OPTIONS)]
        rule = "rejection" if i % 4 == 3 else "exact"
        one = view([i % VOCAB, 3 * i % VOCAB], 1, rule=rule, logprobs=i % 3 or None, **{**options, "seed": i})
        pairs.append((one, random_tree(chance) if i % 5 else EMPTY_TREE))
    alone = [accept_one(TABLE, one, drafted) for one, drafted in pairs]
    for _ in range(3):
        order = list(range(len(pairs)))
        chance.shuffle(order)
        rows, scores = rows_of(TABLE, [pairs[i] for i in order])
        together = accept(rows, scores)
        for i, kept in zip(order, together, strict=True):
            assert kept == alone[i], "logprobs included, bit for bit"


# --- logprobs (SD-09) --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_logprobs_are_the_raw_models_for_every_token(options: dict[str, Any]) -> None:
    one = view([0, 3, 3], 2, logprobs=3, **options)
    entries: list[Any] = []
    plain = generate(TABLE, one, 20, logprobs=entries)
    truth = torch.log_softmax(TABLE.double(), dim=-1)
    for last, token, entry in zip([3, *plain], plain, entries, strict=False):
        assert math.isclose(entry.chosen, float(truth[last, token]), abs_tol=1e-5)
        assert [i for i, _ in entry.top] == torch.topk(truth[last], 3).indices.tolist()
        assert all(math.isclose(value, float(truth[last, i]), abs_tol=1e-5) for i, value in entry.top)
    assert any(entry.chosen < -0.1 for entry in entries)
    drafted: list[Any] = []
    assert generate(TABLE, one, 20, lambda now: tree(plain[len(now.token_ids) - 3 :][:5]), logprobs=drafted) == plain
    assert drafted == entries


def test_logprobs_counts_are_each_rows_own() -> None:
    pairs = [(view([1], logprobs=count), tree([2, 3])) for count in (0, 20, None, 2)]
    rows, scores = rows_of(TABLE, pairs)
    results = accept(rows, scores)
    for (one, drafted), kept in zip(pairs, results, strict=True):
        asked = one.sampling.logprobs
        assert len(kept.logprobs) == (0 if asked is None else len(said(drafted, kept)))
        assert all(len(entry.top) == min(asked or 0, VOCAB) for entry in kept.logprobs)


def test_logits_must_be_there_when_options_need_them() -> None:
    scores = replace(scores_of(TABLE[:1]), logits=None)
    assert accept([ScoredRow(view([0]), EMPTY_TREE, 0)], scores)[0].error is None
    for options in ({"temperature": 1.0}, {"logprobs": 1}, {"min_tokens": 1}):
        with pytest.raises(InvariantError):
            accept([ScoredRow(view([0], **options), EMPTY_TREE, 0)], scores)


# --- what cannot be said: one request's error, nobody else's ------------------------------------------------------------


@pytest.mark.parametrize("broken", [NAN, INF], ids=["nan", "inf"])
@pytest.mark.parametrize("rule", ["exact", "rejection"])
def test_a_broken_row_ends_its_own_request_only(broken: float, rule: str) -> None:
    table = TABLE.clone()
    table[5, 9] = broken
    good = view([0], temperature=1.0, seed=1, rule=rule)
    pairs = [
        (good, EMPTY_TREE),
        (view([5], temperature=1.0, rule=rule, logprobs=2), tree([1, 2])),
        (view([1], min_tokens=1), tree([5])),
    ]
    rows, scores = rows_of(table, pairs)
    fine, bad, greedy = accept(rows, scores)
    assert fine == accept_one(TABLE, good)
    assert (bad.path, bad.next_id, bad.logprobs) == ((), -1, ())
    assert bad.error is not None
    assert bad.error.code == "scores_not_finite"
    assert greedy.error is None or greedy.path == (0,)


def test_accepted_nodes_before_a_broken_one_are_kept() -> None:
    table = torch.zeros(VOCAB, VOCAB)
    table[0, 5] = 50.0
    table[5, 6] = 50.0
    table[6, :] = NAN
    for rule in ("exact", "rejection"):
        kept = accept_one(table, view([0], temperature=0.9, rule=rule, logprobs=1), tree([5, 6, 7]))
        assert (kept.path, kept.next_id, len(kept.logprobs)) == ((0, 1), -1, 2)
        assert kept.error is not None


def test_a_greedy_row_without_logits_is_checked_by_its_hidden_state() -> None:
    hidden = torch.zeros(6, 4)
    hidden[3] = NAN  # the second row's root: nodes 3, 4
    argmax = torch.tensor([5, 6, 7, 1, 2], dtype=torch.int32)
    rows = [
        ScoredRow(view([0]), tree([5, 6]), 0, first_node=0),
        ScoredRow(view([0]), tree([1]), 3, first_node=3),
    ]
    fine, bad = accept(rows, TargetScores(argmax, None, hidden))
    assert (fine.path, fine.next_id, fine.error) == ((0, 1), 7, None)
    assert bad.error is not None
    assert bad.error.code == "scores_not_finite"


@pytest.mark.parametrize("rule", ["exact", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banning_the_whole_vocabulary_is_a_typed_error(rule: str, temperature: float) -> None:
    one = view([0], temperature=temperature, rule=rule, bad_words=tuple((i,) for i in range(VOCAB)))
    kept = accept_one(TABLE, one, tree([1, 2]))
    assert (kept.path, kept.next_id) == ((), -1)
    assert kept.error is not None
    assert kept.error.code == "no_token_allowed"


def test_tokens_the_model_itself_rules_out_are_never_said() -> None:
    table = TABLE.clone()
    table[:, 3:] = -INF
    for rule in ("exact", "rejection"):
        for seed in range(50):
            one = view([0], temperature=1.5, seed=seed, rule=rule)
            drafted = tree([7, 2, 9], (-1, -1, 1))
            assert set(said(drafted, accept_one(table, one, drafted))) <= {0, 1, 2}


def test_a_padding_token_in_a_tree_is_never_accepted() -> None:
    """A draft model with a larger padded vocabulary may propose ids the target does not have (SD-10)."""
    drafted = tree([VOCAB + 5, 2], (-1, -1))
    for rule in ("exact", "rejection"):
        one = view([0], temperature=1.0, seed=3, rule=rule)
        rows = [ScoredRow(one, drafted, 0)]
        scores = scores_of(torch.stack([TABLE[0], TABLE[0], TABLE[2]]))
        assert 0 not in accept(rows, scores)[0].path
