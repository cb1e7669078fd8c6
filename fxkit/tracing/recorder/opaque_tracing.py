"""Opaque calls: one node each, for functions that run unrecorded."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch import fx

from fxkit.torch_adapters import pytree
from fxkit.tracing.bytecode.value_flow import UNKNOWN, Flow
from fxkit.tracing.environment.call_watch import LOAD, SEED
from fxkit.tracing.environment.environment_walk import EnvironmentWalk
from fxkit.tracing.environment.foreign_calls import name_of
from fxkit.tracing.environment.random_generators import draws_unseen
from fxkit.tracing.recorder.frames import Frames, source_text
from fxkit.tracing.recorder.recorded import (
    OpaqueCall,
    application_of,
    declare_result,
    holds_tensor,
    may_be_object,
    memory_of,
    needs_grad,
    own_application_of,
    python_random_states,
)
from fxkit.tracing.recorder.scalar_tracing import ScalarTracing
from fxkit.tracing.recorder.transforms import Transformed
from fxkit.tracing.values.refusals import Refusal


class OpaqueTracing(ScalarTracing, Transformed):
    """A tape that takes calls of functions in as they are.

    Those are what is marked with `fxkit.opaque`, what can't be looked into, custom autograd
    functions, and the seeding of torch.

    Attributes:
        opaque_calls: The calls, in order.
        opaque_objects: What they returned and the program keeps, with the nodes, by `id`.
    """

    _frames: Frames
    _grad: bool

    def __init__(
        self, leaves: Iterable[tuple[str, torch.Tensor]], environment: EnvironmentWalk
    ) -> None:
        super().__init__(leaves, environment)
        self.opaque_calls: list[OpaqueCall] = []
        self.opaque_objects: dict[int, tuple[Any, fx.Node]] = {}
        self._is_suspended = False
        self._texts_written_early: int | None = None

    @property
    @abstractmethod
    def hands_on_results(self) -> bool:
        """Whether what opaque calls return may be followed; not where other things are."""

    @property
    @abstractmethod
    def kept(self) -> dict[int, Any]:
        """The objects that are older than the call and that the program refers to, by `id`."""

    @property
    def writes_early(self) -> bool:
        """Whether texts are written before an opaque call."""
        return self._texts_written_early is not None

    def record_opaque(
        self,
        target: Any,
        run: Callable[[], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        function: Any,
        *,
        flow: Flow = UNKNOWN,
        reason: str = "it is marked with fxkit.opaque",
    ) -> Any:
        """Run a function unrecorded, and append one node for it.

        Args:
            target: What the node calls.
            run: Makes the call.
            args: The arguments of the node.
            kwargs: Those given by keyword.
            function: What is called, in which code of the program may be reached.
            flow: What the program does with the result.
            reason: Why the call is opaque.
        """
        self.watcher.pause()
        self._location = self._frames.locate(sys._getframe(1))
        self._is_suspended = True
        self.watcher.enter_opaque(function)
        self._try(self._check_python_random)
        try:
            result = run()
        except BaseException as error:
            self.refuse(f"an opaque call raises {type(error).__name__}")
            raise
        finally:
            self._is_suspended = False
            self.watcher.leave_opaque()
        if self.failure is not None:
            return result
        self.opaque_calls.append(
            OpaqueCall(name_of(function), source_text(self._location.trace), reason)
        )
        self._progress.python = python_random_states()
        if self.texts:
            self._texts_written_early = len(self.reads)
            self.write_texts()
        result = self._append_opaque(target, args, kwargs, result, flow)
        self.watcher.resume()
        return result

    def begin_special(self, frame: FrameType) -> tuple[FrameType, Callable[[Any], None]] | None:
        """See `Listener`: a custom autograd function, or the seeding of torch."""
        if self.failure is not None or self._is_suspended:
            return None
        if frame.f_code is LOAD:  # what forward-mode differentiation imports at its first use
            if not str(frame.f_locals.get("name")).startswith("torch._decomp"):
                return None
            self._is_suspended = True
            return frame, self._end_of_load
        values = frame.f_locals
        target, args = torch.manual_seed, (values.get("seed"),)
        if frame.f_code is not SEED:
            target, args = application_of(values["cls"]), tuple(values["args"])
            if values.get("kwargs") or not self.unseen(lambda: self._needs_gradient(args)):
                return None
        self._location = self._frames.locate(frame.f_back)
        self._is_suspended = True

        def end(result: Any) -> None:
            self._is_suspended = False
            nonlocal target
            if result is None:
                self.refuse(f"{getattr(target, '__qualname__', target)} fails, or gives nothing")
                return
            if target is torch.manual_seed:
                result = None
            elif self.unseen(lambda: self._would_be_noticed(result, args)):
                target = self.unseen(lambda: _with_known_result(values["cls"], result))
            self._append_opaque(target, args, {}, result)

        return frame, end

    def _would_be_noticed(self, result: Any, args: tuple[Any, ...]) -> bool:
        """Tell whether one more run of a custom function, to know types, would be noticed."""
        if not (self.watcher.has_effects and self.hands_on_results):
            return False
        memory = [
            {memory_of(it) for it in pytree.tree_leaves(some) if isinstance(it, torch.Tensor)}
            for some in (result, args)
        ]
        return memory[0].isdisjoint(memory[1])

    def _end_of_load(self, _: Any) -> None:
        self._is_suspended = False

    def _needs_gradient(self, args: tuple[Any, ...]) -> bool:
        return self._grad and not torch.is_inference_mode_enabled() and any(map(needs_grad, args))

    def _append_opaque(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        flow: Flow = UNKNOWN,
    ) -> Any:
        self._is_suspended = True
        try:
            self._follow_modes()
            known = self.opaque_objects
            node_args = tuple(
                [known[id(a)][1] if id(a) in known else self._argument(a, target) for a in args]
            )
            node_kwargs = {name: self._argument(arg, target) for name, arg in kwargs.items()}
            node = self._create("call_function", target, node_args, node_kwargs, None)
            self._note_random()
            if flow.is_known and self.hands_on_results:
                if type(result) in (int, float):
                    self._has_scalars = True
                    return self.stand_in(result, node)
                if may_be_object(result, flow, self.kept):
                    self.opaque_objects[id(result)] = (result, node)
                    return result
            if result is None or holds_tensor(result):
                self._register(node, result, True)
            else:
                self._expect(node, result)
        except Refusal as refusal:
            self.refuse(refusal.reason, refusal.hint)
        finally:
            self._is_suspended = False
        return result

    def unseen(self, look: Callable[[], Any]) -> Any:
        """Look at tensors without recording it."""
        before, self._is_suspended = self._is_suspended, True
        try:
            return look()
        finally:
            self._is_suspended = before

    def _try(self, *checks: Callable[[], None]) -> None:
        try:
            for check in checks:
                check()
        except Refusal as refusal:
            self.refuse(refusal.reason, refusal.hint)

    def _check_python_random(self) -> None:
        if python_random_states() != self._progress.python:
            self.watcher.blamed.update(filter(draws_unseen, self.watcher.codes))
            raise Refusal(
                "the program draws random numbers from Python or NumPy",
                "draw them with torch, or pass them as arguments",
            )


def _with_known_result(kind: Any, result: Any) -> Callable[..., Any]:
    """Return an application of a custom function whose types are those of a result."""
    target = own_application_of(kind)
    declare_result(target, result)
    return target
