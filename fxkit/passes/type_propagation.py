"""Record the type of every node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxkit.analysis.tensor_types import propagate_types
from fxkit.ir.session import EditSession
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.subjects import sample_inputs


@dataclass(frozen=True)
class TypePropagation(Pass):
    """Record shape, strides and dtype of every node, for inputs like the example inputs.

    Without example inputs those of the placeholders are taken, where they are known. The graph is
    not changed.

    Rewrites:
        %a = aten.relu(%x)  →  %a: f32[2,4] = aten.relu(%x)
    """

    ensures: ClassVar[tuple[str, ...]] = ("shapes_known",)

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Propagate types. Cost: linear in the nodes."""
        args, kwargs = context.args, context.kwargs
        if args is None:
            args, kwargs = sample_inputs(edit.gm), {}
        propagate_types(edit.gm, args, kwargs)
