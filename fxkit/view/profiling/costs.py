"""The costs of many nodes: equal calls on equal types are counted once.

Torch's counter takes milliseconds for an operator, and a model repeats its layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from fxkit.analysis.cost import FREE, Cost, cost_of
from fxkit.ir.attributes import find_attribute
from fxkit.ir.node_kinds import COMPUTES_NOTHING
from fxkit.ir.types import type_of, type_of_value
from fxkit.view.texts.labels import operator_name

_UNKNOWN = Cost(None, None)


def costs_of(nodes: Iterable[fx.Node]) -> list[Cost]:
    """Return `cost_of` each node; unknown for a node without a type."""
    known: dict[Any, Cost] = {}
    return [_cost(node, known) for node in nodes]


def is_call(node: fx.Node) -> bool:
    """Tell whether a node computes something: no input, constant or output."""
    return node.op not in COMPUTES_NOTHING


def _cost(node: fx.Node, known: dict[Any, Cost]) -> Cost:
    if node.op in COMPUTES_NOTHING:
        return FREE
    if type_of(node) is None and not operator_name(node).startswith("guard."):
        return _UNKNOWN
    key = signature(node)
    if key is None:
        return cost_of(node)
    if key not in known:
        known[key] = cost_of(node)
    return known[key]


def signature(node: fx.Node) -> Any:
    """Describe operator, operand types and constants; None where something can't be compared.

    Nodes of equal signature do the same work.
    """
    target = _module(node) if node.op == "call_module" else node.target
    arguments = map_aggregate((node.args, node.kwargs), _described)
    key = (node.op, target, repr(arguments), repr(type_of(node)))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _module(node: fx.Node) -> Any:
    module = find_attribute(node.graph.owning_module, str(node.target))
    if not isinstance(module, torch.nn.Module):
        return str(node.target)
    state = [type_of_value(t) for t in (*module.parameters(), *module.buffers())]
    return type(module), repr(module), module.training, repr(state)


def _described(value: Any) -> Any:
    if not isinstance(value, fx.Node):
        return value
    if value.op == "get_attr" and type_of(value) is None and value.graph.owning_module is not None:
        return type_of_value(find_attribute(value.graph.owning_module, str(value.target)))
    return type_of(value)
