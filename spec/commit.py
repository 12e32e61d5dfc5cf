"""The one place where what the target said becomes part of a sequence. Knows tokens, ends and slots; refuses to know pages'
owners, drafters and text.

The earliest of end token, stop token, max_tokens and context edge wins, inside an accepted run too: ids, sources, logprobs,
counts and committed keys are all cut at that place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spec.accept import Acceptance
from spec.errors import RequestError
from spec.plan import PlanRow
from spec.request import FinishReason, StepCounts, TokenEvent, TokenLogprob
from spec.sequence import Phase, Sequence
from spec.tree import ROOT, DraftTree

if TYPE_CHECKING:  # the parser behind it is loaded only where grammars are used
    from spec.grammar import GrammarState

_NO_COUNTS = StepCounts()


@dataclass(slots=True)
class Moves:
    """Accepted keys that lie behind rejected ones, gathered over all rows of a step: slots to copy from and to."""

    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)


def commit_chunk(sequence: Sequence, row: PlanRow) -> None:
    """A prompt chunk that did not reach the prompt's end: its keys are committed, nothing is said."""
    sequence.num_kv = row.num_kv + len(row.token_ids)


def commit(
    sequence: Sequence, row: PlanRow, tree: DraftTree, acceptance: Acceptance, page_size: int, moves: Moves
) -> TokenEvent:
    """Append the accepted tokens and `next`, cut at the first end; returns what the server is told.

    Writes `token_ids`, `num_kv`, `phase` (PREFILL becomes DECODE) and `finish_reason`. A finished sequence keeps its pages
    until the scheduler removes it.
    """
    length = len(sequence.token_ids)
    run = [tree.token_ids[node] for node in acceptance.path]
    if acceptance.error is None:
        run.append(acceptance.next_id)
    reason: FinishReason | None = None
    if sequence.remaining <= 0:  # only the prompt was asked for
        run, reason = [], None if acceptance.error else "length"
    for count, token in enumerate(run, 1):
        reason = sequence.ends_with(length + count, token)
        if reason is not None:
            del run[count:]
            break
    error = acceptance.error if reason is None else None  # what failed behind the end was never asked for
    if sequence.grammar is not None and (failed := _follow(sequence.grammar, run)) is not None:
        error = failed
    if error is not None:
        reason = "error"
    sequence.token_ids += run
    # Keys exist for the known tokens and the path; the newest token stays the pending root. Where the target said nothing (an
    # error), the keys of this step are as doubtful as its scores and are not committed.
    sequence.num_kv = len(sequence.token_ids) - 1 if run else row.num_kv
    if acceptance.path:
        _compact(acceptance.path[: max(sequence.num_kv - length, 0)], length, row.page_ids, page_size, moves)
    if sequence.phase is Phase.PREFILL:
        sequence.move_to(Phase.DECODE)
    sequence.finish_reason = reason
    return _event(sequence, tree, acceptance, run, error.code if error else None, str(error) if error else None)


def _follow(grammar: GrammarState, run: list[int]) -> RequestError | None:
    """Move the grammar along the run, and cut the run before a token at which the grammar fails: plain decoding ends there too."""
    for count, token in enumerate(run):
        try:
            grammar.advance((token,))
        except RequestError as error:
            del run[count:]
            return error
    return None


def failure(sequence: Sequence, message: str, code: str) -> TokenEvent:
    """End one request with an error; its pages come back when the scheduler removes it."""
    sequence.finish_reason = "error"
    return TokenEvent(request_id=sequence.seq_id, finish_reason="error", error=message, error_code=code)


def _compact(path: tuple[int, ...], start: int, pages: list[int], page_size: int, moves: Moves) -> None:
    """Queue the copies that bring the accepted keys to positions start, start + 1, ...; node i lies at start + i.

    Nothing moves when the accepted path came first in the tree. Over all rows the copies may overlap (a target of one depth is
    a source of the next), so the move op reads every source before it writes.
    """
    for depth, node in enumerate(path):
        if node != depth:
            source, target = start + node, start + depth
            moves.sources.append(pages[source // page_size] * page_size + source % page_size)
            moves.targets.append(pages[target // page_size] * page_size + target % page_size)


def _event(
    sequence: Sequence,
    tree: DraftTree,
    acceptance: Acceptance,
    run: list[int],
    error_code: str | None,
    error: str | None,
) -> TokenEvent:
    accepted = min(len(acceptance.path), len(run))
    sources = tuple([tree.sources[node][0] for node in acceptance.path[:accepted]] + [""] * (len(run) - accepted))
    logprobs: tuple[TokenLogprob, ...] = acceptance.logprobs[: len(run)] if acceptance.logprobs else ()
    first = not sequence.started
    sequence.started = True
    prompt, sequence.prompt_logprobs = tuple(sequence.prompt_logprobs), []
    stopped = sequence.finish_reason == "stop"
    return TokenEvent(
        request_id=sequence.seq_id,
        token_ids=tuple(run),
        sources=sources,
        logprobs=logprobs,
        prompt_logprobs=prompt,
        counts=_counts(tree, acceptance.path, sources[:accepted], len(run)) if tree.token_ids else _NO_COUNTS,
        started=first,
        cached_tokens=sequence.cached_tokens if first else 0,
        queue_seconds=(sequence.scheduled_at or sequence.arrived_at) - sequence.arrived_at if first else 0.0,
        finish_reason=sequence.finish_reason,
        stop_token=run[-1] if stopped else None,
        error=error,
        error_code=error_code,
    )


def _counts(tree: DraftTree, path: tuple[int, ...], accepted_sources: tuple[str, ...], delivered: int) -> StepCounts:
    drafted_by: dict[str, int] = {}
    accepted_by: dict[str, int] = {}
    for names in tree.sources:
        drafted_by[names[0]] = drafted_by.get(names[0], 0) + 1
    for name in accepted_sources:
        accepted_by[name] = accepted_by.get(name, 0) + 1
    accepted = len(accepted_sources)
    # Drafts below the last accepted node were refused, if the target's own token there was delivered.
    refused = delivered > accepted and (path[-1] if path else ROOT) in tree.parents
    return StepCounts(len(tree), accepted, drafted_by, accepted_by, accepted + refused)
