"""The draft model: what it proposes, what it remembers of its store, what it survives."""

from __future__ import annotations

import pytest
import torch
import toy
from drafting import GREEDY, Pool, View, budget, drive, paths

from drafters.model import ModelDrafter
from kernels.batch import KVTensors, StepInputs
from kernels.decoder import Decoder, DecoderOutput
from spec.request import SamplingParams, SpeculationPolicy
from spec.tree import Proposal

PROMPT = [3, 77, 210, 5, 9, 400, 3, 77]


class Counting:
    """A decoder that notes the nodes of each pass."""

    def __init__(self, inner: Decoder) -> None:
        self.inner = inner
        self.shape = inner.shape
        self.passes: list[int] = []

    def forward(self, inputs: StepInputs, store: KVTensors, need_logits: bool) -> DecoderOutput:
        self.passes.append(inputs.num_nodes)
        return self.inner.forward(inputs, store, need_logits)


def make(decoder: Decoder, page_size: int = 4, pages: int = 128, **options: object) -> tuple[ModelDrafter, Pool]:
    pool = Pool(pages, page_size)
    store = toy.new_store(decoder.shape, pages, page_size, fill=float("nan"))
    return ModelDrafter("model", decoder, store, pool, **options), pool  # type: ignore[arg-type]


def small(seed: int = 0, **sizes: object) -> Decoder:
    return toy.rand_decoder(seed, layers=2, hidden=64, q_heads=2, kv_heads=1, head_dim=32, intermediate=64, vocab=512, **sizes)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_target_drafting_for_itself_is_always_right(page_size: int) -> None:
    decoder = small()
    answer = toy.greedy(decoder, PROMPT, 40)
    drafter, pool = make(decoder, page_size)
    view = View(1, [*PROMPT, answer[0]], len(PROMPT))
    passes = drive(drafter, [view], [[*PROMPT, *answer]], pool, nodes=4)
    assert view.token_ids == [*PROMPT, *answer]
    # At least the best chain of two survives in a tree of four nodes; poisoned slots would end it at once.
    assert passes[0] <= 16


def test_a_tree_scores_every_branch_as_the_model_would_alone() -> None:
    decoder = small()
    drafter, pool = make(decoder, fan=3, width=3)
    view = View(1, list(PROMPT), len(PROMPT))
    pool.reserve(view, len(PROMPT) + 16)
    drafter.open(view)
    (proposal,) = drafter.propose([view], [budget(nodes=16, depth=6)])
    assert len(proposal.token_ids) == 16
    assert max(len(path) for path in paths(proposal)) >= 3
    assert len(set(proposal.parents)) > 3  # it branches at several nodes
    by_parent: dict[int, list[int]] = {}
    for i, parent in enumerate(proposal.parents):
        by_parent.setdefault(parent, []).append(i)
    for parent, nodes in by_parent.items():
        context = [*PROMPT, *(paths(proposal)[parent] if parent >= 0 else ())]
        store = toy.new_store(decoder.shape, 16)
        inputs = toy.step_inputs([toy.Row(context, list(range(16)), score=[len(context) - 1])], 16)
        out = decoder.forward(inputs, store, need_logits=True)
        assert out.logits is not None
        shares = torch.softmax(out.logits[0], dim=-1)
        best = torch.topk(shares, len(nodes))
        assert [proposal.token_ids[i] for i in nodes] == best.indices.tolist()
        torch.testing.assert_close(torch.tensor([proposal.confidence[i] for i in nodes]), best.values)
        assert [proposal.ranks[i] for i in nodes] == list(range(len(nodes)))


def test_a_batch_of_sequences_is_drafted_for_as_each_alone() -> None:
    decoder = small()
    prompts = [PROMPT, [8], [5, 6], list(range(20, 57))]
    answers = [toy.greedy(decoder, prompt, 12) for prompt in prompts]
    seen: dict[int, list[Proposal]] = {}

    def run(picked: list[int]) -> None:
        drafter, pool = make(decoder)
        views = [View(i, [*prompts[i], answers[i][0]], len(prompts[i])) for i in picked]
        noted: dict[int, list[Proposal]] = {i: [] for i in picked}
        drive(
            drafter,
            views,
            [[*prompts[i], *answers[i]] for i in picked],
            pool,
            check=lambda view, proposal: noted[view.seq_id].append(proposal),
        )
        for i in picked:
            assert seen.setdefault(i, noted[i]) == noted[i]
            assert any(proposal.token_ids for proposal in noted[i])

    run([0, 1, 2, 3])
    for i in range(4):
        run([i])


def test_accepted_chains_are_not_computed_twice() -> None:
    decoder = Counting(small())
    answer = toy.greedy(decoder.inner, PROMPT, 30)
    drafter, pool = make(decoder, fan=1)
    view = View(1, [*PROMPT, answer[0]], len(PROMPT))
    drive(drafter, [view], [[*PROMPT, *answer]], pool, nodes=4)
    # 5 tokens a round: 4 drafted (3 expanded) and next; then the root and the one draft that was never run itself.
    assert decoder.passes[0] == len(PROMPT) + 1
    assert set(decoder.passes[1:]) <= {1, 2}


def test_long_prompts_are_caught_up_in_bounded_pieces() -> None:
    decoder = Counting(small())
    drafter, pool = make(decoder, catch_up_tokens=16)
    prompt = [i % 500 for i in range(50)]
    long, short = View(1, list(prompt), 50), View(2, [7, 8, 9], 3)
    for view in (long, short):
        pool.reserve(view, len(view.token_ids) + 4)
        drafter.open(view)
    drafted = []
    for _ in range(6):
        proposals = drafter.propose([long, short], [budget(nodes=4, depth=1)] * 2)
        drafted.append([bool(p.token_ids) for p in proposals])
    assert max(decoder.passes) <= 16
    assert all(short_drafted for _, short_drafted in drafted)  # nobody waits for the long one
    assert [long_drafted for long_drafted, _ in drafted] == [False, False, False, True, True, True]


def test_a_prefix_hit_is_used_only_where_this_store_was_filled() -> None:
    decoder = Counting(small())
    drafter, pool = make(decoder, page_size=4)
    first = View(1, [i * 7 % 500 for i in range(22)], 22)
    pool.reserve(first, 26)
    drafter.open(first)
    (fresh,) = drafter.propose([first], [budget(nodes=4, depth=2)])
    drafter.close(1)

    again = View(2, list(first.token_ids), 22, page_ids=list(first.page_ids))
    decoder.passes.clear()
    drafter.open(again)
    assert drafter.propose([again], [budget(nodes=4, depth=2)]) == [fresh]
    assert decoder.passes[0] == 2  # 20 of 22 tokens lie in five filled pages

    pool.generations[first.page_ids[2]] += 1  # one page was handed out anew; its draft keys are another text's
    drafter.close(2)
    decoder.passes.clear()
    store = drafter._store
    store.k[:, first.page_ids[2]] = float("nan")
    drafter.open(again)
    assert drafter.propose([again], [budget(nodes=4, depth=2)]) == [fresh]
    assert decoder.passes[0] == 14  # from the third page on


def test_keys_of_a_window_given_back_are_not_believed() -> None:
    """A drafted token that is committed only later may have lost its page in between."""
    decoder = small()
    drafter, pool = make(decoder, page_size=1)
    answer = toy.greedy(decoder, PROMPT, 12)
    view = View(1, list(PROMPT), len(PROMPT))
    pool.reserve(view, len(PROMPT) + 4)
    drafter.open(view)
    drafter.propose([view], [budget(nodes=4)])
    drafter.observe([], torch.zeros(0, 1))
    pool.reserve(view, len(PROMPT))
    drafter._store.k[:, pool.free] = float("nan")
    view.token_ids += answer[:3]
    pool.reserve(view, len(view.token_ids) + 4)
    (proposal,) = drafter.propose([view], [budget(nodes=4)])
    assert proposal.token_ids[0] == answer[3]


def test_passes_are_bought_only_when_they_pay() -> None:
    decoder = Counting(small())
    ticks = iter(range(10_000))
    drafter, pool = make(decoder, clock=lambda: next(ticks) * 1e-3)  # every pass takes a millisecond
    view = View(1, list(PROMPT), len(PROMPT))
    pool.reserve(view, len(PROMPT) + 8)
    drafter.open(view)
    drafter.propose([view], [budget()])
    decoder.passes.clear()
    assert drafter.propose([view], [budget(pass_price=lambda ms: 100.0 * ms)])[0].token_ids == ()
    assert decoder.passes == []
    dear = [len(drafter.propose([view], [budget(pass_price=lambda ms, p=p: p * ms)])[0].token_ids) for p in (0.0, 1.0)]
    assert dear[0] >= dear[1] > 0
    assert drafter.propose([view], [budget(price=0.999999)])[0].token_ids in ((), drafter_top(decoder))
    assert drafter.propose([view], [budget(nodes=0)])[0].token_ids == ()


def drafter_top(decoder: Decoder) -> tuple[int, ...]:
    return tuple(toy.greedy(decoder, PROMPT, 1))


def test_the_context_edge_of_a_shorter_draft_model_just_ends_drafting() -> None:
    decoder = small(max_position=32)
    long = small()
    answer = toy.greedy(long, PROMPT, 60)
    drafter, pool = make(decoder)
    drafted_at: list[int] = []

    def note(view: View, proposal: Proposal) -> None:
        if proposal.token_ids:
            drafted_at.append(len(view.token_ids))
            assert len(view.token_ids) + max(len(p) for p in paths(proposal)) <= 33

    view = View(1, [*PROMPT, answer[0]], len(PROMPT))
    drive(drafter, [view], [[*PROMPT, *answer]], pool, check=note)
    assert drafted_at
    assert max(drafted_at) <= 31


class Broken:
    """NaN logits from the `after`-th pass on, or an exception."""

    def __init__(self, inner: Decoder, after: int, raises: bool) -> None:
        self.inner, self.after, self.raises = inner, after, raises
        self.shape = inner.shape
        self.calls = 0

    def forward(self, inputs: StepInputs, store: KVTensors, need_logits: bool) -> DecoderOutput:
        out = self.inner.forward(inputs, store, need_logits)
        self.calls += 1
        if self.calls <= self.after:
            return out
        if self.raises:
            raise RuntimeError("out of luck")
        assert out.logits is not None
        return DecoderOutput(out.hidden, out.argmax, torch.full_like(out.logits, float("nan")))


@pytest.mark.parametrize("raises", [False, True])
def test_trouble_in_the_model_is_an_empty_proposal(raises: bool) -> None:
    decoder = Broken(small(), after=3, raises=raises)
    drafter, pool = make(decoder)
    view = View(1, list(PROMPT), len(PROMPT))
    pool.reserve(view, len(PROMPT) + 4)
    drafter.open(view)
    found = [drafter.propose([view], [budget(nodes=3, depth=2)])[0].token_ids for _ in range(8)]
    assert found[0]
    assert found[-1] == ()
    calls = decoder.calls
    assert drafter.propose([view], [budget(nodes=3, depth=2)])[0].token_ids == ()
    assert decoder.calls == calls  # it is left alone after a few failures


def test_padding_rows_are_never_proposed() -> None:
    shape, weights = toy.rand_weights(0, layers=1, hidden=64, q_heads=2, kv_heads=1, head_dim=32, intermediate=64, vocab=512)
    assert isinstance(weights.lm_head, toy.DenseWeight)
    weights.lm_head.values[500:] *= 50.0
    drafter, pool = make(toy.decoder(shape, weights), vocab_size=500)
    view = View(1, list(PROMPT), len(PROMPT))
    pool.reserve(view, len(PROMPT) + 8)
    drafter.open(view)
    (proposal,) = drafter.propose([view], [budget()])
    assert proposal.token_ids
    assert max(proposal.token_ids) < 500


def test_draws_carry_the_distribution_they_came_from() -> None:
    table = torch.full((64, 64), -30.0)
    table[:, :4] = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    drafter, pool = make(toy.table_decoder(table), pages=64)
    counts = torch.zeros(4)
    for seed in range(400):
        sampling = SamplingParams(max_tokens=8, temperature=1.0, seed=seed)
        view = View(seed, [9, 1], 2, sampling=sampling, policy=SpeculationPolicy(rule="rejection"))
        pool.reserve(view, 8)
        drafter.open(view)
        (proposal,) = drafter.propose([view], [budget(nodes=3)])
        assert proposal.parents == (-1, 0, 1)
        assert proposal.draft_probs is not None
        for token, probs, confidence in zip(proposal.token_ids, proposal.draft_probs, proposal.confidence, strict=True):
            counts[token] += 1
            assert probs is not None
            dense = torch.zeros(64)
            dense[probs.token_ids] = probs.probs
            torch.testing.assert_close(dense[:4], torch.tensor([0.4, 0.3, 0.2, 0.1]))
            assert confidence == pytest.approx(0.4)  # a function of q, not of the token
        pool.reserve(view, 0)
        drafter.close(seed)
    expected = 1200 * torch.tensor([0.4, 0.3, 0.2, 0.1])
    assert float(((counts - expected) ** 2 / expected).sum()) < 30.7  # chi-square, 3 degrees, false alarm 1e-6


@pytest.mark.parametrize(
    "options", [{"top_k": 2}, {"top_p": 0.65}, {"min_p": 0.7}, {"temperature": 1e-45}], ids=lambda o: next(iter(o))
)
def test_draws_respect_the_filters(options: dict[str, float]) -> None:
    table = torch.full((64, 64), -30.0)
    table[:, :4] = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    drafter, pool = make(toy.table_decoder(table), pages=64)
    sampling = SamplingParams(**{"max_tokens": 8, "temperature": 1.0, "seed": 3, **options})  # type: ignore[arg-type]
    view = View(1, [9, 1], 2, sampling=sampling, policy=SpeculationPolicy(rule="rejection"))
    pool.reserve(view, 8)
    drafter.open(view)
    (proposal,) = drafter.propose([view], [budget(nodes=2)])
    assert proposal.draft_probs is not None
    assert proposal.draft_probs[0] is not None
    support = set(proposal.draft_probs[0].token_ids[proposal.draft_probs[0].probs > 0].tolist())
    assert support == ({0} if "temperature" in options else {0, 1})


def test_other_requests_get_certain_proposals() -> None:
    drafter, pool = make(small())
    views = [
        View(1, list(PROMPT), 8, sampling=SamplingParams(max_tokens=8, temperature=0.7)),
        View(2, list(PROMPT), 8, sampling=GREEDY, policy=SpeculationPolicy(rule="rejection")),
    ]
    for view in views:
        pool.reserve(view, 16)
        drafter.open(view)
    for proposal in drafter.propose(views, [budget(), budget()]):
        assert proposal.token_ids
        assert proposal.draft_probs is None
