"""The shared level of attention: which rows it finds, and that reading keys once for all of them changes no value."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from device import DEVICE, to_device
from toy import Row, step_inputs

from kernels.batch import KVTensors, SharedPrefix
from kernels.float8.reference import stored
from kernels.kv_slots import reference as slots
from kernels.tree_attention import reference
from kernels.tree_attention.shared import WORTH_KEYS, shared_prefix
from kernels.tree_attention.triton import tree_attention
from spec.inputs import build_inputs
from spec.plan import PlanRow
from spec.tree import EMPTY_TREE

FLOAT32_ORDER = 5e-6
WHOLE_WEIGHTS = 5e-4  # the CPU makes softmax weights over bytes whole
PAGE = 16
PAGES = WORTH_KEYS // PAGE


def find(pages: list[list[int]], kv_lens: list[int] | None = None) -> SharedPrefix | None:
    return shared_prefix(pages, kv_lens or [PAGE * len(p) for p in pages], list(range(len(pages) + 1)), PAGE)


def brute(pages: list[list[int]], kv_lens: list[int]) -> int:
    """Pages read less, by trying every run of rows."""
    best = 0
    for a in range(len(pages)):
        for b in range(a + 2, len(pages) + 1):
            most = min(n // PAGE for n in kv_lens[a:b])
            same = 0
            while same < most and len({p[same] for p in pages[a:b]}) == 1:
                same += 1
            if same * PAGE >= WORTH_KEYS:
                best = max(best, same * (b - a - 1))
    return best


def test_the_run_that_saves_most_is_found() -> None:
    chance = random.Random(0)
    for _ in range(300):
        rows = chance.randint(1, 6)
        pages = [[0] * 3 * PAGES for _ in range(rows)]
        for row in pages:  # leaves a common start of some length
            cut = chance.choice([0, PAGES - 1, PAGES, 2 * PAGES, 3 * PAGES])
            row[cut:] = [chance.randint(1, 10**6) for _ in row[cut:]]
        kv_lens = [chance.choice([3, WORTH_KEYS, 3 * WORTH_KEYS - 1, 3 * WORTH_KEYS]) for _ in range(rows)]
        found, saved = find(pages, kv_lens), brute(pages, kv_lens)
        assert (found is None) == (saved == 0)
        if found is not None:
            first, last = found.rows
            assert (last - first - 1) * found.keys // PAGE == saved
            assert found.nodes == found.rows
            assert all(p[: found.keys // PAGE] == pages[first][: found.keys // PAGE] for p in pages[first:last])
            assert min(kv_lens[first:last]) >= found.keys


def test_little_or_nothing_in_common() -> None:
    assert find([]) is None
    assert find([[1, 2, 3]]) is None
    assert find([list(range(PAGES - 1)), list(range(PAGES - 1))]) is None
    assert find([list(range(PAGES)), list(range(PAGES))]) == SharedPrefix((0, 2), (0, 2), WORTH_KEYS)
    assert find([list(range(PAGES)), list(range(PAGES))], [WORTH_KEYS, WORTH_KEYS - 1]) is None  # not all committed


def test_inputs_carry_it_to_other_devices_than_the_cpu() -> None:
    pages = list(range(PAGES))
    rows = [PlanRow(i, WORTH_KEYS, [5], [*pages, 90 + i], True, True) for i in range(3)]
    trees = [EMPTY_TREE] * 3
    assert build_inputs(rows, trees, PAGE, torch.device("cpu")).shared is None
    assert build_inputs(rows, trees, PAGE, torch.device("meta")).shared == SharedPrefix((0, 3), (0, 3), WORTH_KEYS)


@pytest.mark.parametrize("split_keys", [None, 64])
@pytest.mark.parametrize(("window", "sinks"), [(None, False), (100, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.uint8])
def test_values_are_the_references(dtype: torch.dtype, window: int | None, sinks: bool, split_keys: int | None) -> None:
    """Rows 1 to 3 of five share 160 keys: a tree, a chunk and a lone node."""
    g = torch.Generator().manual_seed(1)
    common = list(range(20, 30))
    rows = [
        Row([1, 2], [0, 1], 17),
        Row([1, 2, 3, 4], [*common, 2], 163, [-1, 0, 0, 1]),
        Row(list(range(20)), [*common, 3, 4], 160),
        Row([9], [*common, 5], 171),
        Row([7, 8], [6], 5, [-1, 0]),
    ]
    inputs = step_inputs(rows, PAGE)
    q = torch.randn(inputs.num_nodes, 4, 16, generator=g) * 1.5
    k, v = kept(torch.randn(30, 2, 16, PAGE, generator=g), torch.randn(30, 2, PAGE, 16, generator=g), dtype)
    logits = torch.randn(4, generator=g) if sinks else None
    want = reference.tree_attention(q, k, v, inputs, 0.25, window, logits)
    shared = replace(to_device(inputs), shared=SharedPrefix((1, 4), (2, 27), 160))
    got = tree_attention(*to_device((q, k, v)), shared, 0.25, window, to_device(logits), split_keys)
    order = WHOLE_WEIGHTS if dtype == torch.uint8 else FLOAT32_ORDER
    atol = order if DEVICE == "cpu" else 3e-2
    torch.testing.assert_close(got.cpu(), want, atol=atol, rtol=atol)


def kept(k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [pages, Hkv, D, PAGE] and values [pages, Hkv, PAGE, D] as a store of that dtype has them."""
    if dtype != torch.uint8:
        return stored(k, dtype), stored(v, dtype)
    pages, heads, dim, page_size = k.shape
    store = KVTensors.allocate(1, pages, heads, dim, page_size, dtype)
    every = torch.arange(pages * page_size)
    rows = [x.flatten(0, 1) for x in (k.permute(0, 3, 1, 2), v.permute(0, 2, 1, 3))]
    slots.write(rows[0], rows[1], every, store.k[0], store.v[0])
    return store.k[0], store.v[0]


def test_shared_keys_are_read_from_the_first_row_of_the_group() -> None:
    """The hint is used: with a page table that lies about the others' shared pages, only the first row's pages are read."""
    rows = [Row([1], list(range(11)), 170), Row([2], list(range(11, 22)), 170)]
    inputs = step_inputs(rows, PAGE)
    g = torch.Generator().manual_seed(2)
    q = torch.randn(2, 2, 16, generator=g)
    k, v = torch.randn(22, 1, 16, PAGE, generator=g), torch.randn(22, 1, PAGE, 16, generator=g)
    same = step_inputs([rows[0], Row([2], [*range(10), 21], 170)], PAGE)
    want = reference.tree_attention(q, k, v, same, 0.25, None)
    lying = replace(to_device(inputs), shared=SharedPrefix((0, 2), (0, 2), 160))
    got = tree_attention(*to_device((q, k, v)), lying, 0.25, None).cpu()
    torch.testing.assert_close(got, want, atol=FLOAT32_ORDER, rtol=FLOAT32_ORDER)
