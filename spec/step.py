"""One step: propose, build inputs, run the target, accept, commit, observe. Knows the order; refuses to know how each is done.

Decide, compute, commit: until `_commit_rows` nothing here changes a sequence, except that the scheduler lends it pages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from spec.accept import Acceptance, ScoredRow, accept
from spec.commit import Moves, commit, commit_chunk, failure
from spec.drafter import Outcome
from spec.drafting import DraftTeam
from spec.errors import InvariantError, RequestError
from spec.inputs import pack_inputs
from spec.paging import Paging
from spec.plan import PlanRow, StepPlan
from spec.prompt_scores import PromptScores, keep, prompt_scores
from spec.request import TokenEvent
from spec.sampling import SampleOps, not_finite
from spec.scheduler import Scheduler
from spec.sequence import Phase
from spec.sequence import Sequence as EngineSequence
from spec.speculator import Load, StepRecord
from spec.stats import EngineStats
from spec.store import KVStore
from spec.target import TargetModel, TargetScores
from spec.tree import EMPTY_TREE, DraftTree

log = logging.getLogger(__name__)

_DROPPED = Acceptance((), -1, error=RequestError("the engine failed on this request", code="internal_error"))


@dataclass(frozen=True, slots=True)
class Core:
    """What a step works with; made once by the engine."""

    target: TargetModel
    store: KVStore
    paging: Paging
    scheduler: Scheduler
    team: DraftTeam
    eos_ids: frozenset[int]
    ops: SampleOps
    clock: Callable[[], float]
    stats: EngineStats
    sequences: dict[int, EngineSequence] = field(default_factory=dict)  # every unfinished one, by id


def speculative_step(core: Core, plan: StepPlan, planned: float) -> list[TokenEvent]:
    """Run the plan's rows through the target once and return what its sequences said. `planned`: when the step began to be planned."""
    clock = core.clock
    began = clock()
    sequences = [core.sequences[row.seq_id] for row in plan.rows]

    team, decoding = core.team, sequences[: plan.num_decoding]
    resting = not team.active or (bool(decoding) and team.rests(decoding))
    drafting = bool(decoding) and not resting
    plain = resting and plan.num_decoding == len(plan.rows)
    if not plain:
        team.settle()
    trees = [EMPTY_TREE] * len(plan.rows)
    if drafting:
        trees[: plan.num_decoding] = _propose(core, plan, decoding)
    proposed = clock()

    inputs = pack_inputs(plan.rows, trees, core.paging.page_size, core.target.shares_keys)
    prompts_scored = any(row.prompt_scored for row in plan.rows)
    need_logits = prompts_scored or any(
        row.scored and sequence.needs_logits for row, sequence in zip(plan.rows, sequences, strict=True)
    )
    scores = core.target.run_packed(inputs, need_logits)
    verified = clock()

    acceptances = _accept(core, plan.rows, sequences, trees, scores)
    prompts = prompt_scores(plan.rows, sequences, trees, scores) if prompts_scored else {}
    accepted = clock()

    events = _commit_rows(core, plan.rows, sequences, trees, acceptances, prompts)
    committed = clock()

    if team.active:
        ended = any(event.finish_reason is not None for event in events)
        told = plain and not ended and team.watch(sequences, scores.hidden, core.target.held)
        if not resting or ended or (team.watches and not told):
            if plain:
                team.settle(1)
            outcomes = _outcomes(plan.rows, sequences, trees, acceptances)
            team.observe(outcomes, scores.hidden)
        if resting:
            if team.passed():
                team.tell(plan.num_decoding, _load(plan), (verified - proposed) * 1e3, (clock() - began) * 1e3)
        else:
            _record(core, plan, outcomes, scores, began, proposed, verified)
    observed = clock()

    _give_back(core, sequences)
    done = clock()
    core.stats.end_step(
        done - planned,
        draft=proposed - began + observed - committed,
        verify=verified - proposed,
        accept=accepted - verified,
        commit=committed - accepted + done - observed,
    )
    return events


def _propose(core: Core, plan: StepPlan, decoding: Sequence[EngineSequence]) -> list[DraftTree]:
    """One tree per decoding row. Where nobody may draft this costs little and the step is plain decoding."""
    budgets = core.team.budgets(decoding, core.scheduler.limits(decoding), _load(plan))
    if budgets is None:
        return [EMPTY_TREE] * len(decoding)
    for sequence, budget in zip(decoding, budgets, strict=True):
        core.scheduler.reserve_window(sequence, budget.max_nodes)
    return core.team.propose(decoding, budgets) or [EMPTY_TREE] * len(decoding)


def _accept(
    core: Core,
    rows: Sequence[PlanRow],
    sequences: Sequence[EngineSequence],
    trees: Sequence[DraftTree],
    scores: TargetScores,
) -> list[Acceptance | None]:
    """One acceptance per scored row, None for prompt chunks in between. One row's failure is that row's alone."""
    scored: list[ScoredRow] = []
    first = node = 0
    for row, sequence, tree in zip(rows, sequences, trees, strict=True):
        node += len(row.token_ids)
        if row.prompt_scored:  # the nodes before the one that is accepted at
            first += len(row.token_ids) - row.scored
        if row.scored:
            scored.append(ScoredRow(sequence, tree, first, sequence.grammar, node - 1, not sequence.needs_logits))
            first += len(tree) + 1
        node += len(tree)
    if not scored:
        return [None] * len(rows)
    try:
        found = accept(scored, scores, eos_ids=core.eos_ids, ops=core.ops)
    except Exception:
        log.exception("accepting %d rows at once failed; each is tried alone", len(scored))
        found = [_accept_alone(core, row, scores) for row in scored]
    answers = iter(found)
    return [next(answers) if row.scored else None for row in rows]


def _accept_alone(core: Core, row: ScoredRow, scores: TargetScores) -> Acceptance:
    try:
        return accept([row], scores, eos_ids=core.eos_ids, ops=core.ops)[0]
    except RequestError as error:
        return Acceptance((), -1, error=error)
    except Exception:
        log.exception("request %d is ended: what the target said to it cannot be read", row.view.seq_id)
        return _DROPPED


def _commit_rows(
    core: Core,
    rows: Sequence[PlanRow],
    sequences: Sequence[EngineSequence],
    trees: Sequence[DraftTree],
    acceptances: Sequence[Acceptance | None],
    prompts: PromptScores,
) -> list[TokenEvent]:
    """Write every row's result into its sequence and move accepted keys into place."""
    events: list[TokenEvent] = []
    moves = Moves()
    for row, sequence, tree, acceptance in zip(rows, sequences, trees, acceptances, strict=True):
        if row.prompt_scored:
            entries = prompts[row.seq_id]
            if entries is None:
                acceptance = Acceptance((), -1, error=not_finite())
            else:
                keep(sequence, row, entries)
        if acceptance is None:
            commit_chunk(sequence, row)
            continue
        starts = sequence.phase is Phase.PREFILL
        try:
            event = commit(sequence, row, tree, acceptance, core.paging.page_size, moves)
        except Exception:
            log.exception("request %d is ended: its step could not be committed", sequence.seq_id)
            event = failure(sequence, "the engine failed on this request", "internal_error")
        core.stats.count(event, tree, row.decoding)
        events.append(event)
        if starts and event.finish_reason is None:
            core.team.open(sequence)
    core.store.move(moves.sources, moves.targets)
    return events


def _outcomes(
    rows: Sequence[PlanRow],
    sequences: Sequence[EngineSequence],
    trees: Sequence[DraftTree],
    acceptances: Sequence[Acceptance | None],
) -> list[Outcome]:
    """What became of each row, before its pages are given back."""
    outcomes: list[Outcome] = []
    node = 0
    for row, sequence, tree, acceptance in zip(rows, sequences, trees, acceptances, strict=True):
        count = len(row.token_ids) + len(tree)
        path = acceptance.path if acceptance is not None else ()
        next_id = acceptance.next_id if acceptance is not None and acceptance.error is None else None
        finished = sequence.finish_reason is not None
        outcomes.append(Outcome(sequence, tree, path, next_id, node, count, finished))
        node += count
    return outcomes


def _load(plan: StepPlan) -> Load:
    return Load(plan.prefill_tokens, len(plan.rows), plan.context)


def _record(
    core: Core,
    plan: StepPlan,
    outcomes: Sequence[Outcome],
    scores: TargetScores,
    began: float,
    proposed: float,
    verified: float,
) -> None:
    draft_ms = core.team.last_ms
    # Where nobody was asked after all, deciding so is no part of what plain decoding costs.
    total_ms = (core.clock() - (began if draft_ms else proposed)) * 1e3
    nodes, decoding = scores.hidden.shape[0], outcomes[: plan.num_decoding]
    core.team.record(StepRecord(nodes, _load(plan), decoding, draft_ms, (verified - proposed) * 1e3, total_ms, core.team.hoped))


def _give_back(core: Core, sequences: Sequence[EngineSequence]) -> None:
    """Publish full pages, free the rest of the draft windows, let finished sequences go."""
    for sequence in sequences:
        if sequence.finish_reason is not None:
            core.team.close(sequence.seq_id)
            core.scheduler.remove(sequence)
            del core.sequences[sequence.seq_id]
            continue
        core.paging.publish(sequence)
        core.paging.trim(sequence)
        if sequence.phase is Phase.DECODE and sequence.num_kv != len(sequence.token_ids) - 1:
            raise InvariantError(
                f"sequence {sequence.seq_id} holds {sequence.num_kv} keys for {len(sequence.token_ids)} tokens"
            )
