"""Keys and values as bytes with a step per token and head: the form, and attention over it by every instruction set."""

from __future__ import annotations

import pytest
import torch
from attention_cases import ODD_ROWS, AttentionCase, Shape, as_bytes, dequantised, make_case, poisoned
from toy import Row, step_inputs

from kernels.batch import KVTensors, bytes_per_token, store_sizes
from kernels.kv_slots import reference as slots
from kernels.native import load
from kernels.tree_attention import reference as attention
from kernels.whole_store.reference import encode, key_parts, keys_at, value_parts

LIBRARY = load()
ISAS = LIBRARY.isas if LIBRARY else ()
if LIBRARY is not None:
    from kernels.kv_slots import native as native_slots
    from kernels.tree_attention.native import tree_attention as native_attention

needs_library = pytest.mark.skipif(LIBRARY is None, reason="no C++ compiler here")

# Weights are whole numbers up to 32639 of their chunk's largest, so each is off by half of that at most; queries alike. Sums of a few
# hundred such errors; a last bit of an exponential can move a weight to the next number besides.
ROUNDED_WEIGHTS = 5e-4


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def native(case: AttentionCase, store: KVTensors, threads: int = 2, isa: str | None = None) -> torch.Tensor:
    return native_attention(case.q, store.k[0], store.v[0], case.inputs, case.scale, case.window, threads, isa)


def test_numbers_and_steps_by_hand() -> None:
    x = torch.tensor(
        [[127.0, -63.5, 62.5, 1.0], [0.0, 0.0, 0.0, -0.0], [2.0**-101, 0.0, 0.0, 0.0], [1.0, float("nan"), 0.0, 2.0]]
    )
    codes, steps = encode(x)
    assert codes.tolist() == [[255, 64, 190, 129], [128] * 4, [128] * 4, [128] * 4]  # halves to even
    assert steps[:3].tolist() == [1.0, 0.0, 0.0]
    assert steps[3].isnan()
    assert encode(torch.tensor([[float("-inf"), 1.0, 1.0, 1.0]]))[1].isnan().all()


def test_half_a_step_is_the_most_a_number_is_off() -> None:
    x = random(50, 3, 64) * random(50, 3, 1, seed=1).exp() ** 8
    codes, steps = encode(x)
    assert ((codes.float() - 128) * steps[..., None] - x).abs().le(steps[..., None] * 0.501).all()


def test_where_the_bytes_lie() -> None:
    """The form of the contract, spelt out."""
    store = poisoned(2, 1, 8, 32)
    slots.write(
        torch.arange(1.0, 9)[None, None], torch.arange(8.0, 0, -1)[None, None], torch.tensor([32 + 21]), store.k[0], store.v[0]
    )
    keys, values = store.k[0, 1, 0, 1], store.v[0, 1, 0, 1]  # token 5 of the page's second block
    numbers, step = encode(torch.arange(1.0, 9)[None])
    for c in range(8):
        assert keys[c // 4 * 64 + 5 * 4 + c % 4] == numbers[0, c]
        assert values[1 * 32 + c * 4 + 1] == numbers[0, 7 - c]
    for steps in (keys[128:].view(torch.float32), values[128:].view(torch.float32)):
        assert steps[5] == step
        assert steps.isnan().sum() == 15


def test_sizes() -> None:
    store = KVTensors.allocate(3, 4, 2, 40, 32, torch.uint8)
    assert (store.page_size, store.num_pages, store_sizes(store.k[0])) == (32, 4, (40, 32))
    assert store.k.numel() + store.v.numel() == bytes_per_token(3, 2, 40, torch.uint8) * 4 * 32
    assert bytes_per_token(3, 2, 40, torch.bfloat16) == 3 * 2 * 40 * 4
    for dim, page_size in ((64, 8), (64, 24), (30, 16), (516, 16)):
        with pytest.raises(ValueError, match="keys and values of 8 bits need"):
            KVTensors.allocate(1, 1, 1, dim, page_size, torch.uint8)


@needs_library
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dim", "page_size"), [(4, 16), (24, 32), (40, 16), (64, 48), (128, 16), (512, 16)])
def test_writing_and_moving(dim: int, page_size: int, isa: str) -> None:
    ours, theirs = poisoned(6, 2, dim, page_size, layers=3), poisoned(6, 2, dim, page_size, layers=3)
    at = torch.randperm(6 * page_size, generator=torch.Generator().manual_seed(4))[:9].to(torch.int32)
    k, v = random(9, 2, dim, seed=5), random(9, 2, dim, seed=6)
    k[0, 0], k[1, 1, 0], v[2, 0, 3], v[3, 1] = 0, float("inf"), float("nan"), 1e-33
    v[4, 0, 0] = 3e38
    for layer in range(3):
        native_slots.write(k * (layer + 1), v, at, ours.k[layer], ours.v[layer], isa)
        slots.write(k * (layer + 1), v, at, theirs.k[layer], theirs.v[layer])
    assert torch.equal(ours.k, theirs.k)
    assert torch.equal(ours.v, theirs.v)
    src, dst = at[:5].clone(), at[1:6].clone()  # a move done one by one would smear the first row
    native_slots.move(src, dst, ours, threads=2, isa=isa)
    slots.move(src, dst, theirs)
    assert torch.equal(ours.k, theirs.k)
    assert torch.equal(ours.v, theirs.v)
    page, offset = dst.long() // page_size, dst.long() % page_size
    moved, steps = keys_at(ours.k[2], page, offset)
    torch.testing.assert_close(moved[2] * steps[2][:, None], k[2] * 3, atol=0.05, rtol=0)


CASES: dict[str, tuple[tuple[Shape, ...], dict[str, int]]] = {
    **{name: (rows, {}) for name, rows in ODD_ROWS.items()},
    "long": ((Shape(700, 30), Shape(129, 40, "chain"), Shape(250, 20, "deep")), {"head_dim": 64}),
    "window": ((Shape(300, 9), Shape(0, 150, "chain"), Shape(120, 30, "deep"), Shape(250, 5)), {"window": 17, "head_dim": 64}),
    "wide window": ((Shape(300, 9), Shape(120, 30)), {"window": 130, "head_dim": 40, "page_size": 32}),
    "heads of 24": ((Shape(140, 9), Shape(33, 3, "chain")), {"head_dim": 24}),
    "heads of 128": ((Shape(140, 9), Shape(33, 3, "chain")), {"head_dim": 128, "page_size": 32}),
    "heads of 512": ((Shape(20, 9), Shape(33, 3, "chain")), {"head_dim": 512}),
    "many heads a group": ((Shape(130, 3), Shape(5, 40, "chain")), {"q_heads": 16, "kv_heads": 1, "head_dim": 64}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_reference_is_attention_over_what_is_stored(name: str) -> None:
    rows, options = CASES[name]
    case = make_case(rows, **options)  # type: ignore[arg-type]
    store = as_bytes(case)
    got = attention.tree_attention(case.q, store.k[0], store.v[0], case.inputs, case.scale, case.window)
    torch.testing.assert_close(got, dequantised(case, store), atol=ROUNDED_WEIGHTS, rtol=0)
    assert (got - case.expected).abs().max() < 0.1  # what 8 bits cost, of numbers about 1


@pytest.mark.parametrize("window", [None, 20])
def test_sinks(window: int | None) -> None:
    case = make_case((Shape(150, 9), Shape(3, 12, "deep")), window=window, with_sinks=True)
    store = as_bytes(case)
    got = attention.tree_attention(case.q, store.k[0], store.v[0], case.inputs, case.scale, window, case.sinks)
    torch.testing.assert_close(got, dequantised(case, store), atol=ROUNDED_WEIGHTS, rtol=0)


@needs_library
@pytest.mark.parametrize("name", CASES)
def test_every_instruction_set_gives_the_same_bits(name: str) -> None:
    rows, options = CASES[name]
    case = make_case(rows, **({"q_heads": 6} | options))  # type: ignore[arg-type]
    store = as_bytes(case)
    want = attention.tree_attention(case.q, store.k[0], store.v[0], case.inputs, case.scale, case.window)
    first = native(case, store, threads=1)
    torch.testing.assert_close(first, want, atol=ROUNDED_WEIGHTS, rtol=0)
    for threads in (2, 3):
        assert torch.equal(native(case, store, threads), first)
    for isa in ISAS:
        assert torch.equal(native(case, store, isa=isa), first), isa


@needs_library
@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 6, 8, 11, 16, 17, 32, 33, 64])
def test_rows_of_every_size(nodes: int) -> None:
    case = make_case((Shape(200, nodes), Shape(100, nodes, "chain"), Shape(120, nodes, "deep")), head_dim=64)
    store = as_bytes(case)
    first = native(case, store)
    torch.testing.assert_close(first, dequantised(case, store), atol=ROUNDED_WEIGHTS, rtol=0)
    for isa in ISAS:
        assert torch.equal(native(case, store, isa=isa), first), isa


def bits_of_one_node(kv_len: int, page_size: int, kind: str, seed: int, window: int | None) -> torch.Tensor:
    """The same query over the same kv_len + 4 keys by absolute position, laid out in another way each time."""
    heads, dim, total = 2, 64, kv_len + 4
    q, keys, values = random(1, 6, dim, seed=1), random(total, heads, dim, seed=2), random(total, heads, dim, seed=3)
    place = torch.Generator().manual_seed(seed)
    spread = [0, 2, 5, 9]  # where the last four positions lie among a tree's nodes
    nodes = {"alone": 1, "root": 1, "chain": 4, "long chain": 40, "deep": 4, "tree": 10, "big tree": 64}[kind]
    committed = {"alone": total - 1, "root": total - 1, "long chain": total - 40}.get(kind, kv_len)
    count = -(-(committed + nodes) // page_size)
    pages = torch.randperm(count + 3, generator=place)
    store = poisoned(len(pages), heads, dim, page_size)
    everything = torch.randperm(len(pages) * page_size, generator=place)  # whatever lies elsewhere
    slots.write(
        random(len(everything), heads, dim, seed=seed),
        random(len(everything), heads, dim, seed=seed + 1),
        everything,
        store.k[0],
        store.v[0],
    )
    for position in range(total):
        index = position
        if "tree" in kind and position >= kv_len:
            index = kv_len + spread[position - kv_len]
        slot = pages[index // page_size] * page_size + index % page_size
        slots.write(keys[position][None], values[position][None], slot[None], store.k[0], store.v[0])
    tree = [-1, 0, 0, 1, 1, 2, 3, 2, 0, 5]
    parents = {"root": [-1], "deep": [-1, 0, 1, 2], "tree": tree, "big tree": tree + [i % 10 for i in range(54)]}.get(kind)
    row = Row(range(nodes), pages[:count].tolist(), committed, parents)
    queries = random(nodes, 6, dim, seed=seed + 2)
    mine = {"tree": 9, "big tree": 9}.get(kind, nodes - 1)
    queries[mine] = q[0]
    inputs = step_inputs([row], page_size)
    return native_attention(queries, store.k[0], store.v[0], inputs, dim**-0.5, window, threads=2)[mine]


@needs_library
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("kv_len", [36, 100, 121, 124, 125, 126, 128, 250, 380])
def test_only_absolute_positions_count(kv_len: int, window: int | None) -> None:
    want = bits_of_one_node(kv_len, 16, "alone", 0, window)
    for page_size in (16, 32):
        for kind in ("alone", "root", "chain", "long chain", "deep", "tree", "big tree"):
            assert torch.equal(bits_of_one_node(kv_len, page_size, kind, page_size, window), want), (page_size, kind)


@needs_library
@pytest.mark.parametrize("isa", ISAS)
def test_nan_stays_with_those_who_see_it(isa: str) -> None:
    case = make_case((Shape(150, 4, "star"), Shape(150, 9, "chain")), head_dim=64)
    store = as_bytes(case)
    want = native(case, store, isa=isa)
    slot = case.inputs.slots[2:3].long()  # of the star's node 2: no other node sees it
    page, offset = slot // 16, slot % 16
    value_parts(store.v[0])[1][page, :, offset // 16, offset % 16] = float("nan")
    got = native(case, store, isa=isa)
    assert got[2].isnan().all()
    others = [0, 1, *range(3, 13)]
    assert torch.equal(got[others], want[others])
    key_parts(store.k[0])[1][page, :, offset // 16, offset % 16] = float("nan")
    assert torch.equal(native(case, store, isa=isa)[others], want[others])
    committed = case.inputs.page_table[1, :1].long()  # all nodes of the second row see it
    value_parts(store.v[0])[1][committed, :, 0, 3] = float("nan")
    got = native(case, store, isa=isa)
    assert got[4:].isnan().all()
    assert torch.equal(got[[0, 1, 3]], want[[0, 1, 3]])


@needs_library
@pytest.mark.parametrize("isa", ISAS)
def test_zeros(isa: str) -> None:
    """Vectors of zeros have step 0: keys that all score 0, values that add nothing, a query that weighs all alike."""
    store = poisoned(2, 1, 64, 16)
    k, v = random(20, 1, 64), random(20, 1, 64, seed=1)
    k[:10], v[5:15] = 0, 0
    slots.write(k, v, torch.arange(20), store.k[0], store.v[0])
    inputs = step_inputs([Row([0], [0, 1], 19)], 16)
    q = torch.zeros(1, 2, 64)
    q[0, 1] = random(64)
    got = native_attention(q, store.k[0], store.v[0], inputs, 0.125, None, 1, isa)
    torch.testing.assert_close(got, attention.tree_attention(q, store.k[0], store.v[0], inputs, 0.125, None), atol=1e-4, rtol=0)
    torch.testing.assert_close(got[0, 0], v[:, 0].mean(0), atol=0.02, rtol=0)
    slots.write(k * 0, v * 0, torch.arange(20), store.k[0], store.v[0])
    assert not native_attention(q, store.k[0], store.v[0], inputs, 0.125, None, 1, isa).any()
