"""Values that are the same at every call, such as a causal mask, worked out where a rule asks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fxkit.analysis.effects import effects_of
from fxkit.ir.attributes import find_attribute
from fxkit.ir.op import resolve
from fxkit.ir.types import TensorType, type_of
from fxkit.torch_adapters.fx_nodes import order_key

# Beyond these, a value is not worked out.
_MOST_NODES = 64
_MOST_ELEMENTS = 2**22


def constant_value(value: Any) -> Any:
    """Return what a node computes when that is the same at every call, else None.

    It is when it is made of numbers and of buffers that nothing in the graph writes to; parameters
    and inputs are no constants. As in constant folding, a buffer is taken to stay as it is.

    Args:
        value: A node; any other value is itself.

    Cost: that of computing it; nothing large, and nothing of many steps, is computed.
    """
    if not isinstance(value, fx.Node):
        return value
    cone = _constant_cone(value)
    if cone is None:
        return None
    known: dict[fx.Node, Any] = {}
    with torch.no_grad():
        for node in cone:
            known[node] = _compute(node, known)
    return known[value]


def _constant_cone(value: fx.Node) -> list[fx.Node] | None:
    """Return all that a node is computed from, operands first, when all of it is constant."""
    seen: set[fx.Node] = {value}
    stack = [value]
    while stack:
        node = stack.pop()
        if not _is_constant_step(node) or len(seen) > _MOST_NODES:
            return None
        for operand in node.all_input_nodes:
            if operand not in seen:
                seen.add(operand)
                stack.append(operand)
    return sorted(seen, key=order_key)


def _is_constant_step(node: fx.Node) -> bool:
    known = type_of(node)
    if isinstance(known, TensorType) and not _is_small(known):
        return False
    if any(node in effects_of(user).writes for user in node.users):
        return False
    if node.op == "get_attr":
        found = find_attribute(node.graph.owning_module, str(node.target))
        return isinstance(found, torch.Tensor) and not isinstance(found, torch.nn.Parameter)
    call = resolve(node)
    if call is None or node.op == "call_module" or call.operator.is_opaque:
        return False
    return effects_of(node).is_pure


def _is_small(known: TensorType) -> bool:
    sizes = [size for size in known.shape if isinstance(size, int)]
    return len(sizes) == len(known.shape) and math.prod(sizes) <= _MOST_ELEMENTS


def _compute(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    if node.op == "get_attr":
        return find_attribute(node.graph.owning_module, str(node.target))
    args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
    if callable(node.target):
        return node.target(*args, **kwargs)
    return getattr(args[0], node.target)(*args[1:], **kwargs)


def numbers_below(value: Any) -> set[float]:
    """Return the numbers that a node and what it is computed from take, near ones only."""
    found: set[float] = set()
    seen: set[fx.Node] = set()
    stack = [value] if isinstance(value, fx.Node) else []
    while stack and len(seen) <= _MOST_NODES:
        node = stack.pop()
        seen.add(node)
        _collect(node.args, found)
        _collect(tuple(node.kwargs.values()), found)
        stack.extend(operand for operand in node.all_input_nodes if operand not in seen)
    return found


def _collect(value: Any, found: set[float]) -> None:
    if isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found)
    elif type(value) in (int, float):
        found.add(float(value))
