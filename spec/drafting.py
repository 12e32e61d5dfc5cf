"""All drafters as one, with their faults contained. Knows the Drafter and Speculator interfaces; refuses to know any drafter.

Whatever a drafter does (raises, offers ids outside the vocabulary, too many nodes, NaN), the cost is speed: the proposal is
dropped, the fault counted, the drafter closed for that sequence, and after MAX_FAULTS faults closed for good with one log line.
A speculator in trouble is contained the same way: the step goes on as plain decoding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from spec.drafter import Budget, Drafter, Outcome, SequenceView
from spec.errors import InvariantError
from spec.flaws import find_flaw, too_large
from spec.sequence import Sequence as EngineSequence
from spec.speculator import Limit, Load, Speculator, StepRecord
from spec.tree import NOTHING, DraftTree, Proposal

MAX_FAULTS = 3
TELL_EVERY = 8  # plain steps
_VAIN = 16  # looks that came to nothing after which one step more is left out between two looks
_LEFT_OUT = 3  # steps at most
_NO_ROOM = Limit(0, 0)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Member:
    drafter: Drafter
    name: str
    hopes: Callable[[Sequence[SequenceView]], Sequence[int]] | None  # of spec.drafter.Glancing
    watch: Callable[[Sequence[SequenceView], Sequence[torch.Tensor], int], None] | None  # of spec.drafter.Watching
    sure: bool
    faults: int = 0
    serves: set[int] = field(default_factory=set)  # sequences whose policy lets it draft
    opened: set[int] = field(default_factory=set)  # of those, the ones that decode


def _member(drafter: Drafter) -> _Member:
    hopes, watch = getattr(drafter, "hopes", None), getattr(drafter, "watch", None)
    return _Member(drafter, drafter.name, hopes, watch, getattr(drafter, "sure", True))


class DraftTeam:
    """`seconds` and `faults` are totals by drafter name, for the metrics."""

    def __init__(
        self, drafters: Sequence[Drafter], speculator: Speculator, vocab_size: int, clock: Callable[[], float]
    ) -> None:
        self.speculator_faults = 0
        self.seconds = {drafter.name: 0.0 for drafter in drafters}
        self.faults = {drafter.name: 0 for drafter in drafters}
        self.last_ms: dict[str, float] = {}  # drafting time of the latest step that decoded
        self._members = [_member(drafter) for drafter in drafters]
        self._plain_views: Sequence[EngineSequence] = []  # of plain steps that watching drafters were not told of
        self._plain_states: list[torch.Tensor] = []
        self._untold = 0  # plain steps the speculator does not know of
        self._hopes: list[bool] | None = None  # of the sequences in this step; None = nobody can tell
        self._sure = True  # only drafters that are sure of it have hope
        self._vain = 0  # looks since a tree came of one
        self._wait = 0  # steps until the next look
        self._patient = getattr(speculator, "patient", False)  # of spec.speculator.Patient
        self._refused: Callable[[int], Collection[str]] = getattr(speculator, "refused", nobody)
        self._speculator = speculator
        self._vocab_size = vocab_size
        self._clock = clock

    @property
    def active(self) -> bool:
        return bool(self._members)

    @property
    def watches(self) -> bool:
        """Whether somebody must be told of steps in which nobody drafts and no sequence ends."""
        return any(member.drafter.watches for member in self._members)

    @property
    def hoped(self) -> bool:
        """Whether only sequences were asked about in this step that somebody was sure of."""
        return self._hopes is not None and self._sure

    # --- a sequence's life ------------------------------------------------------------------------------------------

    def admit(self, sequence: EngineSequence) -> None:
        """The sequence starts prefilling. Its policy is read here."""
        policy = sequence.policy
        if policy.mode == "off" or policy.max_nodes == 0:
            return
        for member in self._members:
            if policy.drafters is None or member.name in policy.drafters:
                member.serves.add(sequence.seq_id)

    def open(self, sequence: EngineSequence) -> None:
        """The sequence starts decoding: its first token of this run is in `token_ids`."""
        for member in list(self._members):
            if sequence.seq_id in member.serves:
                # One more of n about which nothing is known: so much of what was seen of looks counts no more.
                self._vain -= self._vain // (len(member.opened) + 1)
                self._wait = 0
                try:
                    member.drafter.open(sequence)
                    member.opened.add(sequence.seq_id)
                except Exception as error:
                    self._fault(member, sequence.seq_id, f"open raised {error!r}")

    def close(self, seq_id: int) -> None:
        """The sequence left: finished, cancelled or preempted."""
        self.settle()
        for member in list(self._members):
            if seq_id in member.serves:  # it was told of the prompt's chunks even where decoding never began
                member.serves.discard(seq_id)
                member.opened.discard(seq_id)
                try:
                    member.drafter.close(seq_id)
                except Exception as error:
                    self._fault(member, seq_id, f"close raised {error!r}")

    # --- one step ---------------------------------------------------------------------------------------------------

    def rests(self, sequences: Sequence[EngineSequence]) -> bool:
        """Whether this step passes as plain decoding: the speculator says so, or nobody has anything to offer.

        A look costs one to two percent of a small model's step. Where nothing comes of it, because texts copy nothing or because no copy
        pays under this load, it is taken less often; what that may cost is up to three tokens where a copy begins.
        """
        try:
            if self._speculator.rests(sequences):
                return True
        except Exception as error:
            self._speculator_fault("rests", error)
            return True
        if self._wait:
            self._wait -= 1
            return True
        self._hopes = self._look(sequences)
        if self._hopes is None:
            return False
        self._vain += 1
        if self._patient:
            self._wait = min(_LEFT_OUT, self._vain // _VAIN)
        return True not in self._hopes

    def passed(self) -> bool:
        """A step passed as plain decoding. True: it is time to `tell` the speculator."""
        self._untold += 1
        return self._untold >= TELL_EVERY

    def tell(self, sequences: int, load: Load, target_ms: float, total_ms: float) -> None:
        """What the latest plain step cost."""
        steps, self._untold = self._untold, 0
        try:
            self._speculator.passed(steps, sequences, load, target_ms, total_ms)
        except Exception as error:
            self._speculator_fault("passed", error)

    def _look(self, sequences: Sequence[EngineSequence]) -> list[bool] | None:
        """For which sequences some drafter has hope. None when one of them cannot tell."""
        hopes = [False] * len(sequences)
        self._sure = True
        try:
            refused = self._refused(len(sequences))
        except Exception as error:
            self._speculator_fault("refused", error)
            return hopes
        for member in list(self._members):
            opened = member.opened
            if not opened or member.name in refused:
                continue
            if member.hopes is None:
                return None
            mine = [i for i, sequence in enumerate(sequences) if sequence.seq_id in opened]
            if not mine:
                continue
            start = self._clock()
            try:
                for i in member.hopes([sequences[i] for i in mine]):
                    hopes[mine[i]] = True
                    self._sure = self._sure and member.sure
            except Exception as error:
                self._fault(member, None, f"hopes raised {error!r}")
            self.seconds[member.name] += self._clock() - start
        return hopes

    def budgets(self, sequences: Sequence[EngineSequence], limits: Sequence[Limit], load: Load) -> list[Budget] | None:
        """What each sequence may draft now; None when nobody may, and then the step is plain decoding."""
        self.last_ms = {}
        if self._hopes is not None:
            limits = [limit if hope else _NO_ROOM for limit, hope in zip(limits, self._hopes, strict=True)]
        if not any(limit.max_nodes for limit in limits):
            return None
        try:
            budgets = self._speculator.budgets(sequences, limits, load)
            if any(budget.max_nodes > limit.max_nodes for budget, limit in zip(budgets, limits, strict=True)):
                raise InvariantError("a budget is above its limit")
        except Exception as error:
            self._speculator_fault("budgets", error)
            return None
        return budgets if any(budget.max_nodes > 0 for budget in budgets) else None

    def propose(self, sequences: Sequence[EngineSequence], budgets: Sequence[Budget]) -> list[DraftTree] | None:
        """One tree per sequence, merged and priced by the speculator; None when nothing was drafted."""
        proposals: dict[str, Sequence[Proposal]] = {}
        for member in list(self._members):
            opened = member.opened
            asked = [i for i, s in enumerate(sequences) if budgets[i].max_nodes > 0 and s.seq_id in opened]
            if asked:
                offered = self._ask(member, sequences, budgets, asked)
                if any(proposal.token_ids for proposal in offered):
                    proposals[member.name] = offered
        if not proposals:
            return None
        try:
            trees = self._speculator.admit(sequences, budgets, proposals)
            if any(too_large(tree, budget) for tree, budget in zip(trees, budgets, strict=True)):
                raise InvariantError("a tree is above its budget")
        except Exception as error:
            self._speculator_fault("admit", error)
            return None
        if any(tree.token_ids for tree in trees):
            self._vain = self._wait = 0
        return trees

    def observe(self, outcomes: Sequence[Outcome], hidden: torch.Tensor) -> None:
        """Tell every drafter what became of the sequences it serves, prompt chunks included."""
        for member in list(self._members):
            serves = member.serves
            mine = [outcome for outcome in outcomes if outcome.view.seq_id in serves]
            if not mine:
                continue
            start = self._clock()
            try:
                member.drafter.observe(mine, hidden)
            except Exception as error:
                self._fault(member, None, f"observe raised {error!r}")
            self._charge(member, start)

    def watch(self, sequences: Sequence[EngineSequence], hidden: torch.Tensor, held: int) -> bool:
        """A plain step, in which every sequence got one token. Those who watch are told of `held` such steps at once, or when `settle` is
        called, which must be before more than `held` - 1 passes have followed. False: somebody wants outcomes."""
        watching = [member for member in self._members if member.drafter.watches]
        if any(member.watch is None for member in watching):
            return False
        if watching:
            if self._plain_views != sequences:
                self.settle(1)
                self._plain_views = sequences
            self._plain_states.append(hidden)
            if len(self._plain_states) >= held:
                self.settle()
        return True

    def settle(self, behind: int = 0) -> None:
        """Tell of the plain steps not told yet. `behind`: steps that were committed after them."""
        if not self._plain_states:
            return
        views, states = self._plain_views, self._plain_states
        self._plain_views, self._plain_states = [], []
        for member in list(self._members):
            serves = member.serves
            mine = [i for i, view in enumerate(views) if view.seq_id in serves]
            if not mine or member.watch is None or not member.drafter.watches:
                continue
            start = self._clock()
            try:
                if len(mine) == len(views):
                    member.watch(views, states, behind)
                else:
                    member.watch([views[i] for i in mine], [step[mine] for step in states], behind)
            except Exception as error:
                self._fault(member, None, f"watch raised {error!r}")
            self.seconds[member.name] += self._clock() - start

    def record(self, step: StepRecord) -> None:
        try:
            self._speculator.record(step)
        except Exception as error:
            self._speculator_fault("record", error)

    # --- faults -----------------------------------------------------------------------------------------------------

    def _ask(
        self, member: _Member, sequences: Sequence[EngineSequence], budgets: Sequence[Budget], asked: list[int]
    ) -> list[Proposal]:
        """The member's proposals, NOTHING for sequences it was not asked about or drafted garbage for."""
        offered = [NOTHING] * len(sequences)
        start = self._clock()
        try:
            answers = member.drafter.propose([sequences[i] for i in asked], [budgets[i] for i in asked])
            if len(answers) != len(asked):
                raise ValueError(f"{len(answers)} proposals for {len(asked)} sequences")
        except Exception as error:
            self._fault(member, None, f"propose raised {error!r}")
            return offered
        finally:
            self._charge(member, start)
        for i, proposal in zip(asked, answers, strict=True):
            if not proposal.token_ids:
                continue
            flaw = find_flaw(proposal, budgets[i], self._vocab_size)
            if flaw is None:
                offered[i] = proposal
            else:
                self._fault(member, sequences[i].seq_id, flaw)
        return offered

    def _charge(self, member: _Member, start: float) -> None:
        seconds = self._clock() - start
        self.seconds[member.name] += seconds
        self.last_ms[member.name] = self.last_ms.get(member.name, 0.0) + seconds * 1e3

    def _speculator_fault(self, method: str, error: Exception) -> None:
        """Count it; after too many, give up drafting altogether."""
        self.speculator_faults += 1
        if self.speculator_faults == MAX_FAULTS:
            log.warning("speculation is switched off after %d faults; the last one: %s raised %r", MAX_FAULTS, method, error)
            for member in self._members:
                for served in member.serves:
                    _quietly(member.drafter.close, served)
            self._members.clear()

    def _fault(self, member: _Member, seq_id: int | None, what: str) -> None:
        """Count it; close the drafter for the sequence, and for everybody after too many."""
        member.faults += 1
        self.faults[member.name] += 1
        if seq_id is not None:
            member.serves.discard(seq_id)
            member.opened.discard(seq_id)
            _quietly(member.drafter.close, seq_id)
        if member.faults == MAX_FAULTS and member in self._members:
            self._members.remove(member)
            log.warning("drafter %s is switched off after %d faults; the last one: %s", member.name, MAX_FAULTS, what)
            for served in member.serves:
                _quietly(member.drafter.close, served)


def nobody(_sequences: int) -> Collection[str]:
    return ()


def _quietly(close: Callable[[int], None], seq_id: int) -> None:
    """Close a drafter that is being given up; what it raises was counted already."""
    try:
        close(seq_id)
    except Exception as error:
        log.debug("closing sequence %d raised %r", seq_id, error)
