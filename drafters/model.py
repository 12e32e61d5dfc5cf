"""A small language model as a drafter. Knows its decoder, its own KV store over the shared pages, and which of it is filled;
refuses to know the target, the scheduler and who else drafts.

Its store lies over the target's page ids, so a prefix-cache hit is a hit for both, provided this drafter did fill the
page: it remembers the generation under which it filled each page, and recomputes pages it did not. Committed tokens it has
not seen are run as a chain first (bounded per step); then the tree grows by one batched pass a level while that pays.

Leviathan et al. 2023, Chen et al. 2023 (draft models); best-first trees: Wang et al. 2024 (OPT-Tree).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from drafters.draft_rows import DraftRow, draft_inputs
from drafters.draws import choices, is_drawn
from drafters.forest import chain_after, forest
from drafters.growth import Growth, Node, PassClock, worthwhile
from kernels.batch import KVTensors
from kernels.decoder import Decoder
from spec.drafter import Budget, Outcome, SequenceView
from spec.tree import NOTHING, Proposal

log = logging.getLogger(__name__)

_WINDOW = 63  # tree nodes of one sequence in one pass
_MAX_FAULTS = 3


class Pages(Protocol):
    """What is asked of the page pool: `generations[page]` rises whenever the page is handed out for new content."""

    generations: list[int]


class _Draft:
    """One open sequence: the first `valid` tokens have draft keys; `chain` are tokens drafted after `base` whose keys exist."""

    __slots__ = ("base", "chain", "faults", "marked", "valid")

    def __init__(self) -> None:
        self.valid = 0
        self.marked = 0  # leading pages already noted as filled
        self.base = 0
        self.chain: list[int] = []
        self.faults = 0


class _Growing:
    """A sequence being drafted for in this call."""

    __slots__ = ("budget", "chain", "draft", "growth", "place", "room", "view")

    def __init__(self, place: int, view: SequenceView, budget: Budget, draft: _Draft, growth: Growth, room: int) -> None:
        self.place = place
        self.view = view
        self.budget = budget
        self.draft = draft
        self.growth = growth
        self.room = room  # slots after the root
        self.chain: list[Node] = []  # nodes whose keys lie right after the root, each the child of the one before


class ModelDrafter:
    """The `Drafter` protocol over any decoder with the target's vocabulary."""

    def __init__(
        self,
        name: str,
        decoder: Decoder,
        store: KVTensors,
        pages: Pages,
        *,
        vocab_size: int | None = None,
        fan: int = 4,
        width: int = 4,
        catch_up_tokens: int = 256,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`vocab_size`: ids below it may be proposed (padding rows above it never are). `fan`: children scored per node.
        `width`: nodes of one sequence expanded per pass. `catch_up_tokens`: committed tokens run per step, all together.
        `clock`: seconds.
        """
        self.name = name
        self._decoder = decoder
        self._store = store
        self._pages = pages
        self._vocab = min(decoder.shape.vocab_size, vocab_size or decoder.shape.vocab_size)
        self._fan = fan
        self._width = width
        self._catch_up_tokens = catch_up_tokens
        self._clock = clock
        self._passes = PassClock()
        self._drafts: dict[int, _Draft] = {}
        self._filled: dict[int, int] = {}  # page -> the generation under which this store was filled
        self._faults = 0

    # --- the protocol -------------------------------------------------------------------------------------------------

    def open(self, view: SequenceView) -> None:
        self._drafts[view.seq_id] = self._begin(view)

    def observe(self, outcomes: Sequence[Outcome], hidden: torch.Tensor) -> None:
        """Drafted tokens that were committed are valid: their keys are in place. Read now, while the sequence still
        owns the pages of its window; what else was drafted is worthless once they are given back."""
        for outcome in outcomes:
            draft = self._drafts.get(outcome.view.seq_id)
            if draft is None or not draft.chain:
                continue
            committed = outcome.view.token_ids[draft.base :]
            for token, drafted in zip(committed, draft.chain, strict=False):
                if token != drafted:
                    break
                draft.valid += 1
            draft.chain = []

    def close(self, seq_id: int) -> None:
        self._drafts.pop(seq_id, None)

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Proposal]:
        if self._faults >= _MAX_FAULTS:
            return [NOTHING] * len(views)
        try:
            with torch.inference_mode():
                return self._propose(views, budgets)
        except Exception:
            self._faults += 1
            log.exception("draft model %s failed (%d of %d) and drafts nothing", self.name, self._faults, _MAX_FAULTS)
            for view in views:
                self._drafts.pop(view.seq_id, None)  # what it had written is not to be trusted
                self._forget(view)
            return [NOTHING] * len(views)

    # --- what is filled -----------------------------------------------------------------------------------------------

    def _begin(self, view: SequenceView) -> _Draft:
        """A new sequence starts after the leading pages that were filled for the very content they hold."""
        draft = _Draft()
        for page in view.page_ids:
            if self._filled.get(page) != self._pages.generations[page]:
                break
            draft.marked += 1
        size = self._store.page_size
        draft.valid = min(draft.marked * size, len(view.token_ids) - 1)
        draft.marked = draft.valid // size
        return draft

    def _forget(self, view: SequenceView) -> None:
        for page in view.page_ids:
            self._filled.pop(page, None)

    def _settle(self, view: SequenceView) -> _Draft:
        draft = self._drafts.get(view.seq_id)
        if draft is None:
            draft = self._drafts[view.seq_id] = self._begin(view)
        draft.chain = []
        draft.valid = min(draft.valid, len(view.token_ids) - 1)  # the last token is always run: its scores are wanted
        return draft

    def _mark(self, view: SequenceView, draft: _Draft) -> None:
        full = draft.valid // self._store.page_size
        for page in view.page_ids[draft.marked : full]:
            self._filled[page] = self._pages.generations[page]
        draft.marked = max(draft.marked, full)

    # --- drafting -----------------------------------------------------------------------------------------------------

    def _propose(self, views: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Proposal]:
        proposals = [NOTHING] * len(views)
        growing = self._candidates(views, budgets)
        if not growing:
            return proposals
        price = growing[0].budget.pass_price
        if sum(g.growth.promise(None) for g in growing) <= price(self._passes.estimate(len(growing))):
            return proposals
        ready = self._catch_up(growing)
        while ready and self._grow(ready, price):
            pass
        for g in ready:
            g.draft.base = len(g.view.token_ids)
            g.draft.chain = [node.token for node in g.chain]
            proposals[g.place] = g.growth.proposal()
        return proposals

    def _candidates(self, views: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[_Growing]:
        """The sequences this model may draft for: wanted, inside its own context, and not in trouble."""
        found = []
        for place, (view, budget) in enumerate(zip(views, budgets, strict=True)):
            if not budget.wants(self.name) or len(view.token_ids) >= self._decoder.shape.max_position:
                continue
            draft = self._settle(view)
            if draft.faults >= _MAX_FAULTS:
                continue
            room = min(len(view.page_ids) * self._store.page_size, self._decoder.shape.max_position) - len(view.token_ids)
            fan = 1 if is_drawn(view) else self._fan
            if room < 0:
                continue
            found.append(_Growing(place, view, budget, draft, Growth(self.name, budget, fan), min(room, _WINDOW)))
        return found

    def _catch_up(self, growing: list[_Growing]) -> list[_Growing]:
        """Run committed tokens without draft keys, shortest backlog first; those that got through are scored and returned."""
        left = self._catch_up_tokens
        rows: list[DraftRow] = []
        run: list[tuple[_Growing, bool]] = []
        for g in sorted(growing, key=lambda g: (len(g.view.token_ids) - g.draft.valid, g.place)):
            tokens = g.view.token_ids[g.draft.valid : g.draft.valid + left]
            if not tokens:
                break
            left -= len(tokens)
            done = g.draft.valid + len(tokens) == len(g.view.token_ids)
            rows.append(DraftRow(tokens, None, g.draft.valid, g.view.page_ids, (len(tokens) - 1,) if done else ()))
            run.append((g, done))
        logits = self._forward(rows, timed=all(done for _, done in run))
        for (g, _), row in zip(run, rows, strict=True):
            g.draft.valid += len(row.token_ids)
            self._mark(g.view, g.draft)
        ready = [g for g, done in run if done]
        if ready:
            self._add([(g, None) for g in ready], logits)
        return [g for g in ready if g.growth.nodes]

    def _grow(self, ready: list[_Growing], price: Callable[[float], float]) -> bool:
        """One more pass over the most promising nodes of all sequences, if it pays. False = stop."""
        ranked = [(gain, g, node) for g in ready for gain, node in g.growth.next_to_expand(self._width) if node.depth <= g.room]
        ranked.sort(key=lambda item: -item[0])
        count = worthwhile([gain for gain, _, _ in ranked], lambda rows: price(self._passes.estimate(rows)))
        if not count:
            return False
        picks: dict[int, tuple[_Growing, list[Node]]] = {}
        for _, g, node in ranked[:count]:
            picks.setdefault(g.place, (g, []))[1].append(node)
        rows: list[DraftRow] = []
        asked: list[tuple[_Growing, Node | None]] = []
        chains: list[tuple[_Growing, list[Node]]] = []
        for g, wanted in picks.values():
            kept, order, parents = forest(g.chain, wanted)
            if kept + len(order) > g.room:
                continue
            targets = {node.index for node in wanted}
            scored = [i for i, node in enumerate(order) if node.index in targets]
            start = len(g.view.token_ids) + kept
            rows.append(DraftRow([node.token for node in order], parents, start, g.view.page_ids, scored))
            asked += [(g, order[i]) for i in scored]
            chains.append((g, chain_after(g.chain, kept, order, parents)))
        if not rows:
            return False
        logits = self._forward(rows, timed=True)
        for g, chain in chains:
            g.chain = chain
        self._add(asked, logits)
        return True

    def _add(self, asked: list[tuple[_Growing, Node | None]], logits: torch.Tensor) -> None:
        """Give every asked node its children; a sequence with scores that are not numbers starts over."""
        views = [g.view for g, _ in asked]
        depths = [0 if node is None else node.depth for _, node in asked]
        scores = choices(logits[:, : self._vocab], views, depths, self._fan, self.name)
        broken: set[int] = set()
        for (g, node), found in zip(asked, scores, strict=True):
            if found is not None and g.place not in broken:
                g.growth.add_children(node, found.token_ids, found.confidence, found.probs)
            elif g.place not in broken:
                broken.add(g.place)
                self._reset(g)

    def _reset(self, g: _Growing) -> None:
        g.draft.valid, g.draft.marked = 0, 0
        g.draft.faults += 1
        g.growth.nodes.clear()
        g.chain.clear()
        self._forget(g.view)

    def _forward(self, rows: list[DraftRow], *, timed: bool) -> torch.Tensor:
        """Logits of the scored nodes [R, vocab]; [0, vocab] when none is."""
        nothing = not any(row.scored for row in rows)
        if nothing:  # decoders want a node to score
            first = rows[0]
            rows = [DraftRow(first.token_ids, first.parents, first.kv_len, first.page_ids, (0,)), *rows[1:]]
        began = self._clock()
        out = self._decoder.forward(draft_inputs(rows, self._store.page_size, self._store.k.device), self._store, True)
        if out.logits is None:
            raise ValueError("the draft decoder gave no logits")
        if timed:
            self._passes.record(sum(len(row.token_ids) for row in rows), (self._clock() - began) * 1e3)
        return out.logits[:0] if nothing else out.logits
