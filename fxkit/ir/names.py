"""Names that generated code can have: `self` is the module there, and no node or parameter."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from torch import fx

from fxkit.torch_adapters.graph_surgery import reserve_name

MODULE_NAME = "self"


def keep_module_name(graph: fx.Graph) -> fx.Graph:
    """Let no node that is made or renamed from now on be called `self`; return the graph."""
    reserve_name(graph, MODULE_NAME)
    return graph


def append_placeholder(graph: fx.Graph, name: str) -> fx.Node:
    """Append an input; its target is the name of the generated code's parameter."""
    node = keep_module_name(graph).placeholder(name)
    if name == MODULE_NAME or not name.isidentifier():
        node.target = node.name
    return node


def distinct_names(names: Iterable[str]) -> list[str]:
    """Return names of parameters as wished, with a number where one is taken or is `self`."""
    wished = list(names)
    taken = {*wished, MODULE_NAME}
    found: dict[str, None] = {}
    for name in wished:
        if name in found or name == MODULE_NAME:
            numbered = (f"{name}_{number}" for number in itertools.count(1))
            name = next(free for free in numbered if free not in taken)
            taken.add(name)
        found[name] = None
    return list(found)
