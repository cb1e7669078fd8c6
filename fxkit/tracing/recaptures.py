"""Record the calls of a captured program that no graph holds for, and keep their graphs."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Protocol

from fxkit.errors import CaptureError, FxkitError
from fxkit.tracing.generalisation import Generalisation, OpenInputs
from fxkit.tracing.graph_cache import MAX_GRAPHS, GraphCache
from fxkit.tracing.guarding.guards import Mismatch
from fxkit.tracing.parameter_names import parameter_names
from fxkit.tracing.recorder.frames import source_text
from fxkit.tracing.recording.dynamic_inputs import Request
from fxkit.tracing.recording.guarded_graph import GuardedGraph
from fxkit.tracing.recording.invocation import Invocation
from fxkit.tracing.recording.recording import Attempt, record
from fxkit.tracing.recording.state import Learned, replaced_tensors
from fxkit.tracing.user_lines import with_line
from fxkit.tracing.values.refusals import Failure, Refusal

MAX_RUNS = 4


class RecaptureWarning(UserWarning):
    """A captured program keeps being captured again, which costs more than running it."""


class Finish(Protocol):
    """Makes what is to be run of a graph."""

    def __call__(self, guarded: GuardedGraph, attempt: Attempt, *, is_for_one: bool) -> None:
        """Finish the graph of a run; `is_for_one` where it serves its inputs alone."""
        ...


class Recaptures:
    """The recorded runs of a program.

    Args:
        fn: The program.
        cache: Its graphs.
        dynamic: Which sizes are free; see `fxkit.capture`.
        control_flow: Whether branches on tensors become nodes; see `fxkit.capture`.
        has_backend: Whether graphs are compiled.

    Attributes:
        count: How many runs were recorded while there was a graph already.
        learned: What the runs have shown, for those that follow.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        cache: GraphCache,
        *,
        dynamic: Request,
        control_flow: bool,
        has_backend: bool,
    ) -> None:
        self.count = 0
        self.learned = Learned()
        self._fn = fn
        self._cache = cache
        self._has_backend = has_backend
        self._has_captured = False
        self._has_warned = False
        self._generalisation = Generalisation(
            fn,
            cache,
            self.learned,
            dynamic=dynamic,
            control_flow=control_flow,
            has_backend=has_backend,
        )

    def record(self, invocation: Invocation, finish: Finish, *, keeps_parameters: bool) -> Attempt:
        """Run the program, and return its finished graph: one for more calls if there is one.

        Args:
            invocation: The call.
            finish: Makes what is to be run of a graph.
            keeps_parameters: Whether parameters that others have taken the place of stay attributes
                of the graph, where what changes the graph finds them, instead of inputs.

        Raises:
            FxkitError: When the graph for this call alone can't be finished; what the run has
                changed is taken back then, as far as it can be.
        """
        call, learned = invocation.call, invocation.learned
        for entry in self._cache.entries:
            found = replaced_tensors(entry.guards, parameters=not keeps_parameters)
            learned.replaced.update(found)
        inputs = self._generalisation.open_inputs(call, is_first=not self._has_captured)
        attempt = record(invocation)
        is_first = not self._cache.entries
        if attempt.guarded is not None:
            self._settle(invocation, attempt, inputs, finish)
        self._has_captured = True
        self.count += not is_first
        return attempt

    def _settle(
        self, invocation: Invocation, attempt: Attempt, inputs: OpenInputs, finish: Finish
    ) -> None:
        """Put a graph for more calls in the place of that for one, and make what is to be run."""
        for_more = functools.partial(finish, attempt=attempt, is_for_one=False)
        found = self._generalisation.graph(invocation, attempt, inputs, for_more)
        if found is not None:
            attempt.guarded = found
            return
        assert attempt.guarded is not None
        try:
            finish(attempt.guarded, attempt, is_for_one=True)
        except Refusal as refusal:
            attempt.guarded, attempt.failure = None, Failure(refusal.reason, refusal.hint)
        except FxkitError:
            attempt.take_back()
            raise

    def until_held(
        self, run: Callable[[], Attempt], begins_again: Callable[[Attempt], bool] | None = None
    ) -> Attempt:
        """Run a program again until a graph holds it, as long as the next run may be held.

        So it may when the program calls functions that it keeps where they can't be found, or
        computes a memoised one.

        Args:
            run: Records a run.
            begins_again: Takes a run back before the next one; tells whether it could.
        """
        functions = self.learned.functions
        runs = 0
        while True:
            runs, known = runs + 1, len(functions)
            attempt = run()
            may_hold = len(functions) > known or attempt.was_first or attempt.has_learned
            if attempt.guarded is not None or not may_hold or runs == MAX_RUNS:
                return attempt
            if begins_again is not None and not begins_again(attempt):
                return attempt

    def keep(self, entry: GuardedGraph, changed: Mismatch | None) -> None:
        """Keep a graph; warn, once, where another one has to be given up for it.

        Args:
            entry: The graph.
            changed: Why none that was kept has held for its call.
        """
        if self._cache.add(entry) and not self._has_warned:
            self._has_warned = True
            self._warn(changed)

    def _warn(self, changed: Mismatch | None) -> None:
        name = getattr(self._fn, "__qualname__", type(self._fn).__qualname__)
        changed = changed and with_line(self._fn, parameter_names(self._fn), changed)
        keeps = "keep" if changed and changed.what.startswith("the arguments") else "keeps"
        what = f": {changed.what} {keeps} changing" if changed else ""
        line = f" ({changed.source})" if changed and changed.source else ""
        has_numbers = bool(self.learned.numbers)
        hint = "; a number that changes may be a tensor instead, torch.tensor(...), for one graph"
        warnings.warn(
            f"{name} was captured more than {MAX_GRAPHS} times{what}{line}"
            f"{hint if has_numbers and self._has_backend else ''}",
            RecaptureWarning,
            stacklevel=5,
        )

    def reasons(self, mismatches: list[str], failure: Failure | None) -> list[str]:
        """Return why calls run in Python, and why graphs are not more general.

        Args:
            mismatches: Why no graph holds for a call, which comes first.
            failure: Why no graph holds the last run, if none does.
        """
        found = list(mismatches)
        if failure is not None:
            found.append(f"the last call ran in Python: {capture_error(failure)}")
        static_because = self._generalisation.static_because
        if found and static_because is not None:
            found.append(f"sizes are not free: {static_because.reason}")
        if found:
            found.extend(self._generalisation.branches)
        return found


def capture_error(failure: Failure) -> CaptureError:
    """Return the error that says why a program can't be captured."""
    return CaptureError(
        f"expected a program that one graph can hold, got one where {failure.reason}",
        source=source_text(failure.trace),
        hint=failure.hint,
    )
