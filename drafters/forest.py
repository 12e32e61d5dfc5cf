"""Which nodes a draft pass must run so that some are scored, given the keys that lie in the window already. Knows nodes and
their order; refuses to know tensors and pages.

The store holds one chain after the root; a pass keeps its head as far as it lies above every wanted node, and writes the rest anew.
"""

from __future__ import annotations

from drafters.growth import Node


def forest(chain: list[Node], wanted: list[Node]) -> tuple[int, list[Node], list[int]]:
    """(kept, order, parents): keep the first `kept` nodes of `chain`, run `order` (its parents row-local, -1 = what is kept).

    `order` holds `wanted` and those of their ancestors that are not kept, parents first, the likeliest path ahead.
    """
    needed: dict[int, Node] = {}
    targets = {node.index for node in wanted}
    for node in wanted:
        step: Node | None = node
        while step is not None and step.index not in needed:
            needed[step.index] = step
            step = step.parent
    kept = 0
    while kept < len(chain) and chain[kept].index not in targets and _above_all(chain[kept], wanted):
        kept += 1
    held = {node.index for node in chain[:kept]}
    order = _depth_first([node for index, node in needed.items() if index not in held])
    place = {node.index: i for i, node in enumerate(order)}
    return kept, order, [-1 if n.parent is None else place.get(n.parent.index, -1) for n in order]


def chain_after(chain: list[Node], kept: int, order: list[Node], parents: list[int]) -> list[Node]:
    """The chain the store holds once `order` has run behind the first `kept` nodes of `chain`."""
    found = chain[:kept]
    for i, node in enumerate(order):
        if parents[i] != i - 1:
            break
        found.append(node)
    return found


def _above_all(ancestor: Node, nodes: list[Node]) -> bool:
    for node in nodes:
        step: Node | None = node.parent
        while step is not None and step.depth > ancestor.depth:
            step = step.parent
        if step is not ancestor:
            return False
    return True


def _depth_first(nodes: list[Node]) -> list[Node]:
    """Parents first, the likeliest path ahead, so that the keys of what is accepted tend to lie in place."""
    below: dict[int, list[Node]] = {}
    inside = {node.index for node in nodes}
    for node in sorted(nodes, key=lambda n: (n.path, -n.index)):
        parent = -1 if node.parent is None or node.parent.index not in inside else node.parent.index
        below.setdefault(parent, []).append(node)
    order: list[Node] = []
    stack = list(below.get(-1, []))
    while stack:
        node = stack.pop()
        order.append(node)
        stack += below.get(node.index, [])
    return order
