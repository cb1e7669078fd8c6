"""Write down, as an FX graph, the torch calls that a running program makes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.autograd.forward_ad as forward_ad
from torch import fx
from torch._C import _autograd
from torch._C._functorch import maybe_current_level
from torch.overrides import TorchFunctionMode

from fxkit.ir.provenance import source_of
from fxkit.ir.types import KEY as TYPE_KEY
from fxkit.ir.types import MEMORY_KEY, TensorType, type_of_value
from fxkit.tracing.calls import Reading, Spelling, spelling_of
from fxkit.tracing.data_dependence import META_KEY, has_data_dependent_shape
from fxkit.tracing.effects import write_text
from fxkit.tracing.frames import Frames, Location
from fxkit.tracing.guards import check_value, storage_key
from fxkit.tracing.outside import Origins, attribute_name
from fxkit.tracing.plain_values import ATOMS, READABLE, plain_argument, plain_result
from fxkit.tracing.recorded import (
    Exported,
    Outside,
    Progress,
    Read,
    Value,
    application_of,
    holds_tensor,
    python_random_states,
    same_bytes,
)
from fxkit.tracing.refusals import Failure, Refusal
from fxkit.tracing.regions import Regions, read_ambient
from fxkit.tracing.rollback import Undo, random_states, same_random_states
from fxkit.tracing.watching import SEED, Watcher
from fxkit.tracing.writes import Writes, version_of

TENSOR_CLASSES = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


class Recorder(TorchFunctionMode):
    """Runs each torch call as it comes and appends it to a graph.

    A program that can't be held in a graph is not disturbed: `failure` says why, and the rest of it
    runs unrecorded, so that its result is still that of one eager run.

    Args:
        leaves: The tensor arguments, with the names that their placeholders ask for.
        surroundings: Where tensors and modules from outside of the arguments lie.
        boundary: The frame in which the user's program is called.
    """

    def __init__(
        self,
        leaves: Iterable[tuple[str, torch.Tensor]],
        surroundings: Origins,
        boundary: FrameType,
    ) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.failure: Failure | None = None
        self.outside: list[Outside] = []
        self.reads: list[Read] = []
        self.placeholders: list[fx.Node] = []
        self._memories: dict[int, int] = {}
        self._surroundings = surroundings
        self._frames = Frames(boundary, surroundings.modules)
        self._values: dict[int, Value] = {}
        self._tainted: set[fx.Node] = set()
        self._taken: set[str] = set()
        self._writes = Writes()
        self._exported: list[Exported] = []
        self._dtype = torch.get_default_dtype()
        self._dispatch_modes = torch._C._len_torch_dispatch_stack()
        self._location = Location(None, {}, None)
        self.regions = Regions(self._emit, read_ambient())
        self.watcher: Watcher | None = None
        self.has_opaque_calls = False
        self._is_suspended = False
        self._texts_written_early: int | None = None
        self.has_texts = False
        self.texts: list[tuple[Location, str, str]] = []
        self._grad = self.regions.state.grad
        self._progress = Progress(random_states(), python_random_states())
        for index, (name, tensor) in enumerate(leaves):
            self._place_leaf(index, name, tensor)

    # Entry points ---------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.watcher is None:
            return self._handle(func, types, args, kwargs or {})
        self.watcher.pause()
        try:
            return self._handle(func, types, args, kwargs or {})
        finally:
            self.watcher.resume()

    def _handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        # torch.cond and torch.compile in the program let Dynamo trace this function.
        is_off = self.failure is not None or self._is_suspended
        if is_off or torch.compiler.is_dynamo_compiling():
            return func(*args, **kwargs)
        spelling = spelling_of(func)
        reading = spelling.reading
        if reading is Reading.METADATA and not (self._tainted and self._reads_tainted(args)):
            return func(*args, **kwargs)
        if reading is Reading.STATE:
            result = func(*args, **kwargs)
            self._grad = torch.is_grad_enabled()
            return result
        return self._record(func, spelling, types, args, kwargs)

    def refuse(self, reason: str, hint: str | None = None) -> None:
        """Stop recording; the first reason counts."""
        if self.failure is None:
            trace = self._location.trace
            if self.watcher is not None and self._frames.is_active:
                trace = self._frames.locate(sys._getframe(1)).trace or trace
            self.failure = Failure(reason, hint, trace)
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

    def write_texts(self) -> None:
        """Append the nodes that write the texts again, behind all guards of the graph."""
        for location, stream, text in self.texts:
            self._location = location
            self._emit(write_text, (stream, text)).meta[TYPE_KEY] = None
        self.texts = []

    def make_input(self, outside: Outside) -> fx.Node:
        """Turn a tensor of the graph module into a placeholder, and return it."""
        node, graph = outside.node, self.graph
        first = next(other for other in graph.nodes if other.op != "placeholder")
        with graph.inserting_before(first):
            placeholder = graph.placeholder(outside.target.replace(".", "_"))
        placeholder.meta.update(node.meta)
        key = storage_key(outside.tensor)
        memory = self._memories.setdefault(key, len(self.placeholders))
        placeholder.meta[MEMORY_KEY] = memory
        self.placeholders.append(placeholder)
        node.replace_all_uses_with(placeholder)
        graph.erase_node(node)
        return placeholder

    def watch(self) -> None:
        """Begin to watch what the program calls beside torch, where that is wanted."""
        try:
            if self.watcher is not None:
                self.watcher.start()
        except Refusal as refusal:
            self.refuse(refusal.reason, refusal.hint)

    def release(self) -> None:
        """Drop the frames of the program; what they hold can be freed."""
        if self.watcher is not None:
            self.watcher.stop()
        self._frames.forget()

    def close(self) -> None:
        """Let go of the tensors of the program, which nothing else may keep alive."""
        self.release()
        self._location = Location(None, {}, None)
        self._values.clear()
        self._writes.clear()
        self._exported.clear()
        self._progress.raised = None
        self._progress.random = []

    def finish(self) -> Undo:
        """Check what can only be known at the end, and return what the whole program changed."""
        if self.failure is None:
            try:
                self._follow_modes()
                self._check_random()
                self._check_end()
            except Refusal as refusal:
                self.refuse(refusal.reason, refusal.hint)
        return self._writes.so_far(self._progress.drew)

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """Return the node whose value is `tensor`.

        Raises:
            Refusal: When the tensor is neither recorded nor known to be older than the capture.
        """
        value = self._values.get(id(tensor)) or self._lift(tensor)
        if value.path:
            for step in value.path:
                value.node = self._take(value.node, step)
            value.path = ()
            self._set_type(value.node, value.tensor)
        return value.node

    @property
    def writes_early(self) -> bool:
        """Whether texts are written before an opaque call, so that they can't be taken back."""
        return self._texts_written_early is not None

    @property
    def may_catch(self) -> bool:
        """Whether a function of the program that calls torch handles exceptions."""
        return self._frames.may_catch

    @property
    def before_guards(self) -> Undo:
        """What has changed before the last value guard."""
        return self._progress.before_guard

    # Calls that stay as they are ----------------------------------------------------------------

    def record_opaque(
        self,
        target: Any,
        run: Callable[[], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        function: Any,
    ) -> Any:
        """Run a function unrecorded, and append one node for it."""
        watcher = self.watcher
        if watcher is not None:
            watcher.pause()
        self._location = self._frames.locate(sys._getframe(1))
        self._is_suspended = True
        if watcher is not None:
            watcher.enter_opaque(function)
        try:
            result = run()
        finally:
            self._is_suspended = False
            if watcher is not None:
                watcher.leave_opaque()
        self.has_opaque_calls = True
        if self.texts:
            self._texts_written_early = len(self.reads)
            self.write_texts()
        self._append_opaque(target, args, kwargs, result)
        if watcher is not None:
            watcher.resume()
        return result

    def begin_special(self, frame: FrameType) -> tuple[FrameType, Callable[[Any], None]] | None:
        """See `Listener`: a custom autograd function, or the seeding of torch."""
        if self.failure is not None or self._is_suspended:
            return None
        values = frame.f_locals
        target, args = torch.manual_seed, (values.get("seed"),)
        if frame.f_code is not SEED:
            target, args = application_of(values["cls"]), tuple(values["args"])
            if values.get("kwargs") or not self._needs_gradient(args):
                return None
        self._location = self._frames.locate(frame.f_back)
        self._is_suspended = True

        def end(result: Any) -> None:
            self._is_suspended = False
            if result is None:
                self.refuse(f"{getattr(target, '__qualname__', target)} fails, or gives nothing")
                return
            self._append_opaque(target, args, {}, None if target is torch.manual_seed else result)

        return frame, end

    def _needs_gradient(self, args: tuple[Any, ...]) -> bool:
        if not self._grad or torch.is_inference_mode_enabled():
            return False
        return any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)

    def _append_opaque(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        self._is_suspended = True
        try:
            self._follow_modes()
            node_args = tuple([self._argument(arg, target) for arg in args])
            node_kwargs = {name: self._argument(arg, target) for name, arg in kwargs.items()}
            node = self._create("call_function", target, node_args, node_kwargs, None)
            self._note_random()
            self._register(node, result, isinstance(result, (torch.Tensor, tuple, list, dict)))
        except Refusal as refusal:
            self.refuse(refusal.reason, refusal.hint)
        finally:
            self._is_suspended = False

    # One call -------------------------------------------------------------------------------

    def _record(
        self, func: Any, spelling: Spelling, types: Any, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        try:
            self._location = self._frames.locate(sys._getframe(3))
            self._check_call(func, spelling, types)
            self._follow_modes()
            self._check_random()
            node_args = tuple([self._argument(arg, func) for arg in args])
            node_kwargs = {name: self._argument(arg, func) for name, arg in kwargs.items()}
        except Refusal as refusal:
            self.refuse(refusal.reason, refusal.hint)
            return func(*args, **kwargs)
        try:
            result = func(*args, **kwargs)
        except BaseException as error:
            self._progress.raised = error
            raise
        try:
            self._append(spelling, node_args, node_kwargs, args, kwargs, result)
        except Refusal as refusal:
            self.refuse(refusal.reason, refusal.hint)
        return result

    def _append(
        self,
        spelling: Spelling,
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
        if spelling.may_write_unseen:
            self._writes.note_unseen(spelling.target, (args, kwargs))
        is_tainted = has_data_dependent_shape(spelling, node, args, self._tainted)
        self._register(node, result, is_tainted)

    def _register(self, node: fx.Node, result: Any, is_tainted: bool) -> None:
        if isinstance(result, torch.Tensor):
            self._register_tensor(result, node, ())
            is_tainted = is_tainted or result.layout is not torch.strided
        elif isinstance(result, (tuple, list, dict)) and holds_tensor(result):
            self._register_nested(node, result, ())
            if is_tainted:
                self._guard_length(node, result)
        elif result is not None:
            self._read(node, result)
            return
        self._set_type(node, result)
        if is_tainted:
            self._tainted.add(node)
            node.meta[META_KEY] = True

    def _register_tensor(self, tensor: torch.Tensor, node: fx.Node, path: tuple[Any, ...]) -> None:
        if type(tensor) not in TENSOR_CLASSES:
            raise Refusal(f"the program makes a {type(tensor).__qualname__}, a tensor subclass")
        self._values[id(tensor)] = Value(tensor, node, path)
        if node.target is getattr and node.args[1] == "data":
            self._writes.watch(tensor)

    def _register_nested(self, node: fx.Node, result: Any, path: tuple[Any, ...]) -> None:
        items = result.items() if isinstance(result, dict) else enumerate(result)
        for step, value in items:
            if isinstance(value, torch.Tensor):
                self._register_tensor(value, node, (*path, step))
            elif isinstance(value, (tuple, list, dict)):
                self._register_nested(node, value, (*path, step))
            elif type(value) not in READABLE:
                raise Refusal(f"a torch function returned a {type(value).__qualname__}")

    # Nodes ----------------------------------------------------------------------------------

    def _create(
        self, op: str, target: Any, args: tuple[Any, ...], kwargs: Any, name: str | None
    ) -> fx.Node:
        node = self.graph.create_node(op, target, (), {}, name)
        node.args, node.kwargs = args, kwargs  # a third of the cost of giving them to create_node
        location = self._location
        meta = node.meta
        if location.trace is not None:
            meta["stack_trace"] = location.trace
        meta["nn_module_stack"] = location.modules
        return node

    def _emit(self, target: Any, args: tuple[Any, ...]) -> fx.Node:
        return self._create("call_function", target, args, {}, None)

    def _take(self, node: fx.Node, step: Any) -> fx.Node:
        import operator

        taken = self._create("call_function", operator.getitem, (node, step), {}, None)
        if node in self._tainted:
            self._tainted.add(taken)
            taken.meta[META_KEY] = True
        return taken

    def _set_type(self, node: fx.Node, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            node.meta[TYPE_KEY] = TensorType.of(value)
        else:
            node.meta[TYPE_KEY] = type_of_value(value)

    def _place_leaf(self, index: int, name: str, tensor: torch.Tensor) -> None:
        node = self.graph.placeholder(name)
        self.placeholders.append(node)
        self._set_type(node, tensor)
        node.meta[MEMORY_KEY] = self._memories.setdefault(storage_key(tensor), index)
        self._values.setdefault(id(tensor), Value(tensor, node))
        self._writes.watch(tensor, leaf=index)

    def _lift(self, tensor: torch.Tensor) -> Value:
        found = self._surroundings.places.get(id(tensor))
        if found is None:
            raise Refusal(
                f"a tensor {TensorType.of(tensor)} of unknown origin is used",
                "pass it as an argument, or keep it as a parameter or buffer of a module",
            )
        if type(tensor) not in TENSOR_CLASSES:
            name = found[1][0].name
            raise Refusal(f"{name} is a {type(tensor).__qualname__}, a tensor subclass")
        places = tuple(found[1])
        target = attribute_name(places[0], self._taken)
        node = self._create("get_attr", target, (), {}, None)
        self._set_type(node, tensor)
        self.outside.append(Outside(target, tensor, places, TensorType.of(tensor), node))
        self._writes.watch(tensor, target=target)
        value = self._values[id(tensor)] = Value(tensor, node)
        return value

    def _argument(self, value: Any, func: Any) -> Any:
        kind = type(value)
        if kind in ATOMS:
            return value
        if isinstance(value, torch.Tensor):
            return self.node_of(value)
        if isinstance(value, (tuple, range)):
            return tuple([self._argument(item, func) for item in value])
        if kind is list:
            return [self._argument(item, func) for item in value]
        if kind is slice:
            return slice(*(self._argument(e, func) for e in (value.start, value.stop, value.step)))
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return {key: self._argument(item, func) for key, item in value.items()}
        return plain_argument(value, func)

    # Values that Python sees ----------------------------------------------------------------

    def _read(self, node: fx.Node, result: Any) -> None:
        if isinstance(result, np.ndarray):
            self._read_array(node, result)
            return
        if not node.all_input_nodes:
            self.graph.erase_node(node)
            return
        expected = plain_result(result, node)
        self._set_type(node, expected)
        self._guard(node, expected, node.name)

    def _read_array(self, node: fx.Node, array: np.ndarray) -> None:
        source = node.args[0]
        tensor = next(v.tensor for v in self._values.values() if v.node is source and not v.path)
        self._exported.append(Exported(array, array.copy(), tensor, version_of(tensor)))
        node.op, node.target, node.args, node.kwargs = "call_method", "tolist", (source,), {}
        self._read(node, tensor.tolist())

    def _guard(self, node: fx.Node, expected: Any, what: str) -> None:
        self._progress.before_guard = self._writes.so_far(self._progress.drew)
        line = source_of(node)
        args = (node, expected, what, str(line) if line else "")
        check = self._create("call_function", check_value, args, {}, None)
        check.meta[TYPE_KEY] = None
        self.reads.append(Read(check, what, expected))

    def _guard_length(self, node: fx.Node, result: Any) -> None:
        count = self._create("call_function", len, (node,), {}, None)
        count.meta[TYPE_KEY] = len(result)
        self._guard(count, len(result), f"the number of results of {node.name}")

    def _reads_tainted(self, args: tuple[Any, ...]) -> bool:
        for arg in args:
            if isinstance(arg, torch.Tensor):
                value = self._values.get(id(arg))
                if value is not None and value.node in self._tainted:
                    return True
        return False

    # What ordinary calls don't show ------------------------------------------------------------

    def _check_call(self, func: Any, spelling: Spelling, types: Any) -> None:
        if spelling.refusal is not None:
            raise Refusal(spelling.refusal)
        for kind in types:
            if kind not in TENSOR_CLASSES:
                raise Refusal(f"the program uses a {kind.__qualname__}, a tensor subclass")
        if maybe_current_level() is not None:
            raise Refusal(
                "the program uses torch.func or torch.vmap",
                "capture the function that is transformed, and transform what was captured",
            )
        if forward_ad._current_level >= 0:
            raise Refusal("the program uses forward-mode differentiation")
        if torch.get_default_dtype() is not self._dtype:
            raise Refusal("the program changes torch's default dtype")
        if torch._C._len_torch_dispatch_stack() != self._dispatch_modes:
            raise Refusal("the program enters a TorchDispatchMode")
        if _autograd._top_saved_tensors_default_hooks(True) is not None:
            raise Refusal("the program installs hooks for the tensors that autograd saves")
        if self._location.custom_function is not None:
            self._check_custom_function(self._location.custom_function)

    def _check_custom_function(self, frame: FrameType) -> None:
        args = frame.f_locals.get("args", ())
        has_grad = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
        if has_grad and self._grad and not torch.is_inference_mode_enabled():
            name = getattr(frame.f_locals.get("cls"), "__qualname__", "torch.autograd.Function")
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

    def _check_random(self) -> None:
        if not same_random_states(random_states(), self._progress.random):
            raise Refusal(
                "torch's random state changes between two torch calls",
                "seed the generators before calling the program",
            )

    def _note_random(self) -> None:
        states = random_states()
        if not same_random_states(states, self._progress.random):
            self._progress.random = states
            self._progress.drew = True

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
        if python_random_states() != self._progress.python:
            raise Refusal(
                "the program draws random numbers from Python or NumPy",
                "draw them with torch, or pass them as arguments",
            )
        for exported in self._exported:
            same = np.array_equal(exported.array, exported.copy, equal_nan=False)
            is_nan_only = not same and same_bytes(exported.array, exported.copy)
            if not (same or is_nan_only) or version_of(exported.tensor) != exported.version:
                raise Refusal("an array that shares memory with a tensor is written to")


def active_recorder() -> Recorder | None:
    """Return the recorder that sees this thread's torch calls first, if there is one."""
    if torch._C._len_torch_function_stack() == 0:
        return None
    modes = torch.overrides._get_current_function_mode_stack()
    return next((mode for mode in reversed(modes) if isinstance(mode, Recorder)), None)
