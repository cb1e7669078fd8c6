"""Stop at the first node that makes NaN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.utils import _pytree as pytree

from fxkit.errors import NumericsError
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.building_blocks.probes import Chosen, Place, Probe, insert_probe


class NumberCheck(Probe):
    """Raises when a value holds NaN.

    Args:
        place: The node that it looks at.
        infinite: Whether infinities are faults too.
    """

    def __init__(self, place: Place, infinite: bool) -> None:
        super().__init__(place)
        self.infinite = infinite

    def look(self, *values: Any) -> None:
        """Count what is no number.

        Raises:
            NumericsError: With the node and its source line, when there is any.
        """
        for leaf in pytree.tree_leaves(values):
            if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
                self._check(leaf.detach())

    def _check(self, tensor: torch.Tensor) -> None:
        nans = int(tensor.isnan().sum())
        infinite = int(tensor.isinf().sum()) if self.infinite else 0
        if nans or infinite:
            told = " and ".join(f"{n} {what}" for n, what in ((nans, "NaN"), (infinite, "infinite"))
                                if n)  # fmt: skip
            raise NumericsError(
                f"expected numbers from %{self.place.name}, got {told} among the "
                f"{tensor.numel()} of {TensorType.of(tensor)}",
                node=self.place.node,
                source=self.place.source,
                hint="what it was computed from was checked before, if it was chosen too",
            )


@dataclass(frozen=True)
class CheckNumbers(Chosen, Pass):
    """Raise as soon as a chosen node gives NaN, and say which node and line that was.

    Rewrites:
        %a = aten.log(%x); return %a  →  %a = aten.log(%x); opaque.NumberCheck(%a); return %a

    Attributes:
        infinite: Whether infinities are faults too; masks often hold them on purpose.
    """

    infinite: bool = False

    is_idempotent: ClassVar[bool] = False

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Insert a check after each chosen node. Cost: linear."""
        for node in self.nodes(edit.gm):
            insert_probe(edit, node, NumberCheck(Place.of(node), self.infinite))
