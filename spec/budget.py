"""The price rule: how much each request may draft, and which nodes are verified. Knows chances and costs; refuses to know
drafters, tokens' meaning and the scheduler.

f(v), the path chance of a node, is the tokens that verifying it is expected to bring. Time is worth lambda tokens a
millisecond, the speed the engine runs at. So nodes over all requests, best first, are verified as long as

    F(n) - lambda * (T(R + n) - T(R)),      F(n) = sum of the n largest f,  R = rows of the step without drafts

grows: one price for a node, whoever asked for it. At the optimum f >= lambda dT/drows, and lambda being the long-run E / T is
the fixed point of maximising tokens per millisecond (Dinkelbach 1967). A draft pass of m milliseconds must bring lambda * m. With
load T grows faster in rows, so trees shrink to chains and chains to nothing, with no threshold to tune.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from spec.calibration import Calibration
from spec.cost_table import CostTable
from spec.drafter import Budget, ChanceTable, SequenceView
from spec.guard import Worth
from spec.load_state import LoadState
from spec.offers import Offers, Ranked
from spec.patience import Patience
from spec.skill import Skill, judged
from spec.speculator import Limit, Load, StepRecord
from spec.tree import MAX_NODES, DraftTree, Proposal

_PROBES = ((256, 8), (1024, 16))  # up to so many drafts under a load, every so many steps look below the price
_PROBE_EVERY = 128  # later
_PROBE_PRICE = 0.4  # what a probing step takes for the price of a node and of a pass
_MARGIN = 1.12  # a draft pass must promise this much more than its time is worth: estimates err, plain steps do not
_UNKNOWN = 0.08  # of a plain step: what asking and a tree are believed to cost before that was seen
_SLACK = 0.7  # drafters see a price this much lower: the final cut is made over all requests


def _free(_: float) -> float:
    return 0.0


def _never(_drafter: str, _depth: int, _rank: int, _confidence: float) -> float:
    return 0.0


_NO_DRAFT = Budget(max_nodes=0, max_depth=0, price=1.0, pass_price=_free, chance=_never)


class _Step:
    """What `budgets` decided, for `admit` and `record` of the same step."""

    __slots__ = (
        "asked", "asking", "drafted", "gains", "keys", "lambda_", "node_cost", "plain_ms", "probe", "rows", "state", "views",
    )  # fmt: skip

    def __init__(self, state: LoadState, views: int, load: Load) -> None:
        self.state = state
        self.views = views
        self.rows = views + load.prefill_tokens
        self.keys = load.context / max(1, load.sequences)  # that a sequence holds
        self.plain_ms = self.lambda_ = 0.0
        self.probe = False
        self.drafted = False  # drafters may have been asked
        self.asking: Sequence[bool] = ()  # for which of the views
        self.node_cost = 0.0  # tokens that the time of one verified node would bring, their mean
        self.asked: set[str] = set()
        self.gains: dict[str, float] = {}


class PriceSpeculator:
    """The `Speculator` protocol by price. Deterministic given the calls made to it."""

    patient = True

    def __init__(
        self,
        calibration: Calibration | None = None,
        costs: CostTable | None = None,
        *,
        vocab_size: int | None = None,
        batch: int = 1,
    ) -> None:
        """`batch`: steps that are learnt from at once. Right after a pass all code is cold, and several steps cost little more than
        one; what a sequence's own drafts brought is noted at once."""
        self.calibration = calibration or Calibration()
        self.costs = costs or CostTable()
        self._vocab_size = vocab_size
        self._skill = Skill()
        self._patience = Patience()
        self._loads: dict[int, LoadState] = {}
        self._step: _Step | None = None
        self._began = False  # the step was counted when it began
        self._batch = batch
        self._unread: list[tuple[StepRecord, _Step | None]] = []

    # --- before drafting ----------------------------------------------------------------------------------------------

    def rests(self, views: Sequence[SequenceView]) -> bool:
        self._step = None
        self._began = True
        self._count_step()
        state = self._loads.get(max(0, len(views) - 1).bit_length())
        if state is None:
            return False
        willing = allowed = False
        for view in views:  # a plain loop: this is most of what a step without drafts pays
            policy = view.policy
            if policy.mode == "off" or policy.max_nodes == 0:
                continue
            if view.grammar is not None:
                return False  # forced tokens cost no question
            willing = True
            allowed = allowed or self._patience.allow(view.seq_id)
        return not willing or state.guard.rests() or not allowed

    def refused(self, sequences: int) -> Collection[str]:
        """Drafters that do not earn their time under this load and are not asked for now."""
        state = self._loads.get(max(0, sequences - 1).bit_length())
        return () if state is None else [name for name, worth in state.worth.items() if worth.resting]

    def _count_step(self) -> None:
        self._patience.step()
        self._skill.step()

    def passed(self, steps: int, sequences: int, load: Load, target_ms: float, total_ms: float) -> None:
        state = self._loads.get(max(0, sequences - 1).bit_length())
        if state is None:
            return
        state.passed += steps
        for worth in state.worth.values():
            worth.passed(steps)
        if load.prefill_tokens or load.sequences != sequences:
            return
        # What plain decoding takes, from a step that really was: nothing of drafting was in it.
        plain_ms = max(self.costs.step_ms(sequences, load.context, sequences), 1e-6)
        self.costs.record(sequences, load.context, sequences, target_ms, total_ms - target_ms)
        state.overheads.record(total_ms - target_ms, drafted=False, nodes=0)
        state.guard.record(drafted=False, tokens=1.0, time=min(total_ms / plain_ms, 20.0))

    def budgets(self, views: Sequence[SequenceView], limits: Sequence[Limit], load: Load) -> list[Budget]:
        size = max(0, len(views) - 1).bit_length()
        state = self._loads.get(size)
        if state is None:
            state = self._loads[size] = LoadState(len(views))
        step = self._step = _Step(state, len(views), load)
        plain_ms = step.plain_ms = max(self.costs.step_ms(len(views), load.context, load.sequences), 1e-6)
        lambda_ = step.lambda_ = max(state.speed.value, 1e-3) * len(views) / plain_ms
        if not state.guard.allow():
            return [_NO_DRAFT] * len(views)
        asking = [self._asks(view, limit) for view, limit in zip(views, limits, strict=True)]
        if not any(asking):
            return [_NO_DRAFT] * len(views)
        refused = {name for name, worth in state.worth.items() if not worth.allow()}
        if refused and len(refused) == len(state.worth) and not any(view.grammar for view in views):
            return [_NO_DRAFT] * len(views)  # but for forced tokens, which no drafter has to be asked about, nothing pays
        step.drafted, step.asking = True, asking
        state.steps += 1
        drafts = state.steps * len(views)
        step.probe = state.steps % next((every for until, every in _PROBES if drafts <= until), _PROBE_EVERY) == 0
        price, prices = self._prices(step)
        per_ms = lambda_ * _MARGIN
        state.askers += 0.05 * (sum(asking) - state.askers)
        entry = prices[0] + lambda_ * state.overheads.total(_UNKNOWN * plain_ms) / max(1.0, state.askers)
        most = MAX_NODES
        if step.probe:
            most = int(state.nodes) + 2  # a look just past what is usual: depth costs passes
            price, per_ms = price * _PROBE_PRICE, per_ms * _PROBE_PRICE
            prices = tuple([p * _PROBE_PRICE for p in prices])
        else:
            price *= _SLACK

        def pass_price(ms: float) -> float:
            return ms * per_ms

        found: list[Budget] = []
        for view, limit, wanted in zip(views, limits, asking, strict=True):
            if not wanted:
                found.append(_NO_DRAFT)
                continue
            nodes = min(_most(view, limit), most)
            chance, table = self._chance(view, refused, step.asked)
            found.append(Budget(nodes, min(limit.max_depth, nodes), price, pass_price, chance, entry, prices, table))
        return found

    def _asks(self, view: SequenceView, limit: Limit) -> bool:
        """Whether the sequence may draft now, and has not shown lately that asking is in vain. Forced tokens cost no question."""
        if limit.max_depth <= 0 or view.policy.mode == "off" or _most(view, limit) <= 0:
            return False
        return view.grammar is not None or self._patience.allow(view.seq_id)

    def _prices(self, step: _Step) -> tuple[float, tuple[float, ...]]:
        """Two prices in tokens. lambda dT/drows at the first node or where the last trees ended, whichever is cheaper: no node
        below is wanted. And what a sequence's 1st, 2nd, ... node costs while the others draft as usual: for one sequence the
        next row's cost, for many the usual cost of one node more (whose rows come next is then anybody's guess)."""
        state, lambda_ = step.state, step.lambda_
        cheapest, each = state.row_costs(self.costs, step.rows, step.views, step.keys)
        alone = 1.0 / step.views if state.marginal >= 0.0 else 1.0
        usual = (1.0 - alone) * lambda_ * max(0.0, state.marginal)
        own = alone * lambda_
        return lambda_ * cheapest, tuple([usual + own * ms for ms in each])

    def _chance(
        self, view: SequenceView, refused: set[str], asked: set[str]
    ) -> tuple[Callable[[str, int, int, float], float], Callable[[str], ChanceTable | None]]:
        calibrated, tables = self.calibration.chance, self.calibration.table
        greedy = view.sampling.temperature == 0.0
        wanted = view.policy.drafters
        factors = self._skill.factors(view.seq_id)

        def chance(drafter: str, depth: int, rank: int, confidence: float) -> float:
            if drafter in refused or (wanted is not None and drafter not in wanted):
                return 0.0
            if depth == 1:
                asked.add(drafter)
            p = calibrated(drafter, depth, rank, confidence, greedy=greedy)
            factor = factors.get(drafter)
            return p if factor is None else min(1.0, p * factor)

        def table(drafter: str) -> ChanceTable | None:
            if drafter in refused or (wanted is not None and drafter not in wanted):
                return None
            return ChanceTable(tables(drafter, greedy), factors.get(drafter, 1.0))

        return chance, table

    # --- after drafting -----------------------------------------------------------------------------------------------

    def admit(
        self, views: Sequence[SequenceView], budgets: Sequence[Budget], proposals: Mapping[str, Sequence[Proposal]]
    ) -> list[DraftTree]:
        step = self._step
        if step is None or step.views != len(views):
            raise ValueError("admit was not preceded by budgets for the same sequences")
        offers = Offers(budgets, proposals, self._vocab_size)
        offers.take(self._cut(step, step.rows + offers.drawn, offers.order))
        self._account(step, offers.shares())
        return offers.trees()

    def _cut(self, step: _Step, rows: int, order: Sequence[Ranked]) -> int:
        """How many of the nodes, best first, maximise F(n) - lambda T(R + n)."""
        lambda_ = step.lambda_
        each = self.costs.row_ms(rows, len(order) + 1, step.keys)
        best, best_count, net = 0.0, 0, -lambda_ * step.state.overheads.verifying
        for count, (path, _, _) in enumerate(order):
            net += path - lambda_ * each[count]
            if net > best:
                best, best_count = net, count + 1
        # One more node must beat the next row's cost, or one that is in already.
        after = each[best_count]
        if best_count:
            after = min(after, order[best_count - 1][0] / lambda_)
        state = step.state
        state.marginal = after if state.marginal < 0.0 else state.marginal + 0.05 * (after - state.marginal)
        # A look at what was pruned.
        return min(len(order), best_count + max(2, step.views // 16)) if step.probe else best_count

    def _account(self, step: _Step, shares: Sequence[tuple[str, float, int]]) -> None:
        """Who brought what: tokens expected of each drafter's nodes, less their share of the verification."""
        total = sum([count for _, _, count in shares])
        if not total:
            return
        each = step.node_cost = step.lambda_ * sum(self.costs.row_ms(step.rows, total, step.keys)) / total
        for name, expected, count in shares:
            step.gains[name] = step.gains.get(name, 0.0) + expected - each * count

    # --- after the step -----------------------------------------------------------------------------------------------

    def record(self, step: StepRecord) -> None:
        decided, self._step = self._step, None
        if not self._began:
            self._count_step()
        self._began = False
        if decided is not None and decided.views != len(step.outcomes):
            decided = None
        if decided is not None and decided.drafted and not (step.hoped or decided.probe or step.load.prefill_tokens):
            self._record_interest(step, decided)
        self._unread.append((step, decided))
        if len(self._unread) >= self._batch or any(outcome.finished for outcome in step.outcomes):
            self.catch_up()

    def catch_up(self) -> None:
        """Learn from the steps that wait to be learnt from at once."""
        unread, self._unread = self._unread, []
        for earlier in unread:
            self._read(*earlier)

    def _read(self, step: StepRecord, decided: _Step | None) -> None:
        for outcome in step.outcomes:
            if outcome.tree.token_ids:
                greedy = outcome.view.sampling.temperature == 0.0
                nodes = judged(outcome)
                self._skill.record(outcome.view.seq_id, outcome.tree, nodes, self.calibration, greedy)
                self.calibration.record(outcome.tree, nodes, greedy=greedy)
            if outcome.finished:
                self._skill.forget(outcome.view.seq_id)
                self._patience.forget(outcome.view.seq_id)
        count = len(step.outcomes)
        if decided is None or not count or step.load.prefill_tokens:
            return
        self._record_costs(step, decided)
        time = min(max(step.total_ms, 1e-6) / decided.plain_ms, 20.0)
        tokens = sum([len(outcome.path) + 1 for outcome in step.outcomes]) / count
        state = decided.state
        state.speed.add_plain(state.passed)
        state.passed = 0
        state.speed.add(tokens, time)
        if decided.probe:
            return  # that is not how this load is served
        state.guard.record(drafted=decided.drafted, tokens=tokens, time=time)
        if decided.drafted:
            usual = sum([len(outcome.tree) for outcome in step.outcomes]) / count
            state.nodes += 0.05 * (usual - state.nodes)

    def _record_interest(self, step: StepRecord, decided: _Step) -> None:
        """What asking each sequence brought, against its share of the time that asking takes."""
        cost = decided.lambda_ * decided.state.overheads.asking / max(1, sum(decided.asking))
        for outcome, asked in zip(step.outcomes, decided.asking, strict=True):
            if asked and not outcome.finished:
                gain = len(outcome.path) - decided.node_cost * len(outcome.tree)
                self._patience.record(outcome.view.seq_id, gain, cost)

    def _record_costs(self, step: StepRecord, decided: _Step) -> None:
        load, state = step.load, decided.state
        beside = step.total_ms - step.target_ms
        state.overheads.record(beside, drafted=decided.drafted, nodes=step.nodes - decided.rows)
        if not decided.drafted:
            self.costs.record(step.nodes, load.context, load.sequences, step.target_ms, beside)
            return
        self.costs.record(step.nodes, load.context, load.sequences, step.target_ms, None)
        for name in decided.asked:
            ms = step.draft_ms.get(name)
            if ms is None or decided.probe:
                continue
            self.costs.record_draft(name, load.sequences, ms)
            worth = state.worth.get(name)
            if worth is None:
                worth = state.worth[name] = Worth()
            worth.record(decided.gains.get(name, 0.0), decided.lambda_ * ms)


def _most(view: SequenceView, limit: Limit) -> int:
    """Nodes that the request's policy and the engine leave it."""
    most = view.policy.max_nodes
    return limit.max_nodes if most is None else min(most, limit.max_nodes)
