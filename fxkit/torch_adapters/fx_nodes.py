"""What `torch.fx.Node` keeps to itself: its operands, its place, whether it was erased."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

from torch import fx

from fxkit.torch_adapters.private_names import private

_INPUTS = private(
    "torch.fx.Node._input_nodes",
    "reading the operands of nodes as they are kept",
    "they are copied each time",
)
_ARGS = private(
    "torch.fx.Node._args", "reading arguments of nodes", "they are read through a property"
)
_KWARGS = private(
    "torch.fx.Node._kwargs", "reading arguments of nodes", "they are read through a property"
)
_ERASED = private(
    "torch.fx.Node._erased", "telling erased nodes", "a graph is searched for each of them"
)
_SORT_KEY = private(
    "torch.fx.Node._sort_key", "sorting nodes", "they are compared one with another"
)
_UPDATE = private(
    "torch.fx.Node._update_args_kwargs",
    "exchanging arguments of nodes",
    "they are set through properties",
)
_RENAME = private(
    "torch.fx.Node._rename", "renaming nodes", "they get the name as it is, if it is free"
)


def _has(name: Any) -> bool:
    lost = object()
    return name.get(lost) is not lost


def _copied_inputs(node: fx.Node) -> dict[fx.Node, None]:
    return dict.fromkeys(node.all_input_nodes)


def _is_nowhere(node: fx.Node) -> bool:
    return not any(one is node for one in node.graph.nodes)


def _compared(one: fx.Node, other: fx.Node) -> int:
    return 0 if one is other else -1 if one < other else 1


def _set_one_by_one(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    node.args, node.kwargs = args, kwargs


def _set_name(node: fx.Node, name: str) -> None:
    if all(one.name != name for one in node.graph.nodes):
        node.name = name


input_nodes_of: Callable[[fx.Node], dict[fx.Node, None]] = (
    operator.attrgetter("_input_nodes") if _has(_INPUTS) else _copied_inputs
)
"""Returns the operands of a node, in order, each once; not to be changed."""

args_of: Callable[[fx.Node], tuple[Any, ...]] = operator.attrgetter(
    "_args" if _has(_ARGS) else "args"
)
"""Returns the positional arguments of a node."""

kwargs_of: Callable[[fx.Node], dict[str, Any]] = operator.attrgetter(
    "_kwargs" if _has(_KWARGS) else "kwargs"
)
"""Returns the keyword arguments of a node."""

is_erased: Callable[[fx.Node], bool] = (
    operator.attrgetter("_erased") if _has(_ERASED) else _is_nowhere
)
"""Tells whether a node was taken out of its graph."""

order_key: Callable[[fx.Node], Any] = (
    operator.attrgetter("_sort_key") if _has(_SORT_KEY) else functools.cmp_to_key(_compared)
)
"""Returns what nodes of one graph are sorted by, in its order."""

set_arguments: Callable[[fx.Node, tuple[Any, ...], dict[str, Any]], None] = _UPDATE.get(
    _set_one_by_one
)
"""Gives a node other arguments, and its operands other users."""

rename_node: Callable[[fx.Node, str], None] = _RENAME.get(_set_name)
"""Gives a node a name, with a number added where it is taken."""
