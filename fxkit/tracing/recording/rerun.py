"""Run a recorded call again, with stand-ins for some of its values, and leave no trace of that.

The first run gave the call's result and a graph for its very values. Another run sees the same
state and the same arguments, but for stand-ins: symbolic sizes, symbolic scalars, or other outcomes
of branches. What it changes is put back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from fxkit.tracing.recorder.state_restore import Entries, MemorySnapshot
from fxkit.tracing.recording.guarded_graph import GuardedGraph
from fxkit.tracing.recording.recording import Attempt, RecordedRun
from fxkit.tracing.recording.state import raw
from fxkit.tracing.values.refusals import Failure, Refusal, said

T = TypeVar("T")


class RunStopped(BaseException):
    """Raised by a recorder that stops the program as soon as no graph can hold it."""


class Rerun(RecordedRun, Generic[T]):
    """One more run of a call; subclasses say what stands in for what.

    Attributes:
        subject: How messages call the program in this run.
    """

    is_repeated = True
    subject = "it"

    def stand_ins(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put stand-ins where the program finds them, and return the arguments with theirs.

        Raises:
            Refusal: When nothing can be stood in for.
        """
        return self.invocation.args, self.invocation.kwargs

    def remove_stand_ins(self) -> None:
        """Put values back where the program has left their stand-ins."""

    def outcome(self, entry: GuardedGraph, result: Any) -> Any:
        """Return what comes of the run: its graph, where a subclass says nothing else.

        Args:
            entry: The graph.
            result: What the program returned.

        Raises:
            Refusal: When the graph is of no use.
        """
        return entry

    def failure(self, error: BaseException | None) -> Failure:
        """Return why there is no graph; `error` is what the program raised."""
        if self.recorder.failure is not None:
            return self.recorder.failure
        if isinstance(error, Refusal):
            return Failure(error.reason, error.hint)
        if isinstance(error, Exception):  # the program's own, for want of plain values
            return Failure(f"{self.subject} raises {said(error)}", None)
        return Failure("it could not be recorded", None)

    def restore(self, changed: Entries) -> None:
        """Put back what the program has changed.

        Args:
            changed: What the containers and objects that it has changed held before.
        """
        self.rewind(changed).to_before()

    def run(self) -> T | Failure:
        """Run the program, and put back what it changes of arguments and Python state."""
        changed: Entries = []
        try:
            try:
                result = self.execute(*self.stand_ins())
            except Exception as error:
                return self.failure(error)
            finally:
                self.remove_stand_ins()
                changed = raw(self.state.reach.holders)
            entry = self.guarded_graph(result)
            return self.failure(None) if entry is None else self.outcome(entry, result)
        except RunStopped:
            return self.failure(None)
        finally:
            self.restore(changed)
            self.recorder.close()


def rerun(first: Attempt, make: Callable[[], Rerun[T]]) -> T | Failure:
    """Run a call again on the state that its first run found.

    Args:
        first: The first run.
        make: Makes the other one, once that state is there again.

    Returns:
        What comes of the run, or why nothing does.
    """
    run, objection = first.run, why_not_again(first)
    if objection is not None or run is None:
        return objection or Failure("the program runs in Python", None)
    rewind = run.rewind(run.state.before)
    rewind.to_before()
    snapshot = MemorySnapshot(run.written(), is_random=True)
    try:
        return make().run()
    except Refusal as refusal:
        return Failure(refusal.reason, refusal.hint)
    finally:
        snapshot.restore()
        rewind.to_after()


def why_not_again(first: Attempt) -> Failure | None:
    """Return why a call can't run again without a trace, if it can't."""
    entry = first.guarded
    if entry is None or first.run is None:
        return Failure("the program runs in Python", None)
    if entry.has_opaque_calls:
        return Failure("an opaque call may happen only once", None)
    if entry.changes and entry.value_guards:
        reason = "what the program reads of tensors may follow from what it writes or draws"
        return Failure(reason, None)
    if any(tensor.requires_grad for tensor in first.run.written()):
        return Failure("autograd follows what it writes to, and would follow it twice", None)
    return None
