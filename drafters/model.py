"""A decoder as a drafter: a small language model, a student, or an attention head that also reads the target's hidden states.
Knows its decoder and its own KV store over the shared pages; refuses to know the target, the scheduler and who else drafts.

Committed tokens without draft keys are run as a chain first (bounded per step), when drafts are next wanted; in the usual case that
one pass scores the root's children too. Then the tree grows by one batched pass a level while that pays.

Leviathan et al. 2023, Chen et al. 2023 (draft models); Li et al. 2024 (EAGLE); best-first trees: Wang et al. 2024 (OPT-Tree).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from drafters.draft_rows import DraftRow, draft_inputs
from drafters.draws import choices, is_drawn, wanted
from drafters.faults import MAX_FAULTS, Faults
from drafters.filled import Draft, FilledPages, Pages
from drafters.forest import chain_after, forest
from drafters.growth import Growth, Node, PassClock, grow
from drafters.node_inputs import NodeInputs, State, TokensOnly
from drafters.scoring import DecoderScorer, DraftDecoder, Scored, Scorer
from kernels.batch import KVTensors
from kernels.top_shares.reference import top_shares
from spec.drafter import Budget, Outcome, SequenceView
from spec.tree import NOTHING, Proposal

_WINDOW = 63  # tree nodes of one sequence in one pass
_BACKLOG_STEPS = 48.0  # drafting steps over which the cost of a backlog is spread when its worth is judged


class _Growing:
    """A sequence being drafted for in this call."""

    __slots__ = ("chain", "draft", "growth", "place", "room", "root", "view")

    def __init__(self, place: int, view: SequenceView, draft: Draft, growth: Growth, room: int) -> None:
        self.place = place
        self.view = view
        self.draft = draft
        self.growth = growth
        self.room = room  # slots after the root
        self.root: State | None = None
        self.chain: list[Node] = []  # nodes whose keys lie right after the root, each the child of the one before


def _state_above(g: _Growing, node: Node) -> State:
    found: State | None = g.root if node.parent is None else node.parent.state
    if found is None:
        raise ValueError("a node was to be run before its parent")
    return found


@dataclass(frozen=True, slots=True)
class _Span:
    """Committed tokens `draft.valid` .. `stop - 1` of a sequence, to be run as a chain; the last one scored or not."""

    view: SequenceView
    draft: Draft
    stop: int
    scored: bool


class ModelDrafter:
    """The `Drafter` protocol over any decoder whose scores name the target's tokens."""

    watches = True

    def __init__(
        self,
        name: str,
        decoder: DraftDecoder,
        store: KVTensors,
        pages: Pages,
        *,
        vocab_size: int | None = None,
        token_ids: Sequence[int] | None = None,
        inputs: NodeInputs | None = None,
        score: Scorer | None = None,
        fan: int = 4,
        width: int = 4,
        catch_up_tokens: int = 256,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`vocab_size`: columns below it may be proposed (padding rows above it never are). `token_ids`: the target's token of each
        column; None = its own number. `score`: a pass over `store`; None = the decoder's own forward. `fan`: children scored per node. `width`: nodes of one sequence expanded per pass.
        `catch_up_tokens`: committed tokens run per step, all together. `clock`: seconds.
        """
        self.name = name
        self._longest = decoder.shape.max_position
        self._store = store
        self._columns = min(decoder.shape.vocab_size, vocab_size or decoder.shape.vocab_size)
        self._score = score or DecoderScorer(decoder, store, top_shares, self._columns)
        self._token_ids = token_ids
        self._inputs: NodeInputs = TokensOnly() if inputs is None else inputs
        self._fan = fan
        self._width = width
        self._catch_up_tokens = catch_up_tokens
        self._clock = clock
        self._passes = PassClock()
        self._drafts: dict[int, Draft] = {}
        self._filled = FilledPages(pages, store.page_size)
        self._faults = Faults(f"drafter {name}")

    # --- the protocol -------------------------------------------------------------------------------------------------

    def open(self, view: SequenceView) -> None:
        if view.seq_id not in self._drafts:
            self._drafts[view.seq_id] = self._filled.begin(view)

    def observe(self, outcomes: Sequence[Outcome], hidden: torch.Tensor) -> None:
        """Drafted tokens that were committed are valid: their keys are in place. Read now, while the sequence still
        owns the pages of its window; what else was drafted is worthless once they are given back."""
        if self._faults.given_up:
            return
        for outcome in outcomes:
            draft = self._drafts.get(outcome.view.seq_id)
            if draft is not None and draft.chain:
                draft.valid += self._inputs.survivors(draft.matched(outcome.view.token_ids))
        self._inputs.observe(outcomes, hidden)
        for outcome in outcomes:
            if not outcome.finished and self._inputs.pending(outcome.view.seq_id) > self._inputs.most_pending:
                self._work_off(outcome.view)

    def close(self, seq_id: int) -> None:
        self._drafts.pop(seq_id, None)
        self._inputs.close(seq_id)

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Proposal]:
        if self._faults.given_up:
            return [NOTHING] * len(views)
        try:
            with torch.inference_mode():
                return self._propose(views, budgets)
        except Exception:
            self._fail(views)
            return [NOTHING] * len(views)

    # --- what is filled -----------------------------------------------------------------------------------------------

    def _fail(self, views: Sequence[SequenceView]) -> None:
        self._faults.note()
        for view in views:
            self.close(view.seq_id)  # what it had written is not to be trusted
            self._filled.forget(view)

    def _settle(self, view: SequenceView) -> Draft:
        draft = self._drafts.get(view.seq_id)
        if draft is None:
            draft = self._drafts[view.seq_id] = self._filled.begin(view)
        draft.chain = []
        draft.valid = min(draft.valid, len(view.token_ids) - 1)  # the last token is always run: its scores are wanted
        return draft

    def _work_off(self, view: SequenceView) -> None:
        """Run committed tokens though nobody asks for drafts: their states must not pile up."""
        try:
            with torch.inference_mode():
                draft = self._drafts.get(view.seq_id)
                if draft is None:
                    draft = self._drafts[view.seq_id] = self._filled.begin(view)
                stop = min(view.num_kv, self._longest, draft.valid + self._catch_up_tokens)
                if stop > draft.valid:
                    self._run_committed([_Span(view, draft, stop, scored=False)])
        except Exception:
            self._fail([view])

    # --- drafting -----------------------------------------------------------------------------------------------------

    def _propose(self, views: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Proposal]:
        proposals = [NOTHING] * len(views)
        growing = self._candidates(views, budgets)
        if not growing:
            return proposals
        price = budgets[growing[0].place].pass_price
        backlog = min(self._catch_up_tokens, sum([len(g.view.token_ids) - g.draft.valid for g in growing]))
        cost = price(self._passes.estimate(len(growing))) + price(self._passes.estimate(backlog)) / _BACKLOG_STEPS
        if sum([g.growth.promise(None) for g in growing]) <= cost:
            return proposals
        ready = self._catch_up(growing)
        grow(ready, self._width, price, self._passes, self._expand)
        for g in ready:
            g.draft.base = len(g.view.token_ids)
            g.draft.chain = [node.token for node in g.chain]
            proposals[g.place] = g.growth.proposal()
        return proposals

    def _candidates(self, views: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[_Growing]:
        """The sequences this model may draft for: wanted, inside its own context, and not in trouble."""
        found = []
        longest = self._longest
        for place, (view, budget) in enumerate(zip(views, budgets, strict=True)):
            if not budget.wants(self.name) or len(view.token_ids) >= longest:
                continue
            draft = self._settle(view)
            room = min(len(view.page_ids) * self._store.page_size, longest) - len(view.token_ids)  # slots after the root
            if draft.faults >= MAX_FAULTS or room < 0:
                continue
            room = min(room, _WINDOW)
            growth = Growth(self.name, budget, 1 if is_drawn(view) else self._fan, room)
            found.append(_Growing(place, view, draft, growth, room))
        return found

    def _catch_up(self, growing: list[_Growing]) -> list[_Growing]:
        """Run committed tokens without draft keys, shortest backlog first; those that got through are scored and returned."""
        began = self._clock()
        left = self._catch_up_tokens
        spans: list[_Span] = []
        run: list[_Growing] = []
        if len(growing) > 1:
            growing = sorted(growing, key=lambda g: (len(g.view.token_ids) - g.draft.valid, g.place))
        for g in growing:
            length = len(g.view.token_ids)
            stop = min(length, g.draft.valid + left)
            if stop == g.draft.valid:
                break
            left -= stop - g.draft.valid
            spans.append(_Span(g.view, g.draft, stop, stop == length))
            run.append(g)
        out = self._run_committed(spans)
        ready = [g for g, span in zip(run, spans, strict=True) if span.scored]
        if ready:
            self._add([(g, None) for g in ready], out)
        if len(ready) == len(spans):
            self._passes.record(self._catch_up_tokens - left, (self._clock() - began) * 1e3)
        return [g for g in ready if g.growth.nodes]

    def _run_committed(self, spans: Sequence[_Span]) -> tuple[Scored, list[int]]:
        rows = [
            DraftRow(
                span.view.token_ids[span.draft.valid : span.stop],
                None,
                span.draft.valid,
                span.view.page_ids,
                (span.stop - span.draft.valid - 1,) if span.scored else (),
            )
            for span in spans
        ]
        features = self._inputs.committed([(s.view.seq_id, s.draft.valid, s.stop - s.draft.valid) for s in spans])
        views = [span.view for span in spans if span.scored]
        out = self._forward(rows, views, features)
        for span in spans:
            span.draft.valid = span.stop
            self._filled.mark(span.view, span.draft)
            self._inputs.settle(span.view.seq_id, span.stop)
        return out

    def _expand(self, picks: Sequence[tuple[_Growing, Node]]) -> None:
        """One pass that scores the children of the picked nodes."""
        began = self._clock()
        wanted: dict[int, tuple[_Growing, list[Node]]] = {}
        for g, node in picks:
            node.expanded = True
            wanted.setdefault(g.place, (g, []))[1].append(node)
        rows: list[DraftRow] = []
        asked: list[tuple[_Growing, Node | None]] = []
        parents_of: list[State] = []
        for g, nodes in wanted.values():
            kept, order, parents = forest(g.chain, nodes)
            if kept + len(order) > g.room:
                continue
            targets = {node.index for node in nodes}
            scored = [i for i, node in enumerate(order) if node.index in targets]
            start = len(g.view.token_ids) + kept
            rows.append(DraftRow([node.token for node in order], parents, start, g.view.page_ids, scored))
            asked += [(g, order[i]) for i in scored]
            parents_of += [_state_above(g, node) for node in order]
            g.chain = chain_after(g.chain, kept, order, parents)
        if rows:
            views = [g.view for g, _ in asked]
            self._add(asked, self._forward(rows, views, self._inputs.drafted(parents_of)))
            self._passes.record(len(parents_of), (self._clock() - began) * 1e3)

    def _add(self, asked: list[tuple[_Growing, Node | None]], passed: tuple[Scored, list[int]]) -> None:
        """Give every asked node its children; a sequence with scores that are not numbers starts over."""
        out, at = passed
        views = [g.view for g, _ in asked]
        depths = [0 if node is None else node.depth for _, node in asked]
        scores = choices(out.best, views, depths, self._fan, self.name, names=self._token_ids)
        broken: set[int] = set()
        for (g, node), found, row in zip(asked, scores, at, strict=True):
            if found is None or g.place in broken:
                if g.place not in broken:
                    broken.add(g.place)
                    self._reset(g)
                continue
            if node is None:
                g.root = (out.hidden, row)
            else:
                node.state = (out.hidden, row)
            g.growth.add_children(node, found.token_ids, found.confidence, found.probs)

    def _reset(self, g: _Growing) -> None:
        g.draft.valid, g.draft.marked = 0, 0
        g.draft.faults += 1
        g.growth.clear()
        g.chain.clear()
        self._filled.forget(g.view)

    def _forward(
        self, rows: list[DraftRow], views: Sequence[SequenceView], features: torch.Tensor | None
    ) -> tuple[Scored, list[int]]:
        """Run the rows. `views`: the sequence of each scored node. Returns the scores and which nodes they are of."""
        scored: list[int] = []
        first = 0
        for row in rows:
            scored += [first + node for node in row.scored]
            first += len(row.token_ids)
        if not scored:  # decoders want a node to score
            rows = [dataclasses.replace(rows[0], scored=(0,)), *rows[1:]]
        count, temperatures = wanted(views, self._fan, self._columns)
        return self._score(draft_inputs(rows, self._store.page_size), features, count, temperatures), scored
