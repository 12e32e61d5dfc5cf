"""Heads: files of both kinds, scores conditioned on the tokens chosen, the right hidden state, and trouble."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import toy
from drafting import GREEDY, Pool, View, budget, drive, paths
from safetensors.torch import save_file

from drafters.head_models import FORMAT, MedusaHeads, RecurrentHead, load_heads, torch_linear
from drafters.heads import HeadsDrafter, native_linear
from drafters.tensor_file import TensorFile
from kernels.decoder import DecoderShape, DecoderWeights
from kernels.linear import DenseWeight
from kernels.native import load as load_native
from spec.drafter import Outcome
from spec.errors import ModelFileError
from spec.request import SamplingParams, SpeculationPolicy
from spec.tree import EMPTY_TREE, NOTHING, DraftTree

HIDDEN, VOCAB, WIDTH = 64, 40, 32
IDS = [t for t in range(VOCAB) if t % 3 != 2]  # the trimmed vocabulary


@dataclass(frozen=True)
class Target:
    shape: DecoderShape
    weights: DecoderWeights


@pytest.fixture(scope="module")
def target() -> Target:
    shape, weights = toy.rand_weights(
        1, layers=1, hidden=HIDDEN, q_heads=2, kv_heads=1, head_dim=32, intermediate=32, vocab=VOCAB
    )
    return Target(shape, weights)


def recurrent(seed: int = 0, gain: float = 6.0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)

    def matrix(out: int, into: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(out, into, generator=g) * scale / into**0.5

    return {
        "state_norm": 1 + 0.1 * torch.randn(HIDDEN, generator=g),
        "token_norm": 1 + 0.1 * torch.randn(HIDDEN, generator=g),
        "output_norm": 1 + 0.1 * torch.randn(HIDDEN, generator=g),
        "gate": matrix(WIDTH, 2 * HIDDEN, 2),
        "up": matrix(WIDTH, 2 * HIDDEN, 2),
        "down": matrix(HIDDEN, WIDTH, 4),
        "output": matrix(len(IDS), HIDDEN, gain),
        "token_ids": torch.tensor(IDS, dtype=torch.int32),
    }


def medusa(heads: int = 3, blocks: int = 1, prefix: str = "medusa_head.", vocab: int = VOCAB) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    found = {}
    for i in range(heads):
        for j in range(blocks):
            found[f"{prefix}{i}.{j}.linear.weight"] = torch.randn(HIDDEN, HIDDEN, generator=g) / 8
            found[f"{prefix}{i}.{j}.linear.bias"] = torch.randn(HIDDEN, generator=g)
        found[f"{prefix}{i}.{blocks}.weight"] = torch.randn(vocab, HIDDEN, generator=g)
    return found


def write(path: Path, tensors: dict[str, torch.Tensor], **metadata: str) -> Path:
    save_file(tensors, path, metadata=metadata or None)
    return path


def told(drafter: HeadsDrafter, view: View, state: torch.Tensor) -> None:
    """The step that ended with the view's last token had `state` at its last accepted node."""
    drafter.observe([Outcome(view, EMPTY_TREE, (), 0, 0, 1, False)], state.unsqueeze(0))


def oracle(tensors: dict[str, torch.Tensor], embedding: torch.Tensor, state: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """The formulas of the docstring, one token at a time: softmax over the whole vocabulary."""

    def rms(v: torch.Tensor) -> torch.Tensor:
        return v / torch.sqrt((v * v).mean() + 1e-5)

    for token in tokens:
        z = torch.cat([rms(state) * tensors["state_norm"], rms(embedding[token]) * tensors["token_norm"]])
        gate = tensors["gate"] @ z
        state = state + tensors["down"] @ (gate * torch.sigmoid(gate) * (tensors["up"] @ z))
    scores = torch.full((VOCAB,), -torch.inf)
    scores[tensors["token_ids"].long()] = tensors["output"] @ (rms(state) * tensors["output_norm"])
    return torch.softmax(scores, dim=0)


def check_tree(
    drafter: HeadsDrafter, view: View, state: torch.Tensor, expected: Callable[[list[int]], torch.Tensor], depth: int
) -> None:
    """Every node's children are the best tokens of `expected` after its path, with those probabilities."""
    told(drafter, view, state)
    (proposal,) = drafter.propose([view], [budget(nodes=14, depth=depth)])
    assert len(proposal.token_ids) == 14
    assert proposal.draft_probs is None
    below: dict[int, list[int]] = {}
    for i, parent in enumerate(proposal.parents):
        below.setdefault(parent, []).append(i)
    assert len(below) > 3
    for parent, nodes in below.items():
        path = list(paths(proposal)[parent]) if parent >= 0 else []
        best = torch.topk(expected([view.token_ids[-1], *path]), len(nodes))
        assert [proposal.token_ids[i] for i in nodes] == best.indices.tolist()
        torch.testing.assert_close(torch.tensor([proposal.confidence[i] for i in nodes]), best.values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_node_is_conditioned_on_the_tokens_above_it(tmp_path: Path, target: Target, dtype: torch.dtype) -> None:
    tensors = {k: v if k == "token_ids" else v.to(dtype) for k, v in recurrent().items()}
    drafter = HeadsDrafter.load(write(tmp_path / "h.safetensors", tensors, format=FORMAT), target, make_linear=torch_linear)
    plain = {k: v if k == "token_ids" else v.float() for k, v in tensors.items()}
    assert isinstance(target.weights.embedding, DenseWeight)
    embedding = target.weights.embedding.values
    state = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(5))
    check_tree(drafter, View(1, [4, 7], 1), state, lambda tokens: oracle(plain, embedding, state, tokens), depth=5)


@pytest.mark.parametrize("prefix", ["medusa_head.", ""])
@pytest.mark.parametrize("blocks", [1, 2])
def test_medusa_checkpoints_load_and_draft(tmp_path: Path, target: Target, blocks: int, prefix: str) -> None:
    tensors = medusa(3, blocks, prefix)
    drafter = HeadsDrafter.load(write(tmp_path / "m.safetensors", tensors), target, make_linear=torch_linear)
    state = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(6))

    def expected(tokens: list[int]) -> torch.Tensor:
        head, x = len(tokens) - 1, state
        for j in range(blocks):
            y = tensors[f"{prefix}{head}.{j}.linear.weight"] @ x + tensors[f"{prefix}{head}.{j}.linear.bias"]
            x = x + y * torch.sigmoid(y)
        return torch.softmax(tensors[f"{prefix}{head}.{blocks}.weight"] @ x, dim=0)

    check_tree(drafter, View(1, [4, 7], 1), state, expected, depth=9)
    (proposal,) = drafter.propose([View(1, [4, 7], 1)], [budget(nodes=60, depth=9)])
    assert max(len(path) for path in paths(proposal)) == 3  # there are three heads


def test_batches_are_drafted_for_as_each_alone(target: Target) -> None:
    drafter = HeadsDrafter(RecurrentHead(recurrent(), 1e-5, target.weights.embedding, torch_linear))
    states = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(7))
    views = [View(i, [i + 1, i + 9], 1) for i in range(4)]
    for view, state in zip(views, states, strict=True):
        told(drafter, view, state)
    budgets = [budget(nodes=4 + 3 * i, depth=1 + i) for i in range(4)]
    together = drafter.propose(views, budgets)
    alone = [drafter.propose([view], [limit])[0] for view, limit in zip(views, budgets, strict=True)]
    for a, b in zip(together, alone, strict=True):
        assert (a.token_ids, a.parents, a.ranks) == (b.token_ids, b.parents, b.ranks)
        assert a.confidence == pytest.approx(b.confidence, rel=1e-4)


def test_the_state_is_that_of_the_last_accepted_node(target: Target) -> None:
    """Rows of the step: a prompt chunk of three, a tree row of root and three nodes, a plain row."""
    drafter = HeadsDrafter(RecurrentHead(recurrent(), 1e-5, target.weights.embedding, torch_linear))
    hidden = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(8))
    tree = DraftTree((5, 6, 7), (-1, -1, 1), (0.5,) * 3, (("heads",),) * 3, (((0, 0),),) * 3)
    views = [View(i, [1, 2, i], 3) for i in range(3)]
    drafter.observe(
        [
            Outcome(views[0], EMPTY_TREE, (), 0, 0, 3, False),
            Outcome(views[1], tree, (1, 2), 1, 3, 4, False),
            Outcome(views[2], EMPTY_TREE, (), 2, 7, 1, False),
        ],
        hidden,
    )
    found = drafter.propose(views, [budget(nodes=3, depth=2)] * 3)
    for view, row in zip(views, (2, 6, 7), strict=True):
        other = HeadsDrafter(RecurrentHead(recurrent(), 1e-5, target.weights.embedding, torch_linear))
        told(other, view, hidden[row])
        (alone,) = other.propose([view], [budget(nodes=3, depth=2)])
        assert alone.token_ids == found[view.seq_id].token_ids


def test_without_a_fresh_state_nothing_is_drafted(target: Target) -> None:
    drafter = HeadsDrafter(RecurrentHead(recurrent(), 1e-5, target.weights.embedding, torch_linear))
    view = View(1, [1, 2, 3], 2)
    state = torch.ones(HIDDEN)
    assert drafter.propose([view], [budget()]) == [NOTHING]
    drafter.observe([Outcome(view, EMPTY_TREE, (), None, 0, 1, False)], state.unsqueeze(0))  # a chunk inside the prompt
    assert drafter.propose([view], [budget()]) == [NOTHING]
    told(drafter, view, state)
    assert drafter.propose([view], [budget()]) != [NOTHING]
    view.token_ids.append(4)  # a step this drafter was not told of
    assert drafter.propose([view], [budget()]) == [NOTHING]
    told(drafter, view, state)
    drafter.close(1)
    assert drafter.propose([view], [budget()]) == [NOTHING]
    drafter.close(1)


def test_passes_are_bought_only_when_they_pay(target: Target) -> None:
    ticks = iter(range(10_000))
    model = RecurrentHead(recurrent(), 1e-5, target.weights.embedding, torch_linear)
    drafter = HeadsDrafter(model, clock=lambda: next(ticks) * 1e-3)
    view = View(1, [1, 2], 1)
    told(drafter, view, torch.ones(HIDDEN))
    sizes = []
    for per_ms in (0.0, 0.4, 50.0):
        (proposal,) = drafter.propose([view], [budget(nodes=16, depth=8, pass_price=lambda ms, p=per_ms: p * ms)])  # type: ignore[misc]
        sizes.append(max((len(path) for path in paths(proposal)), default=0))
    assert sizes[0] > sizes[1] >= 1
    assert sizes[2] == 0
    assert drafter.propose([view], [budget(nodes=0)]) == [NOTHING]


def test_heads_drive_a_decode(target: Target) -> None:
    """A head whose scores follow a fixed successor table is right about a text that follows it."""
    eye = torch.eye(VOCAB, HIDDEN)
    successor = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))
    tensors = recurrent()
    tensors |= {
        "token_ids": torch.arange(VOCAB),
        "gate": torch.cat((torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN) * 8), dim=1),
        "up": torch.cat((torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN) * 8), dim=1),
        "down": torch.eye(HIDDEN) * 100,
        "output": torch.zeros(VOCAB, HIDDEN),
        **{name: torch.ones(HIDDEN) for name in ("state_norm", "token_norm", "output_norm")},
    }
    tensors["output"][successor, torch.arange(VOCAB)] = 2.0
    # The newest token must outweigh those before it in the residual state: it is scaled up from depth to depth here.
    model = RecurrentHead(tensors, 1e-5, DenseWeight(eye), torch_linear)
    text = [3]
    while len(text) < 30:
        text.append(int(successor[text[-1]]))
    view = View(1, text[:2], 2)
    drafter = HeadsDrafter(model, fan=1)
    told(drafter, view, torch.zeros(HIDDEN))
    passes = drive(drafter, [view], [text], Pool(8, 16), nodes=1, hidden=lambda v: torch.zeros(2, HIDDEN))
    assert view.token_ids == text
    assert passes[0] <= 16


def test_other_options_shape_the_scores_but_nothing_is_drawn(target: Target) -> None:
    drafter = HeadsDrafter(RecurrentHead(recurrent(), 1e-5, target.weights.embedding, torch_linear))
    sampling = SamplingParams(max_tokens=9, temperature=0.5)
    views = [
        View(1, [1, 2], 1, sampling=GREEDY),
        View(2, [1, 2], 1, sampling=sampling, policy=SpeculationPolicy(rule="rejection")),
    ]
    for view in views:
        told(drafter, view, torch.ones(HIDDEN))
    plain, sharp = drafter.propose(views, [budget(nodes=1)] * 2)
    assert plain.token_ids == sharp.token_ids
    assert sharp.confidence[0] > plain.confidence[0]
    assert sharp.draft_probs is None


def test_trouble_is_an_empty_proposal(target: Target) -> None:
    model = RecurrentHead(recurrent(), 1e-5, target.weights.embedding, torch_linear)
    drafter = HeadsDrafter(model)
    sick, well = View(1, [1, 2], 1), View(2, [1, 2], 1)
    told(drafter, sick, torch.full((HIDDEN,), float("nan")))
    told(drafter, well, torch.ones(HIDDEN))
    found = drafter.propose([sick, well], [budget()] * 2)
    assert found[0] == NOTHING
    assert found[1].token_ids

    class Raises:
        token_ids = None
        depths = None

        def advance(self, states: torch.Tensor, token_ids: object) -> torch.Tensor:
            raise RuntimeError("out of luck")

        def scores(self, states: torch.Tensor, depths: object) -> torch.Tensor:
            return states

    drafter = HeadsDrafter(Raises())
    told(drafter, well, torch.ones(HIDDEN))
    assert [drafter.propose([well], [budget()]) for _ in range(5)] == [[NOTHING]] * 5


@pytest.mark.skipif(load_native() is None, reason="no native library here")
def test_native_products_agree_with_dense_ones(target: Target) -> None:
    state = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(9))
    exact = RecurrentHead(recurrent(), 1e-5, target.weights.embedding, torch_linear)
    fast = RecurrentHead(recurrent(), 1e-5, target.weights.embedding, native_linear(threads=1))
    for tokens in ([3], [3, 11], [3, 11, 0]):
        a = b = state.unsqueeze(0)
        for token in tokens:
            a, b = exact.advance(a, [token]), fast.advance(b, [token])
        p, q = exact.scores(a, [0]).softmax(-1), fast.scores(b, [0]).softmax(-1)
        assert float((p - q).abs().sum()) < 0.2


# --- broken files ----------------------------------------------------------------------------------------------------


def change(name: str, tensor: torch.Tensor | None) -> dict[str, torch.Tensor]:
    tensors = recurrent()
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    return tensors


@pytest.mark.parametrize(
    ("tensors", "names"),
    [
        (change("gate", None), "gate"),
        (change("down", torch.zeros(HIDDEN, WIDTH + 1)), "down"),
        (change("output", torch.zeros(3, HIDDEN)), "output"),
        (change("state_norm", torch.zeros(HIDDEN, dtype=torch.int32)), "state_norm"),
        (change("up", torch.full((WIDTH, 2 * HIDDEN), float("nan"))), "up"),
        (change("token_ids", torch.tensor([*IDS[:-1], VOCAB])), "token_ids"),
        (change("token_ids", torch.tensor([*IDS[:-1], 0])), "token_ids"),
        (change("token_ids", torch.zeros(len(IDS))), "token_ids"),
    ],
)
def test_a_broken_file_is_refused_by_name(tmp_path: Path, target: Target, tensors: dict[str, torch.Tensor], names: str) -> None:
    path = write(tmp_path / "broken.safetensors", tensors, format=FORMAT)
    with pytest.raises(ModelFileError, match=rf"broken\.safetensors.*{names}"):
        HeadsDrafter.load(path, target)


def test_foreign_files_are_refused(tmp_path: Path, target: Target) -> None:
    few = medusa(vocab=VOCAB - 1)
    gap = {k: v for k, v in medusa().items() if not k.startswith("medusa_head.1")}
    headless = {k: v for k, v in medusa().items() if k != "medusa_head.2.1.weight"}
    strange = medusa() | {"fc.weight": torch.zeros(2, 2)}
    cases = ((few, "tokenizer"), (gap, "gaps"), (headless, "head 2"), (strange, "fc.weight"), ({}, "heads"))
    for i, (tensors, word) in enumerate(cases):
        with pytest.raises(ModelFileError, match=word):
            HeadsDrafter.load(write(tmp_path / f"{i}.safetensors", tensors), target)
    (tmp_path / "text.safetensors").write_text("hello, I am not a tensor")
    for name in ("text.safetensors", "absent.safetensors"):
        with pytest.raises(ModelFileError, match=name):
            HeadsDrafter.load(tmp_path / name, target)


def test_a_larger_vocabulary_is_cut_to_real_tokens(tmp_path: Path, target: Target) -> None:
    tensors = medusa(vocab=VOCAB + 8)
    for name in tensors:
        if name.endswith("1.weight") and "linear" not in name:
            tensors[name][VOCAB:] *= 100.0
    model = load_heads(TensorFile.open(write(tmp_path / "m.safetensors", tensors)), target)
    assert isinstance(model, MedusaHeads)
    assert model.scores(torch.ones(1, HIDDEN), [0]).shape == (1, VOCAB)
