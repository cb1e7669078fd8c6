"""The changes of a captured program, which hold for all its graphs: those to come, too."""

from __future__ import annotations

import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxkit.analysis.edit_change import EditChange
from fxkit.analysis.tensor_types import infer_missing_types
from fxkit.ir.program_changes import ProgramChange
from fxkit.tracing.values.refusals import Failure


@dataclass(frozen=True)
class Substitution:
    """Callbacks for a backend whose passes change on purpose what is computed.

    Attributes:
        note_unchanged: Is told why a call runs the program itself.
        with_numbers: Makes what is run of a graph that takes numbers, which is not compiled.
    """

    note_unchanged: Callable[[Failure], None]
    with_numbers: Callable[[fx.GraphModule], Callable[..., Any]]


def _text_hash(graph: fx.Graph) -> int:
    """Return a number that is another one for another graph, as good as surely."""
    return hash(tuple(f"{n.name} {n.target} {n.args} {n.kwargs}" for n in graph.nodes))


class ChangedProgram(ABC):
    """A program with several graphs, and what was applied to them."""

    def __init__(self) -> None:
        self._changes: list[ProgramChange] = []
        self._listeners: list[Callable[[], None]] = []
        self._texts: weakref.WeakKeyDictionary[fx.GraphModule, int] = weakref.WeakKeyDictionary()
        self._has_warned_of_edits = False

    @property
    def changes(self) -> tuple[ProgramChange, ...]:
        """What was applied to the program's graph, and is to each new one, oldest first."""
        return tuple(self._changes)

    @property
    def names_of_changes(self) -> str:
        """What messages call the changes: their text, without arguments where it is long."""
        texts = map(str, self._changes)
        return ", ".join(it if len(it) < 80 else f"{it.partition('(')[0]}(...)" for it in texts)

    @property
    def is_altered(self) -> bool:
        """Whether a change may give other results on purpose: all but fxkit's own rules may."""
        return any(change.alters_results for change in self._changes)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Let a function be called when the program has been changed."""
        self._listeners.append(listener)

    def keep_changes(self, changes: tuple[ProgramChange, ...]) -> None:
        """Apply to each graph that is captured from now on what was applied to another program."""
        self._changes += changes

    def begin_change(self, gm: fx.GraphModule, change: ProgramChange | None) -> ProgramChange:
        """Return what is going to be applied to a graph; edits in a row are one."""
        last = self._changes[-1] if self._changes else None
        if isinstance(last, EditChange) and not last.is_settled:
            if change is None and last.gm is gm:
                return last
            last.settle()
        return EditChange(gm) if change is None else change

    def note_change(self, gm: fx.GraphModule, change: ProgramChange) -> None:
        """Keep what was applied to a graph, for all that are captured from now on.

        Other graphs are given up: they are captured again when they are called for.
        """
        if not self._keep_only(gm):
            if change not in self._changes:
                warnings.warn(
                    "a graph was changed that its program has given up, since another one was "
                    "changed or there are too many; the program is not: take its .graph_module",
                    stacklevel=6,
                )
            return
        if not self._changes or self._changes[-1] != change:
            self._changes.append(change)
        for listener in self._listeners:
            listener()

    def change_again(self, gm: fx.GraphModule, args: tuple[Any, ...] | None) -> None:
        """Change a new graph as the program was changed.

        Args:
            gm: The graph.
            args: Inputs of it; None where it serves inputs of more than one kind.
        """
        for change in self._changes:
            change.apply(gm, args)
        if self._changes:
            infer_missing_types(gm)

    def note_graph(self, gm: fx.GraphModule) -> None:
        """Note what a new graph is like, so that edits of it which nothing reports are seen."""
        if not self._changes:
            self._texts[gm] = _text_hash(gm.graph)

    def warn_of_unreported_edits(self, graphs: Iterable[fx.GraphModule]) -> None:
        """Warn once where a graph was edited by torch.fx alone, as another one is going to run."""
        if self._changes or self._has_warned_of_edits:
            return
        if any(self._texts.get(gm, now) != now for gm in graphs for now in [_text_hash(gm.graph)]):
            self._has_warned_of_edits = True
            warnings.warn(
                "expected edits of a captured graph that its program is told of, got edits by "
                "torch.fx alone: they hold for that graph, and not for one that is captured for "
                "another kind of call, or by fxkit.compile\n  hint:  edit inside `with "
                "fxkit.edit(captured) as edit:`, by fxkit.rewrite or by a PassManager, which hold "
                "for all graphs",
                stacklevel=2,
            )

    @abstractmethod
    def _keep_only(self, gm: fx.GraphModule) -> bool:
        """Give up all graphs but one that was changed; tell whether there is that one."""
