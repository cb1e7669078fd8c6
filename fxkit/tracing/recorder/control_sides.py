"""A branch on a tensor that is a node: the graphs of both of its sides, one of which runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.node import has_side_effect

from fxkit.analysis.type_inference.declared_types import declare_type
from fxkit.ir.op import OPERATOR_NAME
from fxkit.ir.types import KEY, TensorType
from fxkit.torch_adapters.modes import count_dispatch_modes


@has_side_effect  # a side may hold guards
def cond(
    pred: torch.Tensor,
    true_fn: Callable[..., tuple[torch.Tensor, ...]],
    false_fn: Callable[..., tuple[torch.Tensor, ...]],
    operands: tuple[Any, ...],
) -> Any:
    """Run one of two graphs, as an `if` does; it is `torch.cond` to what traces the graph.

    Args:
        pred: A tensor of one element, of any dtype.
        true_fn: Is run where that is not zero.
        false_fn: Is run where it is zero.
        operands: What both are given.

    Returns:
        What the side gives, which may share memory with the operands.
    """
    if torch.compiler.is_compiling() or count_dispatch_modes():
        pred = pred.reshape(()) if pred.dtype is torch.bool else pred.reshape(()) != 0
        return torch.cond(pred, _fresh(true_fn), _fresh(false_fn), operands)
    side = true_fn if bool(pred) else false_fn
    forward = getattr(side, "forward", side)  # without torch.fx's print of exceptions
    return forward(*operands)


setattr(cond, OPERATOR_NAME, "opaque.cond")


def _fresh(side: Callable[..., Any]) -> Callable[..., Any]:
    """Let no result be an operand, which `torch.cond` does not allow."""
    return lambda *operands: tuple([result.clone() for result in side(*operands)])


@declare_type(cond)
def _(pred: Any, true_fn: Any, false_fn: Any, operands: Any) -> Any:
    return results_of_side(true_fn, operands)


def results_of_side(side: fx.GraphModule, operands: Any) -> Any:
    """Return the types of what a graph gives, which it was recorded with."""
    nodes = list(side.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    for node, operand in zip(inputs, operands, strict=True):
        kind = _type_of(node)
        same = (kind.shape, kind.dtype) == (operand.shape, operand.dtype)
        if not same:
            raise TypeError(f"expected {node.name} to be {kind}, got {operand}")
    return tuple([_type_of(node) for node in nodes[-1].args[0]])


def _type_of(node: fx.Node) -> TensorType:
    kind = node.meta.get(KEY)
    return kind if kind is not None else TensorType.of(node.meta["example_value"])
