"""draft_tree in C++: the whole growth in one library call. Knows plain buffers; refuses to know what a chance means."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from kernels.batch import KVTensors
from kernels.draft_tree import MOST_NODES, Grown, GrownTree, GrowthRow, GrowthRules
from kernels.native import NativeLibrary
from kernels.native.library import check
from kernels.native.tensors import address, store_data

_STRIDE = MOST_NODES + 1  # places of one row's output
_WORDS = 3 + 4 * _STRIDE  # of one row's output
_PASSES = 63  # that the library tells of


class NativeTreeGrower:
    """The `TreeGrower` of a C++ decoder. Its buffers are its own: not for use by two threads at once."""

    def __init__(
        self,
        decoder: object,
        library: NativeLibrary,
        handle: int,
        team: int,
        sizes: tuple[int, int, int],
        store: KVTensors,
        rules: GrowthRules,
    ) -> None:
        """`handle`: of the decoder, which is kept alive with the store. `sizes`: hidden, score columns, width of the features (0 = none, else hidden)."""
        self._keeps = decoder, store
        self._c = library.c
        self._team = team
        self._width, self._columns, features = sizes
        self._features = features > 0
        self._store = store_data(store)
        edges, cells = array("d", rules.edges), array("i", rules.depth_cells)
        names = None if rules.names is None else array("i", rules.names)
        if rules.fan < 1 or (names is not None and len(names) != self._columns):
            raise ValueError(f"{rules.fan} children a node, {len(rules.names or ())} names for {self._columns} columns")
        self._handle: int = self._c.fs_tree_create(
            handle, self._width, self._columns, int(self._features), None if names is None else names.buffer_info()[0],
            edges.buffer_info()[0], len(edges), cells.buffer_info()[0], len(cells), rules.ranks, rules.fan, rules.width,
        )  # fmt: skip
        self._table = (max(rules.depth_cells) + 1) * rules.ranks * (len(edges) + 2)
        self._rows = 0
        self._reserve(1)
        self._passes = array("q", bytes(8 * (1 + 2 * _PASSES)))

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle is not None:
            self._c.fs_tree_destroy(handle)

    def _reserve(self, rows: int) -> None:
        if rows > self._rows:
            self._rows = rows
            self._out = array("i", bytes(4 * rows * _WORDS))
            self._shares = array("f", bytes(4 * rows * _STRIDE))

    def grow(self, rows: Sequence[GrowthRow], features: torch.Tensor | None, costs: Sequence[float]) -> Grown:
        """Raises NativeError, having written no key, when a row does not fit its pages or features do not fit."""
        words: list[int] = []
        numbers: list[float] = []
        for row in rows:
            table = row.chances
            if table is not None and len(table) != self._table:
                raise ValueError(f"a table of {len(table)} chances, expected {self._table}")
            words += (len(row.token_ids), row.kv_len, len(row.page_ids), row.grows, row.room, row.max_nodes, row.max_depth)
            words += (len(row.prices), 0 if table is None else table.buffer_info()[0])
            words += row.token_ids
            words += row.page_ids
            numbers += (row.temperature, row.factor, row.price)
            numbers += row.prices
        self._reserve(len(rows))
        ints, floats, prices = array("q", words), array("d", numbers), array("d", costs)
        check(
            self._c.fs_tree_grow(
                self._handle,
                self._team,
                self._store,
                ints.buffer_info()[0],
                floats.buffer_info()[0],
                len(rows),
                None if features is None else self._checked(features, rows),
                prices.buffer_info()[0],
                len(prices),
                self._out.buffer_info()[0],
                self._shares.buffer_info()[0],
                self._passes.buffer_info()[0],
            )
        )
        told = self._passes[1 : 1 + 2 * self._passes[0]].tolist()
        passes = [(nodes, ns / 1e6) for nodes, ns in zip(told[::2], told[1::2], strict=True)]
        return Grown([self._tree(i) if row.grows else None for i, row in enumerate(rows)], passes)

    def _checked(self, features: torch.Tensor, rows: Sequence[GrowthRow]) -> int:
        nodes = sum([len(row.token_ids) for row in rows])
        if features.shape != (nodes, self._width):
            raise ValueError(f"features are {list(features.shape)}, expected {[nodes, self._width]}")
        return address(features, torch.float32, "features")

    def _tree(self, row: int) -> GrownTree:
        out, at = self._out, row * _WORDS
        broken, count, length = out[at : at + 3]
        tokens, parents, ranks, chain = (at + 3 + part * _STRIDE for part in range(4))
        shares = self._shares[row * _STRIDE : row * _STRIDE + count]
        return GrownTree(
            tuple(out[tokens : tokens + count]),
            tuple(out[parents : parents + count]),
            tuple(out[ranks : ranks + count]),
            tuple(shares),
            out[chain : chain + length].tolist(),
            bool(broken),
        )
