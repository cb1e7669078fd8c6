"""Run passes in order, check each, and tell what it did."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from fxkit.analysis.equivalence import assert_equivalent
from fxkit.analysis.tensor_types import propagate_types
from fxkit.errors import FxkitError, NumericsError, PassError, PostconditionError
from fxkit.ir.journal import Change
from fxkit.ir.printer import format_graph, format_type
from fxkit.ir.session import edit
from fxkit.ir.types import TensorType
from fxkit.ir.verifier import verify
from fxkit.passes.base import FunctionPass, Pass, PassContext

VERIFY_LEVELS = ("off", "structure", "each", "numerics")


@dataclass(frozen=True)
class PassRecord:
    """What one pass did.

    Attributes:
        name: Name of the pass, with the options that are not default.
        seconds: Time it took, its verification left out.
        verify_seconds: Time its verification took.
        nodes_before: Number of nodes before it.
        nodes_after: Number of nodes after it.
        changes: The journal of its edits.
        rewrites: Rewrites by rule.
        notes: What it did not do, and why.
    """

    name: str
    seconds: float
    verify_seconds: float
    nodes_before: int
    nodes_after: int
    changes: tuple[Change, ...] = ()
    rewrites: Counter[str] = field(default_factory=Counter)
    notes: tuple[str, ...] = ()

    @property
    def modified(self) -> bool:
        """Whether it changed anything."""
        return bool(self.changes)


@dataclass(frozen=True)
class PassResult:
    """What a run of a pass manager did.

    Attributes:
        graph_module: The module, changed in place.
        records: One record a pass, in order.
    """

    graph_module: fx.GraphModule
    records: tuple[PassRecord, ...]

    @property
    def modified(self) -> bool:
        """Whether any pass changed anything."""
        return any(record.modified for record in self.records)

    def table(self) -> str:
        """Return the passes with time, nodes before and after, and rules hit, as text."""
        rows = [("pass", "ms", "verify ms", "nodes", "", "rules hit")]
        for record in self.records:
            hits = ", ".join(f"{n} {rule}" for rule, n in record.rewrites.most_common())
            edits = f"{len(record.changes)} edits" if record.modified else "no change"
            rows.append(
                (
                    record.name,
                    f"{record.seconds * 1e3:.1f}",
                    f"{record.verify_seconds * 1e3:.1f}",
                    f"{record.nodes_before} -> {record.nodes_after}",
                    edits,
                    hits,
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join("  ".join(map(_align, row, widths, _ALIGNMENT)).rstrip() for row in rows)

    def diff(self) -> str:
        """Return every change, pass by pass, as text."""
        parts = []
        for record in self.records:
            if record.modified:
                parts.append(f"{record.name}:")
                parts.extend(f"  {change}" for change in record.changes)
        return "\n".join(parts)

    def __str__(self) -> str:
        return self.table()


_ALIGNMENT = ("<", ">", ">", ">", "<", "<")


def _align(cell: str, width: int, side: str) -> str:
    return f"{cell:{side}{width}}"


class PassManager:
    """Runs passes over a graph: each wholly or not at all, each checked.

    Args:
        passes: The passes, in order. A function that takes a `GraphModule` is a pass too.
        verify: `off`; `structure`: the graph's invariants after each pass; `each` (default): also
            that the types of the outputs stayed, when `args` are given; `numerics`: also that
            outputs, argument mutation and gradients stayed, within twice the error of the graph
            before against float64, or exactly where the pass says so.
        args: Example inputs: their types are propagated before the first pass.
        kwargs: Example keyword inputs.

    Raises:
        PassError: When it is given something that is no pass, or an unknown level.

    Example:
        >>> import torch, fxkit
        >>> gm = fxkit.symbolic_trace(lambda x: torch.relu(torch.relu(x * 1)))
        >>> pm = fxkit.PassManager([fxkit.passes.Canonicalise()], args=(torch.randn(2, 3),))
        >>> pm.run(gm).records[0].rewrites
        Counter({'multiply_by_one': 1, 'relu_of_relu': 1})
    """

    def __init__(
        self,
        passes: Iterable[Pass | Callable[[fx.GraphModule], Any]],
        *,
        verify: str = "each",
        args: tuple[Any, ...] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if verify not in VERIFY_LEVELS:
            raise PassError(
                f"expected verify to be one of {', '.join(VERIFY_LEVELS)}, got {verify!r}",
                hint="leave it out to get 'each'",
            )
        if verify == "numerics" and args is None:
            raise PassError(
                "expected example inputs to compare numbers on, got none",
                hint="pass args=(...) to PassManager",
            )
        self.passes = tuple(_as_pass(p) for p in passes)
        self.verify = verify
        self.args = args
        self.kwargs = dict(kwargs or {})

    def run(self, gm: fx.GraphModule) -> PassResult:
        """Run all passes over a module, in place.

        Args:
            gm: The module to change.

        Returns:
            The module, with a record of what each pass did.

        Raises:
            PassError: When a pass raises; the graph is as it was before that pass.
            PostconditionError: When a pass left a broken graph, other types or other numbers; the
                graph is as it was before that pass.
        """
        if self.verify != "off":
            verify(gm)
        output_type = None
        if self.args is not None:
            output_type = propagate_types(gm, self.args, self.kwargs)
        records = []
        for index, current in enumerate(self.passes):
            place = f"{current.name} ({index + 1}/{len(self.passes)})"
            records.append(self._run_one(gm, current, place, output_type))
        return PassResult(gm, tuple(records))

    def _run_one(
        self, gm: fx.GraphModule, current: Pass, place: str, output_type: Any
    ) -> PassRecord:
        context = PassContext(self.args, self.kwargs)
        before = copy.deepcopy(gm) if self.verify == "numerics" else None
        nodes_before = len(gm.graph.nodes)
        start = time.perf_counter()
        verified = 0.0
        try:
            with edit(gm, by=current.name) as session:
                current.apply(session, context)
                finished = time.perf_counter()
                if session.is_modified:
                    self._check(gm, before, current, place, output_type)
                    verified = time.perf_counter() - finished
        except PassError:
            raise
        except Exception as error:
            raise _pass_error(error, place) from error
        return PassRecord(
            name=str(current),
            seconds=finished - start,
            verify_seconds=verified,
            nodes_before=nodes_before,
            nodes_after=len(gm.graph.nodes),
            changes=tuple(session.journal),
            rewrites=context.rewrites,
            notes=tuple(context.notes),
        )

    def _check(
        self,
        gm: fx.GraphModule,
        before: fx.GraphModule | None,
        current: Pass,
        place: str,
        output_type: Any,
    ) -> None:
        """Check what a pass left, inside of its session, so that a fault rolls it back."""
        if self.verify == "off":
            return
        try:
            verify(gm)
            if self.verify != "structure" and self.args is not None:
                self._check_types(gm, output_type, place)
            if before is not None and self.args is not None:
                self._check_numbers(gm, before, current)
        except PostconditionError:
            raise
        except FxkitError as error:
            raise PostconditionError(
                error.message,
                node=error.node or format_graph(gm).replace("\n", "\n         "),
                source=error.source,
                in_pass=place,
                hint=error.hint or "the pass left a graph that is not equal to the one before it",
            ) from error

    def _check_types(self, gm: fx.GraphModule, output_type: Any, place: str) -> None:
        found = propagate_types(gm, self.args or (), self.kwargs)
        if found != output_type:
            raise PostconditionError(
                f"expected the pass to keep the output's type {_whole_type(output_type)}, "
                f"got {_whole_type(found)}",
                in_pass=place,
                hint="a pass that changes types on purpose is run with verify='structure'",
            )

    def _check_numbers(self, gm: fx.GraphModule, before: fx.GraphModule, current: Pass) -> None:
        if current.numerics == "changed":
            return
        gm.recompile()
        after = copy.deepcopy(gm)
        exact = current.numerics == "exact"
        assert_equivalent(before, after, self.args or (), self.kwargs, exact=exact)


def _whole_type(value_type: Any) -> str:
    """Return a type as text, with the strides and requires_grad that its short form leaves out."""
    leaves = [t for t in pytree.tree_leaves(value_type) if isinstance(t, TensorType)]
    details = [f"stride {t.stride}" + (" requires_grad" if t.requires_grad else "") for t in leaves]
    return f"{format_type(value_type)} ({'; '.join(details)})"


def _as_pass(candidate: Any) -> Pass:
    if isinstance(candidate, Pass):
        return candidate
    if isinstance(candidate, type) and issubclass(candidate, Pass):
        raise PassError(
            f"expected a pass, got the class {candidate.__name__}",
            hint=f"write {candidate.__name__}()",
        )
    if callable(candidate):
        return FunctionPass(candidate)
    raise PassError(
        f"expected a pass or a function of a GraphModule, got {type(candidate).__name__}",
        hint="derive from fxkit.passes.Pass",
    )


def _pass_error(error: Exception, place: str) -> PassError:
    message = error.message if isinstance(error, FxkitError) else f"{type(error).__name__}: {error}"
    kind = PostconditionError if isinstance(error, NumericsError) else PassError
    return kind(
        f"expected {place.split(' ')[0]} to run, got {message}",
        node=getattr(error, "node", None),
        source=getattr(error, "source", None),
        in_pass=place,
        hint=getattr(error, "hint", None) or "the graph is as it was before this pass",
    )
