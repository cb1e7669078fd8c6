"""The tape: the graph of a running program, and where each value of the program lies."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import fx

from fxkit.ir.code_tracer import CodeTracer
from fxkit.ir.names import append_placeholder, keep_module_name
from fxkit.ir.provenance import source_of
from fxkit.ir.types import KEY as TYPE_KEY
from fxkit.ir.types import MEMORY_KEY, TensorType, type_of_value
from fxkit.tracing.environment.environment_walk import EnvironmentWalk
from fxkit.tracing.guarding.aliasing_guards import storage_key
from fxkit.tracing.guarding.guards import check_value
from fxkit.tracing.guarding.plain_values import ATOMS, READABLE, plain_argument, plain_result
from fxkit.tracing.recorder.data_dependence import META_KEY
from fxkit.tracing.recorder.frames import Location
from fxkit.tracing.recorder.recorded import (
    ExportedCall,
    Outside,
    Progress,
    Read,
    TracedValue,
    holds_tensor,
    python_random_states,
    same_bytes,
)
from fxkit.tracing.recorder.state_restore import Mutations, random_states, same_random_states
from fxkit.tracing.recorder.writes import Writes, version_of
from fxkit.tracing.values.effects import write_text
from fxkit.tracing.values.refusals import Refusal
from fxkit.tracing.values.sources import attribute_name
from fxkit.tracing.values.symbolic_scalars import SYMBOLIC, SymbolicScalar

TENSOR_CLASSES = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


def misfit(tensor: torch.Tensor) -> str | None:
    """Return what a tensor is, given that it is of a kind that no graph holds."""
    if type(tensor) not in TENSOR_CLASSES:
        return f"a {type(tensor).__qualname__}, a tensor subclass"
    return "a nested tensor" if tensor.is_nested else None


class Tape:
    """What has been recorded so far; a recorder decides what comes next.

    Args:
        leaves: The tensor arguments, with the names that their placeholders ask for.
        environment: Where tensors and modules from outside of the arguments lie.

    Attributes:
        graph: The graph.
        outside: The tensors that it takes from elsewhere than its arguments.
        reads: The Python values that the program read out of tensors.
        placeholders: The nodes of the arguments, in order.
        texts: What the program printed and no node writes yet: place, stream, text.
        modules: The graphs that nodes refer to, such as the sides of a `torch.cond`.
    """

    def __init__(
        self, leaves: Iterable[tuple[str, torch.Tensor]], environment: EnvironmentWalk
    ) -> None:
        super().__init__()
        self.graph = keep_module_name(fx.Graph(tracer_cls=CodeTracer))
        self.outside: list[Outside] = []
        self.reads: list[Read] = []
        self.placeholders: list[fx.Node] = []
        self.texts: list[tuple[Location, str, str]] = []
        self.modules: dict[str, fx.GraphModule] = {}
        self._memories: dict[int, int] = {}
        self._has_scalars = False
        self._environment = environment
        self._values: dict[int, TracedValue] = {}
        self._tainted: set[fx.Node] = set()
        self._taken: set[str] = set()
        self._writes = Writes()
        self._exported: list[ExportedCall] = []
        self._location = Location(None, {}, None)
        self._progress = Progress(random_states(), python_random_states())
        for index, (name, tensor) in enumerate(leaves):
            self._place_leaf(index, name, tensor)

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """Return the node whose value is `tensor`.

        Raises:
            Refusal: When the tensor is neither recorded nor known to be older than the capture.
        """
        if type(tensor) in SYMBOLIC:
            return tensor.fx_node  # type: ignore[attr-defined]
        value = self._values.get(id(tensor)) or self._lift(tensor)
        if value.path:
            for step in value.path:
                value.node = self._take(value.node, step)
            value.path = ()
            self._set_type(value.node, value.tensor)
        return value.node

    def scalar_input(self, name: str) -> fx.Node:
        """Append a placeholder for a number, and return it."""
        self._has_scalars = True
        name = re.sub(r"\W+", "_", name).strip("_")
        name = name if name.isidentifier() else f"number_{name}"
        return append_placeholder(self.graph, name)

    def make_input(self, outside: Outside) -> fx.Node:
        """Turn a tensor of the graph module into a placeholder, and return it."""
        node, graph = outside.node, self.graph
        first = next(other for other in graph.nodes if other.op != "placeholder")
        with graph.inserting_before(first):
            placeholder = append_placeholder(graph, outside.target.replace(".", "_"))
        placeholder.meta.update(node.meta)
        key = storage_key(outside.tensor)
        memory = self._memories.setdefault(key, len(self.placeholders))
        placeholder.meta[MEMORY_KEY] = memory
        self.placeholders.append(placeholder)
        node.replace_all_uses_with(placeholder)
        graph.erase_node(node)
        return placeholder

    def write_texts(self) -> None:
        """Append the nodes that write the texts again, behind all guards of the graph."""
        for location, stream, text in self.texts:
            self._location = location
            self._emit(write_text, (stream, text)).meta[TYPE_KEY] = None
        self.texts = []

    def append_graph(
        self, module: fx.GraphModule, inputs: tuple[Any, ...], values: dict[fx.Node, Any]
    ) -> None:
        """Append the nodes of another graph.

        Args:
            module: The graph.
            inputs: What it was given: tensors of the program, and plain values.
            values: What each of its nodes gave.
        """
        given = iter([self._argument(it, module) for it in inputs])
        env: dict[fx.Node, Any] = {}
        for node in module.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(given)
            elif node.op == "get_attr":
                env[node] = self._refer(node, values[node])
            elif node.op != "output":
                args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
                env[node] = self._create(node.op, node.target, args, kwargs, node.name)
                self._register(env[node], values[node], False)

    def _refer(self, node: fx.Node, value: Any) -> fx.Node:
        if not isinstance(value, fx.GraphModule):
            raise Refusal(f"it makes a {type(value).__qualname__} when it is traced")
        name = str(node.target)
        while name in self.modules:
            name = f"{name}_{len(self.modules)}"
        self.modules[name] = value
        return self._create("get_attr", name, (), {}, None)

    @property
    def before_guards(self) -> Mutations:
        """What has changed before the last value guard."""
        return self._progress.before_guard

    # Results --------------------------------------------------------------------------------------

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
        why = misfit(tensor)
        if why is not None:
            raise Refusal(f"the program makes {why}")
        self._values[id(tensor)] = TracedValue(tensor, node, path)
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
        if args:  # a third of the cost of giving them to create_node
            node.args = args
        if kwargs:
            node.kwargs = kwargs
        location = self._location
        meta = node.meta
        if location.trace is not None:
            meta["stack_trace"] = location.trace
        meta["nn_module_stack"] = location.modules
        return node

    def _emit(self, target: Any, args: tuple[Any, ...]) -> fx.Node:
        return self._create("call_function", target, args, {}, None)

    def _take(self, node: fx.Node, step: Any) -> fx.Node:
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
        node = append_placeholder(self.graph, name)
        self.placeholders.append(node)
        self._set_type(node, tensor)
        node.meta[MEMORY_KEY] = self._memories.setdefault(storage_key(tensor), index)
        self._values.setdefault(id(tensor), TracedValue(tensor, node))
        self._writes.watch(tensor, leaf=index)

    def _lift(self, tensor: torch.Tensor) -> TracedValue:
        found = self._environment.places.get(id(tensor))
        why = misfit(tensor)
        if why is not None:
            raise Refusal(f"{found[1][0].name if found else 'a value'} is {why}")
        if found is None:
            raise Refusal(
                f"a tensor {TensorType.of(tensor)} of unknown origin is used",
                "pass it as an argument, or keep it as a parameter or buffer of a module",
            )
        places = tuple(found[1])
        target = attribute_name(places[0], self._taken)
        node = self._create("get_attr", target, (), {}, None)
        self._set_type(node, tensor)
        self.outside.append(Outside(target, tensor, places, TensorType.of(tensor), node))
        self._writes.watch(tensor, target=target)
        value = self._values[id(tensor)] = TracedValue(tensor, node)
        return value

    def _argument(self, value: Any, func: Any) -> Any:
        kind = type(value)
        if kind in ATOMS:
            return value
        if isinstance(value, torch.Tensor):
            return self.node_of(value)
        if isinstance(value, (tuple, range)):
            return tuple([self._argument(item, func) for item in value])
        if isinstance(value, list):
            return [self._argument(item, func) for item in value]
        if kind is slice:
            return slice(*(self._argument(e, func) for e in (value.start, value.stop, value.step)))
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return {key: self._argument(item, func) for key, item in value.items()}
        if isinstance(value, SymbolicScalar):
            return value.fx_node if value.tracer is self else value.value
        return plain_argument(value, func)

    # Values that Python sees ----------------------------------------------------------------

    def _read(self, node: fx.Node, result: Any) -> None:
        if isinstance(result, np.ndarray):
            self._read_array(node, result)
            return
        if not node.all_input_nodes:
            self.graph.erase_node(node)
            return
        self._expect(node, result)

    def _expect(self, node: fx.Node, result: Any) -> None:
        """Guard a plain value that a node gives to the program."""
        expected = plain_result(result, node)
        self._set_type(node, expected)
        self._guard(node, expected, node.name)

    def _read_array(self, node: fx.Node, array: np.ndarray) -> None:
        source = node.args[0]
        tensor = next(v.tensor for v in self._values.values() if v.node is source and not v.path)
        self._exported.append(ExportedCall(array, array.copy(), tensor, version_of(tensor)))
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

    # What torch calls don't show --------------------------------------------------------------

    def _check_random(self) -> None:
        if not same_random_states(random_states(), self._progress.random):
            raise Refusal(
                "torch's random state changes between two torch calls",
                "seed the generators before calling the program; where another thread draws "
                "numbers meanwhile, call the program with each kind of inputs before it does",
            )

    def _note_random(self) -> None:
        states = random_states()
        if not same_random_states(states, self._progress.random):
            self._progress.random = states
            self._progress.drew = True

    def _check_exported(self) -> None:
        for exported in self._exported:
            same = np.array_equal(exported.array, exported.copy, equal_nan=False)
            is_nan_only = not same and same_bytes(exported.array, exported.copy)
            if not (same or is_nan_only) or version_of(exported.tensor) != exported.version:
                raise Refusal("an array that shares memory with a tensor is written to")
