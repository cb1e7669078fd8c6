"""Turn writes into values."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.node import map_arg

from fxkit.analysis.effects import AliasSets, effects_of
from fxkit.analysis.tensor_types import infer_type
from fxkit.ir.op import resolve
from fxkit.ir.session import EditSession
from fxkit.ir.types import MEMORY_KEY, TensorType, requires_grad, set_type, type_of
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.building_blocks.functional_forms import FunctionalForm, functional_form
from fxkit.passes.building_blocks.layout import laid_out_as
from fxkit.passes.building_blocks.view_inverses import Inverse, inverse_of, shares_memory
from fxkit.passes.properties import property_named


@dataclass(frozen=True)
class Functionalise(Pass):
    """Compute new values where a program writes; write inputs and buffers back at the end.

    An operator in place, or with `out=`, becomes the one that returns its result, and whoever reads
    that memory afterwards, through whichever view, takes the new value. Writing to a view puts the
    new part into the value of what it is a view of. Inputs, parameters and buffers that were
    written get their last value by `copy_` at the end of the graph, and results that share memory
    with one another or with an input go on doing so.

    Memory of which something stays unknown is left alone as a whole, with a note.

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
        memory = _Memory(edit, context)
        if memory.understand():
            memory.rewrite()


@dataclass(eq=False)
class _Tensor:
    """A tensor of the program: memory of its own, or a view of another.

    Attributes:
        node: What made it.
        known: Its type.
        base: What it is a view of.
        view: The call that made the view; `part` tells which of its results, if it has several.
        shown: The operand of that call that it is a view of.
        given: The call's operands, as the program had them.
        inverse: How a new value goes back into the base.
        value: Its present value, as of `seen` writes to its memory.
    """

    node: fx.Node
    known: TensorType
    base: _Tensor | None = None
    view: fx.Node | None = None
    part: int | None = None
    shown: fx.Node | None = None
    given: Any = None
    inverse: Inverse | None = None
    value: fx.Node = field(init=False)
    seen: int = 0
    writes: int = 0

    def __post_init__(self) -> None:
        self.value = self.node

    @property
    def owner(self) -> _Tensor:
        """The tensor whose memory it shows."""
        owner = self
        while owner.base is not None:
            owner = owner.base
        return owner


class _Memory:
    """The memory that a graph writes to, as far as it is understood."""

    def __init__(self, edit: EditSession, context: PassContext) -> None:
        self.edit = edit
        self.context = context
        self.aliases = AliasSets(edit.graph)
        inputs = edit.graph.find_nodes(op="placeholder")
        self.inputs = Counter(node.meta.get(MEMORY_KEY) for node in inputs)
        self.tensors: dict[fx.Node, _Tensor] = {}
        self.attributes: dict[str, _Tensor] = {}
        self.parts: dict[fx.Node, _Tensor] = {}
        self.shown: dict[fx.Node, fx.Node] = {}
        self.forms: dict[fx.Node, FunctionalForm] = {}
        self.refused: dict[fx.Node, str] = {}
        self.switches_grad = any(effects_of(n).is_global for n in self.aliases.effectful)
        self.gone: list[fx.Node] = []

    # First round: nothing is changed.

    def understand(self) -> bool:
        """Look at all memory that is written; return whether any of it can be made values."""
        for node in self.edit.graph.nodes:
            if node.op != "output" and self._is_concerned(node):
                reason = self._look_at(node)
                if reason is not None:
                    self._refuse(node, reason)
        for root, reason in self.refused.items():
            self.context.notes.append(f"writes to the memory of %{root.name} stay: {reason}")
        self.forms = {n: f for n, f in self.forms.items() if not self._is_refused(n)}
        return bool(self.forms)

    def _is_concerned(self, node: fx.Node) -> bool:
        return bool(effects_of(node).writes) or self.aliases.is_written(node)

    def _refuse(self, node: fx.Node, reason: str) -> None:
        nodes = [node, *(w for w in effects_of(node).writes if isinstance(w, fx.Node))]
        for one in nodes:
            self.refused.setdefault(self.aliases.root(one), reason)

    def _is_refused(self, node: fx.Node) -> bool:
        nodes = [node, *(w for w in effects_of(node).writes if isinstance(w, fx.Node))]
        return any(self.aliases.root(one) in self.refused for one in nodes)

    def _look_at(self, node: fx.Node) -> str | None:
        """Take note of a node that makes, shows or writes memory; return what is in the way."""
        effects, known = effects_of(node), type_of(node)
        if effects.is_opaque:
            self._note_graph(node)
            return f"nothing is known of %{node.name}"
        if effects.writes:
            return self._look_at_write(node)
        if node.op in ("placeholder", "get_attr"):
            return self._look_at_outside(node, known)
        if effects.aliases and not self._is_result_of_write(node):
            return self._look_at_view(node, known)
        if isinstance(known, TensorType) and node not in self.tensors:
            self.tensors[node] = _Tensor(node, known)
        return None

    def _note_graph(self, node: fx.Node) -> None:
        """Say of a call of another graph, as the splitting passes make, what to do about it."""
        call = resolve(node)
        if call is not None and call.name == "opaque.torch.fx.GraphModule":
            self.context.notes.append(
                f"%{node.name} calls a graph of its own: run functionalise before what split the "
                "graph, or put it back with fxkit.analysis.slices.inline"
            )

    def _is_result_of_write(self, node: fx.Node) -> bool:
        """Tell whether a node takes one of the results of a call that writes and returns others."""
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        return node.target is not None and source in self.forms and source not in self.tensors

    def _look_at_outside(self, node: fx.Node, known: Any) -> str | None:
        if not isinstance(known, TensorType):
            return None
        if node.op == "placeholder":
            self.tensors[node] = _Tensor(node, known)
            return "inputs share memory" if self._has_shared_memory(node) else None
        path = str(node.target)
        tensor = self.attributes.setdefault(path, _Tensor(node, known))
        self.tensors[node] = tensor
        if known.requires_grad:
            return f"{path} wants a gradient"
        others = [t for p, t in self.attributes.items() if p != path]
        tied = any(self.aliases.may_alias(t.node, node) for t in others)
        return f"{path} shares memory with another attribute" if tied else None

    def _has_shared_memory(self, placeholder: fx.Node) -> bool:
        memory = placeholder.meta.get(MEMORY_KEY)
        return memory is not None and self.inputs[memory] > 1

    def _look_at_view(self, node: fx.Node, known: Any) -> str | None:
        call = resolve(node)
        if call is not None and call.name == "python.getitem" and node.args[0] in self.parts:
            source, part = self.parts[node.args[0]], call.arguments["1"]  # type: ignore[index]
            view = node.args[0]
        else:
            try:
                shown = shares_memory(node)
            except LookupError as reason:
                return str(reason)
            if shown is None:
                if isinstance(known, TensorType):
                    self.tensors[node] = _Tensor(node, known)
                return None
            if shown not in self.tensors:
                return f"it is not known what %{shown.name} holds"
            source, view, part = self.tensors[shown], node, None
            self.shown[node] = shown
            if not isinstance(known, TensorType):
                self.parts[node] = source
                return None
        if not isinstance(known, TensorType) or not isinstance(view, fx.Node):
            return f"it is not known what %{node.name} holds"
        index = part if type(part) is int else None
        inverse = inverse_of(view, source.known, index)
        shown, given = self.shown[view], (view.args, view.kwargs)
        self.tensors[node] = _Tensor(node, known, source, view, index, shown, given, inverse)
        return None

    def _look_at_write(self, node: fx.Node) -> str | None:
        call = resolve(node)
        form = "nothing is known of it" if call is None else functional_form(call)
        if call is None or isinstance(form, str):
            return str(form)
        for name in form.written:
            reason = self._objection(call.arguments[name])
            if reason is not None:
                return reason
        known = type_of(node)
        target = self.tensors[call.arguments[form.written[0]]]
        if form.returns_written and isinstance(known, TensorType):
            if known.shape != target.known.shape:
                return f"%{node.name} changes the shape of what it writes to"
            self.tensors[node] = target
        elif isinstance(known, TensorType):
            self.tensors[node] = _Tensor(node, known)
        elif any(not _is_taking_of_part(user) for user in node.users):
            return f"the results of %{node.name} are taken whole"
        self.forms[node] = form
        return None

    def _objection(self, written: Any) -> str | None:
        tensor = self.tensors.get(written) if isinstance(written, fx.Node) else None
        if tensor is None:
            return f"it is not known what {written} holds"
        if self.switches_grad and tensor.known.requires_grad:
            return "it wants a gradient, and gradients are switched on or off"
        while tensor.base is not None:
            if tensor.inverse is None:
                return f"it is written through %{tensor.node.name}"
            tensor = tensor.base
        return None

    # Second round.

    def rewrite(self) -> None:
        """Give every reader the value of its time, and every writer's target a new one."""
        output = next(iter(reversed(self.edit.graph.nodes)))
        for node in list(self.edit.graph.nodes):
            if node in self.forms:
                with self.edit.on_behalf_of([node], "functionalise"):
                    self._write(node)
            elif node is not output:
                self._read(node)
        self._finish(output)
        for node in reversed(self.gone):
            self.edit.erase(node)
        for node in reversed([n for n in self.tensors if not n._erased]):
            if node.op.startswith("call") and not node.users and effects_of(node).is_pure:
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

    def _value(self, node: fx.Node, before: fx.Node) -> fx.Node:
        tensor = self.tensors.get(node)
        if tensor is None or self.aliases.root(node) in self.refused:
            return node
        return self._current(tensor, before)

    def _current(self, tensor: _Tensor, before: fx.Node) -> fx.Node:
        """Return a tensor's present value; a view is taken anew after a write to its memory."""
        if tensor.base is None or tensor.seen == tensor.owner.writes:
            return tensor.value
        base = self._current(tensor.base, before)
        with self.edit.on_behalf_of([tensor.node], "functionalise"):
            tensor.value = self._take(tensor, base, before)
        tensor.seen = tensor.owner.writes
        return tensor.value

    def _take(self, tensor: _Tensor, base: fx.Node, before: fx.Node) -> fx.Node:
        """Take a view again, of another value."""
        assert tensor.view is not None
        emit = self._emitter(before)
        args, kwargs = map_arg(
            tensor.given, lambda n: base if n is tensor.shown else self._value(n, before)
        )
        made = emit(tensor.view.target, *args, **kwargs)
        return made if tensor.part is None else emit(operator.getitem, made, tensor.part)

    def _emitter(self, before: fx.Node) -> Callable[..., fx.Node]:
        def emit(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            node = self.edit.call(target, *args, before=before, **kwargs)
            known = infer_type(node)
            follows = any(requires_grad(operand) for operand in node.all_input_nodes)
            if isinstance(known, TensorType) and follows and known.dtype.is_floating_point:
                set_type(node, replace(known, requires_grad=True))
            return node

        return emit

    def _write(self, node: fx.Node) -> None:
        call, form, emit = resolve(node), self.forms[node], self._emitter(node)
        assert call is not None

        def current(value: Any) -> Any:
            return map_arg(value, lambda n: self._value(n, node))

        values, result = form.compute(emit, call, current)
        for name, value in zip(form.written, values, strict=True):
            self._assign(self.tensors[call.arguments[name]], value, node)
        if node in self.tensors and result is not None:
            self.tensors[node].value = result
        for user in list(node.users) if node not in self.tensors else ():
            self.edit.set_args(user, (result, *user.args[1:]), user.kwargs)
        self.gone.append(node)

    def _assign(self, tensor: _Tensor, value: fx.Node, before: fx.Node) -> None:
        """Make a value the present one of a tensor, and of all that it is a view of."""
        emit, owner = self._emitter(before), tensor.owner
        value = self._as_before(tensor, value, before)
        first, latest = tensor, value
        while tensor.base is not None:
            base = self._current(tensor.base, before)
            view = resolve(tensor.view) if tensor.view is not None else None
            assert tensor.inverse is not None and view is not None
            value = tensor.inverse(emit, base, value, view.arguments, tensor.base.known)
            tensor = tensor.base
            tensor.value = value = self._as_before(tensor, value, before)
        owner.value = value
        owner.writes += 1
        if first is not owner and type_of(latest) == first.known:
            first.value, first.seen = latest, owner.writes

    def _as_before(self, tensor: _Tensor, value: fx.Node, before: fx.Node) -> fx.Node:
        """Give a value the dtype and the strides that the tensor has."""
        known = type_of(value)
        if isinstance(known, TensorType) and known.dtype != tensor.known.dtype:
            to = torch.ops.aten._to_copy.default
            value = self._emitter(before)(to, value, dtype=tensor.known.dtype)
        if isinstance(known, TensorType) and known.shape != tensor.known.shape:
            shape = list(tensor.known.shape)
            value = self._emitter(before)(torch.ops.aten.expand.default, value, shape)
        placed = laid_out_as(self.edit, value, tensor.known, before)
        return value if placed is None else placed

    def _finish(self, output: fx.Node) -> None:
        """Bring new values into inputs and attributes, and return what was returned."""
        owners = dict.fromkeys(t.owner for t in self.tensors.values())
        written = [t for t in owners if t.writes and t.node.op in ("placeholder", "get_attr")]
        last = {tensor: tensor.value for tensor in written}
        for tensor in written:
            tensor.value = tensor.node
        for tensor in dict.fromkeys(self.tensors.values()):
            if tensor.base is not None and tensor.owner.writes:
                tensor.seen = -1
        self._read(output)
        for tensor in written:
            with self.edit.on_behalf_of([last[tensor]], "functionalise"):
                self.edit.call(
                    torch.ops.aten.copy_.default, tensor.node, last[tensor], before=output
                )


def _is_taking_of_part(node: fx.Node) -> bool:
    call = resolve(node)
    return call is not None and call.name == "python.getitem"
