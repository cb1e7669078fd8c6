"""Decompose calls: into ATen's overloads, into the core set, or into what kernels compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxkit.passes.decomposition.decompositions import Decompose, Decomposition
from fxkit.passes.decomposition.for_kernels import ForKernels
from fxkit.passes.decomposition.to_aten import ToAten
from fxkit.passes.decomposition.to_core import ToCore


@dataclass(frozen=True)
class DecomposeToAten(Decompose):
    """Turn functions, methods, operators and modules into calls of ATen's overloads.

    What has an overload of its own keeps its meaning and place: a linear layer stays one. Indexing
    becomes slices, selections and `index`, assigning to an index a `copy_` or `index_put_`. Modules
    give up their parameters, which become reads. Functions of torch without one operator, such as
    `F.interpolate`, become the operators that they call for the recorded types. Plain Python on
    numbers, shapes and tuples stays, and so does what nothing is known of, with a note.

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


@dataclass(frozen=True)
class DecomposeForKernels(Decompose):
    """Compute calls by the calls that torch itself makes for them, where kernels take those in.

    Only those of `FUNCTIONS` and `OPERATORS`: what they are made of joins its neighbours in a
    kernel, and what the call as a whole would do is not faster. A call whose numbers decide what it
    calls stays, with a note. A mean or sum of `LOSSES` becomes one of the losses of each row.

    Rewrites:
        return aten.isclose(%x, %y)
            →  %d = aten.sub(%x, %y); …; return aten.logical_or(%near, %same)
    """

    table: ClassVar[type[Decomposition]] = ForKernels
    numerics: ClassVar[str] = "close"
