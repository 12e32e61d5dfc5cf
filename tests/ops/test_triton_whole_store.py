"""Keys and values as bytes with steps on the device: written, moved and read as the reference does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from attention_cases import ODD_ROWS, AttentionCase, Shape, as_bytes, dequantised, make_case, poisoned
from device import DEVICE, to_device
from toy import rope_tables

from kernels.batch import KVTensors, store_sizes
from kernels.kv_slots import reference as slots
from kernels.kv_slots import triton as slots_triton
from kernels.rope import reference as rope
from kernels.rope import triton as rope_triton
from kernels.tree_attention import triton as attention_triton
from kernels.tree_attention.ordered import triton as ordered_triton

FLOAT32_ORDER = 5e-6
BFLOAT16_INPUTS = 3e-2  # on a device q and the softmax weights are rounded to bfloat16
ATOL = FLOAT32_ORDER if DEVICE == "cpu" else BFLOAT16_INPUTS


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def moved(store: KVTensors) -> KVTensors:
    return KVTensors(*to_device((store.k, store.v)))


@pytest.mark.parametrize(("dim", "page_size"), [(4, 16), (24, 32), (64, 16), (128, 48)])
def test_writing_and_moving(dim: int, page_size: int) -> None:
    theirs = poisoned(4, 2, dim, page_size, layers=2)
    ours = moved(poisoned(4, 2, dim, page_size, layers=2))
    at = torch.randperm(4 * page_size, generator=torch.Generator().manual_seed(4))[:7].to(torch.int32)
    k, v = random(7, 2, dim, seed=5), random(7, 2, dim, seed=6)
    k[0, 0], k[1, 1, 0], v[2, 0, 3], v[3, 1] = 0, float("inf"), float("nan"), 1e-33
    v[4, 0, 0] = 3e38
    for layer in range(2):
        slots.write(k * (layer + 1), v, at, theirs.k[layer], theirs.v[layer])
        slots_triton.write(*to_device((k * (layer + 1), v, at)), ours.k[layer], ours.v[layer])
    assert torch.equal(ours.k.cpu(), theirs.k)
    assert torch.equal(ours.v.cpu(), theirs.v)
    src, dst = at[:5].clone(), at[1:6].clone()  # a move done one by one would smear the first row
    slots.move(src, dst, theirs)
    slots_triton.move(*to_device((src, dst)), ours)
    assert torch.equal(ours.k.cpu(), theirs.k)
    assert torch.equal(ours.v.cpu(), theirs.v)


def test_rotation_writes_what_the_reference_keeps() -> None:
    q, k, v = (random(3, heads * 24, seed=heads) * 5 for heads in (4, 2, 2))
    cos, sin = rope_tables(32, 24)
    positions, at = torch.tensor([0, 7, 31], dtype=torch.int32), torch.tensor([5, 2, 19], dtype=torch.int32)
    store, other = poisoned(2, 2, 24, 16), moved(poisoned(2, 2, 24, 16))
    slots.write(rope.rope(k.view(3, 2, 24), positions, cos, sin), v.view(3, 2, 24), at, store.k[0], store.v[0])
    rope_triton.rope_write(*to_device((q, k, v, positions, at, cos, sin)), other.k[0], other.v[0])
    assert torch.equal(store.v, other.v.cpu())
    if DEVICE == "cpu":  # on a device the rotation may differ in its last bit
        assert torch.equal(store.k, other.k)


CASES: dict[str, tuple[tuple[Shape, ...], dict[str, int]]] = {
    **{name: (rows, {}) for name, rows in ODD_ROWS.items()},
    "long": ((Shape(700, 30), Shape(129, 40, "chain")), {"head_dim": 64}),
    "window": ((Shape(300, 9), Shape(0, 70, "chain"), Shape(250, 5)), {"window": 17, "head_dim": 64}),
    "pages of 32": ((Shape(300, 9), Shape(120, 30)), {"window": 130, "head_dim": 40, "page_size": 32}),
    "many heads a group": ((Shape(130, 3), Shape(5, 40, "chain")), {"q_heads": 16, "kv_heads": 1, "head_dim": 64}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("split_keys", [None, 64])
def test_attention(name: str, split_keys: int | None) -> None:
    rows, options = CASES[name]
    check(make_case(rows, **options), split_keys)  # type: ignore[arg-type]


@pytest.mark.parametrize("split_keys", [None, 64])
@pytest.mark.parametrize("window", [None, 20])
def test_sinks(window: int | None, split_keys: int | None) -> None:
    check(make_case((Shape(150, 9), Shape(3, 12, "deep")), window=window, with_sinks=True), split_keys)


def check(case: AttentionCase, split_keys: int | None) -> None:
    store = as_bytes(case)
    want = dequantised(case, store)
    inputs = to_device((case.q, store.k[0], store.v[0], case.inputs))
    got = attention_triton.tree_attention(*inputs, case.scale, case.window, to_device(case.sinks), split_keys=split_keys)
    torch.testing.assert_close(got.cpu(), want, atol=ATOL, rtol=ATOL)


@pytest.mark.parametrize("window", [None, 20])
def test_one_key_at_a_time(window: int | None) -> None:
    case = make_case((Shape(40, 9), Shape(0, 20, "chain")), window=window, with_sinks=True)
    store = as_bytes(case)
    inputs = to_device((case.q, store.k[0], store.v[0], case.inputs))
    got = ordered_triton.tree_attention(*inputs, case.scale, window, to_device(case.sinks))
    torch.testing.assert_close(got.cpu(), dequantised(case, store), atol=FLOAT32_ORDER, rtol=FLOAT32_ORDER)


def test_one_key_at_a_time_gives_the_same_bits_alone_and_in_company() -> None:
    case = make_case((Shape(70, 5, "deep"), Shape(33, 20, "chain")))
    store = as_bytes(case)
    first, second = case.inputs.row_ptr[1:].tolist()
    row = replace(
        case.inputs,
        **{name: getattr(case.inputs, name)[:first] for name in ("input_ids", "positions", "slots", "words")},
        **{name: getattr(case.inputs, name)[:1] for name in ("causal", "page_table", "kv_lens")},
        row_ptr=case.inputs.row_ptr[:2],
    )
    tensors = to_device((store.k[0], store.v[0]))
    both = ordered_triton.tree_attention(to_device(case.q), *tensors, to_device(case.inputs), case.scale, None)
    alone = ordered_triton.tree_attention(to_device(case.q[:first]), *tensors, to_device(row), case.scale, None)
    assert second > first
    assert torch.equal(both[:first], alone)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("split_keys", [None, 64])
@pytest.mark.parametrize("which", ["key", "value"])
def test_a_broken_token_breaks_those_who_see_it_and_nobody_else(which: str, split_keys: int | None) -> None:
    """It must not pass for a number: the engine ends such a request, and only a value that is no number tells it to."""
    case = make_case((Shape(70, 3, "chain"), Shape(90, 2, "chain")))
    store = as_bytes(case)
    first = int(case.inputs.row_ptr[1])
    page = int(case.inputs.page_table[0, 1])
    bad, good = torch.full((1, *store_row(store)), torch.nan), torch.ones(1, *store_row(store))
    at = torch.tensor([page * store.page_size + 3], dtype=torch.int32)
    slots.write(bad if which == "key" else good, good if which == "key" else bad, at, store.k[0], store.v[0])
    inputs = to_device((case.q, store.k[0], store.v[0], case.inputs))
    got = attention_triton.tree_attention(*inputs, case.scale, case.window, split_keys=split_keys).cpu()
    assert got[:first].isnan().flatten(1).any(1).all()
    assert got[first:].isfinite().all()


def store_row(store: KVTensors) -> tuple[int, int]:
    """Heads and channels of a token."""
    return store.k.shape[2], store_sizes(store.k)[0]
