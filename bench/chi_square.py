"""Does a rule keep the target's distribution? Simulated against exact tables, for every rule, drafter kind, filter and tree.

A target over 8 live tokens whose next-token row depends on the last token only, and a drafter whose rows are quite
different. Many seeded sequences run through `spec.accept` until each has 3 new tokens; the first token, the first pair and
the second pair are then compared with the exact law by Pearson's chi-square (7 and 63 degrees of freedom, cells under 5
pooled). A case fails when any of the three has p < 1e-6. Known faults, put in on purpose, must fail.

    python -m bench.chi_square [--samples N] [--full]
"""

from __future__ import annotations

import argparse
import bisect
import importlib.util
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import chi2

from spec import rejection
from spec.accept import ScoredRow, accept
from spec.keyed_random import DRAFT, uniform
from spec.request import Rule, SamplingParams, SpeculationPolicy
from spec.sampling import REFERENCE_OPS
from spec.target import TargetScores
from spec.tree import ROOT, DraftProbs, DraftTree

LIVE = 8
NEW = 3  # tokens per sequence
FALSE_ALARM = 1e-6
POOL_BELOW = 5.0
Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]

FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "temperature 0.7": {"temperature": 0.7},
    "top_k 3": {"top_k": 3},
    "top_p 0.8": {"top_p": 0.8},
    "min_p 0.2": {"min_p": 0.2, "temperature": 1.3},
    "logit_bias": {"logit_bias": {1: 1.5, 3: -100.0}},
}
SHAPES: dict[str, tuple[int, ...]] = {  # parents by node, siblings in the order they are tried
    "chain": (ROOT, 0, 1, 2),
    "star": (ROOT, ROOT, ROOT, ROOT),
    "mixed": (ROOT, 0, 1, 0, ROOT, 4, ROOT),
}
KINDS = ("point mass", "drawn", "drawn, replaced", "drawn + points", "point + drawn", "two models", "stale, trimmed")
RULES: tuple[Rule, ...] = ("exact", "rejection")


@dataclass(frozen=True)
class Case:
    rule: Rule
    kind: str
    filter: str
    shape: str

    def __str__(self) -> str:
        return f"{self.rule:9}  {self.kind:15}  {self.filter:15}  {self.shape:5}"


@dataclass(frozen=True)
class Fault:
    """A fault put in on purpose: in the drafter, or in the rule by replacing functions of spec.rejection."""

    name: str
    declared_heat: float = 1.0  # the q told to the rule is this much hotter than the q drawn from
    prune_below: float = 0.0  # drop drawn nodes whose own probability is lower
    replaced: dict[str, Callable[..., Any]] = field(default_factory=dict)

    @contextmanager
    def put_in(self) -> Iterator[None]:
        healthy = {name: getattr(rejection, name) for name in self.replaced}
        try:
            for name, function in self.replaced.items():
                setattr(rejection, name, function)
            yield
        finally:
            for name, function in healthy.items():
                setattr(rejection, name, function)


HEALTHY = Fault("")


@dataclass(frozen=True)
class View:
    """spec.drafter.SequenceView of one simulated sequence."""

    seq_id: int
    token_ids: list[int]
    sampling: SamplingParams
    policy: SpeculationPolicy
    prompt_len: int = 1
    page_ids: list[int] = field(default_factory=list)
    tenant: str = ""
    grammar: None = None
    num_kv: int = 0


class TableOps:
    """The reference `sample` op on the distinct rows of a batch: a simulation has few, and the rest are copies."""

    def probabilities(self, logits: torch.Tensor, *filters: torch.Tensor) -> torch.Tensor:
        rows, where = torch.unique(logits, dim=0, return_inverse=True)
        alike = [values[:1].expand(rows.shape[0]) for values in filters]  # one case has one set of options
        return REFERENCE_OPS.probabilities(rows, *alike)[where]

    def sample(self, logits: torch.Tensor, *arguments: torch.Tensor) -> torch.Tensor:
        *filters, uniforms = arguments
        mass = self.probabilities(logits, *filters).double().cumsum(-1)
        return torch.searchsorted(mass, (uniforms * mass[:, -1]).unsqueeze(1), right=True).squeeze(1).to(torch.int32)


def target_logits() -> torch.Tensor:
    """[8, 8] float32: row t holds the logits after token t."""
    return torch.from_numpy(np.random.default_rng(11).normal(size=(LIVE, LIVE)) * 1.3).float()


def target_law(options: SamplingParams) -> Floats:
    """[8, 8] float64, exact: row t is the processed distribution after token t."""
    logits = target_logits()
    for token, bias in options.logit_bias.items():
        logits[:, token] += bias
    heat, keep = torch.full((LIVE,), options.temperature), torch.full((LIVE,), options.top_k, dtype=torch.int32)
    law = REFERENCE_OPS.probabilities(
        logits, heat, keep, torch.full((LIVE,), options.top_p), torch.full((LIVE,), options.min_p)
    )
    rows: Floats = law.double().numpy()
    return np.asarray(rows / rows.sum(axis=1, keepdims=True))


class Drafter:
    """Trees of one kind and shape. Every draw is keyed in the DRAFT stream, as a real drafter's is."""

    def __init__(self, kind: str, parents: Sequence[int], fault: Fault) -> None:
        scores = np.random.default_rng(5).normal(size=(2, LIVE, LIVE)) * 1.5
        if kind == "stale, trimmed":  # rows of another context over half the vocabulary
            scores = np.roll(scores, 3, axis=1)
            scores[:, :, ::2] = -np.inf
        self._kind = kind
        self._parents = parents
        self._ranks = [sum(1 for other in parents[:node] if other == parent) for node, parent in enumerate(parents)]
        self._prune_below = fault.prune_below
        self._drawn: list[list[list[float]]] = _softmax(scores).tolist()  # [model][context][token], what is drawn from
        self._best: list[list[int]] = np.argsort(-scores[0], axis=-1, kind="stable").tolist()
        ids, told = torch.arange(LIVE), torch.from_numpy(_softmax(scores / fault.declared_heat)).float()
        self._told = [[DraftProbs(ids, row) for row in model] for model in told]

    def tree(self, view: View) -> DraftTree:
        tokens: list[int] = []
        parents: list[int] = []
        probs: list[DraftProbs | None] = []
        place: dict[int, int] = {ROOT: ROOT}  # template node -> tree node, only of those that are there
        tried: dict[int, list[int]] = {}
        depth = {ROOT: 0}
        for node, parent in enumerate(self._parents):
            depth[node] = depth[parent] + 1
            if parent not in place:
                continue
            siblings = tried.setdefault(parent, [])
            context = view.token_ids[-1] if parent == ROOT else tokens[place[parent]]
            found = self._child(view, len(view.token_ids) + depth[parent], context, self._ranks[node], siblings)
            if found is None or found[0] in siblings:  # the same token under one parent is one node
                continue
            siblings.append(found[0])
            place[node] = len(tokens)
            tokens.append(found[0])
            parents.append(place[parent])
            probs.append(found[1])
        if tokens and parents == list(range(ROOT, len(tokens) - 1)) and ROOT in self._parents[1:]:
            # Whether a tree is a chain decides how it is verified, so merged draws must not make one.
            tokens.append(next(token for token in self._best[view.token_ids[-1]] if token != tokens[0]))
            parents.append(ROOT)
            probs.append(None)
        return DraftTree(tuple(tokens), tuple(parents), draft_probs=tuple(probs))

    def _child(
        self, view: View, position: int, context: int, rank: int, tried: Sequence[int]
    ) -> tuple[int, DraftProbs | None] | None:
        draws = {"point mass": False, "drawn + points": rank == 0, "point + drawn": rank > 0}.get(self._kind, True)
        model = rank % 2 if self._kind == "two models" else 0
        if not draws:
            return self._best[context][rank], None
        left = list(self._drawn[model][context])
        if self._kind != "drawn, replaced":
            for token in tried:
                left[token] = 0.0
        mass = list(itertools.accumulate(left))
        if mass[-1] <= 0.0:
            return None
        noise = uniform(view.sampling.seed, position, DRAFT, rank, len(view.token_ids))
        token = bisect.bisect_right(mass, noise * mass[-1])
        return None if left[token] < self._prune_below else (token, self._told[model][context])


def _softmax(scores: Floats) -> Floats:
    mass = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(mass / mass.sum(axis=-1, keepdims=True))


def simulate(case: Case, samples: int, fault: Fault = HEALTHY) -> Ints:
    """[samples, 3] int64: the new tokens of `samples` sequences that start after token 0, each with its own seed."""
    drafter = Drafter(case.kind, SHAPES[case.shape], fault)
    policy = SpeculationPolicy(rule=case.rule)
    views = [View(i, [0], options(case, seed=i + 1), policy) for i in range(samples)]
    table, ops = target_logits(), TableOps()
    unfinished = views
    while unfinished:
        rows: list[ScoredRow] = []
        nodes: list[int] = []
        for view in unfinished:
            tree = drafter.tree(view)
            rows.append(ScoredRow(view, tree, len(nodes)))
            nodes += [view.token_ids[-1], *tree.token_ids]
        logits = table[torch.tensor(nodes)]
        scores = TargetScores(logits.argmax(-1).to(torch.int32), logits, torch.zeros(1, 1))
        for view, row, kept in zip(unfinished, rows, accept(rows, scores, ops=ops), strict=True):
            view.token_ids.extend([*(row.tree.token_ids[node] for node in kept.path), kept.next_id])
        unfinished = [view for view in unfinished if len(view.token_ids) <= NEW]
    return np.array([view.token_ids[1 : NEW + 1] for view in views])


def options(case: Case, seed: int = 0) -> SamplingParams:
    return SamplingParams(max_tokens=NEW, seed=seed, **FILTERS[case.filter])


def p_value(counts: Ints, law: Floats) -> float:
    """Chance of counts at least this far from `law` (both flat, law sums to 1). A token of probability 0 that came: 0."""
    expected = law * counts.sum()
    if counts[law <= 0.0].any():
        return 0.0
    small = expected < POOL_BELOW
    observed = np.append(counts[~small], counts[small].sum())
    wanted = np.append(expected[~small], expected[small].sum())
    if wanted[-1] < POOL_BELOW:  # too small a pool joins the smallest full cell
        least = int(np.argmin(wanted[:-1]))
        observed[least] += observed[-1]
        wanted[least] += wanted[-1]
        observed, wanted = observed[:-1], wanted[:-1]
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    return float(chi2.sf(statistic, len(wanted) - 1)) if len(wanted) > 1 else 1.0


def judge(tokens: Ints, law: Floats) -> float:
    """The least p-value of first token, first pair and second pair."""
    pair = law[0][:, None] * law
    second = pair.sum(axis=0)[:, None] * law
    first_counts = np.bincount(tokens[:, 0], minlength=LIVE)
    pair_counts = [np.bincount(tokens[:, i] * LIVE + tokens[:, i + 1], minlength=LIVE * LIVE) for i in (0, 1)]
    return min(p_value(first_counts, law[0]), p_value(pair_counts[0], pair.ravel()), p_value(pair_counts[1], second.ravel()))


def run(case: Case, samples: int, fault: Fault = HEALTHY) -> float:
    """The case's p-value with a fault put in; without one, of the rule as it is."""
    with fault.put_in():
        return judge(simulate(case, samples, fault), target_law(options(case)))


def true_cases(full: bool) -> list[Case]:
    """The rejection rule on every drafter kind, filter and tree, or so that every two of them meet; the exact rule on every
    filter (its text does not depend on drafts at all, which tests assert as equality).
    """
    kinds, filters, shapes = list(KINDS), list(FILTERS), list(SHAPES)
    if full:
        return [Case(*values) for values in itertools.product(RULES, kinds, filters, shapes)]
    exact = [Case("exact", kinds[i % len(kinds)], name, shapes[i % len(shapes)]) for i, name in enumerate(filters)]
    square = itertools.product(range(len(kinds)), range(len(filters)))
    return exact + [Case("rejection", kinds[i], filters[j], shapes[(i + j) % len(shapes)]) for i, j in square]


def known_faults() -> tuple[tuple[Fault, tuple[Case, ...]], ...]:
    """The mutants and the cases that must show each; they live beside the tests, outside the package."""
    path = Path(__file__).resolve().parent.parent / "tests" / "support" / "mutants.py"
    made = importlib.util.spec_from_file_location("mutants", path)
    if made is None or made.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    found: tuple[tuple[Fault, tuple[Case, ...]], ...] = module.MUTANTS
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--full", action="store_true", help="every combination instead of every pair of values")
    chosen = parser.parse_args(argv)
    torch.set_num_threads(1)
    began = time.perf_counter()
    wrong = 0
    smallest = 1.0
    print(f"{'rule':9}  {'drafter':15}  {'filter':15}  {'tree':5}  {'p-value':>9}  verdict")
    cases = [(case, HEALTHY) for case in true_cases(chosen.full)]
    faulty = [(case, fault) for fault, shown_by in known_faults() for case in shown_by]
    for case, fault in cases + faulty:
        p = run(case, chosen.samples, fault)
        passed = p >= FALSE_ALARM
        as_wanted = passed == (fault is HEALTHY)
        wrong += not as_wanted
        smallest = min(smallest, p) if fault is HEALTHY else smallest
        note = f"  fault: {fault.name}" if fault is not HEALTHY else ""
        print(f"{case}  {p:9.2g}  {'pass' if passed else 'FAIL'}{'' if as_wanted else ' (NOT EXPECTED)'}{note}")
    summary = {
        "bench": "chi_square",
        "samples": chosen.samples,
        "true_cases": len(cases),
        "faults": len(faulty),
        "unexpected": wrong,
        "smallest_true_p": smallest,
        "seconds": round(time.perf_counter() - began, 1),
    }
    print(json.dumps(summary))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
