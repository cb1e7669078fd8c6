"""Turn every call into one of ATen's overloads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxkit.passes.decomposition.decompositions import Decompose, Decomposition
from fxkit.passes.decomposition.to_aten import ToAten


@dataclass(frozen=True)
class DecomposeToAten(Decompose):
    """Turn functions, methods, operators and modules into calls of ATen's overloads.

    What has an overload of its own keeps its meaning and place: a linear layer stays one. Indexing
    becomes slices, selections and `index`, assigning to an index a `copy_` or `index_put_`. Modules
    give up their parameters, which become reads. Functions of torch without one operator, such as
    `F.interpolate`, become the operators that they call for the recorded types, and operators of
    `fxkit.operator` become those of their definition. Plain Python on numbers, shapes and tuples
    stays, and so does what nothing is known of, with a note.

    Rewrites:
        return self.fc(%x)[0]
            →  %w = self.fc.weight; %b = self.fc.bias
               %y = torch.ops.aten.linear.default(%x, %w, %b)
               return torch.ops.aten.select.int(%y, 0, 0)
    """

    table: ClassVar[type[Decomposition]] = ToAten
    requires: ClassVar[tuple[str, ...]] = ("shapes_known",)
    ensures: ClassVar[tuple[str, ...]] = ("aten",)
    preserves: ClassVar[tuple[str, ...]] = ("functional", "shapes_known")
