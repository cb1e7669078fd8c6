"""Turn writes into values."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.node import map_arg

from fxkit.analysis.effects import effects_of
from fxkit.analysis.tensor_types import infer_type
from fxkit.ir.op import resolve
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, requires_grad, set_type, type_of
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.decomposition.strides import laid_out_as
from fxkit.passes.layout.written_memory import Tensor, WrittenMemory
from fxkit.passes.properties import property_named
from fxkit.torch_adapters.fx_nodes import is_erased


@dataclass(frozen=True)
class Functionalise(Pass):
    """Compute new values where a program writes; write inputs and buffers back at the end.

    An operator in place, or with `out=`, becomes the one that returns its result, and whoever reads
    that memory afterwards, through whichever view, takes the new value. A custom operator becomes
    a call of `torch.ops.higher_order.auto_functionalized`. Writing to a view puts the new part into
    the value of what it is a view of. Inputs, parameters and buffers that were written get their
    last value by `copy_` at the end of the graph, an input whose shape was changed in place gets
    its last shape there, and results that share memory with one another or with an input go on
    doing so.

    Memory of which something stays unknown is left alone as a whole, with a note: what a leaf
    module is given, say. A pass that requires `functional` is then refused.

    Rewrites:
        %r = aten.select(%x, 0, 1); %_ = aten.add_(%r, 2); return aten.relu(%x)
            →  %r = aten.select(%x, 0, 1); %n = aten.add(%r, 2)
               %m = aten.select_scatter(%x, %n, 0, 1); %y = aten.relu(%m)
               aten.copy_(%x, %m); return %y
    """

    requires: ClassVar[tuple[str, ...]] = ("shapes_known", "aten")
    ensures: ClassVar[tuple[str, ...]] = ("functional",)
    preserves: ClassVar[tuple[str, ...]] = ("aten", "shapes_known")
    numerics: ClassVar[str] = "close"  # the same values; gradients are summed in another order

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Visit the nodes in order, twice. Cost: linear in the edges and the depth of views."""
        if property_named("functional").check(edit.gm) is None:
            return
        memory = WrittenMemory(edit.graph)
        context.notes.extend(memory.notes())
        for node, reason in memory.left().items():
            context.left_at("functional", node, reason)
        if memory.has_work:
            _Rewriting(edit, memory).run()


class _Rewriting:
    """Gives every reader the value of its time, and every writer's target a new one."""

    def __init__(self, edit: EditSession, memory: WrittenMemory) -> None:
        self.edit = edit
        self.memory = memory
        self.made: list[fx.Node] = []
        self.gone: dict[fx.Node, None] = {}
        self.results: dict[fx.Node, Any] = {}

    def run(self) -> None:
        """Visit the nodes in order, then bring inputs and attributes up to date."""
        memory, output = self.memory, next(iter(reversed(self.edit.graph.nodes)))
        for resized in reversed(memory.resized.values()):
            for tensor, (before, _) in resized.items():
                tensor.known = before
        for node in list(self.edit.graph.nodes):
            if node in memory.forms:
                with self.edit.on_behalf_of([node], "functionalise"):
                    self._write(node)
            elif node in memory.reshaped:
                self._change_shape(node)
            elif node is not output and node not in self.gone:
                self._read(node)
        self._finish(output)
        self._clean_up()

    def _clean_up(self) -> None:
        for node in reversed(self.gone):
            self.edit.erase(node)
        for node in reversed([*self.memory.tensors, *self.made]):
            is_kept = is_erased(node) or not node.op.startswith("call") or node.users
            if not is_kept and effects_of(node).is_pure:
                self.edit.erase(node)

    def _read(self, node: fx.Node) -> None:
        """Let a node take the present values of its operands."""
        stale = [o for o in node.all_input_nodes if self._value(o, node) is not o]
        if stale:
            self.edit.set_args(
                node,
                map_arg(node.args, lambda n: self._value(n, node)),
                map_arg(node.kwargs, lambda n: self._value(n, node)),
            )

    def _value(self, node: fx.Node, before: fx.Node) -> Any:
        if node in self.results:
            return self._result(self.results[node], before)
        tensor = self.memory.now(node)
        if tensor is None or self.memory.is_refused(node):
            return node
        return self._current(tensor, before)

    def _result(self, result: Any, before: fx.Node) -> Any:
        if isinstance(result, tuple):
            return tuple(self._result(one, before) for one in result)
        return self._current(result, before) if isinstance(result, Tensor) else result

    def _current(self, tensor: Tensor, before: fx.Node) -> fx.Node:
        """Return a tensor's present value; a view is taken anew after a write to its memory."""
        if tensor.base is None or tensor.seen == tensor.owner.writes:
            return tensor.value
        base = self._current(tensor.base, before)
        with self.edit.on_behalf_of([tensor.node], "functionalise"):
            tensor.value = self._take(tensor, base, before)
        tensor.seen = tensor.owner.writes
        return tensor.value

    def _take(self, tensor: Tensor, base: fx.Node, before: fx.Node) -> fx.Node:
        """Take a view again, of another value."""
        view = tensor.view
        assert view is not None
        emit = self._emitter(before)
        args, kwargs = map_arg(
            (view.args, view.kwargs), lambda n: base if n is view.shown else self._value(n, before)
        )
        made = emit(view.target, *args, **kwargs)
        return made if view.part is None else emit(operator.getitem, made, view.part)

    def _emitter(self, before: fx.Node) -> Callable[..., fx.Node]:
        def emit(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            node = self.edit.call(target, *args, before=before, **kwargs)
            self.made.append(node)
            known = infer_type(node)
            follows = any(requires_grad(operand) for operand in node.all_input_nodes)
            if isinstance(known, TensorType) and follows and known.dtype.is_floating_point:
                set_type(node, replace(known, requires_grad=True))
            return node

        return emit

    def _write(self, node: fx.Node) -> None:
        call, form, emit = resolve(node), self.memory.forms[node], self._emitter(node)
        assert call is not None
        for tensor, (_, after) in self.memory.resized.get(node, {}).items():
            tensor.known = after

        def current(value: Any) -> Any:
            return map_arg(value, lambda n: self._value(n, node))

        standing = map(self.memory.now, form.operands(call))
        targets = [tensor for tensor in standing if tensor is not None]
        values, made = form.compute(emit, call, current)
        for tensor, value in zip(targets, values, strict=True):
            self._assign(tensor, value, node)
        self._give(node, targets, made)

    def _give(self, node: fx.Node, targets: list[Tensor], made: list[Any]) -> None:
        """Let what a writing call returned be the tensors that it wrote, and its new results."""
        returns = self.memory.forms[node].returns
        results = [
            one if position is None else targets[position]
            for one, position in zip(made, returns, strict=True)
        ]
        self.gone[node] = None
        if not isinstance(type_of(node), (list, tuple)):
            self._stand_for(node, results[0] if results else None)
            return
        self.results[node] = tuple(results)
        for user in node.users:
            taken = resolve(user)
            if taken is not None and taken.name == "python.getitem":
                self.gone[user] = None
                self._stand_for(user, results[taken.arguments["1"]])

    def _stand_for(self, node: fx.Node, result: Any) -> None:
        """Let a new result stand for a node; what was written is known by its tensor."""
        tensor = self.memory.tensors.get(node)
        if isinstance(result, fx.Node) and tensor is not None:
            tensor.value = result
        elif isinstance(result, fx.Node):
            self.results[node] = result

    def _change_shape(self, node: fx.Node) -> None:
        """Let a tensor be a view of what it was."""
        call, later = resolve(node), self.memory.reshaped[node]
        assert call is not None
        self.gone[node] = None
        source = self.memory.now(call.arguments["self"])
        if source is not None and source is not later:
            later.seen = -1
            source.later = later

    def _assign(self, tensor: Tensor, value: fx.Node, before: fx.Node) -> None:
        """Make a value the present one of a tensor, and of all that it is a view of."""
        emit, owner = self._emitter(before), tensor.owner
        value = self._as_before(tensor, value, before)
        first, latest = tensor, value
        while tensor.base is not None:
            base, view = self._current(tensor.base, before), tensor.view
            assert view is not None and view.inverse is not None
            value = view.inverse(emit, base, value, view.call.arguments, tensor.base.known)
            tensor = tensor.base
            tensor.value = value = self._as_before(tensor, value, before)
        owner.value = value
        owner.writes += 1
        if first is not owner and type_of(latest) == first.known:
            first.value, first.seen = latest, owner.writes

    def _as_before(self, tensor: Tensor, value: fx.Node, before: fx.Node) -> fx.Node:
        """Give a value the dtype and the strides that the tensor has."""
        known = type_of(value)
        if isinstance(known, TensorType) and known.dtype != tensor.known.dtype:
            to = torch.ops.aten._to_copy.default
            value = self._emitter(before)(to, value, dtype=tensor.known.dtype)
        if isinstance(known, TensorType) and known.shape != tensor.known.shape:
            shape = list(tensor.known.shape)
            value = self._emitter(before)(torch.ops.aten.expand.default, value, shape)
        placed = laid_out_as(self.edit, value, tensor.known, before, is_exact=True)
        return value if placed is None else placed

    # The end of the graph.

    def _finish(self, output: fx.Node) -> None:
        """Bring new values into inputs and attributes, and return what was returned."""
        tensors = dict.fromkeys(self.memory.tensors.values())
        written = [t for t in dict.fromkeys(t.owner for t in tensors) if t.writes and t.is_outside]
        last = {tensor: tensor.value for tensor in written}
        for tensor in written:
            tensor.value = tensor.node
        for tensor in tensors:
            if tensor.base is not None and tensor.owner.writes:
                tensor.seen = -1
        ends = self._shape_inputs(output)
        first = next(iter(ends.values()), [output])[0]
        self._return(output, first, {tensor: nodes[-1] for tensor, nodes in ends.items()})
        for tensor in written:
            with self.edit.on_behalf_of([last[tensor]], "functionalise"):
                copy = torch.ops.aten.copy_.default
                infer_type(self.edit.call(copy, tensor.node, last[tensor], before=first))

    def _shape_inputs(self, output: fx.Node) -> dict[Tensor, list[fx.Node]]:
        """Change the shapes of inputs as the program did; return what each is then."""
        ends: dict[Tensor, list[fx.Node]] = {}
        for node in self.edit.graph.find_nodes(op="placeholder"):
            tensor = self.memory.tensors.get(node)
            made: list[fx.Node] = []
            while tensor is not None and tensor.later is not None:
                tensor = tensor.later
                call = resolve(tensor.node)
                assert call is not None
                with self.edit.on_behalf_of([tensor.node], "functionalise"):
                    args = (made[-1] if made else node, *tensor.node.args[1:])
                    new = self.edit.call(tensor.node.target, *args, before=output)
                    self.edit.set_args(new, args, tensor.node.kwargs)
                set_type(new, tensor.known)
                made.append(new)
            if tensor is not None and made:
                ends[tensor] = made
        return ends

    def _return(self, output: fx.Node, before: fx.Node, ends: dict[Tensor, fx.Node]) -> None:
        def returned(node: fx.Node) -> Any:
            tensor = self.memory.now(node)
            return ends[tensor] if tensor in ends else self._value(node, before)

        self.edit.set_args(output, map_arg(output.args, returned), output.kwargs)
