"""Changes of a program that has a graph for each kind of call: kept, to be made in all of them.

A change is kept as what was applied: rules, passes, or what an edit session did. A graph that is
made later gets it before it runs for the first time.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import Any, Protocol

from torch import fx


class ProgramChange(Protocol):
    """What was applied to a graph of a program, and can be applied to another one."""

    @property
    def alters_results(self) -> bool:
        """Whether results may be others than those of the program before, on purpose."""
        ...

    def apply(self, gm: fx.GraphModule, args: tuple[Any, ...] | None) -> None:
        """Change another graph of the program.

        Args:
            gm: The graph.
            args: Inputs of it; None where it serves inputs of more than one kind.
        """
        ...


def changes_for_copy(
    changes: tuple[ProgramChange, ...], memo: dict[int, Any]
) -> tuple[ProgramChange, ...]:
    """Return the changes of a deep copy of a program.

    Args:
        changes: Those of the program.
        memo: What `copy.deepcopy` has copied already.
    """
    for_copies = [getattr(change, "for_copy", None) for change in changes]
    pairs = zip(changes, for_copies, strict=True)
    return tuple(change if made is None else made(memo) for change, made in pairs)


class GraphProgram(ABC):
    """A program that has a graph; where a `GraphModule` is asked for, it serves too."""

    @property
    @abstractmethod
    def graph_module(self) -> fx.GraphModule:
        """The graph."""


class KeepsChanges(Protocol):
    """What keeps the changes of its graphs."""

    def begin_change(self, gm: fx.GraphModule, change: ProgramChange | None) -> ProgramChange:
        """Return what is going to be applied to a graph; an edit where nothing is given."""
        ...

    def note_change(self, gm: fx.GraphModule, change: ProgramChange) -> None:
        """Note what was applied to a graph."""
        ...


_programs: weakref.WeakKeyDictionary[fx.GraphModule, weakref.ref[KeepsChanges]] = (
    weakref.WeakKeyDictionary()
)


def belongs_to(gm: fx.GraphModule, program: KeepsChanges) -> None:
    """Let changes of a graph be noted by the program that it is of."""
    _programs[gm] = weakref.ref(program)


def program_of_graph(gm: fx.GraphModule) -> KeepsChanges | None:
    """Return the program that a graph is of, if there is one."""
    found = _programs.get(gm)
    return None if found is None else found()
