"""What a pass is: a frozen dataclass whose fields are its options.

    @dataclass(frozen=True)
    class RemoveDropout(Pass):
        def apply(self, edit, context):
            for node in edit.graph.find_nodes(op="call_function", target=F.dropout):
                edit.replace(node, node.args[0])

The pass manager opens the edit session, so a pass can neither forget to recompile nor leave half a
change behind, and whether it modified the graph is read from the session's journal.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import fx

from fxkit.ir.printer import format_graph
from fxkit.ir.session import EditSession
from fxkit.patterns.report import RewriteReport

NUMERICS = ("exact", "close", "changed")


@dataclass
class PassContext:
    """What a pass is given beside the graph, and where it leaves its notes.

    Attributes:
        args: Example inputs, or None.
        kwargs: Example keyword inputs.
        reports: Reports of the rules that the pass ran.
        notes: What the pass did not do and why, as text.
    """

    args: tuple[Any, ...] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    reports: list[RewriteReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def rewrites(self) -> Counter[str]:
        """Rewrites by rule."""
        return sum((report.hits for report in self.reports), Counter())


class Pass:
    """Base of all passes; a subclass is a frozen dataclass that implements `apply`.

    What a pass says of itself is its contract; the pass manager checks it.

    Attributes:
        requires: Names of the properties (`fxkit.passes.properties`) that must hold before.
        ensures: Names of the properties that hold after.
        preserves: Names of the properties that hold after if they held before.
        is_idempotent: Whether a second run right after the first changes nothing.
        numerics: `exact`: the very same numbers; `close`: at most twice the error, against float64,
            of the module before; `changed`: other numbers on purpose.
    """

    requires: ClassVar[tuple[str, ...]] = ()
    ensures: ClassVar[tuple[str, ...]] = ()
    preserves: ClassVar[tuple[str, ...]] = ()
    is_idempotent: ClassVar[bool] = True
    numerics: ClassVar[str] = "exact"

    @property
    def name(self) -> str:
        """Registry name: the class's name in snake case."""
        return pass_name(type(self))

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Change the graph through the session.

        Args:
            edit: The session; `edit.gm` and `edit.graph` are the module and its graph.
            context: Example inputs, and where to leave reports and notes.
        """
        raise TypeError(f"{type(self).__name__} has no apply method")

    def __str__(self) -> str:
        options = ""
        if dataclasses.is_dataclass(self):
            changed = {
                f.name: getattr(self, f.name)
                for f in dataclasses.fields(self)
                if getattr(self, f.name) != f.default
            }
            options = ", ".join(f"{key}={value!r}" for key, value in changed.items())
        return f"{self.name}({options})" if options else self.name


@dataclass(frozen=True)
class FunctionPass(Pass):
    """A plain function as a pass, such as one written for torch.fx.

    Attributes:
        function: Takes a `GraphModule`, changes it in place or returns another; what else it
            returns is ignored. Its own claim to have modified the graph is not asked for.
    """

    function: Callable[[fx.GraphModule], Any]

    numerics: ClassVar[str] = "close"
    is_idempotent: ClassVar[bool] = False

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Run the function on a copy of the graph, and adopt it when it is another graph now."""
        trial = fx.GraphModule(edit.gm, copy.deepcopy(edit.graph))
        returned = self.function(trial)
        result = returned if isinstance(returned, fx.GraphModule) else trial
        if format_graph(result) != format_graph(edit.gm):
            edit.adopt(result)


def pass_name(cls: type) -> str:
    """Return a class's name in snake case: `DeadCodeElimination` → `dead_code_elimination`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()
