"""Compute many equal small operators in one call."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from fxkit.analysis.effects import effects_of
from fxkit.analysis.retyping import Retyping
from fxkit.ir.op import Attribute, Call, resolve
from fxkit.ir.session import EditSession
from fxkit.ir.types import KEY as TYPE_KEY
from fxkit.ir.types import TensorType, type_of
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.layers.layers import Layer, layer_of
from fxkit.passes.layers.weights import Weights
from fxkit.passes.options import check_at_least
from fxkit.torch_adapters.fx_nodes import is_erased
from fxkit.torch_adapters.operators import OpOverload


@dataclass(frozen=True)
class BatchOperators(Pass):
    """Stack the operands of equal small operators that do not depend on one another.

    Element-wise functions of one tensor, and linear layers with weights of one shape, are put
    together when their operands have one type, none is written to, and all operands are there
    before the first result is used. What a call costs beside its work is saved; what is paid is a
    copy of the operands, so that only small ones can be worth it, and only many: on one core of a
    CPU it was measured to be no faster, so that it is in no pipeline. Weights are stacked once, in
    new parameters: for inference only.

    An element-wise function of each part of a tensor that was split is computed before the split,
    whatever its size: that copies nothing.

    Rewrites:
        %a = aten.tanh(%x); %b = aten.tanh(%y); ...
            →  %s = aten.stack([%x, %y, ...]); %t = aten.tanh(%s); %u = aten.unbind(%t);
               %a = %u[0]; %b = %u[1]; ...

    Attributes:
        fewest: How many operators to put together at least.
        max_bytes: Largest operand of each, in bytes.
    """

    fewest: int = 6
    max_bytes: int = 4096

    numerics: ClassVar[str] = "close"

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        check_at_least(self, "fewest", 2)
        check_at_least(self, "max_bytes", 0)

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Lift, then merge group by group until there are no more.

        Cost: linear in the edges and the weights, for each link of a chain of operators that can
        only be merged once those in front of them are.
        """
        batcher = _Batcher(edit, context, self)
        for node in list(edit.graph.nodes):
            if not is_erased(node):
                batcher.lift(node)
        while batcher.merge_all():
            pass


@dataclass
class _Group:
    """Equal operators: all operands come before the first user of any."""

    nodes: dict[fx.Node, None] = field(default_factory=dict)
    operands: list[fx.Node] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)
    first_user: fx.Node | None = None
    last_operand: fx.Node | None = None

    def try_add(self, node: fx.Node, operand: fx.Node) -> bool:
        """Add an operator if it fits; say whether it did."""
        if operand in self.nodes:
            return False
        user = min(node.users)
        first = user if self.first_user is None else min(user, self.first_user)
        there = _taken_from(operand) or operand
        last = there if self.last_operand is None else max(there, self.last_operand)
        if not last < first:
            return False
        self.first_user, self.last_operand = first, last
        self.nodes[node] = None
        self.operands.append(operand)
        return True


class _Batcher:
    def __init__(self, edit: EditSession, context: PassContext, options: BatchOperators) -> None:
        self.edit = edit
        self.context = context
        self.options = options
        self.weights = Weights(edit)
        self.groups: list[_Group] = []
        self._open: dict[Hashable, _Group] = {}
        root = self.weights.order.aliases.root
        output = next(iter(reversed(edit.graph.nodes)))
        self._returned = {root(n) for n in output.all_input_nodes}

    def lift(self, node: fx.Node) -> None:
        """Compute functions of each part of a split tensor before the split, one by one."""
        split: fx.Node | None = node
        while split is not None:
            split = self._lift_once(split)

    def _lift_once(self, node: fx.Node) -> fx.Node | None:
        """Return the split behind the function, or None when nothing was lifted."""
        call, parts = resolve(node), type_of(node)
        if call is None or call.name not in _SPLITS or not isinstance(parts, (list, tuple)):
            return None
        source, items = call.arguments["self"], list(node.users)
        functions = [next(iter(item.users)) for item in items if len(item.users) == 1]
        if len(functions) != len(items) or len(set(functions)) < max(2, len(parts)):
            return None
        if not isinstance(source, fx.Node) or not self._is_lifted(node, items, functions):
            return None
        mark, types = self.edit.mark(), Retyping()
        whole = self._copy(functions[0], items[0], source, node, functions)
        again = self._copy(node, source, whole, node, [node])
        changed = [whole, again]
        for item, function in zip(items, functions, strict=True):
            changed.append(self._copy(item, node, again, node, [item, function]))
            self.weights.replaced(function, changed[-1])
            self.edit.replace(function, changed[-1])
            self.edit.erase(item)
        self.edit.erase(node)
        reason = types.propagate(changed)
        if reason is None:
            return again
        self.edit.undo(mark)
        types.restore()
        self.context.notes.append(f"%{node.name} stays in front: {reason}")
        return None

    def _is_lifted(self, node: fx.Node, items: list[fx.Node], functions: list[fx.Node]) -> bool:
        """Tell whether all parts are taken once, and the same function of each."""
        calls = [resolve(item) for item in items]
        if any(call is None or call.name != "python.getitem" for call in calls):
            return False
        if len({item.args[1:] for item in items}) != len(items):
            return False
        forms: set[Hashable] = set()
        for item, function in zip(items, functions, strict=True):
            call = resolve(function)
            if call is None or _only_operand(function, call) is not item:
                return False
            forms.add(_form_of_function(function, call))
        order = self.weights.order
        if len(forms) != 1 or None in forms or order.mode_between(node, max(functions)):
            return False
        return not any(map(self._is_seen, functions)) and not order.aliases.is_written(node)

    def _is_seen(self, node: fx.Node) -> bool:
        """Tell whether somebody writes to a result, or the caller gets it."""
        aliases = self.weights.order.aliases
        return aliases.is_written(node) or aliases.root(node) in self._returned

    def _copy(
        self, node: fx.Node, old: fx.Node, new: fx.Node, place: fx.Node, originals: list[fx.Node]
    ) -> fx.Node:
        with self.edit.on_behalf_of(originals, "batch_operators"):
            made = self.edit.copy(node, lambda n: new if n is old else n, before=place)
        made.meta.pop(TYPE_KEY, None)
        return self.weights.inserted(made)

    def collect(self, node: fx.Node) -> None:
        """Put an operator to its equals."""
        call = resolve(node)
        if call is None or not node.users:
            return
        layer = layer_of(node, self.weights)
        is_layer = isinstance(layer, Layer)
        operand = layer.input if is_layer else _only_operand(node, call)
        if operand is None or not self._is_small(operand, node):
            return
        form = _form_of_layer(layer) if is_layer else _form_of_function(node, call)
        if form is None:
            return
        key = (form, type_of(operand), isinstance(node.target, OpOverload))
        group = self._open.get(key)
        is_apart = group is None or self._changes_mode(group, node)
        if group is None or is_apart or not group.try_add(node, operand):
            group = self._open[key] = _Group()
            if not group.try_add(node, operand):
                return
            self.groups.append(group)

    def _changes_mode(self, group: _Group, node: fx.Node) -> bool:
        return self.weights.order.mode_between(next(iter(group.nodes)), node) is not None

    def _is_small(self, operand: fx.Node, node: fx.Node) -> bool:
        known, made = type_of(operand), type_of(node)
        if not isinstance(known, TensorType) or not isinstance(made, TensorType):
            return False
        if self.weights.order.aliases.is_written(operand) or self._is_seen(node):
            return False
        is_plain = known.is_contiguous and made.is_contiguous and 0 not in known.shape
        return is_plain and known.nbytes <= self.options.max_bytes

    def merge_all(self) -> bool:
        """Collect equal operators and merge them; say whether there were any."""
        self._open, self.groups = {}, []
        for node in list(self.edit.graph.nodes):
            self.collect(node)
        merged = [self._merge(group) for group in self.groups]
        return any(merged)

    def _merge(self, collected: _Group) -> bool:
        """Compute a group in one call, or note why not."""
        group = self._as_it_is_now(collected)
        place = group.first_user
        if len(group.nodes) < self.options.fewest or place is None:
            return False
        mark, types = self.edit.mark(), Retyping()
        with self.edit.on_behalf_of(list(group.nodes), "batch_operators"):
            chain = self._chain(group, place)
            reason = types.propagate(chain)
            for node, part in zip(group.nodes, chain[-len(group.nodes) :], strict=True):
                if type_of(part) != type_of(node) and reason is None:
                    reason = f"%{node.name} would be of another type"
                if reason is None:
                    self.weights.replaced(node, part)
                    self.edit.replace(node, part)
        if reason is None:
            self.lift(chain[-len(group.nodes) - 1])
            return True
        self.edit.undo(mark)
        types.restore()
        self.weights.forget()
        names = f"%{next(iter(group.nodes)).name} and {len(group.nodes) - 1} like it"
        self.context.notes.append(f"{names} stay apart: {reason}")
        return False

    def _as_it_is_now(self, collected: _Group) -> _Group:
        """Return a group with its operands as the merging of others left them."""
        group = _Group()
        for node in collected.nodes:
            if is_erased(node):
                continue
            layer = layer_of(node, self.weights)
            operand = layer.input if isinstance(layer, Layer) else node.all_input_nodes[0]
            if not group.try_add(node, operand):
                return _Group()
            if isinstance(layer, Layer):
                group.layers.append(layer)
        return group

    def _chain(self, group: _Group, place: fx.Node) -> list[fx.Node]:
        """Insert the stack, the one operator, and the parts, in this order."""
        aten = torch.ops.aten
        first = next(iter(group.nodes))
        is_aten = isinstance(first.target, OpOverload)
        stack, unbind = (
            (aten.stack.default, aten.unbind.int) if is_aten else (torch.stack, torch.unbind)
        )
        for operand in group.operands:
            if not operand < place:
                self.edit.move(operand, before=place)
        joined = self._made(stack, place, list(group.operands))
        if group.layers:
            chain = self._product(group, joined, place)
        else:
            operand = group.operands[0]
            chain = [self._copy(first, operand, joined, place, list(group.nodes))]
        parts = self._made(unbind, place, chain[-1])
        items = [self._made(operator.getitem, place, parts, i) for i in range(len(group.nodes))]
        return [joined, *chain, parts, *items]

    def _product(self, group: _Group, joined: fx.Node, place: fx.Node) -> list[fx.Node]:
        layers = group.layers
        is_aten = layers[0].is_spelled_in_aten
        aten = torch.ops.aten
        weight = torch.stack([x.weight if x.is_flipped else x.weight.t() for x in layers])
        name, made_of = f"{layers[0].node.name}_batched", [x.weight_operand for x in layers]
        gradient = self.weights.needs_gradient(*made_of)
        read = self.weights.keep(
            f"{name}_weight", weight, key=(name, "weight"), gradient=gradient, before=place
        )
        if layers[0].bias is None:
            return [self._made(aten.bmm.default if is_aten else torch.bmm, place, joined, read)]
        bias = torch.stack([x.bias for x in layers if x.bias is not None]).unsqueeze(1)
        gradient = self.weights.needs_gradient(*[x.bias_operand for x in layers])
        added = self.weights.keep(
            f"{name}_bias", bias, key=(name, "bias"), gradient=gradient, before=place
        )
        baddbmm = aten.baddbmm.default if is_aten else torch.baddbmm
        return [self._made(baddbmm, place, added, joined, read)]

    def _made(self, target: Any, place: fx.Node, *args: Any) -> fx.Node:
        return self.weights.inserted(self.edit.call(target, *args, before=place))


_SPLITS = frozenset(
    f"aten.{name}"
    for name in "chunk split split_with_sizes unbind unsafe_chunk unsafe_split".split()
)


def _taken_from(node: fx.Node) -> fx.Node | None:
    """Return the list that a node takes an item out of: it may do so right behind that list."""
    call = resolve(node)
    if call is None or call.name != "python.getitem" or not isinstance(node.args[1], int):
        return None
    source = node.args[0]
    is_list = isinstance(source, fx.Node) and isinstance(type_of(source), (list, tuple))
    return source if is_list and isinstance(source, fx.Node) else None


def _only_operand(node: fx.Node, call: Call) -> fx.Node | None:
    """Return the operand of an element-wise function of one tensor, else None."""
    if call.operator.overload is None or torch.Tag.pointwise not in call.operator.overload.tags:
        return None
    if not effects_of(node).is_pure or call.name.endswith("_") or len(node.all_input_nodes) != 1:
        return None
    operand = node.all_input_nodes[0]
    taken = [value for value in call.arguments.values() if isinstance(value, fx.Node)]
    return operand if taken == [operand] else None


def _form_of_function(node: fx.Node, call: Call) -> Hashable:
    """Return what equal functions have in common; None when that can't be compared."""
    if node.op == "call_module" and any(
        isinstance(value, Attribute) for value in call.arguments.values()
    ):
        return None
    constants = [
        (name, type(value).__name__, str(value) if isinstance(value, list) else value)
        for name, value in call.arguments.items()
        if not isinstance(value, fx.Node)
    ]
    positions = tuple(name for name, value in call.arguments.items() if isinstance(value, fx.Node))
    try:
        hash(tuple(constants))
    except TypeError:
        return None
    return (call.name, call.operator.overload, positions, *constants)


def _form_of_layer(layer: Layer) -> Hashable:
    """Return what linear layers of matrices have in common; None for what is none."""
    known = type_of(layer.input)
    if layer.axes or not isinstance(known, TensorType) or len(known.shape) != 2:
        return None
    bias = None if layer.bias is None else layer.bias.dtype
    if bias not in (None, layer.weight.dtype) or known.dtype != layer.weight.dtype:
        return None
    return (layer.call.name, tuple(layer.weight.shape), layer.weight.dtype, bias)
