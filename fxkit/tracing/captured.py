"""A captured program: callable like the original, and never different from it."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import fx

from fxkit.errors import CaptureError, FxkitError, UnsupportedError
from fxkit.ir.modes import is_followed
from fxkit.ir.program_changes import GraphProgram, ProgramChange, belongs_to
from fxkit.torch_adapters.late_imports import FOR_SIZES, import_at_once
from fxkit.tracing.bytecode.call_hooks import with_call_hooks
from fxkit.tracing.changed_program import ChangedProgram, Substitution
from fxkit.tracing.guarding.guards import Guard, GuardedCall, GuardFailed, Mismatch
from fxkit.tracing.opaque_calls.automatic_calls import call_through
from fxkit.tracing.opaque_calls.opaque_calls import called_once, repeats_calls
from fxkit.tracing.parameter_names import parameter_names
from fxkit.tracing.recorder.earlier_content import EarlierContent
from fxkit.tracing.recorder.frames import source_text
from fxkit.tracing.recorder.recorded import OpaqueCall
from fxkit.tracing.recorder.recorder import active_recorder
from fxkit.tracing.recording.backoff import ExponentialBackoff
from fxkit.tracing.recording.cache_entry import Backend, CacheEntry, Repeat
from fxkit.tracing.recording.dynamic_inputs import (
    FreeAxes,
    Request,
    changed_scalars,
    check_request,
    requested,
    seen_to_change,
)
from fxkit.tracing.recording.invocation import Invocation
from fxkit.tracing.recording.recording import Attempt, record
from fxkit.tracing.recording.state import Learned, replaced_tensors
from fxkit.tracing.user_lines import with_line
from fxkit.tracing.values.effects import quietly
from fxkit.tracing.values.refusals import Failure, Refusal

_FOLLOWED = Failure(
    "another capture, a function transform or a tracer is around it",
    "give .graph_module to what is around it",
)

MAX_VARIANTS = 8
MAX_EVICTIONS = 8
MAX_RUNS = 4
MAX_STATIC = 3  # calls that could not be given free sizes, before that is no longer tried


class RecaptureWarning(UserWarning):
    """A captured program keeps being captured again, which costs more than running it."""


def method_of(fn: Any, instance: Any, owner: type | None) -> MethodType | None:
    """Return a function bound to an instance of the class it stands in; None if it is not bound."""
    if instance is None or not hasattr(type(fn), "__get__"):
        return None
    bound = fn.__get__(instance, owner)
    return bound if isinstance(bound, MethodType) and bound is not fn else None


class Captured(ChangedProgram, GraphProgram):
    """A program with its graphs, one for each set of facts under which it was captured.

    A call runs the graph whose guards hold. When none does, the program itself runs once, is
    recorded, and its graph is kept beside the others, up to `MAX_VARIANTS`. A call that can't be
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
        super().__init__()
        if isinstance(fn, Captured) and fn.changes:
            self.change_as(fn)
            fn = fn.fn
        self._options: dict[str, Any] = {
            "backend": backend,
            "dynamic": dynamic,
            "control_flow": control_flow,
            "substitution": substitution,
        }
        self._substitution = substitution
        self._control_flow = control_flow
        self._branches: tuple[str, ...] = ()
        self.fn = self.plain = fn
        self._dynamic = dynamic
        self._static_because: Failure | None = None
        self._static_again = 0
        self._has_captured = False
        self._learned = Learned()
        self._last_ran_in_python = False
        self.recaptures = 0
        self._backend = backend
        self._variants: list[CacheEntry] = []
        self._lock = threading.RLock()
        self._order = {name: i for i, name in enumerate(parameter_names(fn, keywords=True))}
        self._failure: Failure | None = None
        self._evictions = 0
        self._pauses = ExponentialBackoff()
        self._warned = False

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the program: through a graph whose guards hold, else in Python."""
        if active_recorder() is not None or is_followed():
            # Another capture, torch.func or a tracer around this one sees the program itself.
            return self.run_plain(_FOLLOWED, args, kwargs)
        call, kwargs = self._call(args, kwargs)
        if any(variant.has_opaque_calls for variant in self._variants):
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
        return f"<{type(self).__name__} {name}, graphs: {len(self._variants)}>"

    def __reduce__(self) -> Any:
        """Copy and pickle the program with its options; a copy captures graphs of its own."""
        return _captured_again, (type(self), self.fn, self._options, self.changes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Captured:
        """Copy the program with its options and changes; a copy captures graphs of its own."""
        fn = copy.deepcopy(self.fn, memo)
        return _captured_again(type(self), fn, self._options, self.changes)

    # Changes --------------------------------------------------------------------------------------

    def _keep_only(self, gm: fx.GraphModule) -> bool:
        return self.keep_where(lambda variant: self._changed_graph(variant) is gm)

    def keep_where(self, is_changed: Callable[[CacheEntry], bool]) -> bool:
        """Give up all graphs but the one that was changed; tell whether there is that one."""
        kept = next(filter(is_changed, self._variants), None)
        if kept is not None:
            with self._lock:
                self._variants[:] = [kept]
            self._keep_variant(kept)
        return kept is not None

    def _keep_variant(self, kept: CacheEntry) -> None:
        kept.is_stale = self._backend is not None

    def change_as(self, other: Captured) -> None:
        """Change each graph that is captured as another program was changed.

        Raises:
            UnsupportedError: When the other program's graphs are of another kind.
        """
        if other.changes and type(other)._changed_graph is not type(self)._changed_graph:
            raise UnsupportedError(
                f"expected a program whose graph was not changed, got {other!r}, changed by "
                f"{', '.join(map(str, other.changes))}",
                hint="give its .graph_module",
            )
        self.keep_changes(other.changes)

    def _changed_graph(self, variant: CacheEntry) -> fx.GraphModule:
        """Return the graph that is changed where the program is."""
        return variant.graph_module

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
                f"{', '.join(map(str, self.changes))}, got one where {failure.reason}",
                source=source_text(failure.trace),
                hint=failure.hint or "call .fn to run the program without its changes",
            )
        if self._substitution is not None:
            self._substitution.note_unchanged(failure)

    def _run(
        self,
        call: GuardedCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        start_over: Callable[[], None] | None,
    ) -> Any:
        changed: Mismatch | None = None
        for variant in tuple(self._variants):
            changed = variant.mismatch(call)
            if changed is not None:
                continue
            try:
                if variant.is_stale:
                    self._renew(variant, call)
                result = variant(call)
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
            self._touch(variant)
            return result
        if self.alters_results:
            return self._capture_and_run(call, args, kwargs, changed)
        if self._evictions >= MAX_EVICTIONS or self._pauses.takes():
            self._last_ran_in_python = True
            return self._in_python(args, kwargs)
        attempt = self._attempt(self._invocation(args, kwargs, call), changed)
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
        functions = self._learned.functions
        with called_once(may_differ=True) as start_over:
            for number in range(MAX_RUNS):
                known = len(functions)
                earlier = EarlierContent(call.parts.tensors)
                attempt = self._attempt(self._invocation(args, kwargs, call, earlier), changed)
                may_hold = len(functions) > known or attempt.was_first or attempt.has_learned
                if attempt.variant is not None or not may_hold or number == MAX_RUNS - 1:
                    break
                if attempt.take_back() is not None:
                    break
                start_over()
            return self._run_captured(call, args, kwargs, attempt, start_over)

    def _run_captured(
        self,
        call: GuardedCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        attempt: Attempt,
        start_over: Callable[[], None],
    ) -> Any:
        failure, result, variant = attempt.failure, attempt.result, attempt.variant
        has_run = attempt.run is not None
        if variant is not None and (reason := attempt.take_back()) is not None:
            failure = Failure(f"its first run can't be taken back: {reason}", None)
        elif variant is not None:
            start_over()
            try:
                with quietly():
                    return variant(call)
            except GuardFailed as failed:
                self._variants[:] = [it for it in self._variants if it is not variant]
                failure = Failure(f"it goes another way once it is changed: {failed}", None)
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

    def _renew(self, variant: CacheEntry, call: GuardedCall) -> None:
        """Let the backend compile a graph that was changed after it was compiled."""
        assert self._backend is not None
        variant.run = self._backend(variant.graph_module, tuple(variant.inputs(call)))
        variant.is_stale = False

    @property
    def kept(self) -> tuple[CacheEntry, ...]:
        """What is kept of each graph, the last used one first."""
        return tuple(self._variants)

    def note_run(self, variant: CacheEntry) -> None:
        """Note that a graph has run for a call that was not made through here."""
        self._last_ran_in_python = False
        self._touch(variant)

    def _in_python(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the program; opaque calls that a graph has made for this call are not made again."""
        learned = self._learned
        if not learned.codes or not repeats_calls():
            return self.fn(*args, **kwargs)
        with with_call_hooks(frozenset(learned.codes), call_through, frozenset(learned.makers)):
            return self.fn(*args, **kwargs)

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
    def whole(self) -> bool:
        """Whether the last call ran as one graph, or was captured into one."""
        return bool(self._variants) and not self._last_ran_in_python

    @property
    def sound(self) -> bool:
        """Whether no call can go another way than the program's unnoticed.

        So it is: all that a graph takes for granted is guarded, and what can't be held in a graph
        runs in Python.
        """
        return True

    @property
    def opaque_calls(self) -> tuple[OpaqueCall, ...]:
        """The calls in `graph_module` that stay as they are, in order, with line and reason."""
        return self._latest().opaque_calls

    @property
    def nodes(self) -> list[fx.Node]:
        """The nodes of `graph_module`, in order."""
        return list(self.graph_module.graph.nodes)

    @property
    def variants(self) -> tuple[fx.GraphModule, ...]:
        """All graphs that are kept, the last used one first."""
        return tuple(variant.graph_module for variant in self._variants)

    def explain(self, *args: Any, **kwargs: Any) -> str:
        """Say whether a graph holds for a call, or which guard fails first and where it is from.

        Nothing is left changed: arguments, parameters and random states are put back.
        """
        call, kwargs = self._call(args, kwargs)
        reasons = []
        for number, variant in enumerate(self._variants):
            mismatch = variant.mismatch(call) or variant.probe(call)
            if mismatch is None:
                return f"graph {number} of {len(self._variants)} holds for this call"
            reasons.append(str(with_line(self.fn, parameter_names(self.fn), mismatch)))
        if self._failure is not None:
            reasons.append(f"the last call ran in Python: {_failure_text(self._failure)}")
        if reasons and self._static_because is not None:
            reasons.append(f"sizes are not free: {self._static_because.reason}")
        if reasons:
            reasons.extend(self._branches)
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

    def keep(self, variant: CacheEntry) -> None:
        """Put a graph first among those that are tried."""
        belongs_to(variant.graph_module, self)
        with self._lock:
            self._variants.insert(0, variant)

    def capture_now(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Attempt:
        """Run the program and keep its graph, whatever graphs there are already.

        The program runs again where a run can't be held in a graph and the next one may: when it
        calls functions that it keeps where they can't be found, or computes a memoised one.
        """
        functions = self._learned.functions
        runs = 0
        while True:
            runs, known = runs + 1, len(functions)
            call, kwargs = self._call(args, kwargs)
            attempt = self._attempt(self._invocation(args, kwargs, call), None)
            may_hold = len(functions) > known or attempt.was_first or attempt.has_learned
            if attempt.failure is None or not may_hold or runs == MAX_RUNS:
                return attempt

    def _call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[GuardedCall, dict[str, Any]]:
        if len(kwargs) > 1:
            last = len(self._order)
            kwargs = dict(sorted(kwargs.items(), key=lambda item: self._order.get(item[0], last)))
        return GuardedCall.of(args, kwargs), kwargs

    def _latest(self) -> CacheEntry:
        if not self._variants:
            reason = f": {self._failure.reason}" if self._failure else ""
            raise CaptureError(
                f"expected a captured graph, got none{reason}", hint="call the program first"
            )
        return self._variants[0]

    def _touch(self, variant: CacheEntry) -> None:
        if self._variants[0] is variant:
            return
        with self._lock:
            if variant in self._variants:
                self._variants.remove(variant)
                self._variants.insert(0, variant)

    def _invocation(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: GuardedCall,
        earlier: EarlierContent | None = None,
    ) -> Invocation:
        return Invocation(self.fn, args, kwargs, call, self._learned, earlier)

    def _attempt(self, invocation: Invocation, changed: Mismatch | None) -> Attempt:
        call, learned = invocation.call, invocation.learned
        for variant in tuple(self._variants):
            learned.replaced.update(replaced_tensors(variant.guards))
        free = self._free_axes(call)
        has_numbers = self._note_numbers(call)
        attempt = record(invocation)
        is_first = not self._variants
        if attempt.variant is not None:
            self._settle(invocation, attempt, free, has_numbers)
        self._last_ran_in_python = attempt.variant is None
        self._has_captured = True
        with self._lock:
            self._failure = attempt.failure
            self.recaptures += not is_first
            if attempt.variant is not None:
                self._variants.insert(0, attempt.variant)
            if len(self._variants) > MAX_VARIANTS:
                self._variants.pop()
                self._evictions += 1
                self._warn(changed)
        return attempt

    def _free_axes(self, call: GuardedCall) -> FreeAxes:
        """Return which sizes a graph of this call should leave open."""
        if self._dynamic is False or self._static_again >= MAX_STATIC:
            return {}
        if any(tensor.is_nested or tensor.is_quantized for tensor in call.parts.tensors):
            return {}  # no fake tensor stands for such a one
        if self._dynamic is not None:
            return requested(self._dynamic, self.fn, call, is_first=not self._has_captured)
        return seen_to_change([variant.guards for variant in tuple(self._variants)], call)

    def _note_numbers(self, call: GuardedCall) -> bool:
        """Note which numbers have changed, and tell whether any is to be an input of the graph."""
        learned = self._learned
        if self._dynamic is False:
            return False
        learned.numbers |= changed_scalars([it.guards for it in tuple(self._variants)], call)
        if self._backend is not None and len(self._variants) < MAX_VARIANTS:
            return False
        return bool(learned.numbers - learned.fixed)

    def _settle(
        self, invocation: Invocation, attempt: Attempt, free: FreeAxes, has_numbers: bool
    ) -> None:
        """Put a graph for more calls in the place of that for one, and make what is to be run."""
        found = self._for_more(invocation, attempt, free, has_numbers)
        if found is not None:
            attempt.variant = found
            return
        assert attempt.variant is not None
        try:
            self._finish(attempt.variant, attempt, is_for_one=True)
        except Refusal as refusal:
            attempt.variant, attempt.failure = None, Failure(refusal.reason, refusal.hint)
        except FxkitError:
            attempt.take_back()
            raise

    def _for_more(
        self, invocation: Invocation, attempt: Attempt, free: FreeAxes, has_numbers: bool
    ) -> CacheEntry | None:
        """Return a finished graph for more calls than this one, if there is one."""
        if has_numbers:
            # This and the two below are imported where they are used: few programs need them.
            from fxkit.tracing.recording.scalar_recording import record_scalars

            found = self._finished(record_scalars(invocation, attempt), attempt)
            if isinstance(found, CacheEntry):
                return found
        if self._control_flow:
            from fxkit.tracing.branches.cond_capture import capture_cond

            found, self._branches = capture_cond(invocation, attempt)
            found = self._finished(found, attempt)
            if isinstance(found, CacheEntry):
                return found
        if not free:
            return None
        from fxkit.tracing.recording.size_recording import record_sizes

        import_at_once(FOR_SIZES)

        found = self._finished(record_sizes(invocation, attempt, free), attempt)
        if isinstance(found, Failure):
            self._static_because = found
            self._static_again += 1
            return None
        with self._lock:
            self._variants[:] = [old for old in self._variants if not found.serves(old)]
        return found

    def _finished(self, found: CacheEntry | Failure, attempt: Attempt) -> CacheEntry | Failure:
        """Finish a graph for more calls than one; return why it can't be, if it can't."""
        if isinstance(found, Failure):
            return found
        try:
            self._finish(found, attempt, is_for_one=False)
        except Refusal as refusal:
            return Failure(refusal.reason, refusal.hint)
        except FxkitError as error:
            return Failure(error.message, error.hint)
        return found

    def _finish(self, variant: CacheEntry, attempt: Attempt, *, is_for_one: bool) -> None:
        """Change a graph as the program was changed, and let the backend compile it."""
        assert attempt.run is not None
        self.warn_of_unreported_edits(map(self._changed_graph, self._variants))
        extras = (extra.places[0].read() for extra in variant.extras)
        inputs = (*attempt.run.tensors(), *extras)
        self._make(variant, inputs, inputs if is_for_one else None)
        changed = self._changed_graph(variant)
        belongs_to(changed, self)
        self.note_graph(changed)

    def _make(
        self, variant: CacheEntry, inputs: tuple[torch.Tensor, ...], args: tuple[Any, ...] | None
    ) -> None:
        """Make what is to be run of a graph; `args` are inputs where it is for those alone."""
        self.change_again(variant.graph_module, args)
        if not variant.numbers:
            if self._backend is not None:
                variant.run = self._backend(variant.graph_module, inputs)
        elif self._substitution is not None:  # backends compile graphs of tensors
            variant.run = self._substitution.with_numbers(variant.graph_module)

    def _warn(self, changed: Mismatch | None) -> None:
        if self._warned:
            return
        self._warned = True
        name = getattr(self.fn, "__qualname__", type(self.fn).__qualname__)
        changed = changed and with_line(self.fn, parameter_names(self.fn), changed)
        keeps = "keep" if changed and changed.what.startswith("the arguments") else "keeps"
        what = f": {changed.what} {keeps} changing" if changed else ""
        line = f" ({changed.source})" if changed and changed.source else ""
        has_numbers = bool(self._learned.numbers)
        hint = "; a number that changes may be a tensor instead, torch.tensor(...), for one graph"
        warnings.warn(
            f"{name} was captured more than {MAX_VARIANTS} times{what}{line}"
            f"{hint if has_numbers and self._backend is not None else ''}",
            RecaptureWarning,
            stacklevel=4,
        )


def _is_in_vain(attempt: Attempt, call: GuardedCall) -> bool:
    """Tell whether a recording serves no later call, nor the next recording."""
    if attempt.variant is None:
        return not attempt.has_learned
    return attempt.was_first and attempt.variant.mismatch(call) is not None


def _captured_again(
    kind: type[Captured], fn: Any, options: dict[str, Any], changes: tuple[ProgramChange, ...]
) -> Captured:
    made = kind(fn, **options)
    made.keep_changes(changes)
    return made


def capture_error(failure: Failure) -> CaptureError:
    """Return the error that says why a program can't be captured."""
    return CaptureError(
        f"expected a program that one graph can hold, got one where {failure.reason}",
        source=source_text(failure.trace),
        hint=failure.hint,
    )


def _failure_text(failure: Failure) -> str:
    return str(capture_error(failure))
