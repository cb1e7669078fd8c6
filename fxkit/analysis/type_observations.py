"""What is known of calls that may not be runnable: unknown functions, seen at a capture."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxkit.analysis.type_keys import is_function_of_torch, is_module_of_torch
from fxkit.ir.attributes import find_attribute
from fxkit.ir.types import type_of


class Observation:
    """What was known of a call before the sweep: from a capture that ran it.

    Args:
        node: The call.
    """

    __slots__ = ("operands", "result")

    def __init__(self, node: fx.Node) -> None:
        self.operands = tuple(type_of(operand) for operand in node._input_nodes)
        self.result = type_of(node)

    @property
    def has_result(self) -> bool:
        """Whether a result is known."""
        return self.result is not None

    def fits(self, operands: tuple[Any, ...]) -> bool:
        """Tell whether operands of these types were given then."""
        return self.operands == operands


def observations(graph: fx.Graph) -> dict[fx.Node, Observation]:
    """Return what is known of the calls in a graph that may not be runnable on fake tensors."""
    return {node: Observation(node) for node in graph.nodes if is_foreign(node)}


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
