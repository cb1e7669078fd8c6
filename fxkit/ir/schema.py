"""Bind the arguments of a call to an ATen schema, with the leniency of torch's Python side.

`torch.sum(x, -1)`, `x.sum(dim=(-1,))` and `aten.sum.dim_IntList(x, [-1], False)` bind to the same
dictionary, whose keys are the schema's names and whose defaults are filled in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxkit.ir.attributes import Attribute
from fxkit.ir.op_table import NUMBERS_WITHOUT_DTYPE, PARAMETER_NAMES
from fxkit.ir.symbols import Symbol
from fxkit.ir.types import TensorType, type_of
from fxkit.torch_adapters.operators import OpOverloadPacket, overload_name_of, schema_of

_REQUIRED = object()
_MISFIT = object()


@dataclass(frozen=True, slots=True)
class _Parameter:
    name: str
    kind: str
    optional: bool
    length: int | None
    keyword_only: bool
    default: Any
    is_float: bool


class Signature:
    """What one overload accepts.

    Args:
        overload: The ATen overload.
    """

    def __init__(self, overload: Any) -> None:
        self.overload = overload
        packet = schema_of(overload).name.partition("::")[2].removesuffix("_")
        has_dtype = packet not in NUMBERS_WITHOUT_DTYPE
        self.parameters = tuple(_parameter(a, has_dtype) for a in schema_of(overload).arguments)
        self.positional = tuple(p for p in self.parameters if not p.keyword_only)
        self.of_method = tuple(sorted(self.positional, key=lambda p: p.name != "self"))
        self.names = frozenset(p.name for p in self.parameters)
        self.floats = frozenset(p.name for p in self.parameters if p.is_float)
        self._defaults = {p.name: p.default for p in self.parameters}
        self._required = [p.name for p in self.parameters if p.default is _REQUIRED]
        self._outs = tuple(a.name for a in schema_of(overload).arguments if a.is_out)

    def bind(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        lenient: bool,
        is_method: bool = False,
    ) -> dict[str, Any] | None:
        """Bind a call, or return None when it does not fit this overload.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments, under torch's Python names or the schema's.
            lenient: Accept a number where a tensor belongs (`1 - x`), and a node of unknown type
                where a number belongs.
            is_method: Take the first argument for `self`, wherever the schema has it:
                `x.where(condition, y)` is `where(condition, x, y)`.
        """
        positional = self.of_method if is_method else self.positional
        if len(args) > len(positional):
            return None
        kwargs = self._apart(kwargs)
        bound = dict(self._defaults)
        for parameter, value in zip(positional, args, strict=False):
            value = _fit(parameter, value, lenient)
            if value is _MISFIT:
                return None
            bound[parameter.name] = value
        taken = {p.name for p in positional[: len(args)]}
        for given, value in kwargs.items():
            parameter = self._named(given)
            if parameter is None or parameter.name in taken:
                return None
            value = _fit(parameter, value, lenient)
            if value is _MISFIT:
                return None
            bound[parameter.name] = value
        if any(bound[name] is _REQUIRED for name in self._required):
            return None
        return bound

    def pack(self, args: Sequence[Any]) -> Sequence[Any] | None:
        """Gather the last arguments into one list: `x.view(2, 3)` → `x.view([2, 3])`.

        A single node of unknown type is taken for the whole list: `x.view(shape)`.
        """
        position = len(self.positional) - 1
        if position < 0 or self.positional[position].kind not in ("int[]", "Tensor[]"):
            return None
        packed = list(args[position:])
        if not packed or (
            len(packed) == 1 and isinstance(packed[0], fx.Node) and type_of(packed[0]) is None
        ):
            return None
        return (*args[:position], packed)

    def _apart(self, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take `out=(values, indices)` apart, which a schema has as several parameters."""
        outs = kwargs.get("out")
        if not isinstance(outs, (list, tuple)) or not 1 < len(self._outs) == len(outs):
            return kwargs
        others = {name: value for name, value in kwargs.items() if name != "out"}
        return {**others, **dict(zip(self._outs, outs, strict=True))}

    def _named(self, name: str) -> _Parameter | None:
        names = (name,) if name in self.names else PARAMETER_NAMES.get(name, ())
        return next((p for p in self.parameters if p.name in names), None)


@functools.cache
def signatures(packet: str) -> tuple[Signature, ...]:
    """Return the overloads of `aten.<packet>` that Python can reach; none when there is no such."""
    op_packet = getattr(torch.ops.aten, packet, None)
    if not isinstance(op_packet, OpOverloadPacket):  # such as the namespace's `name`, a text
        return ()
    overloads = [getattr(op_packet, name) for name in op_packet.overloads()]
    return tuple(Signature(overload) for overload in overloads if _is_reachable(overload))


@functools.cache
def signature_of(overload: Any) -> Signature:
    """Return the signature of one overload."""
    return Signature(overload)


def _is_reachable(overload: Any) -> bool:
    """Leave out what only TorchScript calls: named dimensions, scalar and list arithmetic."""
    name = overload_name_of(overload)
    if name.startswith("prim_") or name.endswith("hacked_twin"):
        return False
    schema = schema_of(overload)
    kinds = [str(a.real_type) for a in schema.arguments]
    if any(kind.startswith("List[t") for kind in kinds):
        return False
    if any(map(_is_dimension_name, (a.name for a in schema.arguments), kinds)):
        return False
    returns = [str(r.real_type) for r in schema.returns]
    return any("Tensor" in kind for kind in (*kinds, *returns))


def _is_dimension_name(name: str, kind: str) -> bool:
    """Tell names of dimensions, which a schema shows as strings, from strings such as a mode."""
    return "List[str]" in kind or ("dim" in name and "str" in kind)


_KINDS = {
    "Tensor": "Tensor",
    "List[Tensor]": "Tensor[]",
    "List[Optional[Tensor]]": "Tensor[]",
    "int": "int",
    "SymInt": "int",
    "float": "float",
    "bool": "bool",
    "number": "number",
    "List[int]": "int[]",
    "List[SymInt]": "int[]",
    "List[float]": "float[]",
    "List[bool]": "bool[]",
    "List[number]": "float[]",
    "str": "str",
    "ScalarType": "dtype",
    "Device": "device",
    "Layout": "layout",
    "MemoryFormat": "memory_format",
}


def _parameter(argument: Any, has_dtype: bool) -> _Parameter:
    """Return what a schema says of a parameter.

    Args:
        argument: The parameter.
        has_dtype: Whether numbers may change the dtype of the operator's results.
    """
    text = str(argument.real_type)
    optional = text.startswith("Optional[")
    if optional:
        text = text.removeprefix("Optional[")[:-1]
    default = argument.default_value if argument.has_default_value() else _REQUIRED
    kind = _KINDS.get(text, "any")
    is_float = kind == "float" or (kind == "number" and not has_dtype)
    if is_float:
        default = as_float(default)
    return _Parameter(
        argument.name, kind, optional, argument.N, argument.kwarg_only, default, is_float
    )


# Up to here each integer is a float64.
_EXACT = 1 << 53


def as_float(value: Any) -> Any:
    """Return an integer as the float that it is where a float belongs."""
    return float(value) if type(value) is int and abs(value) <= _EXACT else value


def _fit(parameter: _Parameter, value: Any, lenient: bool) -> Any:
    """Return the value in the schema's form, or `_MISFIT`."""
    if value is None:
        if parameter.optional:
            return None
        return _MISFIT if parameter.default is _REQUIRED else parameter.default
    check = _CHECKS.get(parameter.kind)
    if check is None:
        return value
    fit = check(value, parameter.length, lenient)
    return as_float(fit) if parameter.is_float else fit


def _fit_tensor(value: Any, _length: int | None, lenient: bool) -> Any:
    if isinstance(value, fx.Node):
        return value if is_tensor_like(value) else (value if lenient else _MISFIT)
    if isinstance(value, (Attribute, torch.Tensor)):
        return value
    is_number = isinstance(value, (bool, int, float, complex))
    return value if lenient and is_number else _MISFIT


def _fit_tensors(value: Any, _length: int | None, lenient: bool) -> Any:
    if isinstance(value, fx.Node):
        return (
            value
            if type_of(value) is None or isinstance(type_of(value), (list, tuple))
            else (_MISFIT)
        )
    if not isinstance(value, (list, tuple)):
        return _MISFIT
    ok = all(v is None or _fit_tensor(v, None, lenient) is not _MISFIT for v in value)
    return list(value) if ok else _MISFIT


def _fit_number(kinds: tuple[type, ...]) -> Callable[[Any, int | None, bool], Any]:
    def fit(value: Any, _length: int | None, lenient: bool) -> Any:
        if isinstance(value, fx.Node):
            known = type_of(value)
            if known is None or (isinstance(known, TensorType) and not known.shape):
                return value if lenient else _MISFIT
            return value if isinstance(known, kinds) else _MISFIT
        return value if isinstance(value, kinds) else _MISFIT

    return fit


def _fit_list(kinds: tuple[type, ...]) -> Callable[[Any, int | None, bool], Any]:
    fit_one = _fit_number(kinds)

    def fit(value: Any, length: int | None, lenient: bool) -> Any:
        if isinstance(value, (list, tuple)):
            ok = all(fit_one(v, None, True) is not _MISFIT for v in value)
            return list(value) if ok else _MISFIT
        if length is None or isinstance(value, bool):
            return value if isinstance(value, fx.Node) and lenient else _MISFIT
        return _MISFIT if fit_one(value, None, lenient) is _MISFIT else [value] * length

    return fit


def _fit_instance(*kinds: type) -> Callable[[Any, int | None, bool], Any]:
    def fit(value: Any, _length: int | None, lenient: bool) -> Any:
        if isinstance(value, fx.Node):
            return value if lenient or isinstance(type_of(value), kinds) else _MISFIT
        return value if isinstance(value, kinds) else _MISFIT

    return fit


_INTS = (int, torch.SymInt, Symbol)
_FLOATS = (int, float, torch.SymInt, torch.SymFloat, Symbol)
_CHECKS: dict[str, Callable[[Any, int | None, bool], Any]] = {
    "Tensor": _fit_tensor,
    "Tensor[]": _fit_tensors,
    "int": _fit_number(_INTS),
    "float": _fit_number(_FLOATS),
    "bool": _fit_number((bool, torch.SymBool)),
    "number": _fit_number((*_FLOATS, complex)),
    "int[]": _fit_list(_INTS),
    "float[]": _fit_list((*_FLOATS, complex)),
    "bool[]": _fit_list((bool,)),
    "str": _fit_instance(str),
    "dtype": _fit_instance(torch.dtype),
    "device": _fit_instance(torch.device, str),
    "layout": _fit_instance(torch.layout),
    "memory_format": _fit_instance(torch.memory_format),
}


def is_tensor_like(node: fx.Node) -> bool:
    """Tell whether a node may hold a tensor; one of unknown type may."""
    known = type_of(node)
    return known is None or isinstance(known, TensorType)
