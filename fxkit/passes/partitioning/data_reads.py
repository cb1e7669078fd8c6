"""Which nodes turn what is in a tensor into Python numbers or into shapes."""

from __future__ import annotations

import torch
from torch import fx

from fxkit.ir.op import resolve
from fxkit.ir.types import TensorType, type_of

_NUMBERS = frozenset(f"python.{name}" for name in "bool int float complex item tolist".split())
_ATEN = frozenset(f"aten.{name}" for name in "item equal is_nonzero tolist".split())
_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def reads_data(node: fx.Node) -> bool:
    """Tell whether a node's result or its shape depends on the numbers in a tensor.

    Such a node stays outside of submodules: what follows from it is known from the capture, and a
    submodule is only known by its inputs.
    """
    call = resolve(node)
    if call is None:
        return False
    if call.name in _NUMBERS:
        known = [type_of(operand) for operand in node.all_input_nodes]
        return any(t is None or isinstance(t, TensorType) for t in known)
    overload = call.operator.overload
    has_tag = overload is not None and any(tag in overload.tags for tag in _TAGS)
    return has_tag or call.name in _ATEN
