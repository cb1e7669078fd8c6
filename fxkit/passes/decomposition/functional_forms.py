"""The operator that computes what another one writes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxkit.ir.binding import is_out_variant
from fxkit.ir.op import Call, resolve
from fxkit.ir.types import TensorType, type_of
from fxkit.passes.decomposition.drawn_masks import drawn_mask, memory_order
from fxkit.torch_adapters.operators import schema_of

_aten = torch.ops.aten

Emit = Callable[..., fx.Node]


@dataclass(frozen=True)
class FunctionalForm:
    """What a writing call computes, without writing it.

    Attributes:
        written: Names of the arguments that it writes, in order; one may be a list of tensors.
        compute: `(emit, call, current)` → the values to write, one for each of `operands`, and what
            the call returns, in order; `current` gives an operand's present value.
        returns: For each result, which of `operands` it is; None for a new tensor.
    """

    written: tuple[str, ...]
    compute: Callable[[Emit, Call, Callable[[Any], Any]], tuple[list[fx.Node], list[Any]]]
    returns: tuple[int | None, ...] = (0,)

    def operands(self, call: Call) -> list[Any]:
        """Return the tensors that a call writes, lists taken apart."""
        return [one for name in self.written for one in _tensors(call.arguments[name])]


def _tensors(argument: Any) -> list[Any]:
    several = list(argument) if isinstance(argument, (list, tuple)) else [argument]
    return [one for one in several if one is not None]


def functional_form(call: Call) -> FunctionalForm | str:
    """Return the form of a call that writes, or why there is none."""
    overload = call.operator.overload
    if overload is None:
        return f"nothing is known of {call.name}"
    if overload in _SPECIAL:
        return _SPECIAL[overload]
    if overload is _aten.instance_norm.default:
        known = type_of(call.arguments["input"])
        if not isinstance(known, TensorType) or known.is_symbolic:
            return "the sizes of what is normalised are not known"
        return FunctionalForm(_STATISTICS, _instance_norm, (None,))
    variant = _variant_of(overload)
    if variant is None:
        return f"there is no operator that computes what {overload} writes"
    if any(len(_tensors(call.arguments[name])) > 1 for name in variant.written):
        reason = _reads_what_it_wrote(call, variant)
        if reason is not None:
            return reason
    return FunctionalForm(
        variant.written, functools.partial(_call_variant, variant), variant.returns
    )


def _reads_what_it_wrote(call: Call, variant: _Variant) -> str | None:
    """Refuse lists where one tensor is computed from another that was written before it."""
    written = {o: i for n in variant.written for i, o in enumerate(_tensors(call.arguments[n]))}
    for argument in call.arguments.values():
        for index, operand in enumerate(_tensors(argument)):
            if isinstance(operand, fx.Node) and written.get(operand, index) != index:
                return f"{call.name} reads %{operand.name}, which it has written before"
    return None


def is_shape_change(call: Call) -> bool:
    """Tell whether a call lets a tensor show its memory with another shape, or other memory."""
    overload = call.operator.overload
    if overload is None:
        return False
    is_tagged = torch.Tag.inplace_view in overload.tags and call.name not in _RESIZES
    return is_tagged or call.name in _SHAPE_CHANGES


def write_back(graph: fx.Graph) -> set[fx.Node]:
    """Return the calls at the end of a graph that bring inputs and attributes up to date."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output":
            continue
        call = resolve(node)
        if call is None or not (call.name == "aten.copy_" or is_shape_change(call)):
            break
        target = call.arguments.get("self")
        if any(user.op != "output" and user not in found for user in node.users):
            break
        if not isinstance(target, fx.Node) or not _is_outside(target):
            break
        found.add(node)
    return found


def _is_outside(node: fx.Node) -> bool:
    """Tell whether a node is an input or attribute, or one whose shape was changed in place."""
    while (call := resolve(node)) is not None and is_shape_change(call):
        node = call.arguments["self"]
    return isinstance(node, fx.Node) and node.op in ("placeholder", "get_attr")


# Those that torch does not tag, since they call others.
_SHAPE_CHANGES = frozenset(f"aten.{name}" for name in "swapaxes_ swapdims_ set_".split())
# They have other memory, of which the first numbers are the old ones.
_RESIZES = frozenset({"aten.resize_", "aten.resize_as_"})


@dataclass(frozen=True)
class _Variant:
    """The function that computes what an overload writes.

    Attributes:
        function: Takes the operands in the schema's order.
        overload: What writes, if `function` is to be given it first.
        written: Names of what is written.
        returns: For each result of the overload, which of `written` it is; None for a new tensor.
        first: At which result of `function` the written values begin.
    """

    function: Any
    overload: Any
    written: tuple[str, ...]
    returns: tuple[int | None, ...]
    first: int


@functools.cache
def _variant_of(overload: Any) -> _Variant | None:
    schema = schema_of(overload)
    written = tuple(a.name for a in schema.arguments if _is_written(a))
    if is_out_variant(overload) and not all(a.is_out for a in schema.arguments if _is_written(a)):
        return None  # in which order they are returned, no schema tells
    returns = tuple(_position(schema, one, written) for one in schema.returns)
    if None in returns and set(returns) != {None}:
        return None
    new = returns.count(None)
    if overload.namespace != "aten":
        is_plain = all(str(r.type) == "Tensor" for r in schema.returns) and new == len(returns)
        if not is_plain or not written:
            return None
        function = torch.ops.higher_order.auto_functionalized
        return _Variant(function, overload, written, returns, max(new, 1))
    for candidate in _candidates(overload):
        if candidate not in _SPECIAL and _returns_what_is_written(candidate, schema, written, new):
            return _Variant(candidate, None, written, returns, new)
    return None


def _returns_what_is_written(
    candidate: Any, schema: Any, written: tuple[str, ...], new: int
) -> bool:
    """Tell whether an overload takes the operands of a schema and returns what that one writes."""
    found, wanted = schema_of(candidate), {a.name: str(a.type) for a in schema.arguments}
    kept = {a.name: str(a.type) for a in schema.arguments if not a.is_out}
    taken = {a.name: str(a.type) for a in found.arguments if a.name not in _OPTIONS - kept.keys()}
    first = next(iter(kept), None)
    if first == "self" and "self" not in taken and not schema.arguments[-1].is_out:
        # `dropout_(self, …)` writes what `dropout(input, …)` returns.
        taken = {"self" if n == 0 else name: taken[name] for n, name in enumerate(taken)}
    results = [str(r.type) for r in found.returns]
    return (
        not found.is_mutable
        and taken == kept
        and results[new:] == [wanted[name] for name in written]
        and len(results) == new + len(written)
    )


# What functions that make tensors ask for, and their `out=` has.
_OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory"})


def _candidates(overload: Any) -> Iterator[Any]:
    """Yield the overloads that may return what one writes."""
    name = schema_of(overload).name.partition("::")[2]
    bare = name if is_out_variant(overload) else name.removesuffix("_")
    for wished in (bare, f"{bare}_functional"):
        packet = getattr(_aten, wished, None)
        for candidate in [] if packet is None else packet.overloads():
            yield getattr(packet, candidate)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _position(schema: Any, result: Any, written: tuple[str, ...]) -> int | None:
    """Tell which of the written arguments a result is."""
    if result.alias_info is None:
        return None
    sets = {a.name: a.alias_info.before_set for a in schema.arguments if a.name in written}
    same = [n for n, name in enumerate(written) if sets[name] & result.alias_info.before_set]
    return same[0] if same else None


def without_writing(overload: Any) -> Any:
    """Return the overload that takes the same operands and returns the one that this one writes."""
    variant = _variant_of(overload)
    if variant is None or variant.overload is not None or variant.returns != (0,):
        return None
    return variant.function if len(variant.written) == 1 else None


def _call_variant(
    variant: _Variant, emit: Emit, call: Call, current: Callable[[Any], Any]
) -> tuple[list[fx.Node], list[Any]]:
    overload = variant.overload
    parameters = schema_of(variant.function if overload is None else overload).arguments
    given = _given(call, parameters, variant.written[0], current)
    if overload is not None:
        made = emit(variant.function, overload, **given)
        several = True
    else:
        args = [given[p.name] for p in parameters if not p.kwarg_only]
        kwargs = {p.name: given[p.name] for p in parameters if p.kwarg_only and p.name in given}
        made = emit(variant.function, *args, **kwargs)
        several = len(schema_of(variant.function).returns) > 1
    values: list[fx.Node] = []
    for index, name in enumerate(variant.written, start=variant.first):
        operand = call.arguments[name]
        value = emit(operator.getitem, made, index) if several and operand is not None else made
        if isinstance(operand, (list, tuple)):
            values += [emit(operator.getitem, value, n) for n, _ in enumerate(operand)]
        elif operand is not None:
            values.append(value)
    new = range(variant.returns.count(None))
    results = [emit(operator.getitem, made, n) if several else made for n in new]
    return values, results or [values[n] for n in variant.returns if n is not None]


def _given(
    call: Call, parameters: Any, written: str, current: Callable[[Any], Any]
) -> dict[str, Any]:
    """Return the operands of the function that computes what a call writes."""
    given: dict[str, Any] = {}
    for parameter in parameters:
        name = parameter.name
        if name in call.arguments:
            given[name] = current(call.arguments[name])
        elif name not in _OPTIONS:
            given[name] = current(call.arguments["self"])
        elif name in ("dtype", "device"):
            given[name] = getattr(type_of(call.arguments[written]), name)
    return given


def _copy(emit: Emit, call: Call, current: Callable[[Any], Any]) -> tuple[list[fx.Node], list[Any]]:
    """Copy into memory of another shape or dtype: the value, made as the target is."""
    target, source = current(call.arguments["self"]), current(call.arguments["src"])
    wanted, known = type_of(target), type_of(source) if isinstance(source, fx.Node) else None
    if not isinstance(known, TensorType):
        source = emit(_aten.fill.Scalar, target, source)
        return [source], [source]
    if known.dtype != wanted.dtype or known.device != wanted.device:
        options = {"dtype": wanted.dtype, "device": wanted.device}
        source = emit(_aten._to_copy.default, source, **options)
    else:
        source = emit(_aten.clone.default, source)
    if known.shape != wanted.shape:
        wide = emit(_aten.expand.default, source, list(wanted.shape))
        source = emit(_aten.clone.default, wide, memory_format=torch.contiguous_format)
    return [source], [source]


def _draw(emit: Emit, call: Call, current: Callable[[Any], Any]) -> tuple[list[fx.Node], list[Any]]:
    """Draw a mask as it is drawn in place."""
    target, known = current(call.arguments["self"]), type_of(call.arguments["self"])
    order = memory_order(known.shape, known.stride) if isinstance(known, TensorType) else None
    p, generator = call.arguments["p"], call.arguments["generator"]
    mask = drawn_mask(emit, target, p, order, generator=generator)
    return [mask], [mask]


def _batch_norm(
    emit: Emit, call: Call, current: Callable[[Any], Any]
) -> tuple[list[Any], list[Any]]:
    """Normalise a batch, and return its statistics beside the result."""
    values, results = _native_batch_norm(emit, call, current)
    return values, results[:1]


def _native_batch_norm(
    emit: Emit, call: Call, current: Callable[[Any], Any]
) -> tuple[list[Any], list[Any]]:
    """Normalise a batch, and return its statistics behind the results.

    The operator keeps the statistics that it is given for its derivative, so it is given copies:
    the buffers themselves are written at the end.
    """
    names = (
        "input",
        "weight",
        "bias",
        "running_mean",
        "running_var",
        "training",
        "momentum",
        "eps",
    )
    given = {name: current(call.arguments[name]) for name in names}
    for name in ("running_mean", "running_var"):
        given[name] = emit(_aten.clone.default, given[name])
    several = emit(_aten._native_batch_norm_legit_functional.default, *given.values())
    made = [emit(operator.getitem, several, index) for index in range(5)]
    return made[3:], made[:3]


def _instance_norm(
    emit: Emit, call: Call, current: Callable[[Any], Any]
) -> tuple[list[Any], list[Any]]:
    """Normalise each channel of each image as a channel of one image.

    Source: instance_norm in aten/src/ATen/native/Normalization.cpp
    """
    image, known = current(call.arguments["input"]), type_of(call.arguments["input"])
    assert isinstance(known, TensorType)
    batch, channels, *sizes = known.shape
    names = ("weight", "bias", "running_mean", "running_var")
    given = [current(call.arguments[name]) for name in names]
    repeated = [v if v is None else emit(_aten.repeat.default, v, [batch]) for v in given]
    dense = emit(_aten.contiguous.default, image)
    one = emit(_aten.view.default, dense, [1, batch * channels, *sizes])
    numbers = [current(call.arguments[name]) for name in ("use_input_stats", "momentum", "eps")]
    several = emit(_aten._native_batch_norm_legit_functional.default, one, *repeated, *numbers)

    def mean(index: int) -> fx.Node:
        statistics = emit(operator.getitem, several, index)
        each = emit(_aten.view.default, statistics, [batch, channels])
        return emit(_aten.mean.dim, each, [0])

    result = emit(operator.getitem, several, 0)
    return [mean(3), mean(4)], [emit(_aten.view.default, result, list(known.shape))]


_STATISTICS = ("running_mean", "running_var")
_SPECIAL = {
    _aten.batch_norm.default: FunctionalForm(_STATISTICS, _batch_norm, (None,)),
    # They return the mean and the deviation of the batch beside the result.
    _aten.native_batch_norm.default: FunctionalForm(_STATISTICS, _native_batch_norm, (None,) * 3),
    _aten._native_batch_norm_legit.default: FunctionalForm(
        _STATISTICS, _native_batch_norm, (None,) * 3
    ),
    _aten.copy_.default: FunctionalForm(("self",), _copy),
    _aten.bernoulli_.float: FunctionalForm(("self",), _draw),
}
