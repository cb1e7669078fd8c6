"""Record what `torch.func` makes of a function: the calls of ATen that are left below it.

Inside of a transform a program works on wrapped tensors, which no graph can hold. Below all of its
transforms each call comes down to operators of ATen on plain tensors; those are recorded.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from typing import Any

import torch
from torch import fx

from fxkit.analysis.operator_mode import OperatorMode
from fxkit.torch_adapters import pytree
from fxkit.torch_adapters.autograd_state import has_saved_tensors_hooks
from fxkit.torch_adapters.modes import count_dispatch_modes
from fxkit.tracing.environment.call_watch import Watcher
from fxkit.tracing.recorder.calls import CallSpelling, DataRead, spelling_of
from fxkit.tracing.recorder.recorded import TracedValue
from fxkit.tracing.recorder.tape import TENSOR_CLASSES, Tape
from fxkit.tracing.values.mode_scopes import read_ambient
from fxkit.tracing.values.refusals import Failure, Refusal

_MAKES_TENSORS = (torch.tensor, torch.as_tensor)
_LIFTS = frozenset({torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default})


class Transformed(Tape):
    """A tape that also takes in what is called below transforms."""

    failure: Failure | None
    watcher: Watcher
    _below: BelowTransforms
    _entry_level: int | None
    _dispatch_modes: int
    _is_suspended: bool
    _depth: int

    @abstractmethod
    def refuse(self, reason: str, hint: str | None = None) -> None:
        """Stop recording; the first reason counts."""

    @abstractmethod
    def _follow_modes(self) -> None: ...

    @property
    def sees_transforms(self) -> bool:
        """Whether what is called below a transform is recorded."""
        return self.failure is None and not self._is_suspended

    def pause(self) -> None:
        """Look away from what is called, until `resume`."""
        self.watcher.pause()

    def resume(self) -> None:
        """Look again, unless a torch call is being recorded."""
        if not self._depth:
            self.watcher.resume()

    def check_transformed(self, spelling: CallSpelling) -> None:
        """Check a call inside of a transform.

        Raises:
            Refusal: When what it does can't be seen below the transform.
        """
        if spelling.refusal is not None:
            raise Refusal(spelling.refusal)
        if self._entry_level is not None:
            raise Refusal("a function transform is active around the program")
        if read_ambient().autocast is not None:
            raise Refusal("the program transforms a function under autocast")
        if has_saved_tensors_hooks():
            raise Refusal("the program installs hooks for the tensors that autograd saves")
        if count_dispatch_modes() != self._dispatch_modes + self._below.is_on:
            raise Refusal("the program enters a TorchDispatchMode")

    def append_lowered(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """Append a call on plain tensors, before it is run."""
        self._follow_modes()
        node_args = tuple([self._argument(arg, target) for arg in args])
        node_kwargs = {name: self._argument(arg, target) for name, arg in kwargs.items()}
        self._writes.note_unseen(spelling_of(target), (args, kwargs))
        return self._create("call_function", target, node_args, node_kwargs, None)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor has been recorded, or lies where the program finds it."""
        return id(tensor) in self._values or id(tensor) in self._environment.places

    def note_raised(self, error: BaseException) -> None:
        """Note that a torch call failed."""
        self._progress.raised = error

    def note_value(self, value: TracedValue) -> None:
        """Note a tensor that a node gives."""
        self._values[id(value.tensor)] = value

    def note_lowered(self, node: fx.Node, result: Any) -> None:
        """Note what a node gives: its type, whether it is random, or the guard on it."""
        self._note_random()
        if isinstance(result, torch.Tensor) or _holds_tensors(result):
            self._set_type(node, result)
        else:
            self._register(node, result, False)


class BelowTransforms(OperatorMode):
    """Sees the operators that transforms of `torch.func` call, and has them recorded.

    It is entered at the first torch call inside of a transform, and left at the first one that is
    outside of all of them: what a transform does when it ends is seen as well.

    Args:
        recorder: Keeps the graph.
    """

    def __init__(self, recorder: Transformed) -> None:
        super().__init__()
        self._recorder = recorder
        self._call: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None
        self._fresh: list[tuple[weakref.ref[torch.Tensor], TracedValue]] = []
        self._count = 0
        self.is_on = False

    def run(self, func: Any, spelling: CallSpelling, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run a torch call that a program makes inside of a transform."""
        recorder = self._recorder
        try:
            recorder.check_transformed(spelling)
        except Refusal as refusal:
            recorder.refuse(refusal.reason, refusal.hint)
            return func(*args, **kwargs)
        if not self.is_on:
            self.is_on = True
            self.__enter__()
        around, self._call, count = self._call, (func, args, kwargs), self._count
        try:
            result = func(*args, **kwargs)
        except BaseException as error:
            recorder.note_raised(error)
            raise
        finally:
            self._call = around
        if self._count == count and spelling.reading is DataRead.VALUE and _is_plain(result):
            recorder.refuse(f"the program reads {spelling.name} of a tensor that is transformed")
        return result

    def leave(self) -> None:
        """Stop looking: the program is outside of all transforms."""
        if self.is_on:
            self.is_on = False
            self.__exit__(None, None, None)
            self.settle()

    def settle(self) -> None:
        """Note the tensors that are there by now; autograd may have put others in their places."""
        fresh, self._fresh = self._fresh, []
        for reference, value in fresh:
            tensor = reference()
            if tensor is not None:
                value.tensor = tensor
                self._recorder.note_value(value)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        recorder = self._recorder
        if not recorder.sees_transforms:
            return func(*args, **kwargs)
        recorder.pause()
        try:
            with torch.DisableTorchFunction():
                self.settle()
                return self._record(func, args, kwargs)
        finally:
            recorder.resume()

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = self._recorder
        self._count += 1
        try:
            if torch.Tag.dynamic_output_shape in func.tags:
                raise Refusal("a tensor is transformed whose shape depends on its numbers")
            node = self._constant(func, args) or recorder.append_lowered(func, args, kwargs)
        except Refusal as refusal:
            recorder.refuse(refusal.reason, refusal.hint)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        try:
            self._register(node, result)
        except Refusal as refusal:
            recorder.refuse(refusal.reason, refusal.hint)
        return result

    def _constant(self, func: Any, args: tuple[Any, ...]) -> fx.Node | None:
        """Return the node of a tensor that the program makes of Python numbers."""
        if func not in _LIFTS or self._call is None or self._recorder.knows(args[0]):
            return None
        target, given, named = self._call
        leaves = pytree.tree_leaves((given, named))
        if target not in _MAKES_TENSORS or any(isinstance(v, torch.Tensor) for v in leaves):
            return None
        return self._recorder.append_lowered(target, given, named)

    def _register(self, node: fx.Node, result: Any) -> None:
        self._recorder.note_lowered(node, result)
        results = [((), result)] if isinstance(result, torch.Tensor) else _items(result)
        for path, tensor in results:
            if type(tensor) not in TENSOR_CLASSES:
                raise Refusal(f"a transform makes a {type(tensor).__qualname__}")
            # A reference to the tensor itself would let autograd put a copy in its place.
            empty = TracedValue(torch.empty(0), node, path)
            self._fresh.append((weakref.ref(tensor), empty))


def _items(results: Any) -> list[tuple[tuple[Any, ...], torch.Tensor]]:
    if not isinstance(results, (tuple, list)):
        return []
    return [((i,), t) for i, t in enumerate(results) if isinstance(t, torch.Tensor)]


def _holds_tensors(result: Any) -> bool:
    return isinstance(result, (tuple, list)) and any(isinstance(t, torch.Tensor) for t in result)


def _is_plain(result: Any) -> bool:
    """Tell whether a call gave Python values and no tensors."""
    leaves = [leaf for leaf in pytree.tree_leaves(result) if leaf is not None]
    return bool(leaves) and not any(isinstance(leaf, torch.Tensor) for leaf in leaves)
