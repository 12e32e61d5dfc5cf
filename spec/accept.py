"""What the target keeps of each tree. Pure: reads trees, scores and sequences, changes nothing.

accepted: draft nodes the target keeps · next: the token the target itself adds after the last accepted node.

Only the nodes on the walked path are decided. All rows walk at once: each wave gathers the node where every row stands and
asks the pipeline once, so a step costs as many op calls as its longest accepted path, not as its trees have nodes. A rule
is a generator that names the node it stands on and is told the target's token (exact) or distribution (rejection) there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch

from spec import rejection, sampling
from spec.drafter import SequenceView
from spec.errors import InvariantError, RequestError
from spec.keyed_random import DRAW, uniform
from spec.logprobs import raw_logprobs
from spec.penalties import PathEdits, has_edits
from spec.rejection import DistributionWalk, Walked
from spec.request import SamplingParams, TokenLogprob
from spec.sampling import REFERENCE_OPS, Distribution, GrammarSource, NodeQuery, SampleOps
from spec.target import TargetScores
from spec.tree import ROOT, DraftTree


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """One row whose nodes were scored: the root and every node of `tree`, at score rows first .. first + len(tree)."""

    view: SequenceView
    tree: DraftTree
    first: int
    grammar: GrammarSource | None = None  # the sequence's spec.grammar.GrammarState, at the root (read only)
    first_node: int | None = None  # the root's node in scores.hidden; when given, greedy rows are checked for NaN too
    plain: bool = False  # known to be greedy without edits and logprobs: the argmax says it all


@dataclass(frozen=True, slots=True)
class Acceptance:
    """`error` set: the target could not name a next token (see spec.sampling); `next_id` is -1. The accepted nodes in `path`
    are good and are delivered before the request ends with the error; if one of them ends the answer, the error is moot.
    """

    path: tuple[int, ...]  # accepted nodes as indices into the tree, root side first
    next_id: int
    logprobs: tuple[TokenLogprob, ...] = ()  # one per accepted node and one for next, when the request asked
    error: RequestError | None = None


TokenWalk = Generator[int, int | None, Walked]


def accept(
    rows: Sequence[ScoredRow], scores: TargetScores, *, eos_ids: Collection[int] = (), ops: SampleOps = REFERENCE_OPS
) -> list[Acceptance]:
    """One Acceptance per row. `eos_ids` are the model's own end tokens, which min_tokens holds back."""
    argmax: list[int] = scores.argmax if isinstance(scores.argmax, list) else scores.argmax.tolist()
    hidden = None if _all_finite(scores) else scores.hidden
    if all(row.plain for row in rows):
        return [_greedy(row, argmax, hidden) for row in rows]
    walkers = {i: _Walker(row, eos_ids) for i, row in enumerate(rows) if not _is_plain(row.view.sampling)}
    _run(list(walkers.values()), scores.logits, ops)
    results = [walkers[i].result() if i in walkers else _greedy(row, argmax, hidden) for i, row in enumerate(rows)]
    return _with_logprobs(rows, results, scores.logits)


def _all_finite(scores: TargetScores) -> bool:
    """One cheap look at everything; the rows are told apart only when something is wrong."""
    if scores.finite is not None:
        return scores.finite
    return math.isfinite(float(scores.hidden.sum()))  # a sum is not finite when any part of it is not


def exact(tree: DraftTree) -> TokenWalk:
    """The exact rule: follow the target's own tokens for as long as the tree holds them."""
    below = tree.children()
    path: list[int] = []
    node = ROOT
    while True:
        token = yield node
        child = next((c for c in below[node + 1] if tree.token_ids[c] == token), None)
        if child is None:
            return Walked(tuple(path), token)
        path.append(child)
        node = child


def _is_plain(options: SamplingParams) -> bool:
    return sampling.is_greedy(options) and not sampling.has_edits(options)


def _greedy(row: ScoredRow, argmax: Sequence[int], hidden: torch.Tensor | None) -> Acceptance:
    """The exact rule where the target's token is its argmax. `hidden` is given only when something in it is not finite."""
    tree, at = row.tree, row.first + 1
    suspect = hidden is not None and row.first_node is not None
    token = argmax[row.first]
    if not tree.token_ids and not suspect:
        return Acceptance((), token)
    if suspect and not _node_is_finite(row, ROOT, hidden):
        return Acceptance((), -1, error=sampling.not_finite())
    path: list[int] = []
    node = ROOT
    # A parent comes before its children, so one pass over the nodes meets the whole path in order.
    for child, (parent, drafted) in enumerate(zip(tree.parents, tree.token_ids, strict=True)):
        if parent == node and drafted == token:
            path.append(child)
            node, token = child, argmax[at + child]
            if suspect and not _node_is_finite(row, node, hidden):
                return Acceptance(tuple(path), -1, error=sampling.not_finite())
    return Acceptance(tuple(path), token)


def _node_is_finite(row: ScoredRow, node: int, hidden: torch.Tensor | None) -> bool:
    if hidden is None or row.first_node is None:
        return True
    return bool(torch.isfinite(hidden[row.first_node + node + 1]).all())


def _settled(walked: Walked, error: RequestError | None) -> Acceptance:
    if walked.next_id is None:
        return Acceptance(walked.path, -1, error=error)
    return Acceptance(walked.path, walked.next_id)


class _Walker:
    """One row's walk: the rule, and the path state (edits, grammar) of the node it stands on."""

    def __init__(self, row: ScoredRow, eos_ids: Collection[int]) -> None:
        options = row.view.sampling
        self.row = row
        self.walk: TokenWalk | DistributionWalk
        self.wants_distribution = row.view.policy.rule == "rejection" and not sampling.is_greedy(options)
        length = len(row.view.token_ids)
        if self.wants_distribution:
            self.walk = rejection.walk(row.tree, options.seed, length)
        else:
            self.walk = exact(row.tree)
        self.node = next(self.walk)
        self.walked: Walked | None = None
        self.error: RequestError | None = None
        self._edits: PathEdits | None = None
        if has_edits(options):
            self._edits = PathEdits(options, row.view.token_ids, row.view.prompt_len, sampling.end_ids(options, eos_ids))
        self._grammar = row.grammar.cursor() if options.grammar is not None and row.grammar is not None else None
        if options.grammar is not None and row.grammar is None:
            raise InvariantError(f"sequence {row.view.seq_id} has a grammar but its row carries no grammar state")

    def query(self) -> NodeQuery:
        row, options = self.row, self.row.view.sampling
        depth = 0 if self.node == ROOT else row.tree.depths[self.node]
        position = len(row.view.token_ids) + depth
        noise = 0.0 if self.wants_distribution or sampling.is_greedy(options) else uniform(options.seed, position, DRAW)
        return NodeQuery(row.first + self.node + 1, options, noise, self._edits, self._grammar)

    def tell(self, answer: int | Distribution | RequestError) -> None:
        """Hand the rule what the target says at the node; the rule moves on or ends."""
        if isinstance(answer, RequestError):
            self.error = answer
        try:
            self.node = self.walk.send(None if isinstance(answer, RequestError) else answer)  # type: ignore[arg-type]
        except StopIteration as end:
            self.walked = end.value
            return
        token = self.row.tree.token_ids[self.node]
        if self._edits is not None:
            self._edits.extend(token)
        if self._grammar is not None:
            self._grammar.extend(token)

    def result(self) -> Acceptance:
        if self.walked is None:
            raise InvariantError("a walk was left before its end")
        return _settled(self.walked, self.error)


def _run(walkers: Sequence[_Walker], logits: torch.Tensor | None, ops: SampleOps) -> None:
    """Walk every row to its end, one op call per wave and kind of question."""
    if walkers and logits is None:
        raise InvariantError("rows with sampling options were scored without logits; see sampling.need_logits")
    active = list(walkers)
    while active and logits is not None:
        for wants, decide in ((False, sampling.tokens), (True, sampling.distributions)):
            group = [walker for walker in active if walker.wants_distribution == wants]
            answers = decide(logits, [walker.query() for walker in group], ops) if group else []
            for walker, answer in zip(group, answers, strict=True):
                walker.tell(answer)
        active = [walker for walker in active if walker.walked is None]


def _with_logprobs(rows: Sequence[ScoredRow], results: Sequence[Acceptance], logits: torch.Tensor | None) -> list[Acceptance]:
    """Fill in raw log probabilities for the rows that asked: the token after the root, after each accepted node."""
    score_rows: list[int] = []
    chosen: list[int] = []
    counts: list[int] = []
    for row, result in zip(rows, results, strict=True):
        if (count := row.view.sampling.logprobs) is not None:
            emitted = [row.tree.token_ids[n] for n in result.path] + ([result.next_id] if result.error is None else [])
            nodes = (ROOT, *result.path)[: len(emitted)]
            score_rows += [row.first + node + 1 for node in nodes]
            chosen += emitted
            counts += [count] * len(emitted)
    if not chosen:
        return list(results)
    if logits is None:
        raise InvariantError("logprobs were asked for without logits; see sampling.need_logits")
    index = torch.tensor(score_rows, dtype=torch.int64, device=logits.device)
    entries = iter(raw_logprobs(logits.index_select(0, index), chosen, counts))
    return [
        replace(result, logprobs=tuple(islice(entries, len(result.path) + (result.error is None))))
        if row.view.sampling.logprobs is not None
        else result
        for row, result in zip(rows, results, strict=True)
    ]
