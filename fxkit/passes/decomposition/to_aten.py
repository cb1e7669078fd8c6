"""Calls of functions, methods, operators and modules as calls of ATen's overloads."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

from fxkit.analysis.tensor_types import infer_type
from fxkit.ir.attributes import find_attribute
from fxkit.ir.compositions import composition_of
from fxkit.ir.op import Attribute, Call, resolve
from fxkit.ir.printer import is_default_value
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, set_type, type_of
from fxkit.passes.base import PassContext
from fxkit.passes.decomposition import indexing
from fxkit.passes.decomposition.decompositions import Decomposition, Entry, function_of
from fxkit.passes.decomposition.recording import (
    short_name,
)
from fxkit.passes.decomposition.unrecordable import Unrecordable
from fxkit.torch_adapters.layers import backward_hooks_of, forward_hooks_of, forward_pre_hooks_of
from fxkit.torch_adapters.operators import HigherOrderOperator, OpOverload


class ToAten(Decomposition):
    """Every call as one of ATen's overloads."""

    def __init__(self, edit: EditSession, context: PassContext, name: str) -> None:
        super().__init__(edit, context, name)
        self.reads: dict[str, fx.Node] = {}

    def visit(self, node: fx.Node) -> None:
        """Decompose one node, or note why it stays as it is."""
        if node.op == "get_attr":
            self.reads.setdefault(str(node.target), node)
        super().visit(node)

    def entry(self, node: fx.Node, call: Call) -> Entry | None:
        """Return what calls overloads in the place of a call."""
        if composition_of(call.operator.overload) is not None:
            return self._compose
        if isinstance(node.target, _OVERLOADS) or call.name.startswith("guard."):
            return None
        if call.operator.overload is not None:
            return self._call_overload
        return self._python if call.name.startswith("python.") else self._run

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
            self.take_over(node, new)

    def _compose(self, node: fx.Node, call: Call) -> None:
        """Put what an operator was defined by in the place of its call."""
        self.replay(node, composition_of(call.operator.overload), (node.args, node.kwargs))

    def _multiply_by_reciprocal(self, node: fx.Node, call: Call) -> None:
        """Divide as `2 / x` does, which rounds twice."""
        divisor, dividend = call.arguments["other"], call.arguments["self"]
        inverse = self.edit.call(_aten.reciprocal.default, divisor, before=node, name="reciprocal")
        infer_type(inverse)
        product = self.edit.call(_aten.mul.Tensor, inverse, dividend, before=node, name="mul")
        self.take_over(node, product)

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
            self.take_over(node, indexing.read(self.edit, values[0], values[1], node))
        elif name == "getitem" and node.target is getattr:
            self.take_over(node, self.edit.call(operator.getitem, *values, before=node))
        elif is_tensor and name == "setitem":
            indexing.write(self.edit, values[0], values[1], values[2], node)
            self.give(node, None)
        elif is_tensor and name in _QUESTIONS and len(values) == 1:
            self.take_over(node, self.edit.call(_QUESTIONS[name], operand, before=node))
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
            self.take_over(user, new)
        if not node.users:
            self.edit.erase(node)
        elif node.op == "call_method":
            self.take_over(node, self.edit.call(getattr, tensor, "shape", before=node))

    def _python_method(self, node: fx.Node) -> None:
        """Call a method of a container or number as a function of Python."""
        bare = str(node.target).strip("_")
        function = getattr(operator, bare, None)
        if str(node.target).startswith("__") and function is not None:
            self.take_over(node, self.edit.call(function, *node.args, before=node))

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
    return any(forward_hooks_of(m) or forward_pre_hooks_of(m) or backward_hooks_of(m)
               for m in module.modules())  # fmt: skip


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
