"""Find calls that can't run: too few operands, too many, or names that the function does not know.

Only what is certain is a fault. Types of operands are not looked at, and a function in C, whose
names of arguments its schemas do not all tell, is held against all its overloads at once.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx, nn

from fxkit.ir.attributes import find_attribute
from fxkit.ir.op_table import ALIASES, PARAMETER_NAMES
from fxkit.ir.types import TensorType, type_of
from fxkit.torch_adapters.fx_nodes import args_of, kwargs_of
from fxkit.torch_adapters.layers import forward_pre_hooks_of, is_builtin_of_torch
from fxkit.torch_adapters.operators import OpOverload, OpOverloadPacket, schema_of

# What Python's side of torch takes beside the names of the schemas.
_PYTHON_NAMES = frozenset(
    """
    input other out axis keepdims dtype device layout requires_grad pin_memory memory_format names
    generator size sizes shape copy a_min a_max x1 x2 non_blocking as_tuple
    """.split()
).union(*[{name, *names} for name, names in PARAMETER_NAMES.items()])


def unfit_call(gm: fx.GraphModule, node: fx.Node) -> str | None:
    """Return what a node's function takes, when its call can't run; None when it may.

    Args:
        gm: The module.
        node: Any node.

    Returns:
        The function's schema, or its signature.

    Cost: that of the node's own operands.
    """
    args, kwargs = args_of(node), kwargs_of(node)
    if node.op == "call_function":
        return _unfit_function(node.target, args, kwargs)
    if node.op == "call_method":
        of_tensor = args and isinstance(args[0], fx.Node) and type_of(args[0])
        is_told = isinstance(of_tensor, TensorType)
        return _unfit_method(str(node.target), args, kwargs) if is_told else None
    if node.op == "call_module":
        module = find_attribute(gm, str(node.target))
        if isinstance(module, nn.Module) and not _is_hooked(module):
            forward = inspect.getattr_static(type(module), "forward", None)
            if isinstance(forward, types.FunctionType):
                return _unfit_python(forward, (module, *args), kwargs)
    return None


def _is_hooked(module: nn.Module) -> bool:
    return bool(forward_pre_hooks_of(module)) or "forward" in module.__dict__


def _unfit_function(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    if isinstance(target, OpOverload):
        return _unfit_overloads((schema_of(target),), args, kwargs, is_exact=True)
    if isinstance(target, OpOverloadPacket):
        return _unfit_overloads(_schemas(target), args, kwargs, is_exact=True)
    if isinstance(target, types.FunctionType):
        return _unfit_python(target, args, kwargs)
    if isinstance(target, types.BuiltinFunctionType) and is_builtin_of_torch(target):
        return _unfit_overloads(_schemas_named(target.__name__), args, kwargs, is_exact=False)
    return None


def _unfit_method(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    found = inspect.getattr_static(torch.Tensor, name, None)
    if isinstance(found, types.FunctionType):
        return _unfit_python(found, args, kwargs)
    if isinstance(found, types.MethodDescriptorType) and not name.startswith("__"):
        return _unfit_overloads(_schemas_named(name), args, kwargs, is_exact=False)
    return None


def _unfit_python(
    function: types.FunctionType, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str | None:
    if "__signature__" in vars(function):
        return None
    signature = inspect.signature(function, follow_wrapped=False)
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return f"{function.__name__}{signature}"
    return None


def _schemas(packet: Any) -> tuple[Any, ...]:
    return tuple(schema_of(getattr(packet, name)) for name in packet.overloads())


@functools.cache
def _schemas_named(name: str) -> tuple[Any, ...]:
    packet = getattr(torch.ops.aten, ALIASES.get(name, name), None)
    return _schemas(packet) if isinstance(packet, OpOverloadPacket) else ()


def _unfit_overloads(
    schemas: Collection[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_exact: bool
) -> str | None:
    if not schemas or any(_takes(schema, args, kwargs, is_exact) for schema in schemas):
        return None
    if not is_exact and _is_known_to_some(schemas, args, kwargs):
        return None
    shown = [str(schema) for schema in schemas]
    return " or ".join(shown[:3]) + (f" or {len(shown) - 3} others" if shown[3:] else "")


def _takes(schema: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_exact: bool) -> bool:
    """Tell whether the counts and names of operands are those of an overload."""
    arguments = schema.arguments
    if len(args) > _places(schema) and (is_exact or not _packs(schema)):
        return False
    given = {argument.name for argument in arguments[: len(args)]}
    names = {argument.name for argument in arguments}
    if any(name in given or name not in names for name in kwargs):
        return False
    given.update(kwargs)
    return all(a.name in given or a.has_default_value() or a.is_out for a in arguments)


def _is_known_to_some(
    schemas: Collection[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Tell whether a call may be right by names that are not in the schemas."""
    names = _PYTHON_NAMES.union(*[{a.name for a in schema.arguments} for schema in schemas])
    if any(name not in names for name in kwargs):
        return False
    count = len(args) + len(kwargs)
    least = min(sum(not a.has_default_value() for a in schema.arguments) for schema in schemas)
    most = max(map(_places, schemas))
    return count >= least and (len(args) <= most or any(map(_packs, schemas)))


def _places(schema: Any) -> int:
    """Return how many operands an overload takes by position, at most."""
    return sum(not argument.is_out for argument in schema.arguments)


def _packs(schema: Any) -> bool:
    """Tell whether an overload takes a list, which Python may spread over its last operands."""
    return any("[" in str(argument.type) or "List" in str(argument.type)
               for argument in schema.arguments)  # fmt: skip
