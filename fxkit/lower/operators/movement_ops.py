"""Operators that only move elements: all rows of their table."""

from __future__ import annotations

from typing import Any

import torch

from fxkit.lower.loop_ir.builder import Ref
from fxkit.lower.operators import (
    indexing_ops,
    interpolation_ops,
    joining_ops,
    outer_and_scatter_ops,
    quantizing_ops,
    rearranging_ops,
)
from fxkit.lower.operators.movement_table import TABLE, MoveOp, Point
from fxkit.torch_adapters.operators import schema_of

__all__ = [
    "TABLE",
    "indexing_ops",
    "interpolation_ops",
    "joining_ops",
    "outer_and_scatter_ops",
    "quantizing_ops",
    "rearranging_ops",
]


def _add_copy_of_view(view: str) -> None:
    """Add the row of an operator that copies what a view of its operand would show."""
    packet = getattr(torch.ops.aten, view)
    schemas = [schema_of(getattr(packet, overload)) for overload in packet.overloads()]
    names = dict.fromkeys(a.name for schema in schemas for a in schema.arguments[1:])

    def build(p: Point, self: Any, **arguments: Any) -> Ref:
        return p.read(self, p.shown(packet, self, arguments))

    name = f"aten.{view}_copy"
    TABLE[name] = MoveOp(name, build, ("self",), tuple(names))


for _view in """alias detach diagonal expand narrow permute select slice squeeze t transpose unfold
unsqueeze view""".split():
    _add_copy_of_view(_view)
