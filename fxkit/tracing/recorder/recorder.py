"""The recorder: the torch calls of a running program become an FX graph."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from fxkit.torch_adapters.autograd_state import has_saved_tensors_hooks
from fxkit.torch_adapters.custom_functions import APPLY
from fxkit.torch_adapters.modes import count_dispatch_modes, count_function_modes, function_modes
from fxkit.torch_adapters.transforms import current_level, is_forward_mode
from fxkit.tracing.environment.call_watch import Watcher
from fxkit.tracing.environment.environment_walk import EnvironmentWalk
from fxkit.tracing.environment.random_generators import is_unseen, shares_memory
from fxkit.tracing.recorder.calls import CallSpelling, DataRead, spelling_of
from fxkit.tracing.recorder.control_operators import record_control
from fxkit.tracing.recorder.data_dependence import has_data_dependent_shape
from fxkit.tracing.recorder.earlier_content import EarlierContent
from fxkit.tracing.recorder.frames import Frames, Location
from fxkit.tracing.recorder.opaque_tracing import OpaqueTracing
from fxkit.tracing.recorder.recorded import (
    TracedValue,
    needs_grad,
)
from fxkit.tracing.recorder.scalar_tracing import scalar_text
from fxkit.tracing.recorder.state_restore import Mutations
from fxkit.tracing.recorder.tape import TENSOR_CLASSES
from fxkit.tracing.recorder.transforms import BelowTransforms
from fxkit.tracing.values.mode_scopes import Regions, read_ambient
from fxkit.tracing.values.refusals import Failure, Refusal
from fxkit.tracing.values.symbolic_scalars import plain


class Recorder(OpaqueTracing, TorchFunctionMode):
    """Runs each torch call as it comes and appends it to a graph.

    A program that can't be held in a graph is not disturbed: `failure` says why, and the rest of it
    runs unrecorded, so that its result is still that of one eager run.

    Args:
        leaves: The tensor arguments, with the names that their placeholders ask for.
        environment: Where tensors and modules from outside of the arguments lie.
        boundary: The frame in which the user's program is called.
    """

    def __init__(
        self,
        leaves: Iterable[tuple[str, torch.Tensor]],
        environment: EnvironmentWalk,
        boundary: FrameType,
    ) -> None:
        super().__init__(leaves, environment)
        self.failure: Failure | None = None
        self._frames = Frames(boundary, environment.modules)
        self._dtype = torch.get_default_dtype()
        self._dispatch_modes = count_dispatch_modes()
        self.regions = Regions(self._emit, read_ambient())
        self.watcher = Watcher(environment, self)
        self.earlier: EarlierContent | None = None
        self.has_texts = False
        self._grad = self.regions.state.grad
        self._entry_level = current_level()
        self._below = BelowTransforms(self)
        self._depth = 0

    def __exit__(self, *error: Any) -> Any:
        self._below.leave()
        return super().__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.earlier is not None:
            self.earlier.see(func, args, kwargs or {}, self._is_made)
        if self.failure is not None:
            return self._handle(func, types, args, kwargs or {})
        self.watcher.pause()
        self._depth += 1
        try:
            return self._handle(func, types, args, kwargs or {})
        finally:
            self._depth -= 1
            self.watcher.resume()

    def _handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        # torch.cond and torch.compile in the program let Dynamo trace this function.
        is_off = self.failure is not None or self._is_suspended
        if is_off or torch.compiler.is_dynamo_compiling():
            return Recorder._run(self, func, args, kwargs)
        spelling = spelling_of(func)
        reading = spelling.reading
        if current_level() != self._entry_level:
            if reading is DataRead.METADATA:
                return func(*args, **kwargs)
            self._location = self._frames.locate(sys._getframe(2))
            args, kwargs = self.fixed(args), self.fixed(kwargs)
            return self._below.run(func, spelling, args, kwargs)
        if self._below.is_on:
            self._below.leave()
        if reading is DataRead.METADATA and not (self._tainted and self._reads_tainted(args)):
            return func(*args, **kwargs)
        if reading is DataRead.STATE:
            result = func(*args, **kwargs)
            self._grad = torch.is_grad_enabled()
            return result
        if func is torch.Tensor.resize_ and _keeps_size(args, kwargs):
            return func(*args, **kwargs)  # does nothing, as observers of torch do in each call
        return self._record(func, spelling, types, args, kwargs)

    def refuse(self, reason: str, hint: str | None = None, *, watch: bool = False) -> None:
        """Stop recording; the first reason counts.

        Args:
            reason: Why the program can't be held in a graph.
            hint: What to do.
            watch: Whether to find out what else the program calls, for the next time.
        """
        if self.failure is None:
            trace = self._location.trace
            if self._frames.is_active:
                trace = self._frames.locate(sys._getframe(1)).trace or trace
            self.failure = Failure(reason, hint, trace)
        if not watch:
            self.release()

    def note_text(self, stream: str, text: str) -> None:
        """Note what the program writes to a standard stream."""
        if self.failure is not None:
            return
        location = self._frames.locate(sys._getframe(2))
        self.has_texts = True
        if self.texts and self.texts[-1][:2] == (location, stream):
            text = self.texts.pop()[2] + text
        self.texts.append((location, stream, text))

    def watch(self) -> None:
        """Begin to watch what the program calls beside torch."""
        try:
            self.watcher.start()
        except Refusal as refusal:
            self.refuse(refusal.reason, refusal.hint)

    def release(self) -> None:
        """Drop the frames of the program; what they hold can be freed."""
        self.watcher.stop()
        self._frames.forget()

    def close(self) -> None:
        """Let go of the tensors of the program, which nothing else may keep alive."""
        self.release()
        self.watcher.forget()
        self._location = Location(None, {}, None)
        self._values.clear()
        self._writes.clear()
        self._exported.clear()
        self.opaque_objects.clear()
        self._progress.raised = None
        self._progress.random = []

    def finish(self) -> Mutations:
        """Check what can only be known at the end, and return what the whole program changed."""
        if self.failure is None:
            self._try(self._follow_modes, self._check_random, self._check_end)
        return self._writes.so_far(self._progress.drew)

    @property
    def hands_on_results(self) -> bool:
        """Whether what opaque calls return may be followed; not where other things are."""
        return type(self) is Recorder

    @property
    def may_catch(self) -> bool:
        """Whether a function of the program that calls torch handles exceptions."""
        return self._frames.may_catch

    def run_control(self, function: Any, args: Any, kwargs: Any) -> tuple[Any, str | None]:
        """See `record_control`."""
        self._location = self._frames.locate(sys._getframe(3))
        self._follow_modes()
        if not self.hands_on_results:
            return self.unseen(lambda: function(*args, **kwargs)), "its sizes are free"
        found = self.unseen(lambda: record_control(self, self.watcher, function, args, kwargs))
        self.unseen(self._note_random)
        return found

    @property
    def is_following(self) -> bool:
        """Whether the graph still grows."""
        return self.failure is None and not self._is_suspended and self._frames.is_active

    def _is_made(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor came out of the graph and shares no memory with its inputs."""
        return id(tensor) in self._values and not self._writes.watches(tensor)

    @property
    def kept(self) -> dict[int, Any]:
        """The objects that are older than the call and that the program refers to, by `id`."""
        return self.watcher.kept

    def begin_at(self, frame: FrameType) -> None:
        """Take a frame as the one that calls the program; it and its callers are not looked at."""
        self._frames.begin_at(frame)

    def is_inside(self, frame: FrameType) -> bool:
        """Tell whether a frame belongs to the program."""
        return frame is not self._frames._boundary

    def guard_scalar(self, node: fx.Node, value: Any) -> None:
        """Append a guard that expects a scalar to be what it was."""
        if type(value) is not bool:
            self.pinned.append(node)
        self._location = self._frames.locate(sys._getframe(2))
        self.unseen(lambda: self._guard(node, value, scalar_text(node)))
        self.scalars[self.reads[-1].check] = None

    def append_scalar(self, target: Any, args: tuple[Any, ...], value: Any) -> fx.Node:
        """Append a node that computes a scalar."""
        self._location = self._frames.locate(sys._getframe(3))
        node = self._emit(target, args)
        self.scalars[node] = value
        return node

    def _record(
        self, func: Any, spelling: CallSpelling, types: Any, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        try:
            self._location = self._frames.locate(sys._getframe(3))
            self._check_call(spelling, types)
            self._follow_modes()
            self._check_random()
            if self._has_scalars:
                args, kwargs = self.without_settings(spelling, args, kwargs)
            node_args = tuple([self._argument(arg, func) for arg in args])
            node_kwargs = {name: self._argument(arg, func) for name, arg in kwargs.items()}
        except Refusal as refusal:
            if is_unseen(func, (args, kwargs)):
                self.watcher.blame_user(sys._getframe(3))
            self.refuse(refusal.reason, refusal.hint)
            return self._run(func, args, kwargs)
        try:
            result = self._run(func, args, kwargs)
        except BaseException as error:
            self._progress.raised = error
            raise
        try:
            self._append(spelling, node_args, node_kwargs, args, kwargs, result)
        except Refusal as refusal:
            self.refuse(refusal.reason, refusal.hint)
        return result

    def _lift(self, tensor: torch.Tensor) -> TracedValue:
        try:
            return super()._lift(tensor)
        except Refusal:
            self.watcher.blamed.update(filter(shares_memory, self.watcher.codes))
            raise

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if self._has_scalars:
            return func(*plain(args), **plain(kwargs))
        return func(*args, **kwargs)

    def _append(
        self,
        spelling: CallSpelling,
        node_args: tuple[Any, ...],
        node_kwargs: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        if result is NotImplemented:
            return
        if spelling.attribute is not None:
            node_args = (node_args[0], spelling.attribute, *node_args[2:])
            if spelling.target is setattr:
                node_args = (node_args[0], spelling.attribute, self._argument(args[1], setattr))
        elif spelling.swap:
            node_args = (node_args[1], node_args[0])
        node = self._create(spelling.op, spelling.target, node_args, node_kwargs, spelling.name)
        if spelling.may_be_random:
            self._note_random()
        self._writes.note_unseen(spelling, (args, kwargs))
        is_tainted = has_data_dependent_shape(spelling, node, args, self._tainted)
        self._register(node, result, is_tainted)

    # What ordinary calls don't show ------------------------------------------------------------

    def _check_call(self, spelling: CallSpelling, types: Any) -> None:
        if spelling.refusal is not None:
            raise Refusal(spelling.refusal)
        for kind in types:
            if kind not in TENSOR_CLASSES:
                raise Refusal(f"the program uses a {kind.__qualname__}, a tensor subclass")
        if self._entry_level is not None:
            raise Refusal("a function transform is active around the program")
        if is_forward_mode():
            raise Refusal("the program uses forward-mode differentiation")
        if torch.get_default_dtype() is not self._dtype:
            raise Refusal(
                "the program changes torch's default dtype",
                "give dtype= to what makes tensors, or change the default before the call",
            )
        if count_dispatch_modes() != self._dispatch_modes:
            raise Refusal("the program enters a TorchDispatchMode")
        if has_saved_tensors_hooks():
            raise Refusal("the program installs hooks for the tensors that autograd saves")
        if self._location.custom_function is not None:
            self._check_custom_function(self._location.custom_function)

    def _check_custom_function(self, frame: FrameType) -> None:
        if frame.f_code is APPLY:
            name = frame.f_locals["cls"].__qualname__
            has_grad = any(map(needs_grad, frame.f_locals["args"]))
        else:
            name, has_grad = frame.f_code.co_qualname, True
        if has_grad and self._grad and not torch.is_inference_mode_enabled():
            raise Refusal(
                f"{name} has a backward of its own, which the calls in its forward don't show",
                "capture under torch.no_grad()",
            )

    def _follow_modes(self) -> None:
        state = read_ambient()
        if self._location.custom_function is None and not state.inference:
            self._grad = state.grad
        if state != self.regions.state:
            self.regions.follow(state)

    def _check_end(self) -> None:
        early = self._texts_written_early
        if early is not None and (len(self.reads) > early or self.may_catch):
            raise Refusal(
                "the program prints before an opaque call, and may have to be run again behind it",
                "print inside of the opaque function",
            )
        if self._progress.raised is not None:
            error = self._progress.raised
            raise Refusal(f"the program caught a {type(error).__name__} that a torch call raised")
        self._check_python_random()
        self._check_exported()


def active_recorder() -> Recorder | None:
    """Return the recorder that sees this thread's torch calls first, if there is one."""
    if count_function_modes() == 0:
        return None
    modes = function_modes()
    return next((mode for mode in reversed(modes) if isinstance(mode, Recorder)), None)


def _keeps_size(args: tuple[Any, ...], kwargs: Any) -> bool:
    """Tell whether a tensor is resized to the size that it has."""
    if kwargs or len(args) != 2 or type(args[0]) is not torch.Tensor or args[0].requires_grad:
        return False
    is_plain = isinstance(args[1], (tuple, list)) and all(type(size) is int for size in args[1])
    return is_plain and args[0].shape == tuple(args[1])
