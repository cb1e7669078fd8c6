"""Stop at the first node that makes NaN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxkit.analysis.effects import effects_of
from fxkit.errors import NumericsError
from fxkit.ir.op import resolve
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.probes import Chosen, Probe, ProbeSite, insert_probe
from fxkit.torch_adapters import pytree


class NumberCheck(Probe):
    """Raises when a value holds NaN.

    Args:
        place: The node that it looks at.
        infinite: Whether infinities are faults too.
    """

    def __init__(self, place: ProbeSite, infinite: bool) -> None:
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

    Memory that nothing was written to yet may hold anything, and is not looked at.

    Rewrites:
        %a = aten.log(%x); return %a  →  %a = aten.log(%x); opaque.NumberCheck(%a); return %a

    Attributes:
        infinite: Whether infinities are faults too; masks often hold them on purpose.
    """

    infinite: bool = False

    is_idempotent: ClassVar[bool] = False

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Insert a check after each chosen node. Cost: linear."""
        blank = _blank(edit.graph)
        for node in self.nodes(edit.gm, context):
            if node not in blank:
                insert_probe(edit, node, NumberCheck(ProbeSite.of(node), self.infinite))


_EMPTY = frozenset(
    f"aten.{name}"
    for name in "empty empty_like empty_strided empty_permuted new_empty new_empty_strided".split()
)


def _blank(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes whose memory nothing was written to when they are made."""
    roots: dict[fx.Node, fx.Node] = {}
    written: set[fx.Node] = set()
    blank: set[fx.Node] = set()
    for node in graph.nodes:
        effects, call = effects_of(node), resolve(node)
        written.update(roots[it] for it in effects.writes if it in roots)  # type: ignore[index]
        if call is not None and call.name in _EMPTY:
            roots[node] = node
        for shared in effects.aliases:
            if shared in roots:
                roots[node] = roots[shared]
        if node in roots and roots[node] not in written:
            blank.add(node)
    return blank
