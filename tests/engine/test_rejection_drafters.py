"""SD-06: the rejection rule over the drafters that exist, through an engine, keeps the target's law; and faults in a drafter show.

The target is a table over five live tokens, so that the law of four tokens in a row is summed up exactly, with temperature, top_k
and penalties counted along the path. Three chi-square tests over neighbouring pairs, false alarm 1e-6; seeds are fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from checkpoint_tokenizer import IM_END, VOCABULARY, build_tokenizer
from engine_kit import Runner, make_engine, quick
from safetensors.torch import save_file

from bench.chi_square import FALSE_ALARM, p_value
from drafters import draws, registry
from drafters.grammar import GrammarDrafter
from drafters.growth import Growth
from drafters.head_models import FORMAT
from drafters.layer_models import HEADS_FORMAT
from drafters.model import ModelDrafter
from kernels.batch import KVTensors
from spec import merge
from spec.config import EngineConfig
from spec.grammar import GrammarCompiler
from spec.keyed_random import TEST, uniform
from spec.pages import PagePool
from spec.penalties import PathEdits
from spec.request import GrammarSpec, Request, SamplingParams, SpeculationPolicy
from spec.shapes import ShapeSpeculator
from spec.tree import DraftProbs

LIVE, VOCAB, NEW = 5, 64, 4
PROMPT = (1, 2, 0, 1, 2, 0)  # tokens 3 and 4 are new to the answer
BATCH = 50
OPTIONS: dict[str, dict[str, Any]] = {
    "temperature 0.7": {"temperature": 0.7},
    "top_k 3": {"top_k": 3},
    "penalties": {"frequency_penalty": 0.8, "presence_penalty": 0.4, "repetition_penalty": 1.4},
}
DRAFTERS = ("suffix", "model", "heads", "attention head", "student", "suffix + model", "suffix + model + heads")
TREES = ("chain:4", "wide", "mixed")
CASES = [  # two of the options for each, and every tree
    (name, option, TREES[(i + 2 * j) % 3]) for i, name in enumerate(DRAFTERS) for j, option in enumerate(OPTIONS) if (i + j) % 3
]


def rows(seed: int, spread: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.random.default_rng(seed).normal(size=(LIVE, LIVE)) * spread


def table(scores: np.ndarray[Any, np.dtype[np.float64]], vocab: int = VOCAB, first: int = 0) -> torch.Tensor:
    """[V, V] logits; only live tokens, `first` and those after it, can follow live tokens."""
    logits = torch.full((vocab, vocab), -60.0)
    live = slice(first, first + len(scores))
    logits[live, live] = torch.from_numpy(scores).float()
    return logits


# The draft model is the target with noise: right often enough that a wrong q does harm.
TRUE, GUESS = rows(11, 1.3), rows(11, 1.3) + rows(5, 1.0)
SHAPE, WEIGHTS = toy.table_weights(table(TRUE))
DRAFT = toy.table_weights(table(GUESS))


@cache
def law(name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[5, 5, 5, 5]: the chance of each four tokens after the prompt, by the documented order of options."""
    options = SamplingParams(max_tokens=NEW, **OPTIONS[name])
    found = np.zeros((LIVE,) * NEW)

    def after(path: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float64]]:
        scores = TRUE[(*PROMPT, *path)[-1]].copy()
        for token in range(LIVE):
            if token in (*PROMPT, *path):
                scores[token] *= 1 / options.repetition_penalty if scores[token] > 0 else options.repetition_penalty
            scores[token] -= options.frequency_penalty * path.count(token) + options.presence_penalty * (token in path)
        scores /= options.temperature
        if options.top_k:
            scores[np.argsort(-scores)[options.top_k :]] = -np.inf
        mass = np.exp(scores - scores.max())
        return mass / mass.sum()

    for path in product(range(LIVE), repeat=NEW):
        found[path] = np.prod([after(path[:i])[token] for i, token in enumerate(path)])
    return found


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random heads over the live tokens: without attention, and with it (whose guesses are drawn)."""
    folder = tmp_path_factory.mktemp("heads")
    g = torch.Generator().manual_seed(2)
    hidden = SHAPE.hidden

    def matrix(out: int, into: int, gain: float = 2.0) -> torch.Tensor:
        return torch.randn(out, into, generator=g) * gain / into**0.5

    tail = {"output": matrix(LIVE, hidden, 1.5), "token_ids": torch.arange(LIVE, dtype=torch.int32)}
    norms = ("state_norm", "token_norm", "output_norm")
    plain = {name: torch.ones(hidden) for name in norms} | tail
    plain |= {"gate": matrix(32, 2 * hidden), "up": matrix(32, 2 * hidden), "down": matrix(hidden, 32)}
    save_file(plain, folder / "heads.safetensors", metadata={"format": FORMAT})
    names = ("feature_norm", "token_norm", "attn_norm", "mlp_norm", "output_norm")
    layer = {name: torch.ones(hidden) for name in names} | tail | {"fc": matrix(hidden, 2 * hidden)}
    layer |= {"q": matrix(32, hidden), "k": matrix(16, hidden), "v": matrix(16, hidden), "o": matrix(hidden, 32)}
    layer |= {"gate": matrix(64, hidden), "up": matrix(64, hidden), "down": matrix(hidden, 64)}
    kind = {"format": HEADS_FORMAT, "q_heads": "2", "kv_heads": "1", "head_dim": "16", "rope_theta": "10000"}
    save_file(layer, folder / "attention.safetensors", metadata=kind)
    return folder


def built(names: str, files: Path, pool: PagePool) -> list[Any]:
    """The registry's own drafters over the toy target, without the grammar's."""
    kinds = {"heads": f"heads:{files / 'heads.safetensors'}", "attention head": f"heads:{files / 'attention.safetensors'}"}
    kinds |= {"suffix": "suffix", "model": "model:twin", "student": "student:twin"}
    draft: Any = quick(*DRAFT)
    beside: Any = lambda model: quick(model.shape, model.weights)  # noqa: E731
    target = registry.Target("toy", SHAPE, WEIGHTS, lambda path: draft, lambda loaded: loaded, beside)  # type: ignore[arg-type,return-value]
    config = EngineConfig(num_pages=pool.total, page_size=4, context=64)
    plan = registry.plan(",".join(kinds[name] for name in names.split(" + ")), target)
    return registry.build(plan, pool, config, torch.float32, "cpu")[:-1]


def judge(names: str, option: str, tree: str, files: Path, samples: int) -> tuple[float, dict[str, int]]:
    """The least p-value, and accepted tokens by drafter."""
    pool = PagePool(512)
    drafters = built(names, files, pool)
    engine = make_engine(
        quick(SHAPE, WEIGHTS), drafters, speculator=ShapeSpeculator(tree), pool=pool, num_pages=512, context=64
    )
    runner = Runner(engine)
    policy = SpeculationPolicy(rule="rejection")
    for first in range(0, samples, BATCH):
        for seed in range(first + 1, first + BATCH + 1):
            options = SamplingParams(max_tokens=NEW, seed=seed, **OPTIONS[option])
            runner.add(Request(id=seed, prompt_ids=PROMPT, sampling=options, speculation=policy))
        runner.finish()
    assert not any(engine.stats()["drafter_faults"].values())
    said = np.array([answer.token_ids for answer in runner.answers.values()])
    assert said.shape == (samples, NEW)
    least = 1.0
    for i in range(NEW - 1):
        pairs = law(option).sum(axis=tuple(axis for axis in range(NEW) if axis not in (i, i + 1)))
        counts = np.bincount(np.minimum(said[:, i], LIVE - 1) * LIVE + np.minimum(said[:, i + 1], LIVE - 1), minlength=LIVE**2)
        least = min(least, p_value(counts, pairs.ravel()))
    assert said.max() < LIVE, "a token that cannot come"
    return least, engine.stats()["spec_decode_num_accepted_tokens"]


@pytest.mark.parametrize(("names", "option", "tree"), CASES, ids=str)
def test_real_drafters_keep_the_law(files: Path, names: str, option: str, tree: str) -> None:
    p, accepted = judge(names, option, tree, files, 1000)
    assert p >= FALSE_ALARM
    for name in names.split(" + "):
        assert accepted["heads" if "head" in name else name] > 50, accepted


LETTERS, X = b"abc", ord("x")
SHAPED = GrammarSpec("regex", "[ab][bc]x[abc][ab]")


def test_drafts_under_a_grammar_keep_the_law() -> None:
    """A draft model that knows no grammar draws, the grammar forces, and the mask holds at every node."""
    letters = [ord("a") - 97, 1, 2, X - 97]
    true, guess = np.full((24, 24), -60.0), np.full((24, 24), -60.0)
    for row, column in product(range(4), repeat=2):
        true[letters[row], letters[column]] = TRUE[row, column]
        guess[letters[row], letters[column]] = GUESS[row, column]
    pool = PagePool(512)
    draft = quick(*toy.table_weights(table(guess, VOCABULARY, 97)))
    store = KVTensors.allocate(draft.shape.layers, 512, draft.shape.kv_heads, draft.shape.head_dim, 4, torch.float32)
    drafters = [GrammarDrafter(), ModelDrafter("model", draft, store, pool)]
    compiler = GrammarCompiler(build_tokenizer().to_str(), (IM_END,), VOCABULARY)
    engine = make_engine(
        quick(*toy.table_weights(table(true, VOCABULARY, 97))), drafters, speculator=ShapeSpeculator("mixed"), pool=pool,
        num_pages=512, context=64, grammars=compiler, eos_ids=(IM_END,),
    )  # fmt: skip
    runner = Runner(engine)
    for first in range(0, 600, BATCH):
        for seed in range(first + 1, first + BATCH + 1):
            options = SamplingParams(max_tokens=8, seed=seed, temperature=0.7, grammar=SHAPED)
            runner.add(Request(seed, tuple(b"ccc"), options, SpeculationPolicy(rule="rejection")))
        runner.finish()

    def chosen(row: int, allowed: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        mass = np.array([np.exp(TRUE[row, i] / 0.7) if chr(97 + i) in allowed else 0.0 for i in range(3)])
        return mass / mass.sum()

    shaped, counts = np.zeros((3,) * 4), np.zeros((3,) * 4, dtype=np.int64)
    for a, b, c, d in product(range(3), repeat=4):
        shaped[a, b, c, d] = chosen(2, "ab")[a] * chosen(a, "bc")[b] * chosen(3, "abc")[c] * chosen(c, "ab")[d]
    for answer in runner.answers.values():
        a, b, x, c, d, end = answer.token_ids
        assert (x, end, answer.finish_reason) == (X, IM_END, "stop")
        counts[a - 97, b - 97, c - 97, d - 97] += 1
    assert p_value(counts.ravel(), shaped.ravel()) >= FALSE_ALARM
    accepted = engine.stats()["spec_decode_num_accepted_tokens"]
    assert min(accepted["grammar"], accepted["model"]) > 100


# --- known faults, put into what serves ------------------------------------------------------------------------------

_draw, _add_children, _add = draws._draw, Growth.add_children, merge._add


def told_without_temperature(patch: pytest.MonkeyPatch) -> None:
    def untempered(view: Any, depth: int, tokens: list[int], masses: list[float], drafter: str) -> draws.Scores:
        drawn = _draw(view, depth, tokens, masses, drafter)
        raw = torch.tensor(masses[: len(drawn.probs.token_ids)]) ** view.sampling.temperature  # type: ignore[union-attr]
        return draws.Scores(drawn.token_ids, drawn.confidence, DraftProbs(drawn.probs.token_ids, raw / raw.sum()))  # type: ignore[union-attr]

    patch.setattr(draws, "_draw", untempered)


def told_without_filters(patch: pytest.MonkeyPatch) -> None:
    def unfiltered(view: Any, depth: int, tokens: list[int], masses: list[float], drafter: str) -> draws.Scores:
        drawn = _draw(view, depth, tokens, masses, drafter)
        q = torch.tensor(masses)
        return draws.Scores(drawn.token_ids, drawn.confidence, DraftProbs(torch.tensor(tokens), q / q.sum()))

    patch.setattr(draws, "_draw", unfiltered)


def pruned_by_its_own_draw(patch: pytest.MonkeyPatch) -> None:
    def pruned(growth: Growth, parent: Any, token_ids: Sequence[int], scores: Any, probs: DraftProbs | None = None) -> None:
        own = 1.0 if probs is None else float(probs.probs[probs.token_ids.tolist().index(token_ids[0])])
        if own >= 0.25:
            _add_children(growth, parent, token_ids, scores, probs)

    patch.setattr(Growth, "add_children", pruned)


def drawn_with_the_tests_noise(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(draws, "uniform", lambda seed, at, stream, index, step: uniform(seed, at, TEST, 0, step))


def counted_once_a_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PathEdits, "extend", lambda edits, token: None)


def twins_hide_draws(patch: pytest.MonkeyPatch) -> None:
    """A draw that another drafter agrees with is offered as that one's; the others keep their q."""

    def add(found: merge.Candidates, name: str, proposal: Any, chance: Any, max_depth: int) -> None:
        agreed = {node.token for node in found.nodes if node.parent is None and node.probs is None}
        if proposal.draft_probs is not None and proposal.token_ids[0] in agreed:
            return
        _add(found, name, proposal, chance, max_depth)

    patch.setattr(merge, "_add", add)


Fault = Callable[[pytest.MonkeyPatch], None]
FAULTS: list[tuple[Fault, tuple[str, str, str]]] = [
    (told_without_temperature, ("model", "temperature 0.7", "chain:4")),
    (told_without_temperature, ("suffix + model", "temperature 0.7", "mixed")),
    (told_without_filters, ("model", "top_k 3", "chain:4")),
    (pruned_by_its_own_draw, ("model", "temperature 0.7", "chain:4")),
    (pruned_by_its_own_draw, ("suffix + model", "top_k 3", "mixed")),
    (drawn_with_the_tests_noise, ("student", "temperature 0.7", "chain:4")),
    (counted_once_a_step, ("suffix", "penalties", "mixed")),
    (counted_once_a_step, ("model", "penalties", "chain:4")),
    (twins_hide_draws, ("suffix + model", "temperature 0.7", "mixed")),
]


@pytest.mark.parametrize(("fault", "case"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_faults_of_drafters_are_caught(
    files: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault, case: tuple[str, str, str]
) -> None:
    fault(monkeypatch)
    assert judge(*case, files, 1000)[0] < FALSE_ALARM
