"""The tensors of a step against an independent builder, and the promise that a plan holds no tensors."""

from __future__ import annotations

import dataclasses
import random
import typing

import pytest
import torch
import toy
from engine_kit import ScriptDrafter, greedy_request, make_engine, prompts_of, quick_rand
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.batch import PackedInputs, StepInputs
from spec import plan as plan_module
from spec.engine import Engine
from spec.inputs import build_inputs, pack_inputs
from spec.plan import PlanRow, StepPlan
from spec.tree import EMPTY_TREE, ROOT, DraftTree

CPU = torch.device("cpu")


def holds_tensor(kind: object) -> bool:
    if kind is torch.Tensor:
        return True
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return any(holds_tensor(hint) for hint in typing.get_type_hints(kind).values())
    return any(holds_tensor(argument) for argument in typing.get_args(kind))


def test_a_plan_holds_ints_only() -> None:
    kinds = [kind for kind in vars(plan_module).values() if dataclasses.is_dataclass(kind)]
    assert {PlanRow, StepPlan} <= set(kinds)
    assert not any(holds_tensor(kind) for kind in kinds)


def random_tree(chance: random.Random, count: int) -> DraftTree:
    return DraftTree(
        tuple(chance.randrange(512) for _ in range(count)), tuple(chance.randint(ROOT, node - 1) for node in range(count))
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 4, 16, 32]), st.integers(1, 6))
def test_every_field_equals_the_independent_builder(seed: int, page_size: int, count: int) -> None:
    chance = random.Random(seed)
    rows: list[PlanRow] = []
    trees: list[DraftTree] = []
    expected: list[toy.Row] = []
    for number in range(count):
        tree = random_tree(chance, chance.choice([0, 0, 1, 5, 63]))
        known = 1 if len(tree) else chance.randint(1, 40)
        scored = bool(len(tree)) or chance.random() < 0.5
        start = chance.randint(0, 70)
        tokens = [chance.randrange(512) for _ in range(known)]
        pages = [chance.randrange(500) for _ in range(-(-(start + known + len(tree)) // page_size))]
        rows.append(PlanRow(number, start, tokens, pages + [7] * chance.randint(0, 2), scored, decoding=known == 1))
        trees.append(tree)
        parents = [-1, *(parent + 1 for parent in tree.parents)] if len(tree) else None
        score = list(range(known - 1, known + len(tree))) if scored else []
        expected.append(toy.Row([*tokens, *tree.token_ids], pages, start, parents, score))
    got, want = build_inputs(rows, trees, page_size, CPU), toy.step_inputs(expected, page_size)
    for field in dataclasses.fields(StepInputs):
        mine, theirs = getattr(got, field.name), getattr(want, field.name)
        if theirs is None:
            assert mine is None, field.name
            continue
        assert mine.dtype == theirs.dtype, field.name
        assert mine.is_contiguous(), field.name
        assert mine.tolist() == theirs.tolist(), field.name


def test_the_64th_node_is_the_sign_bit() -> None:
    chain = DraftTree(tuple(range(63)), tuple(range(-1, 62)))
    row = PlanRow(1, 0, [5], list(range(64)), scored=True, decoding=True)
    words = build_inputs([row], [chain], 1, CPU).words.tolist()
    assert words[62] == (1 << 63) - 1
    assert words[63] == -1


def test_nothing_drafted_makes_causal_rows_without_words() -> None:
    rows = [PlanRow(1, 3, [5], [0], scored=True, decoding=True), PlanRow(2, 0, [1, 2], [1], scored=False, decoding=False)]
    inputs = build_inputs(rows, [EMPTY_TREE] * 2, 4, CPU)
    assert inputs.causal.tolist() == [1, 1]
    assert inputs.words.tolist() == [0, 0, 0]
    assert inputs.score_rows.tolist() == [0]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[StepInputs]:
    """Every StepInputs an engine builds."""
    seen: list[StepInputs] = []

    def watching(*arguments: object) -> PackedInputs:
        packed = pack_inputs(*arguments)  # type: ignore[arg-type]
        seen.append(packed.tensors(CPU))
        return packed

    monkeypatch.setattr("spec.step.pack_inputs", watching)
    return seen


def test_drafted_nodes_stand_at_positions_by_depth(watched: list[StepInputs]) -> None:
    """SD-11: in a branching tree a node's rotary position is its depth below the root, not its place in the tree."""
    decoder = quick_rand(layers=1)
    engine: Engine = make_engine(decoder, [ScriptDrafter(lambda view: (), (3, 2))])
    engine.add(greedy_request(1, prompts_of([6])[0], 8))
    engine.step()
    engine.step()
    inputs = watched[-1]
    assert inputs.positions.tolist() == [6, 7, 8, 8, 7, 8, 8, 7, 8, 8]
    assert inputs.causal.tolist() == [0]
