"""Write a line for each value of chosen nodes, at every call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.probes import Chosen, Probe, ProbeSite, insert_probe
from fxkit.torch_adapters import pytree


def to_stderr(line: str) -> None:
    """Write a line to the standard error stream."""
    sys.stderr.write(f"{line}\n")


class Printer(Probe):
    """Writes a line about a value.

    Args:
        place: The node that it looks at.
        write: Takes the line.
    """

    def __init__(self, place: ProbeSite, write: Callable[[str], object]) -> None:
        super().__init__(place)
        self.write = write

    def look(self, *values: Any) -> None:
        """Write the node, its line, and the range of its numbers."""
        told = "; ".join(describe(leaf) for leaf in pytree.tree_leaves(values))
        self.write(f"{self.place}    {told}")


def describe(value: Any) -> str:
    """Return a value's type and the range of its numbers as text.

    Args:
        value: A tensor, or anything else, which is written as it is.
    """
    if not isinstance(value, torch.Tensor):
        return repr(value)
    kind = str(TensorType.of(value))
    if not value.numel() or value.is_complex():
        return kind
    numbers = value.detach().double()
    finite = numbers[numbers.isfinite()]
    parts = [kind]
    if finite.numel():
        parts.append(f"{finite.min():.4g} to {finite.max():.4g}, mean {finite.mean():.4g}")
    counts = ((int(numbers.isnan().sum()), "NaN"), (int(numbers.isinf().sum()), "infinite"))
    parts.extend(f"{count} {what}" for count, what in counts if count)
    return ", ".join(parts)


@dataclass(frozen=True)
class PrintValues(Chosen, Pass):
    """Write type, range and mean of the values of chosen nodes, with node and source line.

    Rewrites:
        %a = aten.log(%x); return %a  →  %a = aten.log(%x); opaque.Printer(%a); return %a

    Attributes:
        write: Takes each line; the standard error stream by default.
    """

    write: Callable[[str], object] = to_stderr

    is_idempotent: ClassVar[bool] = False

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Insert a printer after each chosen node. Cost: linear."""
        for node in self.nodes(edit.gm, context):
            insert_probe(edit, node, Printer(ProbeSite.of(node), self.write))
