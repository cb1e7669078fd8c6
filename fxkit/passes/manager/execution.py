"""One run of a pass manager over one module."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import fx

from fxkit import config
from fxkit.analysis.tensor_types import TypeAnalysis
from fxkit.errors import NumericsError, PassError, PostconditionError
from fxkit.ir.modes import without_modes
from fxkit.ir.open_sessions import opened
from fxkit.ir.printer import format_node, format_source
from fxkit.ir.verifier import verify
from fxkit.passes.analyses import Analyses
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.manager import contracts
from fxkit.passes.manager.failures import failure, reproduce
from fxkit.passes.manager.groups import FixedPoint, Group, When, leaves
from fxkit.passes.manager.history import TimelineRecorder
from fxkit.passes.manager.passes_change import PassesChange
from fxkit.passes.manager.protocols import Manager
from fxkit.passes.manager.records import PassRecord, PassResult
from fxkit.passes.manager.scheduling import satisfy
from fxkit.passes.manager.tracking import Limits, RewritesSpent, TrackedSession, out_of_time
from fxkit.passes.manager.watchdog import OutOfTime, time_limit
from fxkit.passes.subjects import Subject, sample_inputs
from fxkit.patterns.rewrite_report import Tally

if TYPE_CHECKING:
    from fxkit.passes.manager.number_checks import NumbersCheck


ALARM_DELAY = 0.25
"""Seconds in which a pass that edits sees by itself that its time is up, and unwinds cleanly."""


_USE_EDIT = "use edit.call, edit.replace, edit.set_args, edit.set_target or edit.erase"


class _Stopped(Exception):
    """The run is to end here, with all that was done."""


class Execution:
    """One run of a pass manager over one module.

    Args:
        manager: The manager, for its passes and options.
        subject: The module, with inputs if there are some.
        stop_after: How many passes of the list to run at most; None for all.
        max_rewrites: How many rewrites to make at most; what the environment says when None.

    Attributes:
        checks: Which properties hold.
        records: What was done so far.
    """

    def __init__(
        self,
        manager: Manager,
        subject: Subject,
        stop_after: int | None = None,
        max_rewrites: int | None = None,
    ) -> None:
        self.manager = manager
        self.subject = subject
        self.gm = subject.graph_module
        self.records: list[PassRecord] = []
        self._stop_after = stop_after
        self._max_rewrites = config.current().max_rewrites if max_rewrites is None else max_rewrites
        self._stopped: str | None = None
        self._recorder = TimelineRecorder(self.gm)
        self.session = self._recorder.session = TrackedSession(self.gm, self._recorder.boundary)
        self._analyses = Analyses(self.session)
        self.checks = contracts.PropertyChecks(self.session)
        self._places = _places(manager.items)
        self._max_nodes = manager.max_nodes or 10 * len(self.gm.graph.nodes) + 10_000
        self._types: TypeAnalysis | None = None
        self._typed_upto = 0
        self._output_type: Any = None
        self._numbers: NumbersCheck | None = None
        self._left_out: set[str] = set()

    def run(self) -> PassResult:
        """Run all passes; see `PassManager.run`."""
        change = PassesChange(self.manager, self._stop_after, self._max_rewrites)
        with opened(self.session, change), without_modes():
            try:
                return self._run()
            except BaseException:
                change.stop_after = self._listed
                raise

    def _run(self) -> PassResult:
        if self.manager.verify != "off":
            verify(self.gm)
        if self.subject.args is not None:
            self._output_type = self._bring_types_up_to_date()
        self._recorder.begin()
        if self.manager.verify == "numerics":
            # Imported, here and below, where numbers are compared: few runs ask for it.
            from fxkit.passes.manager.number_checks import NumbersCheck

            args, kwargs = self.subject.args, self.subject.kwargs
            if args is None:
                args, kwargs = sample_inputs(self.gm), {}
            self._numbers = NumbersCheck(self.gm, args, kwargs)
        try:
            self._run_items(self.manager.items, ())
        except _Stopped as stopped:
            self._stopped = str(stopped)
        finally:
            self.session.outdate()
        if self.manager.verify != "off":
            self._check_no_stray_edit()
        return PassResult(
            self.gm,
            tuple(self.records),
            self._recorder.timeline(),
            self._analyses.tallies,
            self.subject.program,
            self._stopped,
        )

    def _check_no_stray_edit(self) -> None:
        """Refuse what was changed without the session: it is in no journal, and not taken back."""
        node = self._recorder.stray()
        if node is None:
            return
        names = ", ".join(dict.fromkeys(record.name for record in self.records))
        raise PassError(
            f"expected passes to change the graph through their session, got %{node.name} changed "
            f"by other means, in one of {names}",
            node=format_node(node),
            source=format_source(node),
            hint=f"{_USE_EDIT}; a function of a GraphModule may do as it likes",
        )

    def _bring_types_up_to_date(self) -> Any:
        """Record the types of what changed, for the example inputs; return the output's."""
        self.checks.types_changed()
        length = self.session.mark()
        with self._analyses.timed("TypeAnalysis") as tally:
            if self._types is None:
                self._types = TypeAnalysis(self.gm, self.subject.args or (), self.subject.kwargs)
                tally.made += 1
            else:
                is_longer = length >= self._typed_upto
                changes = self.session.journal[self._typed_upto :] if is_longer else None
                self._types.update(changes)
                tally.updated += 1
            tally.visited += self._types.visited
        self._typed_upto = length
        return self._types.output_type

    # Lists and groups.

    def _run_items(self, items: tuple[Any, ...], path: tuple[int, ...], note: str = "") -> None:
        for index, item in enumerate(items):
            here = (*path, index)
            if isinstance(item, FixedPoint):
                self._run_to_fixed_point(item, here)
            elif isinstance(item, When):
                chosen = item.choose(self.gm)
                skipped = len(item.passes) if chosen is not item.passes else 0
                self._run_items((*((),) * skipped, *chosen), here, note)
            elif isinstance(item, Group):
                self._run_items(item.passes, here, note)
            elif item != ():
                self._run_listed(item, f"{item.name} ({self._places[here]}{note})")

    def _run_to_fixed_point(self, group: FixedPoint, path: tuple[int, ...]) -> None:
        for number in range(1, group.max_rounds + 1):
            first = len(self.records)
            self._run_items(group.passes, path, f", round {number}")
            changed = [r for r in self.records[first:] if r.modified]
            if not changed:
                return
        names = ", ".join(dict.fromkeys(record.name for record in changed))
        raise PassError(
            f"expected {group.name} to come to rest within {group.max_rounds} rounds, got changes "
            f"in each, in the last one by {names}",
            node="\n         ".join(str(change) for change in changed[-1].changes[:4]),
            in_pass=changed[-1].place,
            hint="do two of them undo each other? else raise max_rounds=",
        )

    def _run_listed(self, current: Pass, place: str) -> None:
        if self._stop_after is not None and self._listed >= self._stop_after:
            raise _Stopped(f"the limit of {self._stop_after} passes")
        satisfy(self, current, place)
        self.run_pass(current, place)

    @property
    def _listed(self) -> int:
        """How many passes of the list have run."""
        return sum(record.scheduled_for is None for record in self.records)

    # One pass.

    def run_pass(self, current: Pass, place: str, scheduled_for: str | None = None) -> None:
        """Run one pass wholly, verify it, and record it; or leave the graph as it was.

        What fails is left out where the manager's `on_failure` says so: a rule of the pass, one
        after another, else the pass.

        Raises:
            PassError: When it fails otherwise.
        """
        while True:
            try:
                return self._run_pass(current, place, scheduled_for)
            except PassError as error:
                on_failure, rule = self.manager.on_failure, error.rule
                if on_failure is None or not on_failure(current, error):
                    raise
                if rule is None or rule == current.name or rule in self._left_out:
                    return None
                self._left_out.add(rule)

    def _run_pass(self, current: Pass, place: str, scheduled_for: str | None) -> None:
        session, manager = self.session, self.manager
        for instrument in manager.instruments:
            self.session.recompile()
            instrument.before(current, self.gm)
        context = self._context()
        held = self.checks.holding(current.preserves) if self._is_checked else []
        if self._numbers is not None:
            self.session.recompile()
            self._numbers.prepare(current.numerics)
        mark, first_site = session.mark(), len(session.rewrites)
        nodes_before = len(session.graph.nodes)
        session.by, session.current, session.whole_at = current.name, None, mark
        self._recorder.boundary()
        start = finished = time.perf_counter()
        try:
            is_whole = self._apply(current, context)
            finished = time.perf_counter()
            self._check(current, context, held, mark, is_whole)
        except BaseException as error:
            if not isinstance(error, Exception):
                self._undo(mark)
                raise
            raise self._fail(error, current, place, mark) from error
        verified = time.perf_counter() - finished
        self._recorder.end(current.name)
        record = PassRecord(
            name=str(current),
            place=place,
            seconds=finished - start,
            verify_seconds=verified,
            nodes_before=nodes_before,
            nodes_after=len(session.graph.nodes),
            changes=session.journal[mark:],
            rewrites=context.rewrites,
            rules=_tallies(context),
            sites=tuple(session.rewrites[first_site:]),
            notes=tuple(context.notes),
            scheduled_for=scheduled_for,
        )
        self.records.append(record)
        self._tell(current, record)
        if not is_whole:
            raise _Stopped(f"the limit of {self._max_rewrites} rewrites")

    def _context(self) -> PassContext:
        subject = self.subject
        return PassContext(
            subject.args, subject.kwargs, analyses=self._analyses, left_out=self._left_out
        )

    def _apply(self, current: Pass, context: PassContext) -> bool:
        """Let a pass do its work; return False when it was stopped since no rewrite is left."""
        session, seconds = self.session, self.manager.max_seconds
        deadline = None if seconds is None else time.monotonic() + seconds
        session.limits = Limits(self._max_rewrites, self._max_nodes, deadline)
        try:
            with time_limit(None if seconds is None else seconds + ALARM_DELAY):
                current.apply(session, context)
        except RewritesSpent:
            if session.whole_at is not None:
                session.undo(session.whole_at)
            return False
        except OutOfTime:
            raise out_of_time() from None
        finally:
            session.limits = Limits()
            session.settle()
        return True

    @property
    def _is_checked(self) -> bool:
        return self.manager.verify in ("each", "numerics")

    def _check(
        self, current: Pass, context: PassContext, held: list[str], mark: int, is_whole: bool
    ) -> None:
        """Hold what a pass did against what it says of itself."""
        modified = self.session.mark() > mark
        if modified and self.manager.verify != "off":
            verify(self.gm)
        output_type = self._output_type
        if modified and self._types is not None:
            output_type = self._bring_types_up_to_date()
        elif "shapes_known" in current.ensures:
            self.checks.types_changed()
        if not self._is_checked:
            return
        drops_gradients = modified and current.drops_gradients()
        contracts.check_types(self._output_type, output_type, drops_gradients=drops_gradients)
        self._output_type = output_type
        if is_whole:
            self.checks.check_ensured(current, context)
        if modified:
            self.checks.check_preserved(held)
        if modified and is_whole and current.is_idempotent and self._max_rewrites is None:
            self._check_idempotent(current)
        if self._numbers is not None and (modified or self._numbers.written):
            self._check_numbers(self._numbers, current)

    def _check_idempotent(self, current: Pass) -> None:
        self.session.limits = Limits(nodes=self._max_nodes)
        try:
            with time_limit(self.manager.max_seconds):
                contracts.check_idempotent(current, self.session, self._context())
        except OutOfTime:
            raise out_of_time() from None
        finally:
            self.session.limits = Limits()

    def _check_numbers(self, numbers: NumbersCheck, current: Pass) -> None:
        self.session.recompile()

        def before() -> fx.GraphModule:
            return self._recorder.timeline()[-1].graph_module

        try:
            numbers.check(current.numerics, before)
        except NumericsError as error:
            from fxkit.passes.manager.number_checks import explained

            written = ", ".join(numbers.written)
            numbers.put_back()
            difference = numbers.locate(before(), current.numerics)
            raise PostconditionError(
                explained(error, difference),
                node=None if difference is None else difference.node,
                source=None if difference is None else difference.source,
                hint=f"the pass says that its numerics are {current.numerics!r}"
                + (f", and writes to {written}" if written else ""),
            ) from error

    def _fail(self, error: Exception, current: Pass, place: str, mark: int) -> PassError:
        """Take a pass back, and return the error that says all about its failure."""
        told = failure(error, self.session, place, lambda: self._undo(mark))
        self._recorder.boundary()
        if (stray := self._recorder.stray()) is not None:
            told.hint = (
                f"{_USE_EDIT}: what is changed by other means, as %{stray.name} was, is not taken "
                "back"
            )
        if self.manager.reproduce is not None:
            told.repro = reproduce(self.manager, self.subject, current, told)
        for instrument in self.manager.instruments:
            self.session.recompile()
            instrument.failed(current, told, self.gm)
        return told

    def _undo(self, mark: int) -> None:
        """Take changes back, and the types that were recorded for them."""
        is_typed = self._typed_upto > mark
        self.session.undo(mark)
        self.checks.types_changed()
        if is_typed and self._types is not None:
            self._bring_types_up_to_date()

    def _tell(self, current: Pass, record: PassRecord) -> None:
        for instrument in self.manager.instruments:
            self.session.recompile()
            if record.modified:
                instrument.changed(current, record, self.gm)
            instrument.after(current, record, self.gm)


def _places(items: tuple[Any, ...]) -> dict[tuple[int, ...], str]:
    """Return, for the path to each pass in groups, its number among all."""
    total = sum(1 for _ in leaves(items))
    found: dict[tuple[int, ...], str] = {}

    def walk(items: tuple[Any, ...], path: tuple[int, ...]) -> None:
        for index, item in enumerate(items):
            if isinstance(item, Group):
                walk(tuple(item), (*path, index))
            else:
                found[(*path, index)] = f"{len(found) + 1}/{total}"

    walk(items, ())
    return found


def _tallies(context: PassContext) -> Mapping[str, Tally]:
    """Return rule → tally, over all runs of rules of a pass."""
    found: dict[str, Tally] = {}
    for report in context.reports:
        for name, tally in report.tallies.items():
            total = found.setdefault(name, Tally())
            total.tries += tally.tries
            total.hits += tally.hits
            total.refused += tally.refused
            total.seconds += tally.seconds
    return found
