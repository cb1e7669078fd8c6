"""Show the values of chosen nodes to a function of yours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from fxkit.ir.session import EditSession
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.probes import Chosen, Probe, ProbeSite, insert_probe


class Observer(Probe):
    """Gives a value to a function.

    Args:
        place: The node that it looks at.
        callback: Takes the value and the place.
    """

    def __init__(self, place: ProbeSite, callback: Callable[[Any, ProbeSite], object]) -> None:
        super().__init__(place)
        self.callback = callback

    def look(self, *values: Any) -> None:
        """Call the function with the value; what it returns is dropped."""
        (value,) = values
        self.callback(value, self.place)


@dataclass(frozen=True)
class ObserveValues(Chosen, Pass):
    """Call a function with each value of chosen nodes, and the node's name, text and source line.

    Rewrites:
        %a = aten.log(%x); return %a  →  %a = aten.log(%x); opaque.Observer(%a); return %a

    Attributes:
        callback: Takes the value and a `ProbeSite`; without one, nothing is inserted.
    """

    callback: Callable[[Any, ProbeSite], object] | None = None

    is_idempotent: ClassVar[bool] = False

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Insert an observer after each chosen node. Cost: linear."""
        if self.callback is None:
            context.notes.append("there is no callback to call")
            return
        for node in self.nodes(edit.gm, context):
            insert_probe(edit, node, Observer(ProbeSite.of(node), self.callback))
