"""Data-dependent shapes, which no guard on entry can vouch for."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import fx

from fxkit.tracing.recorder.calls import CallSpelling

META_KEY = "fxkit_data_dependent"

# Functions that take integers out of tensors as indices or elements only.
_OF_TENSORS = frozenset({"embedding", "index_select", "gather", "cat", "stack"})


def has_data_dependent_shape(
    spelling: CallSpelling, node: fx.Node, args: tuple[Any, ...], known: Set[fx.Node]
) -> bool:
    """Tell whether the shape of a call's result may depend on the numbers in a tensor.

    Args:
        spelling: The function.
        node: The call.
        args: Its arguments, as the program gave them.
        known: Nodes whose own shapes do.
    """
    if spelling.is_dynamic:
        if _is_dynamic_here(spelling, node, args):
            return True
    elif node.target is torch.where and len(args) == 1:
        return True
    if known and any(operand in known for operand in node.all_input_nodes):
        return True
    return not spelling.is_pointwise and _has_tensor_size(spelling, args)


def _is_dynamic_here(spelling: CallSpelling, node: fx.Node, args: tuple[Any, ...]) -> bool:
    """Tell whether a function that may count what it finds in a tensor does so in this call."""
    if spelling.name == "getitem":
        return _has_mask(args[1])
    if spelling.name == "repeat_interleave":
        repeats = args[1] if len(args) > 1 else node.kwargs.get("repeats")
        return repeats is None or isinstance(repeats, (torch.Tensor, fx.Node))
    return True


def _has_mask(index: Any) -> bool:
    if isinstance(index, torch.Tensor):
        return index.dtype in (torch.bool, torch.uint8)
    return isinstance(index, (tuple, list)) and any(map(_has_mask, index))


def _has_tensor_size(spelling: CallSpelling, args: tuple[Any, ...]) -> bool:
    """Tell whether a tensor is given where torch may read an integer that decides a shape."""
    if spelling.name == "getitem":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(
            isinstance(bound, torch.Tensor)
            for item in index
            if isinstance(item, slice)
            for bound in (item.start, item.stop, item.step)
        )
    if spelling.name in _OF_TENSORS:
        return False
    # A method's own tensor is no size, whatever it holds.
    return any(map(_is_integer_tensor, args[1:] if spelling.op == "call_method" else args))


def _is_integer_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        kind = value.dtype
        return value.numel() == 1 and not (kind.is_floating_point or kind.is_complex)
    return isinstance(value, (tuple, list)) and any(map(_is_integer_tensor, value))
