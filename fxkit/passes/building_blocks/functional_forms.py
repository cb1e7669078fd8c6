"""The operator that computes what another one writes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxkit.ir.binding import is_out_variant
from fxkit.ir.op import Call
from fxkit.ir.types import TensorType, type_of
from fxkit.passes.building_blocks.drawn_masks import drawn_mask, memory_order

_aten = torch.ops.aten

Emit = Callable[..., fx.Node]


@dataclass(frozen=True)
class FunctionalForm:
    """What a writing call computes, without writing it.

    Attributes:
        written: Names of the arguments that it writes, in order.
        compute: `(emit, call, current)` → the values to write, in order, and what else the call
            returns, or what holds its results first; `current` gives an operand's present value.
        returns_written: Whether it returns what it wrote.
    """

    written: tuple[str, ...]
    compute: Callable[[Emit, Call, Callable[[Any], Any]], tuple[list[fx.Node], Any]]
    returns_written: bool = True


def functional_form(call: Call) -> FunctionalForm | str:
    """Return the form of a call that writes, or why there is none."""
    overload = call.operator.overload
    if overload is None:
        return f"nothing is known of {call.name}"
    if overload is _aten.batch_norm.default:
        return FunctionalForm(("running_mean", "running_var"), _batch_norm, False)
    if overload in _WITH_STATISTICS:
        return FunctionalForm(("running_mean", "running_var"), _native_batch_norm, False)
    if overload is _aten.instance_norm.default:
        known = type_of(call.arguments["input"])
        if not isinstance(known, TensorType) or known.is_symbolic:
            return "the sizes of what is normalised are not known"
        return FunctionalForm(("running_mean", "running_var"), _instance_norm, False)
    if torch.Tag.inplace_view in overload.tags:
        return f"{overload} changes the shape of its operand"
    if overload._schema.name == "aten::copy_":
        return FunctionalForm(("self",), _copy)
    if overload is _aten.bernoulli_.float:
        return FunctionalForm(("self",), _draw)
    written = tuple(a.name for a in overload._schema.arguments
                    if a.alias_info is not None and a.alias_info.is_write)  # fmt: skip
    plain = without_writing(overload)
    if plain is None or not written:
        return f"there is no operator that computes what {overload} writes"
    return FunctionalForm(written, functools.partial(_call_plain, plain))


# They return the mean and the deviation of the batch beside the result.
_WITH_STATISTICS = (_aten.native_batch_norm.default, _aten._native_batch_norm_legit.default)


@functools.cache
def without_writing(overload: Any) -> Any:
    """Return the overload that takes the same operands and returns what this one writes."""
    schema = overload._schema
    name = schema.name.partition("::")[2]
    if overload.namespace != "aten" or len(schema.returns) > 1:
        return None
    is_out = is_out_variant(overload)
    if not is_out and not name.endswith("_"):
        return None
    kept = [a.name for a in schema.arguments if not (is_out and a.alias_info is not None)]
    kinds = [str(a.type) for a in schema.arguments if a.name in kept]
    for wished in (name if is_out else name[:-1], f"{name[:-1]}_functional"):
        packet = getattr(_aten, wished, None)
        for candidate in [] if packet is None else packet.overloads():
            found = getattr(packet, candidate)._schema
            names = [a.name for a in found.arguments]
            if not is_out:  # `dropout_(self, …)` writes what `dropout(input, …)` returns
                names[:1] = kept[:1]
            if (
                names == kept
                and not found.is_mutable
                and [str(a.type) for a in found.arguments] == kinds
            ):
                return getattr(packet, candidate)
    return None


def _call_plain(
    plain: Any, emit: Emit, call: Call, current: Callable[[Any], Any]
) -> tuple[list[fx.Node], Any]:
    parameters = plain._schema.arguments
    given = {
        p.name: current(call.arguments[p.name if p.name in call.arguments else "self"])
        for p in parameters
    }
    args = [given[p.name] for p in parameters if not p.kwarg_only]
    kwargs = {p.name: given[p.name] for p in parameters if p.kwarg_only}
    return [emit(plain, *args, **kwargs)], None


def _copy(emit: Emit, call: Call, current: Callable[[Any], Any]) -> tuple[list[fx.Node], Any]:
    """Copy into memory of another shape or dtype: the value, made as the target is."""
    target, source = current(call.arguments["self"]), current(call.arguments["src"])
    wanted, known = type_of(target), type_of(source) if isinstance(source, fx.Node) else None
    if not isinstance(known, TensorType):
        return [emit(_aten.fill.Scalar, target, source)], None
    if known.dtype != wanted.dtype or known.device != wanted.device:
        options = {"dtype": wanted.dtype, "device": wanted.device}
        source = emit(_aten._to_copy.default, source, **options)
    else:
        source = emit(_aten.clone.default, source)
    if known.shape != wanted.shape:
        wide = emit(_aten.expand.default, source, list(wanted.shape))
        source = emit(_aten.clone.default, wide, memory_format=torch.contiguous_format)
    return [source], None


def _draw(emit: Emit, call: Call, current: Callable[[Any], Any]) -> tuple[list[fx.Node], Any]:
    """Draw a mask as it is drawn in place."""
    target, known = current(call.arguments["self"]), type_of(call.arguments["self"])
    order = memory_order(known.shape, known.stride) if isinstance(known, TensorType) else None
    p, generator = call.arguments["p"], call.arguments["generator"]
    return [drawn_mask(emit, target, p, order, generator=generator)], None


def _batch_norm(emit: Emit, call: Call, current: Callable[[Any], Any]) -> tuple[list[Any], Any]:
    """Normalise a batch, and return its statistics beside the result."""
    values, several = _native_batch_norm(emit, call, current)
    return values, emit(operator.getitem, several, 0)


def _native_batch_norm(
    emit: Emit, call: Call, current: Callable[[Any], Any]
) -> tuple[list[Any], Any]:
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
    return [emit(operator.getitem, several, index) for index in (3, 4)], several


def _instance_norm(emit: Emit, call: Call, current: Callable[[Any], Any]) -> tuple[list[Any], Any]:
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
    return [mean(3), mean(4)], emit(_aten.view.default, result, list(known.shape))
