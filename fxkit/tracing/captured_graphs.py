"""The graphs of a captured program: kept, changed as the program was, compiled by its backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxkit.errors import CaptureError, UnsupportedError
from fxkit.ir.program_changes import GraphProgram, belongs_to
from fxkit.tracing.changed_program import ChangedProgram, Substitution
from fxkit.tracing.graph_cache import GraphCache
from fxkit.tracing.guarding.guards import Guard, GuardedCall
from fxkit.tracing.recorder.frames import source_text
from fxkit.tracing.recorder.recorded import OpaqueCall
from fxkit.tracing.recording.guarded_graph import Backend, GuardedGraph
from fxkit.tracing.recording.recording import Attempt
from fxkit.tracing.values.refusals import Failure


class CapturedGraphs(ChangedProgram, GraphProgram):
    """A program with the graphs that were captured of it.

    Args:
        backend: Makes, of each graph module and the tensors that it was captured with, what is run
            in its place; the graph module itself runs when left out.
        substitution: What is known of a backend that changes what the program computes.
    """

    def __init__(self, backend: Backend | None, substitution: Substitution | None) -> None:
        super().__init__()
        self._backend = backend
        self._substitution = substitution
        self._cache = GraphCache()
        self._failure: Failure | None = None

    @property
    def graph_module(self) -> fx.GraphModule:
        """The graph that ran or was captured last.

        Raises:
            CaptureError: When no call has been captured yet.
        """
        return self._latest().graph_module

    @property
    def guards(self) -> tuple[Guard, ...]:
        """What `graph_module` takes for granted, in the order in which it is checked."""
        latest = self._latest()
        return (*latest.guards, *latest.value_guards)

    @property
    def opaque_calls(self) -> tuple[OpaqueCall, ...]:
        """The calls in `graph_module` that stay as they are, in order, with line and reason."""
        return self._latest().opaque_calls

    @property
    def nodes(self) -> list[fx.Node]:
        """The nodes of `graph_module`, in order."""
        return list(self.graph_module.graph.nodes)

    @property
    def graphs(self) -> tuple[fx.GraphModule, ...]:
        """All graphs that are kept, the last used one first."""
        return tuple(guarded.graph_module for guarded in self.kept)

    @property
    def kept(self) -> tuple[GuardedGraph, ...]:
        """What is kept of each graph, the last used one first."""
        return self._cache.entries

    def keep(self, guarded: GuardedGraph) -> None:
        """Put a graph first among those that are tried."""
        belongs_to(guarded.graph_module, self)
        self._cache.add(guarded)

    def _latest(self) -> GuardedGraph:
        if not self.kept:
            reason = f": {self._failure.reason}" if self._failure else ""
            raise CaptureError(
                f"expected a captured graph, got none{reason}", hint="call the program first"
            )
        return self.kept[0]

    def _keep_only(self, gm: fx.GraphModule) -> bool:
        return self.keep_where(lambda guarded: self._changed_graph(guarded) is gm)

    def keep_where(self, is_changed: Callable[[GuardedGraph], bool]) -> bool:
        """Give up all graphs but the one that was changed; tell whether there is that one."""
        kept = next(filter(is_changed, self.kept), None)
        if kept is not None:
            self._cache.keep(lambda guarded: guarded is kept)
            self._keep_variant(kept)
        return kept is not None

    def _keep_variant(self, kept: GuardedGraph) -> None:
        kept.is_stale = self._backend is not None

    def change_as(self, other: CapturedGraphs) -> None:
        """Change each graph that is captured as another program was changed.

        Raises:
            UnsupportedError: When the other program's graphs are of another kind.
        """
        if other.changes and type(other)._changed_graph is not type(self)._changed_graph:
            raise UnsupportedError(
                f"expected a program whose graph was not changed, got {other!r}, changed by "
                f"{other.names_of_changes}",
                hint="give its .graph_module",
            )
        self.keep_changes(other.changes)

    def _changed_graph(self, guarded: GuardedGraph) -> fx.GraphModule:
        """Return the graph that is changed where the program is."""
        return guarded.graph_module

    @property
    def alters_results(self) -> bool:
        """Whether graphs compute on purpose something else than the program does in Python."""
        return self._substitution is not None or self.is_altered

    def _note_unchanged(self, failure: Failure) -> None:
        """Raise or say that a call runs the program as it was before it was changed.

        Raises:
            CaptureError: When the user has changed the program's graph.
        """
        if self.is_altered:
            raise CaptureError(
                f"expected a call that runs the program as it was changed by "
                f"{self.names_of_changes}, got one where {failure.reason}",
                source=source_text(failure.trace),
                hint=failure.hint or "call .fn to run the program without its changes",
            )
        if self._substitution is not None:
            self._substitution.note_unchanged(failure)

    def _finish(self, guarded: GuardedGraph, attempt: Attempt, *, is_for_one: bool) -> None:
        """Change a graph as the program was changed, and let the backend compile it."""
        assert attempt.run is not None
        self.warn_of_unreported_edits(map(self._changed_graph, self.kept))
        extras = (extra.places[0].read() for extra in guarded.extras)
        inputs = (*attempt.run.tensors(), *extras)
        self._make(guarded, inputs, inputs if is_for_one else None)
        changed = self._changed_graph(guarded)
        belongs_to(changed, self)
        self.note_graph(changed)

    def _make(
        self, guarded: GuardedGraph, inputs: tuple[torch.Tensor, ...], args: tuple[Any, ...] | None
    ) -> None:
        """Make what is to be run of a graph; `args` are inputs where it is for those alone."""
        self.change_again(guarded.graph_module, args)
        if not guarded.numbers:
            if self._backend is not None:
                guarded.run = self._backend(guarded.graph_module, inputs)
        elif self._substitution is not None:  # backends compile graphs of tensors
            guarded.run = self._substitution.with_numbers(guarded.graph_module)

    def _renew(self, guarded: GuardedGraph, call: GuardedCall) -> None:
        """Let the backend compile a graph that was changed after it was compiled."""
        assert self._backend is not None
        guarded.run = self._backend(guarded.graph_module, tuple(guarded.inputs(call)))
        guarded.is_stale = False
