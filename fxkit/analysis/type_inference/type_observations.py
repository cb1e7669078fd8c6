"""What was known of the nodes of a graph before a run, such as from a capture that ran them."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxkit.analysis.type_inference.type_keys import is_function_of_torch, is_module_of_torch
from fxkit.ir.attributes import find_attribute
from fxkit.ir.provenance import provenance_of
from fxkit.ir.symbols import Symbol
from fxkit.ir.types import KEY, type_by_others
from fxkit.torch_adapters.fx_nodes import input_nodes_of

_ABSENT: Any = object()


class Observations:
    """The types of all nodes as they were at one moment.

    Args:
        graph: The graph. Cost: linear in its nodes, about 0.1 µs each.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._types = {node: node.meta.get(KEY, _ABSENT) for node in graph.nodes}

    def type_of(self, node: fx.Node) -> Any:
        """Return what was known of a node's value, or None."""
        known = self._types[node] if node in self._types else node.meta.get(KEY)
        return type_by_others(node) if known is None or known is _ABSENT else known

    def number_of(self, node: fx.Node) -> Any:
        """Return the number that a node read out of a tensor when it was captured, or None."""
        known = self.type_of(node)
        return known if isinstance(known, (bool, int, float, complex)) else None

    def has_number_for(self, node: fx.Node, value: Any) -> bool:
        """Tell whether a number that the data decide is known from a capture."""
        is_read = type(value) is Symbol and value.is_data_dependent
        return is_read and self.number_of(node) is not None

    def result_of(self, node: fx.Node) -> Any:
        """Return the type that a call was seen to return; None for one that a rewrite made."""
        return None if provenance_of(node).by else self.type_of(node)

    def operands_of(self, node: fx.Node) -> tuple[Any, ...]:
        """Return the types that a call was seen to take."""
        return tuple(map(self.type_of, input_nodes_of(node)))

    def restore(self) -> None:
        """Bring the types back to what they were."""
        for node, known in self._types.items():
            if known is not _ABSENT:
                node.meta[KEY] = known
            else:
                node.meta.pop(KEY, None)


def is_foreign(node: fx.Node) -> bool:
    """Tell whether a node calls what is not torch's own, and may do anything."""
    if node.op == "call_function":
        try:
            return not is_function_of_torch(node.target)
        except TypeError:
            return True
    if node.op == "call_module":
        module = find_attribute(node.graph.owning_module, str(node.target))
        return not is_module_of_torch(module)
    return False
