"""One operator, one identity, whatever its spelling.

`torch.relu(x)`, `F.relu(x)`, `x.relu()`, `nn.ReLU()(x)`, `F.relu(x, inplace=False)` and
`aten.relu.default(x)` are calls of one operator, `aten.relu`. `resolve` gives a node's operator and
its arguments, bound by the schema's names with the defaults filled in, once, in a cache.

In-place and `out=` variants are operators of their own (`aten.relu_`, `aten.add_out`), since they
have effects. What can't be told is opaque, and opaque means effectful.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import operator
import types
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn import _reduction

from fxkit.ir import op_table, schema
from fxkit.ir.attributes import Attribute, find_attribute
from fxkit.ir.recipe import Recipe, form_of, learn
from fxkit.ir.types import KEY as TYPE_KEY
from fxkit.ir.types import TensorType, type_of

__all__ = ["Attribute", "Call", "Operator", "operator_name", "operator_named", "resolve"]

_CACHE = "_fxkit_call"

# A function with this attribute is the operator that the attribute names. One in the namespace
# `guard` only checks: it may raise, and does nothing else.
OPERATOR_NAME = "fxkit_operator"


@dataclass(frozen=True, slots=True, eq=False)
class Operator:
    """An operator: the same object for every spelling, so that `is` compares.

    Attributes:
        name: `aten.<packet>` for ATen, `python.<name>` for plain Python on numbers and containers,
            `torch.nn.functional.<name>` for what has no single ATen operator, `opaque.<name>` for
            a callable of which nothing is known.
        overload: The ATen overload that the call binds to, if there is one.
    """

    name: str
    overload: Any = None

    @property
    def is_opaque(self) -> bool:
        """Whether nothing is known of what a call does."""
        return self.name.startswith("opaque.")

    @property
    def schema(self) -> Any:
        """The ATen schema (`torch.FunctionSchema`), or None."""
        return None if self.overload is None else self.overload._schema

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Call:
    """What a node computes: an operator and its arguments.

    Attributes:
        operator: The operator.
        arguments: Schema name → value: an `fx.Node`, a constant, an `Attribute`, or lists of them.
            For an operator without schema: the position as text, or the keyword.
    """

    operator: Operator
    arguments: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name of the operator."""
        return self.operator.name


def resolve(node: fx.Node) -> Call | None:
    """Return the operator that a node calls and its arguments.

    Cost: about 15 µs for a node seen the first time, below 2 µs after that. The cache lives with
    the node and is checked against its target and arguments, so that edits can't make it stale.

    Args:
        node: Any node.

    Returns:
        The call, or None for a placeholder, a `get_attr` or the output.
    """
    if node.op not in _RESOLVERS:
        return _resolve_module(node) if node.op == "call_module" else None
    cached = node.__dict__.get(_CACHE)
    if (
        cached is not None
        and cached[0] is node.target
        and cached[1] is node.args
        and cached[2] is node.kwargs
        and (cached[3] or not _is_typed(node))
    ):
        return cached[4]
    call = _resolve(node.op, node.target, node.args, node.kwargs)
    node.__dict__[_CACHE] = (node.target, node.args, node.kwargs, _is_typed(node), call)
    return call


def operator_name(spelling: Any) -> str:
    """Return the name of an operator given in any spelling, without arguments.

    Args:
        spelling: A function (`F.relu`, `torch.relu`, `operator.add`), a tensor method
            (`torch.Tensor.relu`), a module class (`nn.ReLU`), an ATen overload or packet, a name
            (`"aten.relu"`, `"relu"`), or any other callable.
    """
    if isinstance(spelling, str):
        packet = spelling.removeprefix("aten.")
        is_aten = bool(schema.signatures(op_table.ALIASES.get(packet, packet)))
        return f"aten.{op_table.ALIASES.get(packet, packet)}" if is_aten else spelling
    if isinstance(spelling, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        namespace, packet = str(spelling).split(".")[:2]
        return operator_name(packet) if namespace == "aten" else f"{namespace}.{packet}"
    if isinstance(spelling, type) and issubclass(spelling, nn.Module):
        function, _ = op_table.MODULES.get(spelling.__name__, (None, ()))
        if function is not None and getattr(nn, spelling.__name__, None) is spelling:
            home = torch if function.startswith("torch.") else F
            return operator_name(getattr(home, function.removeprefix("torch.")))
        return f"opaque.{spelling.__module__}.{spelling.__qualname__}"
    name = getattr(spelling, "__name__", type(spelling).__name__)
    home = getattr(spelling, "__module__", None) or ""
    if _is_hashable(spelling) and spelling in _PYTHON_FUNCTIONS:
        return f"python.{_PYTHON_FUNCTIONS[spelling]}"
    if home == "_operator":
        return operator_name(op_table.INFIX.get(name) or f"python.{name}")
    if spelling is getattr(F, name, None) and name in op_table.NN_FUNCTIONS:
        return operator_name(op_table.NN_FUNCTIONS[name].packet or name)
    if spelling is getattr(F, name, None) and name in op_table.PURE_FUNCTIONS:
        return f"torch.nn.functional.{name}"
    if _function_resolver(spelling) is not None:
        return operator_name(op_table.REFLECTED.get(name, name))
    return _opaque(spelling, (), {}).name


@functools.cache
def operator_named(name: str, overload: Any = None) -> Operator:
    """Return the one `Operator` object of a name and overload."""
    return Operator(name, overload)


def is_out_variant(overload: Any) -> bool:
    """Tell whether an overload writes its result into arguments named in the call."""
    return torch.Tag.out in overload.tags


_RECIPES: dict[Hashable, Recipe | None] = {}


def _resolve(op: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """Resolve a call through the recipe of its form, if it has one."""
    resolver = _RESOLVERS[op]
    form = form_of(target, args, kwargs) if _is_hashable(target) else None
    if form is None:
        return resolver(target, args, kwargs)
    recipe = _RECIPES.get(form, _UNKNOWN)
    if recipe is _UNKNOWN:
        recipe = learn(args, kwargs, functools.partial(resolver, target))
        if recipe is None or not recipe.operator.is_opaque:
            _RECIPES[form] = recipe
    if recipe is None:
        return resolver(target, args, kwargs)
    return Call(recipe.operator, recipe.arguments(args, kwargs))


_UNKNOWN: Any = object()


def _is_typed(node: fx.Node) -> bool:
    for operand in node._input_nodes:
        if TYPE_KEY not in operand.meta and type_of(operand) is None:
            return False
    return True


def _resolve_function(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    if isinstance(target, torch._ops.OpOverload):
        return _bind_overload(target, args, kwargs) or _opaque(target, args, kwargs)
    if isinstance(target, torch._ops.OpOverloadPacket) and target._qualified_op_name.startswith(
        "aten::"
    ):
        return _aten(target.__name__, args, kwargs) or _opaque(target, args, kwargs)
    return _call_function(target, args, kwargs)


def _call_function(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    resolver = _function_resolver(target) if _is_hashable(target) else None
    call = None if resolver is None else resolver(args, kwargs)
    return call or _opaque(target, args, kwargs)


_Resolver = Callable[[tuple[Any, ...], Mapping[str, Any]], "Call | None"]


@functools.cache
def _function_resolver(target: Any) -> _Resolver | None:
    """Choose, once for each callable, how its calls are bound."""
    name = getattr(target, "__name__", "")
    home = getattr(target, "__module__", None) or ""
    declared = getattr(target, OPERATOR_NAME, None)
    if isinstance(declared, str):
        return functools.partial(_schemaless, declared)
    if home == "_operator":
        return functools.partial(_infix, name)
    if target is builtins.getattr:
        return _attribute
    if target in _PYTHON_FUNCTIONS:
        return functools.partial(_python, _PYTHON_FUNCTIONS[target])
    if isinstance(target, types.FunctionType):
        return _python_function_resolver(target, name)
    if isinstance(target, (types.MethodDescriptorType, types.WrapperDescriptorType)):
        if target is getattr(torch.Tensor, name, None):
            return functools.partial(_method, name)
        return None
    if isinstance(target, types.BuiltinFunctionType) and _is_torch_builtin(target):
        return functools.partial(_python if name in _PYTHON_METHODS else _aten, name)
    return None


def _python_function_resolver(target: Any, name: str) -> _Resolver | None:
    if target is getattr(F, name, None):
        if name in op_table.NN_FUNCTIONS:
            return functools.partial(_spelled, name, op_table.NN_FUNCTIONS[name])
        if name in op_table.PURE_FUNCTIONS:
            return functools.partial(_schemaless, f"torch.nn.functional.{name}")
    if target is getattr(torch, name, None):
        if name in op_table.TORCH_FUNCTIONS:
            return functools.partial(_spelled, name, op_table.TORCH_FUNCTIONS[name])
        if name in op_table.PURE_TORCH_FUNCTIONS:
            return functools.partial(_schemaless, f"torch.{name}")
    if target is getattr(torch.Tensor, name, None):
        return functools.partial(_method, name)
    return None


def _is_torch_builtin(target: Any) -> bool:
    home = getattr(target, "__module__", None) or ""
    variable_functions = getattr(torch._C, "_VariableFunctions", None)
    return home.startswith("torch._C") or target is getattr(
        variable_functions, target.__name__, None
    )


def _resolve_method(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    return _method(str(target), args, kwargs) or _opaque(f"Tensor.{target}", args, kwargs)


def _method(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
    if not args or not _may_be_tensor(args[0]):
        return None
    if name in op_table.REFLECTED and len(args) == 2:
        return _aten(op_table.REFLECTED[name], (args[1], args[0]), kwargs)
    if name in op_table.CASTS and len(args) == 1:
        return _aten("to", (args[0], op_table.CASTS[name]), kwargs)
    if name in ("__getitem__", "__setitem__"):
        return _python(name.strip("_"), args, kwargs)
    if name.startswith("__") and name.endswith("__"):
        return _dunder(name, args, kwargs)
    if name == "size" and len(args) == 1 and not kwargs:
        return _python("getattr", (args[0], "shape"), {})
    if name in _PYTHON_METHODS:
        return _python(name, args, kwargs)
    if name in op_table.PURE_TORCH_FUNCTIONS:
        return _schemaless(f"torch.{name}", args, kwargs)
    if name == "to" and len(args) > 1 and isinstance(args[1], (str, torch.device)):
        names = ("device", "dtype", "non_blocking", "copy")
        return _aten("to", args[:1], {**dict(zip(names, args[1:], strict=False)), **kwargs})
    return _aten(name, args, kwargs, is_method=True)


def _dunder(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
    bare = name.strip("_")
    packet = op_table.INFIX.get(bare) or op_table.INFIX.get(bare + "_")
    return _aten(packet, args, kwargs) if packet else None


def _infix(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
    """Resolve a function of the `operator` module."""
    packet = op_table.INFIX.get(name)
    if not packet or not any(_may_be_tensor(arg) for arg in args):
        return _python(name, args, kwargs)
    return _aten(packet, args, kwargs)


def _attribute(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
    """Resolve `getattr(x, "T")`."""
    if len(args) == 2 and args[1] in op_table.TENSOR_ATTRIBUTES and _may_be_tensor(args[0]):
        return _aten(op_table.TENSOR_ATTRIBUTES[args[1]], args[:1], {})
    return _python("getattr", args, kwargs)


def _spelled(
    name: str, row: op_table.Spelling, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Call | None:
    """Resolve a Python function through its row of the table."""
    packet = row.packet or name
    if row.pack is not None:
        return _aten(packet, (*args[: row.pack], _operands(args[row.pack :])), kwargs)
    home = F if name in op_table.NN_FUNCTIONS else torch
    given = _bind_python(getattr(home, row.signature_of or name), args, kwargs)
    if given is None or any(given.pop(key, value) != value for key, value in row.require.items()):
        return None
    for parameter in row.drop:
        given.pop(parameter, None)
    if given.pop("inplace", False):
        packet += "_"
    if row.when is not None and given.pop(row.when[0], False):
        packet = row.when[1]
    if row.reduction and isinstance(given.get("reduction"), str):
        if given["reduction"] not in ("none", "mean", "sum"):
            return None
        given["reduction"] = _reduction.get_enum(given["reduction"])
    if packet == "embedding" and given.get("padding_idx") is None:
        given["padding_idx"] = -1
    renamed = {row.rename.get(key, key): value for key, value in given.items()}
    return _aten(packet, (), {**row.preset, **renamed})


def _operands(args: tuple[Any, ...]) -> list[Any]:
    """Return the operands of `einsum("ij", a, b)` and of `einsum("ij", [a, b])` as one list."""
    if len(args) == 1 and isinstance(args[0], (list, tuple)):
        return list(args[0])
    return list(args)


def _bind_python(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    try:
        bound = _python_signature(function).bind(*args, **kwargs)
    except TypeError:
        return None
    bound.apply_defaults()
    return dict(bound.arguments)


@functools.cache
def _python_signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


def _aten(
    packet: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_method: bool = False
) -> Call | None:
    """Bind a call to the first overload that fits; packing integers into a list comes last."""
    packet = op_table.ALIASES.get(packet, packet)
    candidates = schema.signatures(packet)
    for lenient in (False, True):
        for signature in candidates:
            bound = signature.bind(args, kwargs, lenient, is_method)
            if bound:
                return _named(packet, signature.overload, bound)
        for signature in candidates:
            packed = signature.pack(args)
            if packed is None:
                continue
            bound = signature.bind(packed, kwargs, lenient, is_method)
            if bound:
                return _named(packet, signature.overload, bound)
    return None


def _bind_overload(overload: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
    namespace, _, packet = overload._schema.name.partition("::")
    if namespace == "aten" and packet in op_table.ALIASES:
        same = getattr(torch.ops.aten, op_table.ALIASES[packet], None)
        overload = getattr(same, overload._overloadname, overload)
    bound = schema.signature_of(overload).bind(args, kwargs, lenient=True)
    if bound is None:
        return None
    if namespace != "aten":
        return Call(operator_named(f"{namespace}.{packet}", overload), bound)
    return _named(packet, overload, bound)


def _named(packet: str, overload: Any, bound: dict[str, Any]) -> Call:
    packet = op_table.ALIASES.get(packet, packet)
    if "kernel_size" in bound and bound.get("stride") == []:
        bound["stride"] = bound["kernel_size"]
    if packet in op_table.REDUCES_TO:
        target, fixed = op_table.REDUCES_TO[packet]
        if all(bound.get(key) == value for key, value in fixed.items()):
            kept = {key: value for key, value in bound.items() if key not in fixed}
            reduced = _aten(target, (), kept)
            if reduced is not None:
                return reduced
    if packet in op_table.EXTENDS_TO:
        target, added = op_table.EXTENDS_TO[packet]
        extended = _aten(target, (), {**bound, **added})
        if extended is not None:
            return extended
    if packet == "rsub":
        swapped = _aten("sub", (bound["other"], bound["self"]), {"alpha": bound["alpha"]})
        if swapped is not None:
            return swapped
    suffix = "_out" if is_out_variant(overload) else ""
    return Call(operator_named(f"aten.{packet}{suffix}", overload), bound)


def _resolve_module(node: fx.Node) -> Call:
    """Resolve a called module through the function that its forward calls."""
    root = node.graph.owning_module
    path = str(node.target)
    module = find_attribute(root, path)
    cls = type(module)
    name = f"{cls.__module__}.{cls.__qualname__}"
    if isinstance(module, fx.GraphModule):
        return _opaque("torch.fx.GraphModule", node.args, node.kwargs)
    if not isinstance(module, nn.Module) or _has_hooks(module):
        return _opaque(name, node.args, node.kwargs)
    if cls is nn.Identity:
        return _python("identity", node.args[:1], {})
    if getattr(nn, cls.__name__, None) is not cls or cls.__name__ not in op_table.MODULES:
        return _opaque(name, node.args, node.kwargs)
    if getattr(module, "padding_mode", "zeros") != "zeros" or node.kwargs or len(node.args) != 1:
        return _opaque(name, node.args, node.kwargs)
    function, attributes = op_table.MODULES[cls.__name__]
    home = torch if function.startswith("torch.") else F
    call = _call_function(
        getattr(home, function.removeprefix("torch.")),
        node.args,
        {attribute: _module_value(module, path, attribute) for attribute in attributes},
    )
    return _opaque(name, node.args, node.kwargs) if call.operator.is_opaque else call


def _module_value(module: nn.Module, path: str, attribute: str) -> Any:
    value = getattr(module, attribute)
    if attribute == "training" and hasattr(module, "running_mean"):
        return value or module.running_mean is None
    return Attribute(f"{path}.{attribute}") if isinstance(value, torch.Tensor) else value


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def _schemaless(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    arguments = {str(position): value for position, value in enumerate(args)}
    return Call(operator_named(name), {**arguments, **kwargs})


def _python(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    return _schemaless(f"python.{name}", args, kwargs)


def _opaque(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    if isinstance(target, str):
        name = target
    else:
        name = getattr(target, "__qualname__", None) or type(target).__qualname__
        home = getattr(target, "__module__", None)
        name = f"{home}.{name}" if home and home != "builtins" else name
    return _schemaless(f"opaque.{name}", args, kwargs)


def _may_be_tensor(value: Any) -> bool:
    if isinstance(value, fx.Node):
        known = type_of(value)
        return known is None or isinstance(known, TensorType)
    return isinstance(value, (torch.Tensor, Attribute))


def _is_hashable(value: Any) -> bool:
    return getattr(type(value), "__hash__", None) is not None


_RESOLVERS: dict[str, Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Call]] = {
    "call_function": _resolve_function,
    "call_method": _resolve_method,
}

# Python functions without effects on numbers and containers.
_PYTHON_FUNCTIONS = {
    len: "len", int: "int", float: "float", bool: "bool", min: "min", max: "max", sum: "sum",
    round: "round", tuple: "tuple", list: "list", slice: "slice", isinstance: "isinstance",
    operator.index: "index",
}  # fmt: skip

# Methods of tensors whose result is a Python value and which ATen has no callable schema for.
_PYTHON_METHODS = frozenset(
    """
    dim ndimension numel nelement element_size is_floating_point is_complex stride
    is_contiguous storage_offset data_ptr get_device type is_pinned
    """.split()
)
