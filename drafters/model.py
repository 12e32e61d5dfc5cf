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

import torch

from drafters.at_once import WIDTH, grow_at_once, growing_row, proposal_of, tables_of
from drafters.draft_rows import DraftRow, draft_inputs
from drafters.draws import choices, is_drawn, wanted
from drafters.dull import Dull
from drafters.faults import MAX_FAULTS, Faults
from drafters.filled import Draft, FilledPages, Pages
from drafters.forest import chain_after, forest
from drafters.growth import Growth, Node, PassClock, grow
from drafters.node_inputs import NodeInputs, State, TokensOnly
from drafters.scoring import DecoderScorer, DraftDecoder, Scored, Scorer
from drafters.spans import Growing, Span, due, state_above
from kernels.batch import KVTensors
from kernels.draft_tree import GrowthRow, TreeGrower
from kernels.top_shares.reference import top_shares
from spec.drafter import Budget, ChanceTable, Outcome, SequenceView
from spec.tree import NOTHING, Proposal

FAN = 4  # children scored per node
_WINDOW = 63  # tree nodes of one sequence in one pass
_BACKLOG_STEPS = 48.0  # drafting steps over which the cost of a backlog is spread when its worth is judged


class ModelDrafter:
    """The `Drafter` protocol over any decoder whose scores name the target's tokens."""

    watches = True
    sure = False

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
        grower: TreeGrower | None = None,
        fan: int = FAN,
        width: int = WIDTH,
        catch_up_tokens: int = 256,
        passes: PassClock | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`vocab_size`: columns below it may be proposed (padding rows above it never are). `token_ids`: the target's token of each
        column; None = its own number. `score`: a pass over `store`; None = the decoder's own forward. `grower`: whole trees over
        `store`, made for the same `fan`, `width` and tokens; None = pass by pass. `fan`: children scored per node. `width`: nodes of one sequence expanded per pass.
        `catch_up_tokens`: committed tokens run per step, all together. `passes`: what a pass after the first takes; None = as it turns out. `clock`: seconds.
        """
        self.name = name
        self._longest = decoder.shape.max_position
        self._store = store
        self._columns = min(decoder.shape.vocab_size, vocab_size or decoder.shape.vocab_size)
        self._score = score or DecoderScorer(decoder, store, top_shares, self._columns)
        self._grower = grower
        self._token_ids = token_ids
        self._inputs: NodeInputs = TokensOnly() if inputs is None else inputs
        self._fan = fan
        self._width = width
        self._catch_up_tokens = catch_up_tokens
        self._clock = clock
        self._first = PassClock()  # of the pass over committed tokens, which finds caches swept by the target
        self._passes = passes or PassClock()  # of those that follow
        self._drafts: dict[int, Draft] = {}
        self._dull = Dull()
        self._filled = FilledPages(pages, store.page_size)
        self._faults = Faults(f"drafter {name}")

    # --- the protocol -------------------------------------------------------------------------------------------------

    def open(self, view: SequenceView) -> None:
        if view.seq_id not in self._drafts:
            self._drafts[view.seq_id] = self._filled.begin(view)

    def hopes(self, views: Sequence[SequenceView]) -> list[int]:
        """Sequences on which a pass promised enough when it was last asked about, or that are due to be asked about again."""
        return [] if self._faults.given_up else self._dull.left(views)

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

    def watch(self, views: Sequence[SequenceView], steps: Sequence[torch.Tensor], behind: int) -> None:
        if self._faults.given_up:
            return
        self._inputs.watch(views, steps, behind)
        for view in views:
            if self._inputs.pending(view.seq_id) > self._inputs.most_pending:
                self._work_off(view)

    def close(self, seq_id: int) -> None:
        self._drafts.pop(seq_id, None)
        self._dull.forget(seq_id)
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
                    self._run_committed([Span(view, draft, stop, scored=False)])
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
        cost = price(self._first.estimate(len(growing))) + price(self._first.estimate(backlog)) / _BACKLOG_STEPS
        if sum([g.growth.promise(None) for g in growing]) <= cost:
            self._dull.note([g.view for g in growing])
            return proposals
        self._dull.clear([g.view for g in growing])
        spans = due(growing, self._catch_up_tokens)
        if self._grower is not None:
            own = [budgets[g.place] for g, _ in spans]
            tables = tables_of(self.name, [g.view for g, _ in spans], own)
            if tables is not None:
                self._at_once(self._grower, spans, own, tables, proposals)
                return proposals
        ready = self._catch_up(spans)
        grow(ready, self._width, price, self._passes, self._expand)
        for g in ready:
            self._note(g, [node.token for node in g.chain])
            proposals[g.place] = g.growth.proposal()
        return proposals

    def _at_once(
        self,
        grower: TreeGrower,
        spans: list[tuple[Growing, Span]],
        budgets: Sequence[Budget],
        tables: Sequence[ChanceTable],
        proposals: list[Proposal],
    ) -> None:
        """All passes in one call."""
        began = self._clock()
        run = [span for _, span in spans]
        rows = [
            growing_row(span.tokens, span.draft.valid, g.view, budget, g.room, table)
            if span.scored
            else GrowthRow(span.tokens, span.draft.valid, g.view.page_ids, False)
            for (g, span), budget, table in zip(spans, budgets, tables, strict=True)
        ]
        grown, later = grow_at_once(grower, rows, self._features(run), budgets[0].pass_price, self._passes)
        self._ran(run)
        for (g, _), tree in zip(spans, grown.trees, strict=True):
            if tree is None:
                continue
            if tree.broken:
                self._reset(g)
                continue
            self._note(g, tree.chain)
            proposals[g.place] = proposal_of(tree)
        self._first.record(grown.passes[0][0], (self._clock() - began) * 1e3 - later)

    def _note(self, g: Growing, chain: list[int]) -> None:
        g.draft.base = len(g.view.token_ids)
        g.draft.chain = chain

    def _candidates(self, views: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Growing]:
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
            found.append(Growing(place, view, draft, growth, room))
        return found

    def _catch_up(self, spans: list[tuple[Growing, Span]]) -> list[Growing]:
        """Run what is due; sequences without a backlog are scored, and those that go on are returned."""
        began = self._clock()
        run = [span for _, span in spans]
        count = sum([len(span.tokens) for span in run])
        out = self._run_committed(run)
        ready = [g for g, span in spans if span.scored]
        if ready:
            self._add([(g, None) for g in ready], out)
        if len(ready) == len(run):
            self._first.record(count, (self._clock() - began) * 1e3)
        return [g for g in ready if g.growth.nodes]

    def _run_committed(self, spans: Sequence[Span]) -> tuple[Scored, list[int]]:
        rows = [
            DraftRow(s.tokens, None, s.draft.valid, s.view.page_ids, (len(s.tokens) - 1,) if s.scored else ()) for s in spans
        ]
        views = [span.view for span in spans if span.scored]
        out = self._forward(rows, views, self._features(spans))
        self._ran(spans)
        return out

    def _features(self, spans: Sequence[Span]) -> torch.Tensor | None:
        return self._inputs.committed([(s.view.seq_id, s.draft.valid, s.stop - s.draft.valid) for s in spans])

    def _ran(self, spans: Sequence[Span]) -> None:
        for span in spans:
            span.draft.valid = span.stop
            self._filled.mark(span.view, span.draft)
            self._inputs.settle(span.view.seq_id, span.stop)

    def _expand(self, picks: Sequence[tuple[Growing, Node]]) -> None:
        """One pass that scores the children of the picked nodes."""
        began = self._clock()
        wanted: dict[int, tuple[Growing, list[Node]]] = {}
        for g, node in picks:
            node.expanded = True
            wanted.setdefault(g.place, (g, []))[1].append(node)
        rows: list[DraftRow] = []
        asked: list[tuple[Growing, Node | None]] = []
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
            parents_of += [state_above(g, node) for node in order]
            g.chain = chain_after(g.chain, kept, order, parents)
        if rows:
            views = [g.view for g, _ in asked]
            self._add(asked, self._forward(rows, views, self._inputs.drafted(parents_of)))
            self._passes.record(len(parents_of), (self._clock() - began) * 1e3)

    def _add(self, asked: list[tuple[Growing, Node | None]], passed: tuple[Scored, list[int]]) -> None:
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

    def _reset(self, g: Growing) -> None:
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
