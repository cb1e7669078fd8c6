"""Compare two graphs of one call, of which one computes numbers that the other one has."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx

from fxkit.ir.types import type_of
from fxkit.tracing.guarding import guards as g


def is_same_but_for_scalars(
    static: fx.Graph, free: fx.Graph, numbers: Mapping[fx.Node, Any]
) -> bool:
    """Tell whether two graphs are the same but for numbers that one of them computes.

    Args:
        static: A graph for the numbers of one call.
        free: The other graph, captured from the same call.
        numbers: The nodes of `free` that compute numbers, and their values in that call.
    """
    return _Comparison(numbers).holds(static, free)


class _Comparison:
    """Goes through two graphs side by side.

    Where one of several results is taken depends on who asks for it first, which a look at its size
    does; such nodes are compared where they are used.
    """

    def __init__(self, numbers: Mapping[fx.Node, Any]) -> None:
        self._numbers = numbers
        self._same: dict[fx.Node, fx.Node] = {}

    def holds(self, static: fx.Graph, free: fx.Graph) -> bool:
        left = [node for node in static.nodes if not _takes(node)]
        right = [n for n in free.nodes if n not in self._numbers and not _takes(n)]
        return len(left) == len(right) and all(map(self._is_same_node, left, right))

    def _is_same_node(self, ours: fx.Node, theirs: fx.Node) -> bool:
        if ours.op != theirs.op:
            return False
        if ours.op == "output":
            return self._is_same_output(ours.args[0], theirs.args[0])
        self._same[ours] = theirs
        return (
            ours.target == theirs.target
            and self._is_same(ours.args, theirs.args)
            and self._is_same(ours.kwargs, theirs.kwargs)
        )

    def _is_same_output(self, ours: Any, theirs: Any) -> bool:
        """Compare what is returned; the other graph's result has numbers of sizes as constants."""
        if isinstance(theirs, fx.Node):
            return self._is_same(ours, theirs)
        return self._is_same(tuple(ours), tuple(it for it in theirs if it not in self._numbers))

    def _is_same(self, ours: Any, theirs: Any) -> bool:
        if isinstance(theirs, fx.Node) or isinstance(ours, fx.Node):
            return self._is_same_operand(ours, theirs)
        if isinstance(ours, (tuple, list)) and isinstance(theirs, (tuple, list)):
            return len(ours) == len(theirs) and all(map(self._is_same, ours, theirs))
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            values = (ours.values(), theirs.values())
            return list(ours) == list(theirs) and all(map(self._is_same, *values))
        if isinstance(ours, slice) and isinstance(theirs, slice):
            return self._is_same(
                (ours.start, ours.stop, ours.step), (theirs.start, theirs.stop, theirs.step)
            )
        return g.is_same(ours, theirs)

    def _is_same_operand(self, ours: Any, theirs: Any) -> bool:
        if theirs in self._numbers:
            return g.is_same(ours, self._numbers[theirs])
        if not (isinstance(ours, fx.Node) and isinstance(theirs, fx.Node)):
            return False
        if _takes(ours) and _takes(theirs):
            return self._is_same(ours.args, theirs.args)
        return self._same.get(ours) is theirs


def _takes(node: fx.Node) -> bool:
    """Tell whether a node takes one of several results of another."""
    if node.target is not operator.getitem:
        return False
    source = node.args[0]
    return isinstance(source, fx.Node) and isinstance(type_of(source), (tuple, list, dict))
