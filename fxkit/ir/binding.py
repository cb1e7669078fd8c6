"""Bind the call of a function or method to the operator that it spells.

What no schema tells is in `op_table`; what a schema tells is bound by `schema`.
"""

from __future__ import annotations

import builtins
import functools
import operator
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fxkit.ir import op_table, schema
from fxkit.ir.attributes import Attribute
from fxkit.ir.call import OPERATOR_NAME, Call, Operator, operator_named
from fxkit.ir.python_signatures import (
    bound_arguments,
    named_arguments,
    named_arguments_of_method,
    signature_named,
    signature_of,
)
from fxkit.ir.types import TensorType, type_of
from fxkit.torch_adapters.layers import is_builtin_of_torch
from fxkit.torch_adapters.operators import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    overload_name_of,
    qualified_name_of,
    schema_of,
)

_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}  # as the schemas of losses number them


def bind_function(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """Bind a `call_function` node's call; what can't be told is opaque."""
    if isinstance(target, OpOverload):
        return _bind_overload(target, args, kwargs) or opaque_call(target, args, kwargs)
    if isinstance(target, OpOverloadPacket):
        return _bind_packet(target, args, kwargs) or opaque_call(target, args, kwargs)
    if isinstance(target, HigherOrderOperator) and target.name() in _FUNCTIONALISED:
        return _bind_functionalised(args, kwargs)
    return call_of(target, args, kwargs)


# They take an operator that writes, and return its results and what it would have written.
_FUNCTIONALISED = frozenset({"auto_functionalized", "auto_functionalized_v2"})


def _bind_functionalised(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    namespace, _, name = schema_of(args[0]).name.partition("::")
    return schemaless_call(f"functional.{namespace}.{name}", args, kwargs)


def call_of(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """Bind a call of any callable that is no ATen overload; what can't be told is opaque."""
    resolver = binder_of(target) if is_hashable(target) else None
    call = None if resolver is None else resolver(args, kwargs)
    return call or opaque_call(target, args, kwargs)


_Binder = Callable[[tuple[Any, ...], Mapping[str, Any]], "Call | None"]


_binders: weakref.WeakKeyDictionary[Any, _Binder | None] = weakref.WeakKeyDictionary()


def binder_of(target: Any) -> _Binder | None:
    """Choose how calls of a callable are bound: once, and without keeping it alive."""
    if isinstance(target, _DESCRIPTORS):  # which have no weak references, and live with a class
        return _binder_of_descriptor(target)
    try:
        return _binders[target]
    except KeyError:
        binder = _binders[target] = _new_binder(target)
        return binder
    except TypeError:
        return _new_binder(target)


_DESCRIPTORS = (types.MethodDescriptorType, types.WrapperDescriptorType)


@functools.lru_cache(maxsize=4096)
def _binder_of_descriptor(target: Any) -> _Binder | None:
    return _new_binder(target)


def _new_binder(target: Any) -> _Binder | None:
    name = getattr(target, "__name__", "")
    home = getattr(target, "__module__", None) or ""
    declared = getattr(target, OPERATOR_NAME, None)
    if isinstance(declared, str):
        return functools.partial(schemaless_call, declared)
    if home == "_operator":
        return functools.partial(_infix, name)
    if target is builtins.getattr:
        return _attribute
    if target in PYTHON_FUNCTIONS:
        return functools.partial(python_call, PYTHON_FUNCTIONS[target])
    if isinstance(target, types.FunctionType):
        return _python_function_binder(target, name)
    if isinstance(target, _DESCRIPTORS):
        if target is getattr(torch.Tensor, name, None):
            return functools.partial(_method, name)
        return None
    if isinstance(target, types.BuiltinFunctionType) and is_builtin_of_torch(target):
        return functools.partial(python_call if name in _PYTHON_METHODS else _aten, name)
    return None


def _python_function_binder(target: Any, name: str) -> _Binder | None:
    pure = functools.partial(_pure, f"torch.nn.functional.{name}")
    if target is getattr(F, name, None):
        if name in op_table.NN_FUNCTIONS:
            spelled = functools.partial(_spelled, name, op_table.NN_FUNCTIONS[name])
            if name not in op_table.PURE_FUNCTIONS:
                return spelled
            return lambda args, kwargs: spelled(args, kwargs) or pure(args, kwargs)
        if name in op_table.PURE_FUNCTIONS:
            return pure
        if name in op_table.PURE_WITHOUT_DROPOUT:
            return functools.partial(_without_dropout, target, pure)
    if target is getattr(torch, name, None):
        if name in op_table.TORCH_FUNCTIONS:
            return functools.partial(_spelled, name, op_table.TORCH_FUNCTIONS[name])
        if name in op_table.PURE_TORCH_FUNCTIONS:
            return functools.partial(_pure, f"torch.{name}")
    if target is getattr(torch.Tensor, name, None):
        return functools.partial(_method, name)
    return None


def _pure(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_method: bool = False
) -> Call | None:
    """Bind a call of a Python function that writes nothing, unless it is told where to."""
    if is_method:
        named = named_arguments_of_method(name, args, kwargs)
    else:
        named = named_arguments(signature_named(name), args, kwargs)
    if named is None:
        return schemaless_call(name, args, kwargs) if kwargs.get("out") is None else None
    return schemaless_call(name, (), named) if named.pop("out", None) is None else None


def _without_dropout(
    target: Any, pure: _Binder, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Call | None:
    """Bind a call of a function that draws no random numbers where one of its options says so."""
    named = named_arguments(signature_of(target), args, kwargs)
    if named is None:
        return None
    options = [named[name] for name in op_table.PURE_WITHOUT_DROPOUT[target.__name__]]
    is_off = any(type(option) in (bool, int, float) and not option for option in options)
    return pure(args, kwargs) if is_off else None


def bind_method(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """Bind a `call_method` node's call; what can't be told is opaque."""
    return _method(str(target), args, kwargs) or opaque_call(f"Tensor.{target}", args, kwargs)


def _method(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
    if not args or not _may_be_tensor(args[0]):
        return None
    if name in op_table.REFLECTED and len(args) == 2:
        return _aten(op_table.REFLECTED[name], (args[1], args[0]), kwargs)
    if name in op_table.CASTS and len(args) == 1:
        return _aten("to", (args[0], op_table.CASTS[name]), kwargs)
    if name in ("__getitem__", "__setitem__"):
        return python_call(name.strip("_"), args, kwargs)
    if name.startswith("__") and name.endswith("__"):
        return _dunder(name, args, kwargs)
    if name == "size" and len(args) == 1 and not kwargs:
        return python_call("getattr", (args[0], "shape"), {})
    if name == "type" and len(args) == 2 and isinstance(args[1], torch.dtype) and not kwargs:
        return _aten("to", args, {})
    if name in _PYTHON_METHODS:
        return python_call(name, args, kwargs)
    if name in op_table.PURE_TORCH_FUNCTIONS:
        return _pure(f"torch.{name}", args, kwargs, is_method=True)
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
        return python_call(name, args, kwargs)
    return _aten(packet, args, kwargs)


def _attribute(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
    """Resolve `getattr(x, "T")`."""
    if len(args) == 2 and args[1] in op_table.TENSOR_ATTRIBUTES and _may_be_tensor(args[0]):
        return _aten(op_table.TENSOR_ATTRIBUTES[args[1]], args[:1], {})
    return python_call("getattr", args, kwargs)


def _spelled(
    name: str, row: op_table.Spelling, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Call | None:
    """Resolve a Python function through its row of the table."""
    packet = row.packet or name
    if row.pack is not None:
        return _aten(packet, (*args[: row.pack], _operands(args[row.pack :])), kwargs)
    home = F if name in op_table.NN_FUNCTIONS else torch
    function = getattr(home, row.signature_of or name)
    given = bound_arguments(signature_of(function), args, kwargs)
    if given is None or any(given.pop(key, value) != value for key, value in row.require.items()):
        return None
    for parameter in row.drop:
        given.pop(parameter, None)
    if given.pop("inplace", False):
        packet += "_"
    if row.when is not None and given.pop(row.when[0], False):
        packet = row.when[1]
    if row.reduction and isinstance(given.get("reduction"), str):
        if given["reduction"] not in _REDUCTIONS:
            return None
        given["reduction"] = _REDUCTIONS[given["reduction"]]
    if packet == "embedding" and given.get("padding_idx") is None:
        given["padding_idx"] = -1
    renamed = {row.rename.get(key, key): value for key, value in given.items()}
    return _aten(packet, (), {**row.preset, **renamed})


def _operands(args: tuple[Any, ...]) -> list[Any]:
    """Return the operands of `einsum("ij", a, b)` and of `einsum("ij", [a, b])` as one list."""
    if len(args) == 1 and isinstance(args[0], (list, tuple)):
        return list(args[0])
    return list(args)


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


def _bind_packet(packet: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
    """Bind a call of an operator that leaves the overload to torch."""
    if qualified_name_of(packet).startswith("aten::"):
        return _aten(packet.__name__, args, kwargs)
    overloads = [getattr(packet, name) for name in packet.overloads()]
    bound = (_bind_overload(overload, args, kwargs) for overload in overloads)
    return next((call for call in bound if call is not None), None)


def _bind_overload(overload: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
    namespace, _, packet = schema_of(overload).name.partition("::")
    if namespace == "aten" and packet in op_table.ALIASES:
        same = getattr(torch.ops.aten, op_table.ALIASES[packet], None)
        overload = getattr(same, overload_name_of(overload), overload)
    bound = schema.signature_of(overload).bind(args, kwargs, lenient=True)
    if bound is None:
        return None
    if namespace != "aten":
        return Call(operator_named(f"{namespace}.{packet}", overload), bound)
    return _named(packet, overload, bound)


def fixed_operator(overload: Any) -> Operator | None:
    """Return the operator of every call of an overload; None when it depends on the arguments."""
    namespace, _, packet = schema_of(overload).name.partition("::")
    if namespace != "aten":
        return operator_named(f"{namespace}.{packet}", overload)
    if packet in op_table.ALIASES or packet == "rsub":
        return None
    if packet in op_table.REDUCES_TO or packet in op_table.EXTENDS_TO:
        return None
    optional = {op_table.NONE_SAYS_NOTHING.get(packet), "dim" if _reduces_all(packet) else None}
    if any(argument.name in optional for argument in schema_of(overload).arguments):
        return None
    return _operator(packet, overload)


def _operator(packet: str, overload: Any) -> Operator:
    suffix = "_out" if is_out_variant(overload) else ""
    return operator_named(f"aten.{packet}{suffix}", overload)


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
    optional = op_table.NONE_SAYS_NOTHING.get(packet)
    if optional in bound and bound[optional] is None and "out" not in bound:
        plain = _aten(packet, (), {key: v for key, v in bound.items() if key != optional})
        if plain is not None:
            return plain
    is_over_all = bound.get("dim", ()) is None and bound.get("keepdim") is False
    if is_over_all and "out" not in bound and _reduces_all(packet):
        whole = _aten(packet, (), {k: v for k, v in bound.items() if k not in ("dim", "keepdim")})
        if whole is not None:
            return whole
    if packet in op_table.EXTENDS_TO:
        target, added = op_table.EXTENDS_TO[packet]
        extended = _aten(target, (), {**bound, **added})
        if extended is not None:
            return extended
    if packet == "rsub":
        swapped = _aten("sub", (bound["other"], bound["self"]), {"alpha": bound["alpha"]})
        if swapped is not None:
            return swapped
    return Call(_operator(packet, overload), bound)


@functools.cache
def _reduces_all(packet: str) -> bool:
    """Tell whether no axis, which says all of them, is left out by an overload of its own."""
    known = [signature.names for signature in schema.signatures(packet)]
    return any({"dim", "keepdim"} <= names for names in known) and any(
        not names & {"dim", "keepdim", "out"} for names in known
    )


def schemaless_call(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """Return a call of an operator that has a name, and no schema."""
    arguments = {str(position): value for position, value in enumerate(args)}
    return Call(operator_named(name), {**arguments, **kwargs})


def python_call(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """Return a call of plain Python, on numbers and containers."""
    return schemaless_call(f"python.{name}", args, kwargs)


def opaque_call(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """Return a call of which nothing is known but its name and arguments."""
    if isinstance(target, str):
        name = target
    else:
        if _is_python_of_torch(target):
            named = named_arguments(signature_of(target), args, kwargs)
            args, kwargs = (args, kwargs) if named is None else ((), named)
        name = getattr(target, "__qualname__", None) or type(target).__qualname__
        home = getattr(target, "__module__", None)
        name = f"{home}.{name}" if home and home != "builtins" else name
    return schemaless_call(f"opaque.{name}", args, kwargs)


def _is_python_of_torch(target: Any) -> bool:
    return isinstance(target, types.FunctionType) and target.__module__.startswith("torch.")


def _may_be_tensor(value: Any) -> bool:
    if isinstance(value, fx.Node):
        known = type_of(value)
        return known is None or isinstance(known, TensorType)
    return isinstance(value, (torch.Tensor, Attribute))


def is_hashable(value: Any) -> bool:
    """Tell whether a callable can be looked up in a dictionary."""
    return getattr(type(value), "__hash__", None) is not None


@functools.cache
def is_out_variant(overload: Any) -> bool:
    """Tell whether an overload writes its result into arguments named in the call."""
    return any(argument.is_out for argument in schema_of(overload).arguments)


# Python functions without effects on numbers and containers.
PYTHON_FUNCTIONS = {
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
