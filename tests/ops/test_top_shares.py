"""The best tokens of a row and what they are worth: reference and C++ agree, odd sizes, rows that are not numbers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import toy

from drafters.draft_rows import DraftRow, draft_inputs
from kernels.native import load
from kernels.top_shares.reference import top_shares

LIBRARY = load()
ISAS = LIBRARY.isas if LIBRARY is not None else ()


def logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4


def test_shares_are_those_of_a_softmax() -> None:
    x = logits(3, 50)
    ids, shares = top_shares(x, 5, torch.tensor([1.0, 0.5, 2.0]))
    want = torch.softmax(x / torch.tensor([[1.0], [0.5], [2.0]]), dim=1)
    torch.testing.assert_close(shares, want.gather(1, ids.long()))
    assert ids.tolist() == torch.topk(want, 5, dim=1).indices.tolist()
    torch.testing.assert_close(top_shares(x, 50)[1].sum(dim=1), torch.ones(3))


@pytest.mark.parametrize("isa", ISAS)
def test_native_is_the_reference(isa: str) -> None:
    from kernels.top_shares.native import NativeTopShares

    native = NativeTopShares(2, isa)
    for rows, vocab, k in [(1, 1, 1), (1, 15, 4), (2, 16, 16), (3, 17, 4), (5, 123, 5), (4, 8192, 4), (7, 8191, 64)]:
        x = logits(rows, vocab, rows * vocab)
        for temperature in (None, torch.rand(rows, generator=torch.Generator().manual_seed(1)) + 0.1):
            ids, shares = native(x, k, temperature)
            want_ids, want = top_shares(x, k, temperature)
            assert torch.equal(ids, want_ids), (rows, vocab, k)
            torch.testing.assert_close(shares, want)


@pytest.mark.parametrize("isa", ISAS)
def test_ascending_and_equal_logits(isa: str) -> None:
    from kernels.top_shares.native import NativeTopShares

    native = NativeTopShares(1, isa)
    ids, _ = native(torch.arange(100.0).unsqueeze(0), 3)
    assert ids.tolist() == [[99, 98, 97]]
    ids, shares = native(torch.zeros(1, 40), 4)
    assert len(set(ids[0].tolist())) == 4
    torch.testing.assert_close(shares, torch.full((1, 4), 1 / 40))


@pytest.mark.parametrize("isa", [None, *ISAS])
def test_rows_that_are_not_numbers_say_so_and_disturb_nobody(isa: str | None) -> None:
    from kernels.top_shares.native import NativeTopShares

    top = top_shares if isa is None else NativeTopShares(2, isa)
    x = logits(5, 70)
    x[1, 69] = float("nan")
    x[2, 3] = float("inf")
    x[3] = -float("inf")
    x[4, 1:] = -float("inf")
    _, shares = top(x, 4)
    sound = [bool(torch.isfinite(row).all()) for row in shares]
    assert sound == [True, False, False, False, True]
    assert shares[4].tolist() == [1.0, 0.0, 0.0, 0.0]


def test_sizes_that_do_not_fit_are_refused() -> None:
    if LIBRARY is None:
        pytest.skip("no native library")
    from kernels.top_shares.native import NativeTopShares

    native = NativeTopShares()
    with pytest.raises(ValueError, match="9 best of 8"):
        native(logits(1, 8), 9)
    with pytest.raises(ValueError, match="temperature"):
        native(logits(2, 8), 1, torch.ones(1))


@pytest.mark.parametrize("temperature", [None, [0.5, 2.0, 1.0]])
@pytest.mark.parametrize("native", [False, True])
def test_a_draft_pass_is_a_forward_and_the_best_of_it(native: bool, temperature: list[float] | None) -> None:
    if native and LIBRARY is None:
        pytest.skip("no native library")
    model = toy.decoder(*toy.rand_weights(layers=1), native=native)
    rows = [
        DraftRow([5, 6, 7], None, 0, [3, 1], (0, 2)),
        DraftRow([8, 9], [-1, -1], 0, [2], (1,)),
    ]
    packed = draft_inputs(rows, 2)
    tensors = packed.tensors(torch.device("cpu"))
    want = toy.step_inputs(
        [toy.Row([5, 6, 7], [3, 1], score=[0, 2]), toy.Row([8, 9], [2], parents=[-1, -1], score=[1])], page_size=2
    )
    for field in dataclasses.fields(want):
        mine, theirs = getattr(tensors, field.name), getattr(want, field.name)
        assert mine is theirs is None or torch.equal(mine, theirs), field.name
    hidden, ids, shares = model.draft(packed, toy.new_store(model.shape, 4, 2), None, 3, temperature)  # type: ignore[attr-defined]
    out = model.forward(want, toy.new_store(model.shape, 4, 2), True)
    assert torch.equal(hidden, out.hidden)
    assert out.logits is not None
    best, mass = top_shares(out.logits, 3, None if temperature is None else torch.tensor(temperature))
    assert list(ids) == best.flatten().tolist()
    torch.testing.assert_close(torch.tensor(list(shares)), mass.flatten())
