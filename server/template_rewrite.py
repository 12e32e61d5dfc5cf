"""Rewrites a chat template's syntax tree: charges where work happens, other strings where the template writes control tokens.

Knows Jinja's nodes. Refuses to know budgets and tokenizers: it calls methods of the environment by name (`tick`, `made`,
`concatenated`) and swaps the strings it is given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from server.template_limits import words


class Rewriter(NodeTransformer):
    """Puts charges into loops and macros, makes concatenation and literals measurable, and swaps literals."""

    # Methods that look at text instead of writing it: their arguments are what users type, so they keep the real strings.
    _LOOKING = words(
        """count endswith find get index lstrip partition removeprefix removesuffix replace rfind rpartition rsplit rstrip split
        startswith strip"""
    )

    def __init__(self, literals: Mapping[str, str]) -> None:
        self._literals = literals
        self._pattern = re.compile("|".join(map(re.escape, sorted(literals, key=len, reverse=True)))) if literals else None

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.TemplateData(self._swap(node.data)).set_lineno(node.lineno)

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        if not isinstance(node.value, str):
            return node
        return nodes.Const(self._swap(node.value)).set_lineno(node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        parts: list[nodes.Compare | nodes.Operand] = [node, *node.ops]
        for part in parts:
            if not isinstance(part.expr, nodes.Const):
                part.expr = self.visit(part.expr)
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._charged(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._charged(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._charged(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Node:
        return self._charged(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _hook("concatenated", list(node.nodes), node.lineno)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _hook("made", [node], node.lineno)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _hook("made", [node], node.lineno)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _hook("made", [node], node.lineno) if node.ctx == "load" else node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        if isinstance(node.node, nodes.Getattr) and node.node.attr in self._LOOKING:
            node.node = self.visit(node.node)
            node.args = [arg if isinstance(arg, nodes.Const) else self.visit(arg) for arg in node.args]
            return node
        return self.generic_visit(node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        if node.name != "replace" or not node.args:
            return self.generic_visit(node)
        sought = node.args[0]
        self.generic_visit(node)
        if isinstance(sought, nodes.Const):
            node.args[0] = sought
        return node

    def _charged(self, node: Any) -> nodes.Node:
        static = sum(len(data.data) for child in node.body for data in child.find_all(nodes.TemplateData))
        self.generic_visit(node)
        tick = nodes.ExprStmt(_hook("tick", [nodes.Const(static)], node.lineno)).set_lineno(node.lineno)
        node.body.insert(0, tick)
        return cast(nodes.Node, node)

    def _swap(self, text: str) -> str:
        return self._pattern.sub(lambda found: self._literals[found.group()], text) if self._pattern else text


def _hook(name: str, args: list[nodes.Expr], line: int) -> nodes.Call:
    call = nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None)
    return cast(nodes.Call, call.set_lineno(line))
