"""A pass run again, to see the graph as it was in the middle of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from fxkit.analysis.tensor_types import propagate_types
from fxkit.ir.graph_copies import copy_graph_module
from fxkit.ir.journal import GraphChange
from fxkit.ir.open_sessions import opened
from fxkit.passes.analyses import Analyses
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.manager.tracking import Rewrite, TrackedSession


@dataclass(frozen=True)
class ReplayStep:
    """The least that can be told apart in what a pass did.

    Attributes:
        start: Its first change, as a place in the pass's journal.
        end: The place after its last change.
        rewrite: The application of a rule or the replacement; None for a single change.
    """

    start: int
    end: int
    rewrite: Rewrite | None = None


class PassReplay:
    """Runs one pass on copies of a module.

    Args:
        gm: The module as it was before the pass; it is not changed.
        current: The pass.
        args: Inputs, one for each placeholder.
    """

    def __init__(self, gm: fx.GraphModule, current: Pass, args: tuple[Any, ...]) -> None:
        self.gm = gm
        self.current = current
        self.args = args
        session = self._run()
        self.changes: tuple[GraphChange, ...] = tuple(session.journal)
        self.steps = _steps(self.changes, session.rewrites, current.name)

    def before(self, step: ReplayStep) -> fx.GraphModule:
        """Return the module as it was before a step."""
        return self._at(step.start)

    def after(self, step: ReplayStep) -> fx.GraphModule:
        """Return the module as it was after a step."""
        return self._at(step.end)

    def _at(self, place: int) -> fx.GraphModule:
        session = self._run()
        session.undo(place)
        session.gm.recompile()
        return session.gm

    def _run(self) -> TrackedSession:
        gm = copy_graph_module(self.gm)
        propagate_types(gm, self.args)
        session = TrackedSession(gm, lambda: None)
        session.by = self.current.name
        context = PassContext(self.args, {}, analyses=Analyses(session))
        with opened(session):
            self.current.apply(session, context)
        return session


def _steps(changes: tuple[GraphChange, ...], rewrites: list[Rewrite], by: str) -> list[ReplayStep]:
    """Cut the journal of a pass into rewrites, and single changes where there are none."""
    found: list[ReplayStep] = []
    place = 0
    for index, rewrite in enumerate(rewrites):
        limit = rewrites[index + 1].start if index + 1 < len(rewrites) else len(changes)
        start = _start_of(rewrite, changes, place, by)
        found.extend(ReplayStep(i, i + 1) for i in range(place, start))
        place = _end_of(rewrite, changes, limit, by)
        if place > start:
            found.append(ReplayStep(start, place, rewrite))
    found.extend(ReplayStep(i, i + 1) for i in range(place, len(changes)))
    return found


def _start_of(rewrite: Rewrite, changes: tuple[GraphChange, ...], earliest: int, by: str) -> int:
    """Return where a rewrite begins: in the pass's own name, with the insertions before it."""
    start = rewrite.start
    while rewrite.by == by and start > earliest and changes[start - 1].kind == "insert":
        start -= 1
    return start


def _end_of(rewrite: Rewrite, changes: tuple[GraphChange, ...], limit: int, by: str) -> int:
    """Return where a rewrite ends.

    That is after the last change that its rule made and the erasures right behind it; of a rewrite
    in the pass's own name, after the erasure of what it replaced, if there is one.
    """
    own = [i for i in range(rewrite.start, limit) if changes[i].by == rewrite.by]
    if rewrite.by == by:
        erased = [i for i in own if changes[i].kind == "erase" and changes[i].name in rewrite.at]
        own = [i for i in own if i <= erased[-1]] if erased else own
    end = own[-1] + 1 if own else rewrite.start
    while end < limit and changes[end].kind == "erase":
        end += 1
    return end
