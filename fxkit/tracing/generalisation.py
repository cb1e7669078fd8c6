"""Graphs for more calls than the one that was recorded: sizes, numbers, branches stay open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fxkit.errors import FxkitError
from fxkit.torch_adapters.late_imports import FOR_SIZES, import_at_once
from fxkit.tracing.graph_cache import MAX_GRAPHS, GraphCache
from fxkit.tracing.guarding.guards import GuardedCall
from fxkit.tracing.recording.dynamic_inputs import (
    FreeAxes,
    Request,
    changed_scalars,
    requested,
    seen_to_change,
)
from fxkit.tracing.recording.guarded_graph import GuardedGraph
from fxkit.tracing.recording.invocation import Invocation
from fxkit.tracing.recording.recording import Attempt
from fxkit.tracing.recording.state import Learned
from fxkit.tracing.values.refusals import Failure, Refusal

MAX_STATIC = 3  # calls that could not be given symbolic sizes, before that is no longer tried

Finish = Callable[[GuardedGraph], None]


@dataclass(frozen=True, slots=True)
class OpenInputs:
    """What the graph of a call should leave open.

    Attributes:
        sizes: The axes whose sizes are to be free, for each tensor argument by its index.
        has_numbers: Whether numbers are to be inputs of it.
    """

    sizes: FreeAxes
    has_numbers: bool


class Generalisation:
    """Makes, of recorded runs of a program, graphs that hold for more calls than those.

    Args:
        fn: The program.
        cache: Its graphs.
        learned: What is known of it.
        dynamic: Which sizes are free; see `fxkit.capture`.
        control_flow: Whether branches on tensors become nodes; see `fxkit.capture`.
        has_backend: Whether graphs are compiled, which those that take numbers are not.

    Attributes:
        static_because: Why sizes could not be free when that was last tried.
        branches: Why branches have stayed guards.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        cache: GraphCache,
        learned: Learned,
        *,
        dynamic: Request,
        control_flow: bool,
        has_backend: bool,
    ) -> None:
        self.static_because: Failure | None = None
        self.branches: tuple[str, ...] = ()
        self._fn = fn
        self._cache = cache
        self._learned = learned
        self._dynamic = dynamic
        self._control_flow = control_flow
        self._has_backend = has_backend
        self._static_again = 0

    def open_inputs(self, call: GuardedCall, *, is_first: bool) -> OpenInputs:
        """Return what a graph of a call should leave open, after what has changed so far.

        Args:
            call: The call, which no graph holds for.
            is_first: Whether none was recorded before it.

        Raises:
            UnsupportedError: When the first call has not what `dynamic` names.
        """
        return OpenInputs(self._free_axes(call, is_first), self._note_numbers(call))

    def _free_axes(self, call: GuardedCall, is_first: bool) -> FreeAxes:
        if self._dynamic is False or self._static_again >= MAX_STATIC:
            return {}
        if any(tensor.is_nested or tensor.is_quantized for tensor in call.parts.tensors):
            return {}  # no fake tensor stands for such a one
        if self._dynamic is not None:
            return requested(self._dynamic, self._fn, call, is_first=is_first)
        return seen_to_change([entry.guards for entry in self._cache.entries], call)

    def _note_numbers(self, call: GuardedCall) -> bool:
        """Note which numbers have changed, and tell whether any is to be an input of the graph."""
        learned = self._learned
        if self._dynamic is False:
            return False
        learned.numbers |= changed_scalars([it.guards for it in self._cache.entries], call)
        if self._has_backend and len(self._cache.entries) < MAX_GRAPHS:
            return False
        return bool(learned.numbers - learned.fixed)

    def graph(
        self, invocation: Invocation, attempt: Attempt, inputs: OpenInputs, finish: Finish
    ) -> GuardedGraph | None:
        """Return a finished graph for more calls than this one, if there is one.

        Args:
            invocation: The call.
            attempt: Its recorded run.
            inputs: What is to be left open.
            finish: Makes what is to be run of a graph; a graph that it raises for is left out.
        """
        if inputs.has_numbers:
            # This and the two below are imported where they are used: few programs need them.
            from fxkit.tracing.recording.scalar_recording import record_scalars

            found = _finished(record_scalars(invocation, attempt), finish)
            if isinstance(found, GuardedGraph):
                return found
        if self._control_flow:
            from fxkit.tracing.branches.cond_capture import capture_cond

            found, self.branches = capture_cond(invocation, attempt)
            found = _finished(found, finish)
            if isinstance(found, GuardedGraph):
                return found
        if not inputs.sizes:
            return None
        from fxkit.tracing.recording.size_recording import record_sizes

        import_at_once(FOR_SIZES)

        found = _finished(record_sizes(invocation, attempt, inputs.sizes), finish)
        if isinstance(found, Failure):
            self.static_because = found
            self._static_again += 1
            return None
        self._cache.keep(lambda entry: not found.serves(entry))
        return found


def _finished(found: GuardedGraph | Failure, finish: Finish) -> GuardedGraph | Failure:
    """Finish a graph; return why it can't be, if it can't."""
    if isinstance(found, Failure):
        return found
    try:
        finish(found)
    except Refusal as refusal:
        return Failure(refusal.reason, refusal.hint)
    except FxkitError as error:
        return Failure(error.message, error.hint)
    return found
