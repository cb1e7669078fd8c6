"""A captured program: callable like the original, and never different from it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

from fxkit.ir.modes import is_followed
from fxkit.ir.program_changes import ProgramChange, changes_for_copy
from fxkit.tracing.bytecode.call_hooks import with_call_hooks
from fxkit.tracing.captured_graphs import CapturedGraphs
from fxkit.tracing.changed_program import Substitution
from fxkit.tracing.guarding.guards import GuardedCall, GuardFailed, Mismatch
from fxkit.tracing.opaque_calls.automatic_calls import call_through
from fxkit.tracing.opaque_calls.opaque_calls import called_once, repeats_calls
from fxkit.tracing.parameter_names import parameter_names
from fxkit.tracing.recaptures import Recaptures
from fxkit.tracing.recorder.earlier_content import EarlierContent
from fxkit.tracing.recorder.generator_states import GeneratorStates
from fxkit.tracing.recorder.recorder import active_recorder
from fxkit.tracing.recording.backoff import ExponentialBackoff
from fxkit.tracing.recording.dynamic_inputs import Request, check_request
from fxkit.tracing.recording.guarded_graph import Backend, GuardedGraph, Repeat
from fxkit.tracing.recording.invocation import Invocation
from fxkit.tracing.recording.recording import Attempt
from fxkit.tracing.user_lines import with_line
from fxkit.tracing.values.effects import quietly
from fxkit.tracing.values.refusals import Failure

_FOLLOWED = Failure(
    "another capture, a function transform or a tracer is around it",
    "give .graph_module to what is around it",
)

MAX_EVICTIONS = 8


def method_of(fn: Any, instance: Any, owner: type | None) -> MethodType | None:
    """Return a function bound to an instance of the class it stands in; None if it is not bound."""
    if instance is None or not hasattr(type(fn), "__get__"):
        return None
    bound = fn.__get__(instance, owner)
    return bound if isinstance(bound, MethodType) and bound is not fn else None


class Captured(CapturedGraphs):
    """A program with its graphs, one for each set of facts under which it was captured.

    A call runs the graph whose guards hold. When none does, the program itself runs once, is
    recorded, and its graph is kept beside the others, up to `MAX_GRAPHS`. A call that can't be
    held in a graph is simply a call of the program.

    What a graph takes for granted is guarded. On entry: the arguments' nesting, their plain values,
    the types and identities of their tensors; modules' training flags, children and hooks; that
    parameters, buffers and other outside tensors are the same objects, of the same types, in their
    places; gradient, inference and autocast modes; default dtype and device. Inside the graph: each
    number, length or text that the program read out of a tensor.

    The Python state that the program reads is guarded as well: globals, closures, attributes,
    containers, context variables, the environment; what it writes there is written again by each
    call, and so are the texts that it prints.

    Calls that can't be looked into (clocks, files, Python's random numbers) stay in the graph as
    opaque calls, and so does what `fxkit.opaque` marks. What `torch.func` transforms is recorded as
    the operators that are left below the transforms.

    A run is not kept when it uses tensor subclasses or tensors of unknown origin, does with the
    result of an opaque call what no graph can follow, and the like; `explain` says what it was.
    Where recordings fail again and again, ever more calls go by, unrecorded, between two of them.
    Writes to a tensor's memory by foreign code (NumPy arrays excepted) are not seen.

    What is done to the program's graph, by rules, passes or edits, is done to the program: it is
    kept in `changes`, and done to each graph that is captured from then on before that runs. So the
    call that is captured runs twice: in Python, of which nothing is left behind, and changed. A
    call to which that can't be done raises a `CaptureError`: the program itself would compute
    something else.

    Args:
        fn: The program: a function, module, bound method, or other callable.
        backend: Makes, of each graph module and the tensors that it was captured with, what is run
            in its place; the graph module itself runs when left out.
        dynamic: Which sizes are free; see `fxkit.capture`.
        control_flow: Whether branches on tensors become nodes; see `fxkit.capture`.
        substitution: What is known of a backend that changes what the program computes.
    """

    _fxkit_stands_for = "fn"

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        backend: Backend | None = None,
        dynamic: Request = None,
        control_flow: bool = False,
        substitution: Substitution | None = None,
    ) -> None:
        check_request(dynamic)
        super().__init__(backend, substitution)
        if isinstance(fn, Captured):
            fn.warn_of_unreported_edits(map(fn._changed_graph, fn.kept))
            if fn.changes:
                self.change_as(fn)
                fn = fn.fn
        self._options: dict[str, Any] = {
            "backend": backend,
            "dynamic": dynamic,
            "control_flow": control_flow,
            "substitution": substitution,
        }
        self.fn = self.plain = fn
        self._last_ran_in_python = False
        self._recaptures = Recaptures(
            fn,
            self._cache,
            dynamic=dynamic,
            control_flow=control_flow,
            has_backend=backend is not None,
        )
        self._order = {name: i for i, name in enumerate(parameter_names(fn, keywords=True))}
        self._pauses = ExponentialBackoff()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the program: through a graph whose guards hold, else in Python."""
        if active_recorder() is not None or is_followed():
            # Another capture, torch.func or a tracer around this one sees the program itself.
            return self.run_plain(_FOLLOWED, args, kwargs)
        call, kwargs = self._call(args, kwargs)
        if any(guarded.has_opaque_calls for guarded in self._cache.entries):
            with called_once() as start_over:
                return self._run(call, args, kwargs, start_over)
        return self._run(call, args, kwargs, None)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind the program to an instance where what was captured would be bound."""
        is_bound = method_of(self.fn, instance, owner) is not None
        return MethodType(self, instance) if is_bound else self

    def __repr__(self) -> str:
        """Say what is captured, in how many graphs."""
        name = getattr(self.fn, "__qualname__", type(self.fn).__qualname__)
        return f"<{type(self).__name__} {name}, graphs: {len(self.kept)}>"

    def __reduce__(self) -> Any:
        """Copy and pickle the program with its options; a copy captures graphs of its own."""
        return _captured_again, (type(self), self.fn, self._options, self.changes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Captured:
        """Copy the program with its options and changes; a copy captures graphs of its own."""
        fn = copy.deepcopy(self.fn, memo)
        changes = changes_for_copy(self.changes, memo)
        return _captured_again(type(self), fn, self._options, changes)

    def _run(
        self,
        call: GuardedCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        start_over: Callable[[], None] | None,
    ) -> Any:
        changed: Mismatch | None = None
        for guarded in self._cache.entries:
            changed = guarded.mismatch(call)
            if changed is not None:
                continue
            try:
                if guarded.is_stale:
                    self._renew(guarded, call)
                result = guarded(call)
            except GuardFailed as failed:
                changed = failed.mismatch
                if start_over is not None:
                    start_over()
                continue
            except Repeat as repeat:
                if self.alters_results:
                    raise repeat.__cause__ or repeat from None
                if start_over is not None:
                    start_over()
                return self._in_python(args, kwargs)
            self._last_ran_in_python = False
            self._cache.use(guarded)
            return result
        if self.alters_results:
            return self._capture_and_run(call, args, kwargs, changed)
        if self._cache.evictions >= MAX_EVICTIONS or self._pauses.skips_call():
            self._last_ran_in_python = True
            return self._in_python(args, kwargs)
        attempt = self._attempt(call, args, kwargs, changed)
        self._pauses.note(failed=_is_in_vain(attempt, call))
        return attempt.result

    def run_plain(self, why: Failure, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the program itself, for who is to see its calls, if it was not changed."""
        self._note_unchanged(why)
        return self.plain(*args, **kwargs)

    def _capture_and_run(
        self,
        call: GuardedCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        changed: Mismatch | None,
    ) -> Any:
        """Capture a call, take back what that did, and run the graph as it was changed."""
        with called_once(may_differ=True) as start_over:

            def run() -> Attempt:
                earlier = EarlierContent(call.parts.tensors)
                return self._attempt(call, args, kwargs, changed, earlier)

            def begins_again(attempt: Attempt) -> bool:
                if attempt.take_back() is not None:
                    return False
                start_over()
                return True

            attempt = self._recaptures.until_held(run, begins_again)
            return self._run_captured(call, args, kwargs, attempt, start_over)

    def _run_captured(
        self,
        call: GuardedCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        attempt: Attempt,
        start_over: Callable[[], None],
    ) -> Any:
        failure, result, guarded = attempt.failure, attempt.result, attempt.guarded
        has_run = attempt.run is not None
        if guarded is not None and (reason := attempt.take_back()) is not None:
            failure = Failure(f"its first run can't be taken back: {reason}", None)
        elif guarded is not None:
            start_over()
            try:
                with quietly():
                    return guarded(call)
            except GuardFailed as failed:
                self._cache.keep(lambda it: it is not guarded)
                where = f", at {failed.source}" if failed.source else ""
                reason = f"it goes another way once it is changed: {failed.message}{where}"
                hint = "capture it with control_flow=True, which keeps both ways, and change that"
                failure = Failure(reason, hint)
                has_run = False
            except Repeat as repeat:
                raise repeat.__cause__ or repeat from None
        elif self.is_altered:
            attempt.take_back()
        assert failure is not None
        self._note_unchanged(failure)
        self._last_ran_in_python = True
        if has_run:
            return result
        start_over()
        return self._in_python(args, kwargs)

    def note_run(self, guarded: GuardedGraph) -> None:
        """Note that a graph has run for a call that was not made through here."""
        self._last_ran_in_python = False
        self._cache.use(guarded)

    def _in_python(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the program; opaque calls that a graph has made for this call are not made again."""
        learned = self._recaptures.learned
        if not learned.codes or not repeats_calls():
            return self.fn(*args, **kwargs)
        with with_call_hooks(frozenset(learned.codes), call_through, frozenset(learned.makers)):
            return self.fn(*args, **kwargs)

    @property
    def recaptures(self) -> int:
        """How many calls were captured, or tried to be, while there was a graph already."""
        return self._recaptures.count

    @property
    def whole(self) -> bool:
        """Whether the last call ran as one graph, or was captured into one."""
        return bool(self.kept) and not self._last_ran_in_python

    @property
    def sound(self) -> bool:
        """Whether no call can go another way than the program's unnoticed.

        So it is: all that a graph takes for granted is guarded, and what can't be held in a graph
        runs in Python.
        """
        return True

    def explain(self, *args: Any, **kwargs: Any) -> str:
        """Say whether a graph holds for a call, or which guard fails first and where it is from.

        Nothing is left changed: arguments, parameters and random states are put back.
        """
        call, kwargs = self._call(args, kwargs)
        found, kept = [], self.kept
        for number, guarded in enumerate(kept):
            mismatch = guarded.mismatch(call) or guarded.probe(call)
            if mismatch is None:
                return f"graph {number} of {len(kept)} holds for this call"
            found.append(str(with_line(self.fn, parameter_names(self.fn), mismatch)))
        reasons = self._recaptures.reasons(found, self._failure)
        return "\n".join(reasons) or "no call has been captured yet"

    def take_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GuardedCall:
        """Return the call as guards see it."""
        return self._call(args, kwargs)[0]

    def graph_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[Any, ...]:
        """Return what `graph_module` takes for a call of the program.

        Args:
            args: Arguments of the program.
            kwargs: Its keyword arguments.
        """
        return tuple(self._latest().inputs(self.take_apart(args, dict(kwargs or {}))))

    def capture_now(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Attempt:
        """Run the program and keep its graph, whatever graphs there are already.

        The program runs again where a run can't be held in a graph and the next one may: when it
        calls functions that it keeps where they can't be found, or computes a memoised one. Then
        generators of random numbers begin where they began before.
        """
        states = GeneratorStates(self.fn, (args, kwargs))

        def run() -> Attempt:
            call, ordered = self._call(args, kwargs)
            return self._attempt(call, args, ordered, None)

        def begins_again(_: Attempt) -> bool:
            states.restore()
            return True

        return self._recaptures.until_held(run, begins_again)

    def _call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[GuardedCall, dict[str, Any]]:
        if len(kwargs) > 1:
            last = len(self._order)
            kwargs = dict(sorted(kwargs.items(), key=lambda item: self._order.get(item[0], last)))
        return GuardedCall.of(args, kwargs), kwargs

    def _attempt(
        self,
        call: GuardedCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        changed: Mismatch | None,
        earlier: EarlierContent | None = None,
    ) -> Attempt:
        """Record a call, and keep its graph; `changed` is why none that was kept holds for it."""
        invocation = Invocation(self.fn, args, kwargs, call, self._recaptures.learned, earlier)
        attempt = self._recaptures.record(
            invocation, self._finish, keeps_parameters=self.is_altered
        )
        self._failure = attempt.failure
        self._last_ran_in_python = attempt.guarded is None
        if attempt.guarded is not None:
            self._recaptures.keep(attempt.guarded, changed)
        return attempt


def _is_in_vain(attempt: Attempt, call: GuardedCall) -> bool:
    """Tell whether a recording serves no later call, nor the next recording."""
    if attempt.guarded is None:
        return not attempt.has_learned
    return attempt.was_first and attempt.guarded.mismatch(call) is not None


def _captured_again(
    kind: type[Captured], fn: Any, options: dict[str, Any], changes: tuple[ProgramChange, ...]
) -> Captured:
    made = kind(fn, **options)
    made.keep_changes(changes)
    return made
