"""The Triton top_shares against the reference: odd sizes, chunks that cut a row, ties, rows that are not numbers."""

from __future__ import annotations

import pytest
import torch
import toy
from device import DEVICE, to_device

from drafters.draft_rows import DraftRow, draft_inputs
from kernels.decoder.triton import TritonDecoder
from kernels.top_shares import reference
from kernels.top_shares.triton import top_shares

# A sum of up to 8191 exponentials in another order.
SUM_ORDER = 1e-5


def logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(
    ("rows", "vocab", "k", "chunk"),
    [(1, 1, 1, 16), (1, 15, 4, 16), (2, 16, 16, 16), (3, 17, 4, 16), (3, 123, 5, 16), (3, 123, 5, 4096), (1, 8191, 8, 2048)],
)
def test_is_the_reference(rows: int, vocab: int, k: int, chunk: int, warm: bool) -> None:
    x = logits(rows, vocab, rows * vocab)
    temperature = torch.rand(rows, generator=torch.Generator().manual_seed(1)) + 0.1 if warm else None
    ids, shares = (t.cpu() for t in top_shares(to_device(x), k, to_device(temperature), chunk))
    want_ids, want = reference.top_shares(x, k, temperature)
    assert ids.dtype == torch.int32
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(shares, want, atol=SUM_ORDER, rtol=SUM_ORDER)


def test_ties_go_to_the_lower_ids() -> None:
    ids, shares = top_shares(to_device(torch.zeros(2, 40)), 5, chunk=16)
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 2
    torch.testing.assert_close(shares.cpu(), torch.full((2, 5), 1 / 40))


def test_rows_that_are_not_numbers_say_so_and_disturb_nobody() -> None:
    x = logits(6, 70)
    x[1, 69] = float("nan")
    x[2, 3] = float("inf")
    x[3] = -float("inf")
    x[4, 1:] = -float("inf")
    x[5, :64] = -float("inf")  # whole chunks without a finite logit
    ids, shares = (t.cpu() for t in top_shares(to_device(x), 4, chunk=16))
    assert [bool(torch.isfinite(row).all()) for row in shares] == [True, False, False, False, True, True]
    assert shares[4].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert ids.min() >= 0
    assert ids.max() < 70
    assert all(len(set(row)) == 4 for row in ids.tolist())


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="9 best of 8"):
        top_shares(logits(1, 8), 9)
    with pytest.raises(ValueError, match="temperature"):
        top_shares(logits(2, 8), 1, torch.ones(1))
    assert top_shares(logits(0, 8), 3)[0].shape == (0, 3)


def test_a_draft_pass_is_a_forward_and_the_best_of_it() -> None:
    shape, weights = toy.rand_weights(layers=1, hidden=32, q_heads=2, kv_heads=1, head_dim=16, intermediate=32, vocab=50)
    decoder = TritonDecoder(shape, to_device(weights))
    packed = draft_inputs([DraftRow([5, 6, 7], None, 0, [3, 1], (0, 2)), DraftRow([8, 9], [-1, -1], 0, [2], (1,))], 2)
    stores = [toy.new_store(shape, 4, 2, device=DEVICE) for _ in range(2)]
    hidden, ids, shares = decoder.draft(packed, stores[0], None, 3, [0.5, 2.0, 1.0])
    out = decoder.forward(packed.tensors(torch.device(DEVICE)), stores[1], True)
    assert out.logits is not None
    assert torch.equal(hidden, out.hidden)
    best, mass = reference.top_shares(out.logits.cpu(), 3, torch.tensor([0.5, 2.0, 1.0]))
    assert list(ids) == best.flatten().tolist()
    torch.testing.assert_close(torch.tensor(list(shares)), mass.flatten(), atol=SUM_ORDER, rtol=SUM_ORDER)
