"""Continuous batching: which sequences run in the next step and with how many tokens. Knows ints and pages; refuses to know
tensors, drafters and what the target says.

Order of a step: every decoding sequence first (one root each), then prompt chunks in what `chunk_tokens` leaves. A sequence is
admitted when its whole prompt fits beside the promises made to others, so prompts never fight for pages; only growing answers
can run out, and then the youngest sequence goes back to the queue and is recomputed later, mostly from the prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterable

from spec.config import EngineConfig
from spec.errors import InvariantError
from spec.paging import Paging
from spec.plan import PlanRow, StepPlan
from spec.prompt_scores import SCORED_TOKENS
from spec.sequence import Phase, Sequence
from spec.speculator import Limit
from spec.waiting import WaitingQueue

MAX_PREFILLING = 8  # prompts in hand at once; more would only make each other's first token later (scored ones take a small part only and do not count)


class Scheduler:
    """Writes phases, pages and `num_kv` (prefix hits); never tokens."""

    def __init__(self, config: EngineConfig, paging: Paging) -> None:
        self.config = config
        self.paging = paging
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.prefix_queries = 0  # prompt tokens looked up; recomputation after a preemption is not counted
        self.prefix_hits = 0
        self._scorable = 0  # scored prompt tokens the plan has room for
        self._rows: dict[int, PlanRow] = {}  # the plan in the making, by sequence id

    def add(self, sequence: Sequence) -> None:
        self.waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """The sequence ends, wherever it stands; its pages come back now, and the full ones may serve others."""
        if sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self.paging.publish(sequence)
            self.paging.release(sequence)
        sequence.move_to(Phase.FINISHED)

    def plan(self, now: float) -> StepPlan:
        """`now`: engine clock in seconds. Every row of the result has its pages."""
        plan = StepPlan()
        self._rows = {}
        self._scorable = SCORED_TOKENS
        prefilling, prompts = 0, False
        for sequence in list(self.running):
            if sequence.phase is Phase.DECODE:
                if self._make_room(sequence, len(sequence.token_ids), plan):
                    self._rows[sequence.seq_id] = self._row(sequence, 1)
            elif sequence.phase is Phase.PREFILL:
                prompts = True
                prefilling += _counts(sequence)
        if not plan.preempted and len(self.waiting):
            prompts |= self._admit(plan, now, prefilling)
        if prompts:
            self._fill_chunk(plan)
        plan.rows = list(self._rows.values())
        for row in plan.rows:
            if row.decoding:
                plan.num_decoding += 1
            else:
                plan.prefill_tokens += len(row.token_ids)
        return plan

    def limits(self, sequences: Iterable[Sequence]) -> list[Limit]:
        """Hard draft limits of the decoding sequences of a plan. Pages that are short shrink drafts; nobody is preempted."""
        spare = self.paging.pool.available
        page_size = self.paging.page_size
        limits: list[Limit] = []
        for sequence in sequences:
            nodes = self.config.max_tree_nodes
            policy = sequence.policy
            if policy.max_nodes is not None and policy.max_nodes < nodes:
                nodes = policy.max_nodes
            depth = sequence.max_length - len(sequence.token_ids) - 1
            if depth <= 0 or policy.mode == "off":
                nodes = 0
            room = len(sequence.page_ids) * page_size - len(sequence.token_ids)  # slots behind the root
            if nodes > room:
                pages = min(self.paging.pages_for(nodes - room), spare)
                spare -= pages
                nodes = min(nodes, room + pages * page_size)
            limits.append(Limit(nodes, min(depth, nodes)))
        return limits

    def reserve_window(self, sequence: Sequence, nodes: int) -> None:
        """Pages for the root and `nodes` drafted nodes, within what `limits` promised."""
        if not self.paging.reserve(sequence, len(sequence.token_ids) + nodes):
            raise InvariantError(f"sequence {sequence.seq_id} may not draft {nodes} nodes: the pool is short of pages")

    # --- room -------------------------------------------------------------------------------------------------------

    def _make_room(self, sequence: Sequence, tokens: int, plan: StepPlan) -> bool:
        """Pages for `tokens` positions, preempting the youngest sequences if need be. False: `sequence` itself had to go."""
        while sequence.phase is not Phase.WAITING:
            if self.paging.reserve(sequence, tokens):
                return True
            self._preempt(max(self.running, key=lambda other: other.ordinal), plan)
        return False

    def _preempt(self, sequence: Sequence, plan: StepPlan) -> None:
        self.running.remove(sequence)
        self._rows.pop(sequence.seq_id, None)
        self.paging.release(sequence)  # its full pages were published when they were committed: they stay as cached ones
        sequence.move_to(Phase.WAITING)
        sequence.recomputing = True
        self.waiting.add(sequence)
        self.preemptions += 1
        plan.preempted.append(sequence.seq_id)

    # --- prompts ----------------------------------------------------------------------------------------------------

    def _admit(self, plan: StepPlan, now: float, prefilling: int) -> bool:
        """Start waiting sequences while there is room for their whole prompts. Returns whether one was started."""
        promised = sum(self._unmet(sequence) for sequence in self.running if sequence.phase is Phase.PREFILL)
        while len(self.running) < self.config.max_sequences and prefilling < MAX_PREFILLING:
            sequence = self.waiting.head()
            if sequence is None:
                break
            shared, cached = self.paging.peek(sequence)
            needed = self._unmet(sequence) - shared
            # One page a running sequence in reserve, or the newcomer would be preempted by their next tokens.
            if self.running and self.paging.pool.available - cached - promised < needed + len(self.running):
                break
            self.waiting.admit(sequence)
            sequence.move_to(Phase.PREFILL)
            self.running.append(sequence)
            self._count_hits(sequence, self.paging.match(sequence), first=True)
            if sequence.scheduled_at is None:
                sequence.scheduled_at = now
            promised += self._unmet(sequence)
            plan.admitted.append(sequence.seq_id)
            prefilling += _counts(sequence)
        return bool(plan.admitted)

    def _unmet(self, sequence: Sequence) -> int:
        """Pages the sequence still needs to finish its known tokens and hold its next root."""
        needed = min(self.paging.pages_for(len(sequence.token_ids) + 1), self.paging.pool.total)
        return needed - len(sequence.page_ids)

    def _count_hits(self, sequence: Sequence, hits: int, first: bool = False) -> None:
        if sequence.recomputing or sequence.scores_prompt:
            return
        if first:
            self.prefix_queries += sequence.prompt_len
        known = sequence.prompt_len - 1 - sequence.cached_tokens  # a resumed answer may hit beyond its prompt
        hits = min(hits, known // self.paging.page_size * self.paging.page_size)
        sequence.cached_tokens += hits
        self.prefix_hits += hits

    def _fill_chunk(self, plan: StepPlan) -> None:
        """Share the chunk: at least half of it to the oldest prompt, the rest to the shortest ones first, so that a short
        prompt never waits for a long one to end and a long one takes at most twice its time alone.

        A prompt whose next page is being computed by another one in this very step waits for it and takes it next step.
        """
        prompts = sorted((s for s in self.running if s.phase is Phase.PREFILL), key=lambda s: s.ordinal)
        if not prompts:
            return  # the only one was preempted while the decoding rows took their pages
        oldest, others = prompts[0], prompts[1:]
        others.sort(key=_missing)
        left = self.config.chunk_tokens
        in_work: set[bytes] = set()
        first = max(left // 2, 1) if others else left
        left -= self._grant(oldest, min(first, left), in_work, plan)
        for sequence in others:
            if left == 0:
                break
            if sequence.phase is Phase.PREFILL:
                left -= self._grant(sequence, left, in_work, plan)
        if left and oldest.seq_id in self._rows:
            granted = len(self._rows[oldest.seq_id].token_ids)
            if granted < _missing(oldest):
                self._grant(oldest, granted + left, in_work, plan)

    def _grant(self, sequence: Sequence, tokens: int, in_work: set[bytes], plan: StepPlan) -> int:
        """Put up to `tokens` known tokens of the sequence into the plan; returns how many."""
        if sequence.seq_id not in self._rows:
            self._count_hits(sequence, self.paging.match(sequence))
            if self.paging.next_digest(sequence) in in_work:
                return 0
        tokens = min(tokens, _missing(sequence))
        held = len(self._rows[sequence.seq_id].token_ids) if sequence.seq_id in self._rows else 0
        if sequence.scores_prompt:
            tokens = min(tokens, held + self._scorable)
        if tokens == held or not self._make_room(sequence, sequence.num_kv + tokens, plan):
            return 0
        if sequence.scores_prompt:
            self._scorable -= tokens - held
        in_work.update(self.paging.pages_touched(sequence, tokens))
        self._rows[sequence.seq_id] = self._row(sequence, tokens)
        return tokens

    @staticmethod
    def _row(sequence: Sequence, tokens: int) -> PlanRow:
        start = sequence.num_kv
        stop = start + tokens
        return PlanRow(
            seq_id=sequence.seq_id,
            num_kv=start,
            token_ids=sequence.token_ids[start:stop],
            page_ids=sequence.page_ids,
            scored=stop == len(sequence.token_ids),
            decoding=sequence.phase is Phase.DECODE,
            prompt_scored=sequence.scores_prompt,
        )


def _counts(sequence: Sequence) -> bool:
    """Whether the prompt is one of the MAX_PREFILLING in hand."""
    return not sequence.scores_prompt


def _missing(sequence: Sequence) -> int:
    """Known tokens without keys."""
    return len(sequence.token_ids) - sequence.num_kv
