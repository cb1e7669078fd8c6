"""Parameters, buffers and submodules by their qualified name, and what is known of their types."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxkit.ir.types import TensorType, type_of

ABSENT: Any = object()


@dataclass(frozen=True, slots=True)
class Attribute:
    """A parameter or buffer that a called module passes to its operator.

    Attributes:
        path: Qualified name from the root of the graph's module, such as `encoder.norm.weight`.
    """

    path: str


def find_attribute(root: Any, path: str) -> Any:
    """Return what a qualified name stands for, or `ABSENT`.

    Args:
        root: The module to begin at.
        path: Names with dots between them.
    """
    found = root
    for name in path.split("."):
        found = getattr(found, name, ABSENT)
        if found is ABSENT:
            break
    return found


def find_attributes(root: Any, paths: Iterable[str]) -> dict[str, Any]:
    """Return what each of several qualified names stands for, or `ABSENT`."""
    return {path: find_attribute(root, path) for path in paths}


def type_of_operand(operand: Any, graph: fx.Graph) -> Any:
    """Return what is known of the type of an argument of a call.

    Args:
        operand: A node, an `Attribute`, a tensor, or a Python value.
        graph: The graph that the call is in.

    Returns:
        What `type_of` gives for a node, a `TensorType` for a tensor; for an attribute that is no
        tensor None; else the value itself.
    """
    if isinstance(operand, fx.Node):
        return type_of(operand)
    if isinstance(operand, Attribute):
        found = find_attribute(graph.owning_module, operand.path)
        return TensorType.of(found) if isinstance(found, torch.Tensor) else None
    return TensorType.of(operand) if isinstance(operand, torch.Tensor) else operand
