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

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from torch import fx

from fxkit.ir.session import EditSession
from fxkit.passes.analyses import Analyses
from fxkit.passes.options import check_types
from fxkit.patterns.engine import rewrite_in
from fxkit.patterns.rewrite_report import RewriteReport
from fxkit.patterns.rewriting import Rule

NUMERICS = ("exact", "close", "changed")

T = TypeVar("T")


@dataclass
class PassContext:
    """What a pass is given beside the graph, and where it leaves its notes.

    Attributes:
        args: Example inputs, or None.
        kwargs: Example keyword inputs.
        reports: Reports of the rules that the pass ran.
        notes: What the pass did not do and why, as text.
        analyses: What was computed about the graph and still holds.
        exceptions: For a property that the pass ensures, the nodes where it does not hold, and why.
        left_out: Names of rules that `rewrite` leaves out, since they have failed in this run.
    """

    args: tuple[Any, ...] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    reports: list[RewriteReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    analyses: Analyses = field(default_factory=Analyses)
    exceptions: dict[str, dict[fx.Node, str]] = field(default_factory=dict)
    left_out: Set[str] = frozenset()

    def left_at(self, name: str, node: fx.Node, reason: str) -> None:
        """Note that a property which the pass ensures does not hold at a node, as it can't there.

        Args:
            name: The property. Passes that require it are refused.
            node: The node that stays as it was.
            reason: Why.
        """
        self.exceptions.setdefault(name, {})[node] = reason

    def rewrite(self, edit: EditSession, rules: Iterable[Rule]) -> RewriteReport:
        """Apply rules to their fixpoint in the session of a pass, and keep their report.

        Args:
            edit: The session of the pass.
            rules: The rules, in order of preference.
        """
        report = rewrite_in(edit, [rule for rule in rules if rule.name not in self.left_out])
        self.reports.append(report)
        return report

    @property
    def rewrites(self) -> Counter[str]:
        """Rewrites by rule."""
        return sum((report.hits for report in self.reports), Counter())

    def analysis(self, make: Callable[[fx.Graph], T]) -> T:
        """Return what an analysis tells of the graph as it is now, computed when it has to be.

        Args:
            make: The analysis: a class or function of a graph, such as `EffectOrder`. An object
                with a method `update(changes)` is brought up to date instead of made anew.
        """
        return self.analyses.get(make)


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
        adds_effects: Whether it adds calls that are noticed outside of the graph, as probes are:
            then each call of a captured program has to run the graph, its first one too.
    """

    requires: ClassVar[tuple[str, ...]] = ()
    ensures: ClassVar[tuple[str, ...]] = ()
    preserves: ClassVar[tuple[str, ...]] = ()
    is_idempotent: ClassVar[bool] = True
    numerics: ClassVar[str] = "exact"
    adds_effects: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Check the options of fxkit's own passes, when they are not those that they have anyway.

        Raises:
            UnsupportedError: When one is of another type than it is to be.
        """
        if type(self).__module__.startswith("fxkit.") and str(self) != self.name:
            check_types(self)

    @property
    def name(self) -> str:
        """Registry name: the class's name in snake case."""
        return pass_name(type(self))

    def drops_gradients(self) -> bool:
        """Tell whether it takes parameters as constants, so that results may need no gradient."""
        return False

    def for_copy(self, memo: dict[int, Any]) -> Pass:
        """Return the pass that goes with a deep copy of a program that this one has changed.

        A pass that holds what its program uses, such as observers, returns one with copies of it.

        Args:
            memo: For `copy.deepcopy(held, memo)`.
        """
        return self

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Change the graph through the session.

        Args:
            edit: The session; `edit.gm` and `edit.graph` are the module and its graph.
            context: Example inputs, analyses, and where to leave reports and notes.
        """
        raise TypeError(f"{type(self).__name__} has no apply method")

    def __str__(self) -> str:
        options = ""
        if dataclasses.is_dataclass(self):
            changed = {
                f.name: getattr(self, f.name)
                for f in dataclasses.fields(self)
                if not _is_default(f, getattr(self, f.name))
            }
            options = ", ".join(f"{key}={value!r}" for key, value in changed.items())
        return f"{self.name}({options})" if options else self.name


def _is_default(option: dataclasses.Field[Any], value: Any) -> bool:
    if option.default_factory is not dataclasses.MISSING:
        return value == option.default_factory()
    return value is option.default or value == option.default


def pass_name(cls: type) -> str:
    """Return a class's name in snake case: `DeadCodeElimination` → `dead_code_elimination`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()
