"""Types on the nodes of a graph: inferred for its inputs, unless they are there already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from fxkit.analysis.tensor_types import propagate_types
from fxkit.ir import types
from fxkit.ir.types import type_of, type_of_value


def typed(
    gm: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> None:
    """Find the types of a graph's nodes for some inputs, unless they are known.

    Raises:
        UnsupportedError: When it is given no graph module, or `args` is not a tuple.
    """
    is_graph = isinstance(gm, fx.GraphModule)  # `propagate_types` refuses others
    if not (is_graph and _is_typed(gm, args, dict(kwargs or {}))):
        propagate_types(gm, args, kwargs)


def _is_typed(gm: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether the types on the nodes are those for these inputs."""
    if not isinstance(args, (tuple, list)):
        return False
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    given = [*args, *(kwargs[n.target] for n in inputs[len(args) :] if n.target in kwargs)]
    if len(given) != len(inputs):
        return False
    untyped = [n for n in gm.graph.nodes if n.op != "output" and not has_type(n)]
    return not untyped and all(map(is_of_type, map(type_of, inputs), given))


def has_type(node: fx.Node) -> bool:
    """Tell whether a node has a type."""
    return not node.meta.keys().isdisjoint((types.KEY, "val", "tensor_meta"))


def is_of_type(expected: Any, value: Any) -> bool:
    """Tell whether a value has just the type that is recorded for it."""
    found = type_of_value(value)
    return type(expected) is type(found) and bool(expected == found)
