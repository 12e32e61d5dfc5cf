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

from collections.abc import Callable, Mapping, Sequence
from heapq import merge as merge_sorted

from spec.calibration import Calibration
from spec.cost_table import CostTable
from spec.drafter import Budget, SequenceView
from spec.guard import Guard, Speed, Worth
from spec.merge import Candidate, Candidates, build, gather
from spec.skill import Skill, judged
from spec.speculator import Limit, Load, StepRecord
from spec.tree import EMPTY_TREE, MAX_NODES, DraftTree, Proposal

_PROBES = ((256, 8), (1024, 16))  # up to so many drafts under a load, every so many steps look below the price
_PROBE_EVERY = 128  # later
_PROBE_PRICE = 0.4  # what a probing step takes for the price of a node and of a pass
_PRICED = 12  # nodes of one sequence that are priced one by one
_MARGIN = 1.12  # a draft pass must promise this much more than its time is worth: estimates err, plain steps do not
_SLACK = 0.7  # drafters see a price this much lower: the final cut is made over all requests
_PRIOR_STEPS = 24.0  # plain steps that lambda starts from


def _free(_: float) -> float:
    return 0.0


def _never(_drafter: str, _depth: int, _rank: int, _confidence: float) -> float:
    return 0.0


_NO_DRAFT = Budget(max_nodes=0, max_depth=0, price=1.0, pass_price=_free, chance=_never)


class _LoadState:
    """What was learnt under one load (decoding sequences, by power of two)."""

    __slots__ = ("guard", "marginal", "nodes", "speed", "steps", "worth")

    def __init__(self) -> None:
        self.guard = Guard()
        self.speed = Speed()  # tokens per sequence and plain-step time: how many times plain
        self.speed.count = self.speed.tokens = self.speed.time = _PRIOR_STEPS
        self.nodes = 2.0  # admitted per sequence, lately
        self.marginal = -1.0  # milliseconds that the node after the last one admitted was worth, lately; -1 = not known
        self.steps = 0
        self.worth: dict[str, Worth] = {}


class _Step:
    """What `budgets` decided, for `admit` and `record` of the same step."""

    __slots__ = ("asked", "context", "drafted", "gains", "lambda_", "prefill", "probe", "rows", "sequences", "state", "views")

    def __init__(self, state: _LoadState, views: int, load: Load) -> None:
        self.state = state
        self.views = views
        self.rows = views + load.prefill_tokens
        self.prefill = load.prefill_tokens
        self.context = load.context
        self.sequences = load.sequences
        self.lambda_ = 0.0
        self.probe = False
        self.drafted = False  # drafters may have been asked
        self.asked: set[str] = set()
        self.gains: dict[str, float] = {}


class PriceSpeculator:
    """The `Speculator` protocol by price. Deterministic given the calls made to it."""

    def __init__(
        self, calibration: Calibration | None = None, costs: CostTable | None = None, *, vocab_size: int | None = None
    ) -> None:
        self.calibration = calibration or Calibration()
        self.costs = costs or CostTable()
        self._vocab_size = vocab_size
        self._skill = Skill()
        self._loads: dict[int, _LoadState] = {}
        self._step: _Step | None = None

    # --- before drafting ----------------------------------------------------------------------------------------------

    def budgets(self, views: Sequence[SequenceView], limits: Sequence[Limit], load: Load) -> list[Budget]:
        size = max(0, len(views) - 1).bit_length()
        state = self._loads.get(size)
        if state is None:
            state = self._loads[size] = _LoadState()
        step = self._step = _Step(state, len(views), load)
        plain_ms = self.costs.step_ms(len(views), load.context, load.sequences)
        lambda_ = step.lambda_ = max(state.speed.value, 1e-3) * len(views) / max(plain_ms, 1e-6)
        if not state.guard.allow():
            return [_NO_DRAFT] * len(views)
        refused = {name for name, worth in state.worth.items() if not worth.allow()}
        if refused and len(refused) == len(state.worth) and not any(view.grammar for view in views):
            return [_NO_DRAFT] * len(views)  # but for forced tokens, which no drafter has to be asked about, nothing pays
        state.steps += 1
        drafts = state.steps * len(views)
        step.probe = state.steps % next((every for until, every in _PROBES if drafts <= until), _PROBE_EVERY) == 0
        price = self._price(step)
        prices = self._prices(step)
        per_ms = lambda_ * _MARGIN
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
        for view, limit in zip(views, limits, strict=True):
            nodes = min(limit.max_nodes, most)
            policy = view.policy
            if policy.max_nodes is not None and policy.max_nodes < nodes:
                nodes = policy.max_nodes
            if nodes <= 0 or limit.max_depth <= 0 or policy.mode == "off":
                found.append(_NO_DRAFT)
                continue
            step.drafted = True
            chance = self._chance(view, refused, step.asked)
            found.append(Budget(nodes, min(limit.max_depth, nodes), price, pass_price, chance, prices))
        return found

    def _price(self, step: _Step) -> float:
        """lambda dT/drows at the first node or where the last trees ended, whichever is cheaper: no node below is wanted."""
        rows, width = step.rows, max(1, step.views // 4)
        first = sum(self.costs.row_ms(rows, width))
        last = sum(self.costs.row_ms(rows + int(step.state.nodes * step.views), width))
        return step.lambda_ * min(first, last) / width

    def _prices(self, step: _Step) -> tuple[float, ...]:
        """What a sequence's 1st, 2nd, ... node costs while the others draft as usual: for one sequence the next row's cost,
        for many the usual cost of one node more (whose rows come next is then anybody's guess)."""
        state, lambda_ = step.state, step.lambda_
        alone = 1.0 / step.views if state.marginal >= 0.0 else 1.0
        usual = (1.0 - alone) * lambda_ * max(0.0, state.marginal)
        own = alone * lambda_
        rows = step.rows + int(state.nodes * (step.views - 1))
        return tuple([usual + own * ms for ms in self.costs.row_ms(rows, _PRICED)])

    def _chance(self, view: SequenceView, refused: set[str], asked: set[str]) -> Callable[[str, int, int, float], float]:
        calibrated = self.calibration.chance
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

        return chance

    # --- after drafting -----------------------------------------------------------------------------------------------

    def admit(
        self, views: Sequence[SequenceView], budgets: Sequence[Budget], proposals: Mapping[str, Sequence[Proposal]]
    ) -> list[DraftTree]:
        step = self._step
        if step is None or step.views != len(views):
            raise ValueError("admit was not preceded by budgets for the same sequences")
        offered = [self._gather(i, budget, proposals) for i, budget in enumerate(budgets)]
        chosen: list[list[Candidate]] = [[] for _ in views]
        ranked = []
        for i, (budget, found) in enumerate(zip(budgets, offered, strict=True)):
            if found is None:
                continue
            best = found.best_first()[: budget.max_nodes]
            if found.sampled:
                # Draws are taken by the price set before they were drawn: anything later would look at them.
                chosen[i] = [node for node in best if node.path >= budget.price]
            else:
                ranked.append([(node.path, i, node) for node in best])
        rows = step.rows + sum(len(nodes) for nodes in chosen)
        order = ranked[0] if len(ranked) == 1 else list(merge_sorted(*ranked, key=_falling))
        for _, i, node in order[: self._cut(step, rows, order)]:
            chosen[i].append(node)
        self._account(step, rows, chosen)
        return [EMPTY_TREE if found is None else build(found, nodes) for found, nodes in zip(offered, chosen, strict=True)]

    def _gather(self, i: int, budget: Budget, proposals: Mapping[str, Sequence[Proposal]]) -> Candidates | None:
        offers = [(name, per_view[i]) for name, per_view in proposals.items() if per_view[i].token_ids]
        if not offers or budget.max_nodes <= 0:
            return None
        return gather(offers, budget.chance, max_depth=budget.max_depth, vocab_size=self._vocab_size)

    def _cut(self, step: _Step, rows: int, order: Sequence[tuple[float, int, Candidate]]) -> int:
        """How many of the nodes, best first, maximise F(n) - lambda T(R + n)."""
        lambda_ = step.lambda_
        each = self.costs.row_ms(rows, len(order) + 1)
        best, best_count, net = 0.0, 0, 0.0
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

    def _account(self, step: _Step, rows: int, chosen: Sequence[Sequence[Candidate]]) -> None:
        """Who brought what: tokens expected of each drafter's nodes, less their share of the verification."""
        total = sum(len(nodes) for nodes in chosen)
        if not total:
            return
        each = step.lambda_ * sum(self.costs.row_ms(step.rows, total)) / total
        gains = step.gains
        for nodes in chosen:
            for node in nodes:
                name = node.sources[0]
                gains[name] = gains.get(name, 0.0) + node.path - each

    # --- after the step -----------------------------------------------------------------------------------------------

    def record(self, step: StepRecord) -> None:
        decided, self._step = self._step, None
        for outcome in step.outcomes:
            if outcome.tree.token_ids:
                greedy = outcome.view.sampling.temperature == 0.0
                nodes = judged(outcome)
                self._skill.record(outcome.view.seq_id, outcome.tree, nodes, self.calibration, greedy)
                self.calibration.record(outcome.tree, nodes, greedy=greedy)
        self._skill.forget([outcome.view.seq_id for outcome in step.outcomes if outcome.finished])
        count = len(step.outcomes)
        if decided is None or not count or decided.views != count or step.load.prefill_tokens:
            return
        drafting = sum(step.draft_ms.values()) if decided.drafted else 0.0
        self._record_costs(step, decided, drafting)
        plain_ms = self.costs.step_ms(count, step.load.context, step.load.sequences)
        time = min(max(step.total_ms, 1e-6) / max(plain_ms, 1e-6), 20.0)
        tokens = sum([len(outcome.path) + 1 for outcome in step.outcomes]) / count
        decided.state.speed.add(tokens, time)
        if decided.probe:
            return  # that is not how this load is served
        decided.state.guard.record(drafted=decided.drafted, tokens=tokens, time=time)
        if decided.drafted:
            usual = sum([len(outcome.tree) for outcome in step.outcomes]) / count
            decided.state.nodes += 0.05 * (usual - decided.state.nodes)

    def _record_costs(self, step: StepRecord, decided: _Step, drafting: float) -> None:
        load = step.load
        overhead = step.total_ms - step.target_ms - drafting
        self.costs.record(step.nodes, load.context, load.sequences, step.target_ms, overhead)
        if not decided.drafted:
            return
        for name in decided.asked:
            ms = step.draft_ms.get(name)
            if ms is None or decided.probe:
                continue
            self.costs.record_draft(name, load.sequences, ms)
            worth = decided.state.worth.get(name)
            if worth is None:
                worth = decided.state.worth[name] = Worth()
            worth.record(decided.gains.get(name, 0.0), decided.lambda_ * ms)


def _falling(item: tuple[float, int, Candidate]) -> float:
    return -item[0]
