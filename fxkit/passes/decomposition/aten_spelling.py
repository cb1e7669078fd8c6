"""Spell calls of a graph as calls of ATen's overloads, one after the other."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from fxkit.analysis.tensor_types import infer_type
from fxkit.ir.attributes import find_attribute
from fxkit.ir.op import Attribute, Call, resolve
from fxkit.ir.printer import is_default_value
from fxkit.ir.session import EditSession
from fxkit.ir.symbols import Symbol
from fxkit.ir.types import TensorType, set_type, type_of
from fxkit.passes.base import PassContext
from fxkit.passes.decomposition import indexing
from fxkit.passes.decomposition.recording import (
    OperatorRecording,
    form_of_call,
    record,
    replay,
    short_name,
)
from fxkit.passes.decomposition.unrecordable import Unrecordable
from fxkit.torch_adapters import pytree
from fxkit.torch_adapters.operators import HigherOrderOperator, OpOverload


class AtenSpelling:
    """Spells nodes of a graph, one after the other."""

    def __init__(self, edit: EditSession, context: PassContext) -> None:
        self.edit = edit
        self.context = context
        self.recordings: dict[Any, OperatorRecording] = {}
        self.reads: dict[str, fx.Node] = {}

    def visit(self, node: fx.Node) -> None:
        """Spell one node, or note why it stays as it is."""
        if node.op == "get_attr":
            self.reads.setdefault(str(node.target), node)
        call = resolve(node)
        if call is None or isinstance(node.target, _OVERLOADS):
            return
        try:
            with self.edit.on_behalf_of([node], "decompose_to_aten"):
                self._spell(node, call)
        except Unrecordable as reason:
            self.context.notes.append(f"%{node.name} stays a call of {call.name}: {reason}")

    def _spell(self, node: fx.Node, call: Call) -> None:
        if call.operator.overload is not None:
            self._call_overload(node, call)
        elif call.name.startswith("python."):
            self._python(node, call)
        elif not call.name.startswith("guard."):
            self._run(node, call)

    def _call_overload(self, node: fx.Node, call: Call) -> None:
        """Call the overload that a node resolves to."""
        if call.name == "aten.tensor":
            self.replay(node, node.target, (node.args, node.kwargs))
            return
        if call.name == "aten.div" and _divides_by_reciprocal(node, call):
            self._multiply_by_reciprocal(node, call)
            return
        if node.op == "call_module":
            self._count_batches(node)
        args, kwargs = self._operands(node, call)
        overload = _SYMBOLIC.get(call.operator.overload, call.operator.overload)
        new = self.edit.call(overload, *args, before=node, name=short_name(overload), **kwargs)
        if node.users and not call.operator.schema.returns:
            # In Python, what writes lists gives those back.
            self.give(node, args[0])
        else:
            self._take_over(node, new)

    def _multiply_by_reciprocal(self, node: fx.Node, call: Call) -> None:
        """Divide as `2 / x` does, which rounds twice."""
        divisor, dividend = call.arguments["other"], call.arguments["self"]
        inverse = self.edit.call(_aten.reciprocal.default, divisor, before=node, name="reciprocal")
        infer_type(inverse)
        product = self.edit.call(_aten.mul.Tensor, inverse, dividend, before=node, name="mul")
        self._take_over(node, product)

    def _operands(self, node: fx.Node, call: Call) -> tuple[list[Any], dict[str, Any]]:
        """Return the operands in the schema's order, without what is left to its defaults."""
        parameters = call.operator.schema.arguments
        given = {p.name: self._operand(call.arguments[p.name], node) for p in parameters}
        defaults = {p.name: p.default_value for p in parameters if p.has_default_value()}
        differs = {
            n for n in given if n not in defaults or not is_default_value(given[n], defaults[n])
        }
        positional = [p.name for p in parameters if not p.kwarg_only]
        while positional and positional[-1] not in differs:
            positional.pop()
        keyword_only = [p.name for p in parameters if p.kwarg_only and p.name in differs]
        return [given[n] for n in positional], {n: given[n] for n in keyword_only}

    def _operand(self, value: Any, place: fx.Node) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._operand(item, place) for item in value]
        if isinstance(value, Attribute):
            return self._read(value.path, place)
        if isinstance(value, torch.Tensor):
            return self.edit.add_attribute("_constant", value, before=place)
        return value

    def _read(self, path: str, place: fx.Node) -> fx.Node:
        if path not in self.reads:
            self.reads[path] = self.edit.get_attr(path, before=place)
            infer_type(self.reads[path])
        return self.reads[path]

    def _count_batches(self, node: fx.Node) -> None:
        """Count as a normalisation in training mode does, beside what its operator does."""
        module = find_attribute(self.edit.gm, str(node.target))
        counter = getattr(module, "num_batches_tracked", None)
        if isinstance(counter, torch.Tensor) and module.training and module.track_running_stats:
            read = self._read(f"{node.target}.num_batches_tracked", node)
            new = self.edit.call(torch.ops.aten.add_.Tensor, read, 1, before=node)
            set_type(new, type_of(read))

    def _python(self, node: fx.Node, call: Call) -> None:
        """Spell what Python does to a tensor; leave what it does to numbers and containers."""
        values = list(call.arguments.values())
        operand = values[0] if values else None
        is_tensor = isinstance(operand, fx.Node) and isinstance(type_of(operand), TensorType)
        name = call.name.removeprefix("python.")
        if name == "identity" and isinstance(operand, fx.Node):
            self.edit.replace(node, operand)
        elif is_tensor and name == "getitem":
            self._take_over(node, indexing.read(self.edit, values[0], values[1], node))
        elif name == "getitem" and node.target is getattr:
            self._take_over(node, self.edit.call(operator.getitem, *values, before=node))
        elif is_tensor and name == "setitem":
            indexing.write(self.edit, values[0], values[1], values[2], node)
            self.give(node, None)
        elif is_tensor and name in _QUESTIONS and len(values) == 1:
            self._take_over(node, self.edit.call(_QUESTIONS[name], operand, before=node))
        elif name == "getattr" and is_tensor and values[1:] == ["shape"]:
            self._sizes(node, values[0])
        elif node.op == "call_method":
            self._python_method(node)

    def _sizes(self, node: fx.Node, tensor: fx.Node) -> None:
        """Ask for single sizes where single ones are taken."""
        rank = len(type_of(tensor).shape)
        for user in list(node.users):
            taken = resolve(user)
            index = None if taken is None else taken.arguments.get("1")
            if taken is None or taken.name != "python.getitem" or type(index) is not int:
                continue
            new = self.edit.call(torch.ops.aten.sym_size.int, tensor, index % rank, before=user)
            self._take_over(user, new)
        if not node.users:
            self.edit.erase(node)
        elif node.op == "call_method":
            self._take_over(node, self.edit.call(getattr, tensor, "shape", before=node))

    def _python_method(self, node: fx.Node) -> None:
        """Call a method of a container or number as a function of Python."""
        bare = str(node.target).strip("_")
        function = getattr(operator, bare, None)
        if str(node.target).startswith("__") and function is not None:
            self._take_over(node, self.edit.call(function, *node.args, before=node))

    def _run(self, node: fx.Node, call: Call) -> None:
        """Put the operators that a function or module of torch calls in its place."""
        if node.op == "call_module":
            module = find_attribute(self.edit.gm, str(node.target))
            if not type(module).__module__.startswith("torch.nn.modules."):
                raise Unrecordable("it is no module of torch")
            if _has_hooks(module):
                raise Unrecordable("it has hooks")
            self._replay_module(node, module)
            return
        if call.operator.is_opaque and not _is_of_torch(node):
            if not _is_mode(node):
                raise Unrecordable("nothing is known of it")
            return
        self.replay(node, function_of(node), (node.args, node.kwargs))

    def _replay_module(self, node: fx.Node, module: nn.Module) -> None:
        tensors = dict(_tensors_of(module))
        reads = [self._read(f"{node.target}.{name}", node) for name in tensors]

        def forward(given: list[Any], args: Any, kwargs: Any) -> Any:
            named = dict(zip(tensors, given, strict=True))
            return torch.func.functional_call(module, named, args, kwargs)

        self.replay(node, forward, ((reads, node.args, node.kwargs), {}), (id(module), "forward"))

    def replay(self, node: fx.Node, target: Any, operands: Any, form: Any = None) -> None:
        """Record what a call does, or find it recorded, and put that in its place."""
        leaves, spec = pytree.tree_flatten(operands, is_leaf=lambda v: isinstance(v, slice))
        nodes = list(dict.fromkeys(nodes_in(leaves)))
        key = form_of_call((form or target, str(spec)), _flat(leaves))
        recording = self.recordings.get(key) if key is not None else None
        if recording is None:
            known = [fakeable(n) for n in nodes]

            def run(*tensors: Any) -> Any:
                values = dict(zip(nodes, tensors, strict=True))
                filled = pytree.tree_unflatten([_filled(v, values) for v in leaves], spec)
                return target(*filled[0], **filled[1])

            recording = record(run, known)
            if key is not None:
                self.recordings[key] = recording
        result = replay(self.edit, recording, nodes, node)
        self.give(node, result)

    def give(self, node: fx.Node, result: Any) -> None:
        """Let a node's users use what replaces it: a node, or a nest of nodes and constants."""
        if isinstance(result, fx.Node):
            self._take_over(node, result)
            return
        if node.users:
            for user in list(node.users):
                self._give_part(user, node, result)
        if node.users:
            raise Unrecordable("its results are taken whole")
        self.edit.erase(node)

    def _give_part(self, user: fx.Node, node: fx.Node, result: Any) -> None:
        taken = resolve(user)
        if taken is None or taken.name != "python.getitem" or user.args[0] is not node:
            self.edit.set_args(
                user,
                map_arg(user.args, lambda n: result if n is node else n),
                map_arg(user.kwargs, lambda n: result if n is node else n),
            )
            return
        part = result[taken.arguments["1"]]
        if isinstance(part, fx.Node):
            self.edit.replace(user, part)
            return
        for further in list(user.users):
            self._give_part(further, user, part)
        if not user.users:
            self.edit.erase(user)

    def _take_over(self, node: fx.Node, new: fx.Node) -> None:
        known = type_of(node)
        self.edit.replace(node, new)
        if known is not None and new.op != "placeholder":
            set_type(new, known)


_OVERLOADS = (OpOverload, HigherOrderOperator)
_aten = torch.ops.aten

# What Python asks a tensor, as an operator.
_QUESTIONS = {
    "dim": _aten.dim.default,
    "ndimension": _aten.dim.default,
    "numel": _aten.sym_numel.default,
    "nelement": _aten.sym_numel.default,
    "storage_offset": _aten.sym_storage_offset.default,
    "is_contiguous": _aten.is_contiguous.default,
    "is_floating_point": _aten.is_floating_point.default,
    "is_complex": _aten.is_complex.default,
}


# The same questions, answered with a symbol where a size is one.
_SYMBOLIC = {
    _aten.size.int: _aten.sym_size.int,
    _aten.stride.int: _aten.sym_stride.int,
    _aten.numel.default: _aten.sym_numel.default,
}
_METHODS: dict[str, Callable[..., Any]] = {}


def function_of(node: fx.Node) -> Any:
    """Return what a node calls; a method as a function."""
    return _method(str(node.target)) if node.op == "call_method" else node.target


def _method(name: str) -> Callable[..., Any]:
    """Return a method as a function, the same one each time."""
    if name not in _METHODS:
        _METHODS[name] = lambda tensor, *args, **kwargs: getattr(tensor, name)(*args, **kwargs)
    return _METHODS[name]


def _divides_by_reciprocal(node: fx.Node, call: Call) -> bool:
    """Tell whether a quotient is spelled so that Python's reflected operator computes it."""
    if node.op == "call_method" or getattr(node.target, "__name__", "") == "__rdiv__":
        return "__r" in str(node.target)
    return not isinstance(call.arguments["self"], (fx.Node, Attribute))


def _is_of_torch(node: fx.Node) -> bool:
    """Tell whether a call is of a function or method of torch that only calls operators."""
    if node.op == "call_method":
        return hasattr(torch.Tensor, str(node.target)) and node.target not in _HOOKING
    home = getattr(node.target, "__module__", None) or ""
    name = getattr(node.target, "__name__", "")
    public = (torch, torch.nn.functional, torch.linalg, torch.special, torch.fft)
    return home.startswith("torch") and any(getattr(p, name, None) is node.target for p in public)


_HOOKING = ("backward", "register_hook", "requires_grad_", "retain_grad", "numpy", "tolist", "item",
            "share_memory_", "detach_", "set_", "record_stream")  # fmt: skip


def _is_mode(node: fx.Node) -> bool:
    """Tell whether a call takes no tensors: it sets a mode, or has nothing to do with them."""
    return not any(isinstance(type_of(n), TensorType) for n in node.all_input_nodes)


def _has_hooks(module: nn.Module) -> bool:
    return any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks
               for m in module.modules())  # fmt: skip


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def nodes_in(leaves: list[Any]) -> list[fx.Node]:
    """Return the nodes among leaves, those in slices too."""
    return [leaf for leaf in _flat(leaves) if isinstance(leaf, fx.Node)]


def _flat(leaves: list[Any]) -> list[Any]:
    """Return leaves with slices taken apart."""
    flat: list[Any] = []
    for leaf in leaves:
        flat.extend((leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else (leaf,))
    return flat


def _filled(leaf: Any, values: dict[fx.Node, Any]) -> Any:
    if isinstance(leaf, slice):
        return slice(*(_filled(part, values) for part in (leaf.start, leaf.stop, leaf.step)))
    return values[leaf] if isinstance(leaf, fx.Node) else leaf


def fakeable(node: fx.Node) -> Any:
    """Return the type of a tensor, or the expression of a size, that a call takes.

    Raises:
        Unrecordable: When it is not known, or something else.
    """
    known = type_of(node)
    if known is None:
        raise Unrecordable(f"the type of %{node.name} is not known")
    if not isinstance(known, (TensorType, Symbol)):
        raise Unrecordable(f"it depends on %{node.name}, which may differ from call to call")
    return known
