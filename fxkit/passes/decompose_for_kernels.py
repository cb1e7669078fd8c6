"""Decompose what kernels compute better in parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxkit.passes.decomposition.decompositions import Decompose, Decomposition
from fxkit.passes.decomposition.for_kernels import ForKernels


@dataclass(frozen=True)
class DecomposeForKernels(Decompose):
    """Compute calls by the calls that torch itself makes for them, where kernels take those in.

    Only those of `FUNCTIONS` and `OPERATORS`, and operators that are declared so: what they are
    made of joins its neighbours in a kernel, and what the call as a whole would do is not faster. A
    call whose numbers decide what it calls stays, with a note. A mean or sum of `LOSSES` becomes
    one of the losses of each row, and a batch normalisation by given statistics one of a single
    result.

    Rewrites:
        return aten.isclose(%x, %y)
            →  %d = aten.sub(%x, %y); …; return aten.logical_or(%near, %same)
    """

    table: ClassVar[type[Decomposition]] = ForKernels
    numerics: ClassVar[str] = "close"
