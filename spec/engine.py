"""The engine: add, cancel, step. Knows requests, phases and figures; refuses to know text, sockets and which drafters there are."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from spec.config import EngineConfig
from spec.drafter import Drafter
from spec.drafting import DraftTeam
from spec.errors import ConfigError, InvariantError, RequestError
from spec.pages import PagePool
from spec.paging import Paging
from spec.request import GrammarSpec, Request, TokenEvent
from spec.sampling import REFERENCE_OPS, SampleOps, need_logits
from spec.scheduler import Scheduler
from spec.sequence import Phase
from spec.sequence import Sequence as EngineSequence
from spec.speculator import Speculator
from spec.stats import EngineStats
from spec.step import Core, speculative_step
from spec.store import REFERENCE_MOVE, KVStore, Move
from spec.target import TargetModel

if TYPE_CHECKING:  # the parser behind it is loaded only where grammars are used
    from spec.grammar import GrammarState


log = logging.getLogger(__name__)


class GrammarMaker(Protocol):
    """spec.grammar.GrammarCompiler as the engine uses it."""

    def compile(self, spec: GrammarSpec) -> GrammarState: ...


class Engine:
    """Single-threaded: one owner calls `add`, `cancel` and `step` in turn.

    An exception that concerns one request ends that request with an error event. One that escapes from `step` (the forward
    pass itself failed) concerns all of them, and the engine must not be used afterwards.
    """

    def __init__(
        self,
        config: EngineConfig,
        target: TargetModel,
        drafters: Sequence[Drafter],
        speculator: Speculator,
        eos_ids: tuple[int, ...],
        grammar_compiler: GrammarMaker | None = None,
        clock: Callable[[], float] = time.perf_counter,
        *,
        pool: PagePool | None = None,
        ops: SampleOps = REFERENCE_OPS,
        move: Move = REFERENCE_MOVE,
    ) -> None:
        """`pool` is given when draft stores lie over the same pages; `ops` and `move` are the fast kernels where there are any.

        Raises ConfigError where sizes do not fit each other.
        """
        _check_sizes(config, target, pool)
        self.config = config
        self.drafters = tuple(drafters)
        self.pool = PagePool(config.num_pages) if pool is None else pool
        self.context = min(config.context, config.num_pages * config.page_size)
        self._end_ids = frozenset(eos_ids)
        self._grammar_compiler = grammar_compiler
        self._clock = clock
        self._stats = EngineStats()
        paging = Paging(config, self.pool)
        self._core = Core(
            target=target,
            store=KVStore(target.store, move),
            paging=paging,
            scheduler=Scheduler(config, paging),
            team=DraftTeam(drafters, speculator, target.vocab_size, clock),
            eos_ids=self._end_ids,
            ops=ops,
            clock=clock,
            stats=self._stats,
        )
        self._close = getattr(speculator, "close", None)  # of spec.speculator.Keeping
        self._events: list[TokenEvent] = []  # said between steps, delivered by the next one
        self._ordinal = 0

    # --- requests ---------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError, and then nothing was queued."""
        self._check(request)
        sequence = EngineSequence(
            request, ordinal=self._ordinal, context=self.context, end_ids=self._end_ids, arrived_at=self._clock()
        )
        sequence.needs_logits = need_logits(request.sampling, request.speculation)
        if request.sampling.grammar is not None:
            sequence.grammar = self._start_grammar(request.sampling.grammar, request.generated_ids)
        self._ordinal += 1
        last = request.generated_ids[-1] if request.generated_ids else None
        ended = sequence.ends_with(len(sequence.token_ids), last) if last is not None else None
        if ended is not None:  # a resumed answer that was complete already
            self._say(TokenEvent(request_id=request.id, started=True, finish_reason=ended))
            return
        self._core.sequences[request.id] = sequence
        self._core.scheduler.add(sequence)

    def cancel(self, request_id: int) -> None:
        """End a request now, waiting or running; its pages are back when this returns. Unknown ids (just ended) are ignored."""
        sequence = self._core.sequences.pop(request_id, None)
        if sequence is None:
            return
        sequence.finish_reason = "cancelled"
        self._core.team.close(request_id)
        self._core.scheduler.remove(sequence)
        self._say(TokenEvent(request_id=request_id, finish_reason="cancelled"))

    def step(self) -> list[TokenEvent]:
        """Run one step and return everything said since the last one. With nothing to do it returns at once."""
        core, stats = self._core, self._stats
        began = self._clock()
        stats.step_phases = ()
        events, self._events = self._events, []
        plan = core.scheduler.plan(began)
        for seq_id in plan.preempted:
            core.team.close(seq_id)
        for seq_id in plan.admitted:
            sequence = core.sequences[seq_id]
            core.team.admit(sequence)
            if not sequence.recomputing:
                stats.prompt_tokens += sequence.prompt_len
        if plan.rows:
            events += speculative_step(core, plan, began)
        return events

    @property
    def step_phases(self) -> tuple[float, ...]:
        """Seconds of the latest step by phase, in the order of spec.request.PHASES; () when it had nothing to run."""
        return self._stats.step_phases

    def close(self) -> None:
        """The engine's owner is done with it: what was learnt is kept for the next one."""
        if self._close is not None:
            try:
                self._close()
            except Exception:
                log.exception("what was learnt in this run could not be kept")

    def has_work(self) -> bool:
        """True while a step would do or say something."""
        return bool(self._core.sequences or self._events)

    # --- figures and checks -----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Gauges and totals since the start. Lists and dicts are copies. Totals never fall; nothing here divides."""
        core, stats, pool = self._core, self._stats, self.pool
        return {
            "num_requests_running": len(core.scheduler.running),
            "num_requests_waiting": len(core.scheduler.waiting),
            "kv_pages_live": pool.live,
            "kv_pages_cached": pool.cached,
            "kv_pages_free": pool.free,
            "prefix_cache_queries": core.scheduler.prefix_queries,
            "prefix_cache_hits": core.scheduler.prefix_hits,
            "prompt_tokens": stats.prompt_tokens,
            "generation_tokens": stats.generation_tokens,
            "finished": dict(stats.finished),
            "preemptions": core.scheduler.preemptions,
            "steps": stats.steps,
            "step_seconds": stats.last_step_seconds,
            "phase_seconds": dict(stats.phase_seconds),
            "row_steps": stats.row_steps,
            "emitted_tokens": stats.emitted,
            "spec_decode_num_drafts": stats.drafts,
            "spec_decode_num_draft_tokens": dict(stats.drafted),
            "spec_decode_num_accepted_tokens": dict(stats.accepted),
            "spec_decode_num_accepted_tokens_per_pos": list(stats.accepted_per_position),
            "spec_decode_num_judged_per_pos": list(stats.judged_per_position),
            "drafter_seconds": dict(core.team.seconds),
            "drafter_faults": dict(core.team.faults),
            "speculator_faults": core.team.speculator_faults,
        }

    def idle_check(self) -> None:
        """Raise InvariantError unless an engine without work holds nothing."""
        if self.has_work():
            raise InvariantError("the engine is not idle")
        self.check()
        if self.pool.live:
            raise InvariantError(f"{self.pool.live} pages are live though nobody runs")

    def check(self) -> None:
        """Raise InvariantError unless pages and sequences agree (O(pages); for tests and idle moments)."""
        core = self._core
        self.pool.check([sequence.page_ids for sequence in core.scheduler.running])
        for sequence in core.sequences.values():
            if len(sequence.page_ids) != core.paging.pages_for(sequence.num_kv):
                raise InvariantError(
                    f"sequence {sequence.seq_id} holds {len(sequence.page_ids)} pages for {sequence.num_kv} keys"
                )
            if sequence.phase is Phase.DECODE and sequence.num_kv != len(sequence.token_ids) - 1:
                raise InvariantError(f"sequence {sequence.seq_id} has no pending root")

    # --- inside -----------------------------------------------------------------------------------------------------

    def _say(self, event: TokenEvent) -> None:
        self._events.append(event)
        if event.finish_reason is not None:
            self._stats.finished[event.finish_reason] += 1

    def _check(self, request: Request) -> None:
        """Raise RequestError for what can never be answered."""
        prompt, known = len(request.prompt_ids), len(request.prompt_ids) + len(request.generated_ids)
        if request.id in self._core.sequences:
            raise RequestError(f"request id {request.id} is in use", code="duplicate_id", param="id")
        if prompt == 0:
            raise RequestError("the prompt is empty; it must hold at least one token", code="empty_prompt", param="prompt")
        if prompt >= self.context or known > self.context:
            raise RequestError(
                f"the prompt has {max(prompt, known)} tokens, but the context holds {self.context}, the answer included; "
                f"at most {self.context - 1} fit",
                code="context_length_exceeded",
                param="messages",
            )
        if request.sampling.max_tokens < (0 if request.sampling.prompt_logprobs is not None else 1):
            raise RequestError(
                f"max_tokens is {request.sampling.max_tokens}; it must be at least 1", code="invalid_value", param="max_tokens"
            )
        vocab_size = self._core.target.vocab_size
        for ids in (request.prompt_ids, request.generated_ids):
            if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
                raise RequestError(
                    f"a prompt token id is outside the vocabulary of {vocab_size} tokens",
                    code="invalid_token_id",
                    param="prompt",
                )

    def _start_grammar(self, spec: GrammarSpec, generated_ids: tuple[int, ...]) -> GrammarState:
        if self._grammar_compiler is None:
            raise RequestError("this engine takes no grammars", code="unsupported_value", param="response_format")
        state = self._grammar_compiler.compile(spec)
        state.advance(generated_ids)
        return state


def _check_sizes(config: EngineConfig, target: TargetModel, pool: PagePool | None) -> None:
    store = target.store
    if (store.num_pages, store.page_size) != (config.num_pages, config.page_size):
        raise ConfigError(
            f"the store has {store.num_pages} pages of {store.page_size} tokens, the config {config.num_pages} of {config.page_size}"
        )
    if pool is not None and pool.total != config.num_pages:
        raise ConfigError(f"the page pool has {pool.total} pages, the config {config.num_pages}")
    longest = target.decoder.shape.max_position
    if config.context > longest:
        raise ConfigError(f"context is {config.context}, but the model's positions end at {longest}")
