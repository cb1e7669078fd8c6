"""Nodes and operands as people give them: nodes, names, or the objects of `fxkit.graph`.

Those objects belong to a later layer; here they are known by their `fx_node`.
"""

from __future__ import annotations

import difflib
from typing import Any

import torch
from torch import fx, nn

from fxkit.errors import RewriteError
from fxkit.ir.node_kinds import KINDS
from fxkit.ir.printer import format_node, format_value
from fxkit.torch_adapters.fx_nodes import is_erased


def node_in(graph: fx.Graph, value: Any) -> fx.Node:
    """Return the node that is meant.

    Args:
        graph: The graph that has to hold it.
        value: A node, an object with an `fx_node`, or the name of a node. Cost of a name: linear
            in the graph.

    Raises:
        RewriteError: When it is something else, was erased, or lies in another graph.
    """
    node = _named(graph, value) if isinstance(value, str) else any_node(value)
    if is_erased(node):
        raise RewriteError(
            f"expected a node of the graph, got %{node.name}, which was erased",
            hint="use the node that took its place",
        )
    if node.graph is not graph:
        raise RewriteError(
            f"expected a node of this graph, got %{node.name} of another one",
            node=format_node(node),
            hint="bring it over with edit.copy(node, substitute)",
        )
    return node


def any_node(value: Any) -> fx.Node:
    """Return the node of any graph that is meant.

    Args:
        value: A node, or an object with an `fx_node`.

    Raises:
        RewriteError: When it is something else.
    """
    node = value if type(value) is fx.Node else getattr(value, "fx_node", value)
    if not isinstance(node, fx.Node):
        raise RewriteError(
            f"expected a node, got {type(value).__name__} {value!r:.60}",
            hint="take one from fxkit.graph(gm), such as fxkit.graph(gm)['relu']",
        )
    return node


def _named(graph: fx.Graph, name: str) -> fx.Node:
    names = {node.name: node for node in graph.nodes}
    if name not in names:
        near = ", ".join(f"%{n}" for n in difflib.get_close_matches(name, names, 3))
        raise RewriteError(
            f"expected the name of a node, got {name!r}",
            hint=f"did you mean {near}?" if near else "print(fxkit.graph(gm)) shows the names",
        )
    return names[name]


def operands_in(graph: fx.Graph, value: Any) -> Any:
    """Return nested operands with nodes in the places of the objects that stand for them.

    Args:
        graph: The graph that has to hold the nodes.
        value: An operand, or a tuple, list, dict or slice of operands.

    Raises:
        RewriteError: When a node is of another graph, or a tensor, a module or an object that no
            code can write down is given as it is.
    """
    if isinstance(value, fx.Node) or hasattr(value, "fx_node"):
        return node_in(graph, value)
    if type(value) in (tuple, list):
        return type(value)(operands_in(graph, item) for item in value)
    if type(value) is dict:
        return {key: operands_in(graph, item) for key, item in value.items()}
    if type(value) is slice:
        parts = (value.start, value.stop, value.step)
        return slice(*(operands_in(graph, part) for part in parts))
    if isinstance(value, (torch.Tensor, nn.Module)):
        raise RewriteError(
            f"expected nodes and plain values as operands, got a {type(value).__name__}",
            hint="give edit.add_attribute('name', value), which the module keeps",
        )
    if type(value).__repr__ is object.__repr__:
        raise RewriteError(
            f"expected nodes and plain values as operands, got {value!r:.60}",
            hint="give numbers, texts, dtypes or lists of them; a function may hold the object",
        )
    return value


def check_name(name: Any) -> None:
    """Refuse what is no name.

    Raises:
        RewriteError: When it is no text, or empty.
    """
    if not isinstance(name, str) or not name:
        raise RewriteError(
            f"expected a name, got {type(name).__name__} {name!r:.60}",
            hint="give a text, such as 'relu_1'",
        )


def check_target(op: str, target: Any) -> None:
    """Refuse what a node of some kind can't call.

    Raises:
        RewriteError: When it is no such thing.
    """
    if op not in KINDS:
        raise RewriteError(
            f"expected the kind of a node, got {op!r}", hint=f"write one of {', '.join(KINDS)}"
        )
    if op != "call_function":
        if not isinstance(target, str):
            raise RewriteError(
                f"expected the name of what a {op} takes, got {format_value(target)}",
                hint="give a path as text; edit.register('name', module) puts a module there",
            )
        return
    if isinstance(target, nn.Module) or (
        isinstance(target, type) and issubclass(target, nn.Module)
    ):
        name = type(target).__name__ if isinstance(target, nn.Module) else target.__name__
        raise RewriteError(
            f"expected a function to call, got the module {name}",
            hint="give edit.register('name', module), with an instance, which names it",
        )
    if not callable(target):
        raise RewriteError(
            f"expected a function to call, got {type(target).__name__} {target!r:.60}",
            hint="give a function, a method as '.view', or the path of a submodule",
        )


def check_args(args: Any) -> None:
    """Refuse operands that come as something else than a tuple or a list.

    Raises:
        RewriteError: When they do.
    """
    if not isinstance(args, (tuple, list)):
        raise RewriteError(
            f"expected a tuple of operands, got {format_value(args)}",
            hint="write (x,) for a single operand",
        )


def check_path(gm: fx.GraphModule, path: str) -> None:
    """Refuse the path of a submodule that a module does not have.

    Raises:
        RewriteError: When there is none.
    """
    try:
        gm.get_submodule(path)
    except AttributeError:
        is_method = hasattr(torch.Tensor, path)
        raise RewriteError(
            f"expected the path of a submodule, got {path!r}",
            hint=f"write '.{path}' to call the method"
            if is_method
            else "register the module first: edit.register('name', module)",
        ) from None
