"""Find the rewrite that broke a program: the pass, the rule and the site, by binary search.

One run of the passes leaves a timeline with the graph after each of them. The oracle is asked of
some of these graphs, then of some in the middle of the pass that was found, which is run again for
that. The graph before the rewrite is minified, the pass being run again on each candidate.
"""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import fx

from fxkit.analysis.reproducing.flat_program import flat_program
from fxkit.analysis.reproducing.reduction import CountedOracle, Minified, Oracle, minify
from fxkit.errors import FxkitError, NumericsError
from fxkit.ir.graph_copies import copy_graph_module
from fxkit.ir.journal import GraphChange
from fxkit.ir.printer import format_graph
from fxkit.passes.base import Pass
from fxkit.passes.manager.differences import ProgramDifference, differences
from fxkit.passes.manager.groups import leaves
from fxkit.passes.manager.history import Timeline
from fxkit.passes.manager.instruments import Instrument
from fxkit.passes.manager.protocols import Manager
from fxkit.passes.manager.records import PassRecord, PassResult
from fxkit.passes.manager.replays import PassReplay, ReplayStep
from fxkit.passes.manager.reproduction import write_rewrite
from fxkit.passes.manager.tracking import Rewrite
from fxkit.passes.manager.written_state import StateHistory, put_back
from fxkit.passes.pass_registry import PASSES
from fxkit.passes.subjects import Subject, sample_inputs

Args = tuple[Any, ...]
Pair = tuple[fx.GraphModule, fx.GraphModule]

# Of the places in a candidate where a rule applies, this many are looked at.
_MOST_SITES = 8


@dataclass(frozen=True)
class Bisection:
    """Where a run of passes broke a program.

    Attributes:
        in_pass: The pass, with its place in the list.
        rewrite: The application of a rule, or the replacement; None for a change outside of any.
        changes: What was changed there.
        before: The graph right before that.
        after: The graph right after it.
        args: Its inputs, one for each placeholder.
        calls: How often the oracle was asked to find it.
        minified: A small program that the same pass breaks, or None.
        reproducer: The script that shows it, or None.
        notes: Why there is no smaller change, no small program or no script.
    """

    in_pass: str
    rewrite: Rewrite | None
    changes: tuple[GraphChange, ...]
    before: fx.GraphModule
    after: fx.GraphModule
    args: Args
    calls: int
    minified: Minified | None = None
    reproducer: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def rule(self) -> str | None:
        """Name of the rule, or of the pass where it replaced something itself."""
        return None if self.rewrite is None else self.rewrite.by

    @property
    def site(self) -> tuple[str, ...]:
        """Names of the nodes that were replaced, or changed where there was no rewrite."""
        if self.rewrite is not None:
            return self.rewrite.at
        return tuple(dict.fromkeys(change.name for change in self.changes))

    def __str__(self) -> str:
        culprit = f": {self.rewrite}" if self.rewrite else ""
        lines = [f"{self.in_pass}{culprit}, found in {self.calls} calls of the oracle"]
        lines.extend(f"  {change}" for change in self.changes)
        if self.minified is not None:
            small = f"minified to {self.minified.nodes} nodes in {self.minified.calls} trials"
            lines.extend([f"{small}:", format_graph(self.minified.graph_module)])
        lines.extend(f"note: {note}" for note in self.notes)
        if self.reproducer is not None:
            lines.append(f"repro: {self.reproducer}")
        return "\n".join(lines)


def find_fault(
    manager: Manager, program: Any, bad: Oracle, folder: str | Path | None = None
) -> Bisection:
    """Find the rewrite after which an oracle says bad; see `PassManager.bisect`."""
    subject = Subject.of(program, manager.args, manager.kwargs)
    args, kwargs = subject.args, subject.kwargs
    if args is None:
        args, kwargs = sample_inputs(subject.graph_module), {}
    start, args = flat_program(subject.graph_module, args, kwargs)
    history = StateHistory(start)
    try:
        index, result, oracle = _first_bad_pass(manager, start, args, bad, history)
        record, before = result.records[index - 1], result.timeline[index - 1].graph_module
        if history.steps[index - 1]:
            return _by_writing(record, index, result.timeline, args, history, oracle)
        with history.at(index - 1):
            current = _pass_of(manager, record)
            found, step = _in_pass(record, current, before, args, oracle)
            return _shown(found, step, current, before, manager, bad, folder)
    finally:
        put_back(history.start)


def _by_writing(
    record: PassRecord, index: int, timeline: Timeline, args: Args, history: StateHistory,
    oracle: CountedOracle,
) -> Bisection:  # fmt: skip
    """Tell of a pass that writes to parameters or buffers, which no rewrite shows."""
    with history.at(index - 1):
        before = copy.deepcopy(timeline[index - 1].graph_module)
    with history.at(index):
        after = copy.deepcopy(timeline[index].graph_module)
    names = ", ".join(history.steps[index - 1])
    return Bisection(
        in_pass=record.place,
        rewrite=None,
        changes=tuple(record.changes),
        before=before,
        after=after,
        args=args,
        calls=oracle.calls,
        notes=(f"it writes to {names}: that is no rewrite, and is neither minified nor replayed",),
    )


def _like(
    manager: Manager,
    items: Any,
    args: Args,
    verify: str,
    instruments: tuple[Instrument, ...] = (),
) -> Manager:
    """Return a manager with the same limits for other passes and inputs."""
    same_class: Any = type(manager)
    made: Manager = same_class(
        items,
        verify=verify,
        args=args,
        instruments=instruments,
        max_seconds=manager.max_seconds,
        max_nodes=manager.max_nodes,
    )
    return made


def _first_bad_pass(
    manager: Manager, start: fx.GraphModule, args: Args, bad: Oracle, history: StateHistory
) -> tuple[int, PassResult, CountedOracle]:
    """Return the number of the first pass after which the oracle says bad, from one on."""
    oracle = CountedOracle(bad)
    if oracle.answer((start, args), "the program as it was given"):
        raise NumericsError(
            "expected the oracle to say good of the program as it was given, got bad",
            hint="it takes (gm, args) and returns True when the fault is there",
        )
    verify = "each" if manager.verify == "numerics" else manager.verify
    again = _like(manager, manager.items, args, verify, (history,))
    result = again.run(copy_graph_module(start))
    timeline = result.timeline
    if not oracle.answer((timeline[-1].graph_module, args), "the program after all passes"):
        raise NumericsError(
            "expected the oracle to say bad of the program after all passes, got good",
            hint="verify='numerics' finds differences of any kind",
        )

    def is_bad_after(index: int) -> bool:
        with history.at(index):
            asked = timeline[index].graph_module, args
            return oracle.answer(asked, f"the program after pass {index}")

    return _first_bad(range(len(timeline)), is_bad_after), result, oracle


def _pass_of(manager: Manager, record: PassRecord) -> Pass:
    """Return the pass of a record: one of the list, or one that was scheduled for it."""
    number = re.search(r"\((\d+)/\d+", record.place)
    if record.scheduled_for is None and number is not None:
        return manager.passes[int(number[1]) - 1]
    found = next((p for p in leaves(manager.items) if str(p) == record.name), None)
    if found is not None:
        return found
    return PASSES[record.name]()


def _in_pass(
    record: PassRecord, current: Pass, before: fx.GraphModule, args: Args, oracle: CountedOracle
) -> tuple[Bisection, ReplayStep | None]:
    """Find the rewrite, or the single change, of a pass."""
    replay = PassReplay(before, current, args)
    whole = ReplayStep(0, len(replay.changes))
    step, note = whole, ()
    after = replay.after(whole)
    if not replay.steps or not oracle.answer((after, args), f"{current.name}, run again"):
        note = (f"{current.name} did something else when it ran again: no rewrite was found",)
    else:
        place = _first_bad(
            range(len(replay.steps) + 1),
            lambda i: oracle.answer((replay.after(replay.steps[i - 1]), args), "a step of a pass"),
        )
        step = replay.steps[place - 1]
        before, after = replay.before(step), replay.after(step)
    found = Bisection(
        in_pass=record.place,
        rewrite=step.rewrite,
        changes=replay.changes[step.start : step.end],
        before=before,
        after=after,
        args=args,
        calls=oracle.calls,
        notes=note,
    )
    return found, None if step is whole else step


def _first_bad(places: range, is_bad: Callable[[int], bool]) -> int:
    """Return the first bad place, where the first of all is good and the last is bad."""
    good, bad = places[0], places[-1]
    while bad - good > 1:
        middle = (good + bad) // 2
        if is_bad(middle):
            bad = middle
        else:
            good = middle
    return bad


def _shown(
    found: Bisection,
    step: ReplayStep | None,
    current: Pass,
    before_pass: fx.GraphModule,
    manager: Manager,
    bad: Oracle,
    folder: str | Path | None,
) -> Bisection:
    """Add the smallest program that shows the fault, and its script."""
    pair = (found.before, found.after)
    difference = next(
        (d for d in differences(bad) if _holds(d, pair, found.args)), differences(bad)[-1]
    )
    again = _Again(manager, current, found.rule if step is not None else None, difference)
    found = _minified(found, again, before_pass)
    return _with_script(found, again, folder)


def _minified(found: Bisection, again: _Again, before_pass: fx.GraphModule) -> Bisection:
    """Minify the program before the rewrite, or that before the pass."""
    for candidate in (found.before, before_pass):
        if again.bad(candidate, found.args):
            small = minify(candidate, found.args, again.bad)
            small = replace(small, nodes_before=len(before_pass.graph.nodes))
            return replace(found, minified=small)
    note = f"{again.current.name} does not do it alone: the program is not minified"
    return replace(found, minified=None, notes=(*found.notes, note))


def _with_script(found: Bisection, again: _Again, folder: str | Path | None) -> Bisection:
    """Write a script that shows the fault; a note says why where there is none."""
    gm, args, pair = found.before, found.args, (found.before, found.after)
    if found.minified is not None:
        gm, args = found.minified.graph_module, found.minified.args
        pair = again.pair(gm, args) or pair
    target = Path(tempfile.mkdtemp(prefix="fxkit-bisect-") if folder is None else folder)
    try:
        script = write_rewrite(
            target, gm, pair, args, rule=again.rule, current=again.current,
            run_pass=lambda m: again.run(m, args), difference=again.difference,
            title=_title(found),
        )  # fmt: skip
    except FxkitError as error:
        return replace(found, notes=(*found.notes, f"no script: {error.message}"))
    return replace(found, reproducer=script)


def _title(found: Bisection) -> str:
    culprit = f": {found.rewrite}" if found.rewrite else ""
    return f"{found.in_pass}{culprit}\nEnds with status 1 while the fault is there."


def _holds(difference: ProgramDifference, pair: Pair, args: Args) -> bool:
    try:
        return difference.differ(*pair, args)
    except Exception:  # the program before raises: another way may still tell them apart
        return False


class _Again:
    """Runs the pass on candidates, and looks at what the rule does there."""

    def __init__(
        self, manager: Manager, current: Pass, rule: str | None, difference: ProgramDifference
    ) -> None:
        self.manager = manager
        self.current = current
        self.rule = rule
        self.difference = difference

    def bad(self, gm: fx.GraphModule, args: Args) -> bool:
        """Tell whether the rule breaks a program."""
        return self.pair(gm, args) is not None

    def run(self, gm: fx.GraphModule, args: Args) -> fx.GraphModule:
        """Return what the whole pass makes of a program."""
        copied = copy_graph_module(gm)
        _like(self.manager, [self.current], args, "off").run(copied)
        return copied

    def pair(self, gm: fx.GraphModule, args: Args) -> Pair | None:
        """Return the graphs before and after the first rewrite that breaks a program."""
        pairs = self._pairs(gm, args)
        return next((p for p in pairs if self.difference.differ(*p, args)), None)

    def _pairs(self, gm: fx.GraphModule, args: Args) -> Iterator[Pair]:
        result = _like(self.manager, [self.current], args, "off").run(copy_graph_module(gm))
        timeline = result.timeline
        if self.rule is None:
            if result.modified:
                yield timeline[0].graph_module, timeline[-1].graph_module
            return
        places = [i for i, site in enumerate(result.sites) if site.by == self.rule]
        for place in places[:_MOST_SITES]:
            yield (
                timeline.after_rewrites(place).graph_module,
                timeline.after_rewrites(place + 1).graph_module,
            )
