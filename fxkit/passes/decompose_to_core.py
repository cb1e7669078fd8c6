"""Lower every operator to the closed core set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxkit.passes.decomposition.decompositions import Decompose, Decomposition
from fxkit.passes.decomposition.to_core import ToCore


@dataclass(frozen=True)
class DecomposeToCore(Decompose):
    """Compute every operator by those of the core set, as torch's own decompositions do.

    The set is the table in `fxkit.passes.decomposition.core_operators`. What an operator becomes
    depends on the recorded types, and equal calls are worked out once. Results keep their types and
    strides. What torch has no decomposition for, and operators outside of ATen, stay, with a note.

    Rewrites:
        return torch.ops.aten.linear.default(%x, %w, %b)
            →  %t = torch.ops.aten.permute.default(%w, [1, 0])
               return torch.ops.aten.addmm.default(%b, %x, %t)

    Source: torch/_decomp, through `fxkit.passes.decomposition.torch_decompositions`.
    """

    table: ClassVar[type[Decomposition]] = ToCore
    requires: ClassVar[tuple[str, ...]] = ("shapes_known", "aten", "functional")
    ensures: ClassVar[tuple[str, ...]] = ("core_aten",)
    preserves: ClassVar[tuple[str, ...]] = ("aten", "functional", "shapes_known")
    numerics: ClassVar[str] = "close"
