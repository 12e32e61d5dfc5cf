"""The C++ tree attention: torch's dense masked attention on odd shapes, and bits that do not depend on the layout."""

from __future__ import annotations

import pytest
import torch
from attention_cases import ODD_ROWS, AttentionCase, Shape, make_case
from toy import Row, step_inputs

from kernels.native import NativeError, load

LIBRARY = load()
if LIBRARY is None:
    pytest.skip("no native library: no C++ compiler here", allow_module_level=True)

from kernels.tree_attention.native import tree_attention  # noqa: E402

# Both sides sum a few hundred float32 products of size about 1, in different orders.
FLOAT32_ORDER = 3e-6


def run(case: AttentionCase, threads: int = 2, isa: str | None = None) -> torch.Tensor:
    return tree_attention(case.q, case.store_k, case.store_v, case.inputs, case.scale, case.window, threads, isa)


def check(case: AttentionCase, isa: str | None = None) -> None:
    torch.testing.assert_close(run(case, isa=isa), case.expected, atol=FLOAT32_ORDER, rtol=FLOAT32_ORDER)


@pytest.mark.parametrize("isa", LIBRARY.isas)
@pytest.mark.parametrize("name", ODD_ROWS)
def test_odd_rows(name: str, isa: str) -> None:
    check(make_case(ODD_ROWS[name]), isa)


@pytest.mark.parametrize("page_size", [1, 4, 16, 32])
@pytest.mark.parametrize("groups", [1, 3, 4, 8])
def test_grouped_heads_and_page_sizes(groups: int, page_size: int) -> None:
    check(make_case((Shape(17, 6), Shape(33, 3, "chain")), q_heads=2 * groups, kv_heads=2, page_size=page_size, seed=groups))


@pytest.mark.parametrize("head_dim", [2, 24, 40, 64, 80, 96, 128])
def test_head_sizes(head_dim: int) -> None:
    check(make_case((Shape(17, 6), Shape(33, 3, "chain")), head_dim=head_dim))


@pytest.mark.parametrize("window", [1, 2, 16, 17, 130, 1000])
def test_window_counts_positions_on_the_path(window: int) -> None:
    check(
        make_case(
            (Shape(20, 9), Shape(0, 40, "chain"), Shape(3, 12, "deep"), Shape(290, 5), Shape(250, 20, "chain")), window=window
        )
    )


@pytest.mark.parametrize("nodes", [1, 3, 30])
@pytest.mark.parametrize("kv_len", [126, 127, 128, 129, 255, 257, 700])
def test_long_context_over_chunk_borders(kv_len: int, nodes: int) -> None:
    check(make_case((Shape(kv_len, nodes), Shape(kv_len, nodes, "chain"), Shape(kv_len, min(nodes, 20), "deep"))))


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_depend_on_neither_threads_nor_instruction_set(dtype: torch.dtype, window: int | None) -> None:
    case = make_case((Shape(300, 7), Shape(0, 150, "chain"), Shape(129, 30, "deep")), dtype=dtype, window=window, q_heads=6)
    first = run(case, threads=1)
    for threads in (2, 3):
        assert torch.equal(run(case, threads), first)
    for isa in LIBRARY.isas:
        assert torch.equal(run(case, isa=isa), first), isa


@pytest.mark.parametrize("isa", LIBRARY.isas)
@pytest.mark.parametrize("name", ODD_ROWS)
@pytest.mark.parametrize(
    ("head_dim", "page_size", "window"), [(64, 16, None), (32, 4, 17), (96, 32, None), (128, 16, 100), (80, 16, None)]
)
def test_bfloat16_stores(head_dim: int, page_size: int, window: int | None, name: str, isa: str) -> None:
    case = make_case(ODD_ROWS[name], head_dim=head_dim, page_size=page_size, window=window, dtype=torch.bfloat16, q_heads=6)
    torch.testing.assert_close(run(case, isa=isa), case.expected, atol=FLOAT32_ORDER, rtol=FLOAT32_ORDER)


def bits_of_one_node(kv_len: int, page_size: int, kind: str, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """The same query over the same kv_len + 4 keys by absolute position, laid out in another way each time."""
    g = torch.Generator().manual_seed(3)
    heads, dim, total = 2, 64, kv_len + 4
    q = torch.randn(1, 6, dim, generator=g)
    keys, values = torch.randn(total, heads, dim, generator=g), torch.randn(total, heads, dim, generator=g)
    place = torch.Generator().manual_seed(seed)
    spread = [0, 2, 5, 9]  # where the last four positions lie among a tree's nodes
    nodes = {"alone": 1, "root": 1, "chain": 4, "deep": 4, "tree": 10}[kind]
    committed = total - 1 if nodes == 1 else kv_len
    pages = torch.randperm(-(-(committed + nodes) // page_size) + 3, generator=place)
    count = -(-(committed + nodes) // page_size)
    store_k = torch.randn(len(pages), heads, dim, page_size, generator=place).to(dtype)
    store_v = torch.randn(len(pages), heads, page_size, dim, generator=place).to(dtype)
    for position in range(total):
        index = position
        if kind == "tree" and position >= kv_len:
            index = kv_len + spread[position - kv_len]
        page, offset = int(pages[index // page_size]), index % page_size
        store_k[page, :, :, offset] = keys[position]
        store_v[page, :, offset] = values[position]
    # Rows of the kinds alone and chain are causal, the others are trees: of one node, without branches, with branches.
    parents = {"root": [-1], "deep": [-1, 0, 1, 2], "tree": [-1, 0, 0, 1, 1, 2, 3, 2, 0, 5]}.get(kind)
    row = Row(range(nodes), pages[:count].tolist(), committed, parents)
    inputs = step_inputs([row], page_size)
    queries = torch.randn(nodes, 6, dim, generator=place)
    queries[-1] = q[0]
    return tree_attention(queries, store_k, store_v, inputs, dim**-0.5, None, threads=2)[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_len", [0, 1, 12, 13, 16, 30, 31, 125, 126, 250, 500])
def test_only_absolute_positions_count(kv_len: int, dtype: torch.dtype) -> None:
    want = bits_of_one_node(kv_len, 16, "alone", 0, dtype)
    for page_size in (1, 4, 16, 32):
        for kind in ("alone", "root", "chain", "deep", "tree"):
            assert torch.equal(bits_of_one_node(kv_len, page_size, kind, page_size, dtype), want), (page_size, kind)


def test_a_row_does_not_know_its_neighbours() -> None:
    shapes = (Shape(200, 5), Shape(40, 33, "chain"), Shape(7, 1))
    case = make_case(shapes, seed=4)
    together = run(case)
    alone = make_case(shapes, seed=4)
    first = 0
    for s, shape in enumerate(shapes):
        last = first + shape.nodes
        step = alone.inputs
        single = type(step)(
            input_ids=step.input_ids[first:last].clone(),
            positions=step.positions[first:last].clone(),
            slots=step.slots[first:last].clone(),
            words=step.words[first:last].clone(),
            causal=step.causal[s : s + 1].clone(),
            row_ptr=torch.tensor([0, shape.nodes], dtype=torch.int32),
            page_table=step.page_table[s : s + 1].clone(),
            kv_lens=step.kv_lens[s : s + 1].clone(),
            score_rows=torch.zeros(0, dtype=torch.int32),
        )
        out = tree_attention(case.q[first:last].contiguous(), case.store_k, case.store_v, single, case.scale, None)
        assert torch.equal(out, together[first:last])
        first = last


def test_out_of_bounds_is_refused() -> None:
    case = make_case((Shape(20, 3),))
    case.inputs.page_table[0, 1] = 99
    with pytest.raises(NativeError, match="slot or page"):
        run(case)
    case = make_case((Shape(20, 3),))
    case.inputs.words[1] = 1 << 40
    with pytest.raises(NativeError, match="malformed"):
        run(case)
