"""How a new value of a view becomes a new value of what it is a view of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fxkit.analysis.tensor_types import fake_mode, fake_value
from fxkit.ir.op import Call
from fxkit.ir.types import TensorType, type_of
from fxkit.torch_adapters.tensors import impl_address_of

_aten = torch.ops.aten

# Makes a node of an overload and its operands.
Emit = Callable[..., fx.Node]
# Puts a new value of the view into the value of its base: (emit, base, new, arguments, base type).
Inverse = Callable[[Emit, fx.Node, fx.Node, Any, TensorType], fx.Node]


def _scatter(overload: Any, *names: str) -> Inverse:
    def put(emit: Emit, base: fx.Node, new: fx.Node, given: Any, known: TensorType) -> fx.Node:
        return emit(overload, base, new, *(given[name] for name in names))

    return put


def _same(emit: Emit, base: fx.Node, new: fx.Node, given: Any, known: TensorType) -> fx.Node:
    return new


def _reshape(emit: Emit, base: fx.Node, new: fx.Node, given: Any, known: TensorType) -> fx.Node:
    return emit(_aten.reshape.default, new, list(known.shape))


def _transpose(emit: Emit, base: fx.Node, new: fx.Node, given: Any, known: TensorType) -> fx.Node:
    return emit(_aten.transpose.int, new, given["dim0"], given["dim1"])


def _turn(emit: Emit, base: fx.Node, new: fx.Node, given: Any, known: TensorType) -> fx.Node:
    """Reverse the axes, which undoes itself."""
    return emit(_aten.permute.default, new, list(reversed(range(len(known.shape)))))


def _permute(emit: Emit, base: fx.Node, new: fx.Node, given: Any, known: TensorType) -> fx.Node:
    order = [axis % len(known.shape) for axis in given["dims"]]
    return emit(_aten.permute.default, new, sorted(range(len(order)), key=order.__getitem__))


def _narrow(emit: Emit, base: fx.Node, new: fx.Node, given: Any, known: TensorType) -> fx.Node:
    start, stop = given["start"], given["start"] + given["length"]
    return emit(_aten.slice_scatter.default, base, new, given["dim"], start, stop)


_SLICE = _scatter(_aten.slice_scatter.default, "dim", "start", "end", "step")
_INVERSES: dict[str, Inverse] = {
    "aten.select": _scatter(_aten.select_scatter.default, "dim", "index"),
    "aten.slice": _SLICE,
    "aten.diagonal": _scatter(_aten.diagonal_scatter.default, "offset", "dim1", "dim2"),
    "aten.narrow": _narrow,
    "aten.transpose": _transpose,
    "aten.permute": _permute,
    "aten.t": _turn,
    "aten.numpy_T": _turn,
}
# Views that show every element once, in the same order.
_RESHAPES = frozenset(
    f"aten.{name}"
    for name in "view reshape flatten unflatten squeeze unsqueeze view_as expand ravel".split()
)
_PARTS = frozenset(
    f"aten.{name}" for name in "split split_with_sizes chunk tensor_split unbind".split()
)


def shares_memory(node: fx.Node, known: Callable[[fx.Node], Any] = type_of) -> fx.Node | None:
    """Return the operand of which a call's result is a view, told by running it on fakes.

    Args:
        node: The call.
        known: Gives an operand's type at the time of the call.

    Raises:
        LookupError: When that can't be told.
    """
    if any(not _is_known(known(operand)) for operand in node.all_input_nodes):
        raise LookupError(f"the operands of %{node.name} are not known")
    with fake_mode(), torch.no_grad():
        made = {operand: fake_value(known(operand)) for operand in node.all_input_nodes}
        args = map_arg(node.args, made.__getitem__)
        kwargs = map_arg(node.kwargs, made.__getitem__)
        try:
            result = node.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, TypeError, ValueError) as error:
            raise LookupError(f"%{node.name} can't run on types alone") from error
        first = next(iter(result), None) if isinstance(result, (list, tuple)) else result
        if not isinstance(first, torch.Tensor):
            return None
        memory = impl_address_of(first.untyped_storage())
        for operand, value in made.items():
            if (
                isinstance(value, torch.Tensor)
                and impl_address_of(value.untyped_storage()) == memory
            ):
                return operand
    return None


def _is_known(known: Any) -> bool:
    return isinstance(known, (TensorType, int, float, bool, str, list, tuple))


def inverse_of(call: Call, known: Any, base: TensorType, part: int | None) -> Inverse | None:
    """Return how a new value of a view goes back into its base; None when that is not known.

    Args:
        call: The call that makes the view, or several of them.
        known: The type of what it returns.
        base: Type of what it is a view of.
        part: Which of several views is meant.
    """
    if part is not None:
        return _inverse_of_part(call, known, part) if call.name in _PARTS else None
    if call.name in _INVERSES:
        return _INVERSES[call.name]
    if not isinstance(known, TensorType) or known.dtype != base.dtype:
        return None
    if call.name == "aten.detach" and base.requires_grad:
        return None
    if call.name in _RESHAPES and known.numel == base.numel:
        return _reshape
    return _same if known.shape == base.shape and known.stride == base.stride else None


def _inverse_of_part(call: Call, known: Any, part: int) -> Inverse | None:
    """Return the inverse of one of the parts that a tensor was split into."""
    dim = call.arguments.get("dim", 0)
    if call.name == "aten.unbind":
        return lambda emit, base, new, given, _: emit(
            _aten.select_scatter.default, base, new, dim, part
        )
    if not isinstance(known, (list, tuple)) or not all(isinstance(k, TensorType) for k in known):
        return None
    sizes = [one.shape[dim] for one in known]
    start, stop = sum(sizes[:part]), sum(sizes[: part + 1])
    return lambda emit, base, new, given, _: emit(
        _aten.slice_scatter.default, base, new, dim, start, stop
    )
