"""Move transposes behind element-wise operators, so that they cancel."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxkit.analysis.effects import effects_of
from fxkit.analysis.tensor_types import infer_type
from fxkit.ir.op import resolve
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, type_of
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.layout.sinking import Sinker
from fxkit.torch_adapters.operators import OpOverload


@dataclass(frozen=True)
class SinkTransposes(Pass):
    """Compute element by element in front of a transpose or permutation, where some cancel then.

    All transposes that enter a region of element-wise operators and all inverse ones that leave it
    are taken out. Other operands of the region are transposed back, other uses of its results get
    a transpose of their own; nothing is done where that makes as many new ones. Nobody can tell:
    a region that is written to is left alone, and so is one of whose result the memory layout would
    change for the caller.

    Rewrites:
        %t = aten.transpose(%x, 1, 2); %g = aten.gelu(%t); return aten.transpose(%g, 1, 2)
            →  return aten.gelu(%x)
    """

    numerics: ClassVar[str] = "close"

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Visit the transposes in order. Cost: linear in the edges for each permutation."""
        _TransposeSinker(edit, context, "sink_transposes").run()


class _TransposeSinker(Sinker):
    def moved(self, node: fx.Node) -> tuple[fx.Node, Hashable] | None:
        call = resolve(node)
        operand = None if call is None else call.arguments.get("self")
        known = type_of(operand) if isinstance(operand, fx.Node) else None
        if call is None or operand is None or not isinstance(known, TensorType):
            return None
        order = _permutation(call.name, call.arguments, len(known.shape))
        is_moving = order is not None and order != tuple(range(len(order)))
        return (operand, order) if is_moving else None

    def undoes(self, node: fx.Node, key: Hashable) -> bool:
        found = self.moved(node)
        return found is not None and found[1] == _inverse(key)

    def carries(self, node: fx.Node, key: Hashable) -> bool:
        call, known = resolve(node), type_of(node)
        if call is None or call.operator.overload is None or not isinstance(known, TensorType):
            return False
        is_pointwise = torch.Tag.pointwise in call.operator.overload.tags
        effects = effects_of(node)
        if not is_pointwise or not effects.is_pure or call.name.endswith("_"):
            return False
        # Where nothing lies in memory, torch and its fake tensors (2.13) disagree on the layout.
        return len(known.shape) == len(_order(key)) and 0 not in known.shape

    def is_neutral(self, operand: fx.Node, user: fx.Node, key: Hashable) -> bool:
        known = type_of(operand)
        if not isinstance(known, TensorType):
            return known is not None
        return all(size == 1 for size in known.shape) and len(known.shape) <= len(_order(key))

    def unmove(self, operand: fx.Node, user: fx.Node, key: Hashable) -> fx.Node | None:
        known = type_of(operand)
        if not isinstance(known, TensorType):
            return None
        rank = len(_order(key))
        value, is_aten = operand, isinstance(user.target, OpOverload)
        for _ in range(rank - len(known.shape)):
            unsqueeze = torch.ops.aten.unsqueeze.default if is_aten else torch.unsqueeze
            value = self._made(unsqueeze, user, value, 0)
        permute = torch.ops.aten.permute.default if is_aten else torch.permute
        return self._made(permute, user, value, list(_inverse(key)))

    def move(self, value: fx.Node, key: Hashable, place: fx.Node) -> fx.Node:
        is_aten = isinstance(place.target, OpOverload)
        permute = torch.ops.aten.permute.default if is_aten else torch.permute
        return self.edit.call(permute, value, list(_order(key)), before=place)

    def _made(self, target: Any, place: fx.Node, *args: Any) -> fx.Node:
        node = self.edit.call(target, *args, before=place)
        infer_type(node)
        return self.sharing.add(node)


def _order(key: Hashable) -> tuple[int, ...]:
    assert isinstance(key, tuple)
    return key


def _inverse(key: Hashable) -> tuple[int, ...]:
    order = _order(key)
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def _permutation(name: str, arguments: Any, rank: int) -> tuple[int, ...] | None:
    """Return where each axis of the result comes from."""
    axes = list(range(rank))
    if name in ("aten.t", "aten.numpy_T"):
        return tuple(reversed(axes)) if rank == 2 else None
    if name == "aten.permute":
        dims = arguments["dims"]
        return tuple(dim % rank for dim in dims) if _are_numbers(dims) else None
    if name != "aten.transpose" or not _are_numbers((arguments["dim0"], arguments["dim1"])):
        return None
    if rank < 2:
        return None
    a, b = arguments["dim0"], arguments["dim1"]
    axes[a], axes[b] = axes[b], axes[a]
    return tuple(axes)


def _are_numbers(values: Any) -> bool:
    return all(isinstance(value, int) for value in values)
