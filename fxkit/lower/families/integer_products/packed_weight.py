"""The operator `fxkit::packed_weight`: a weight of integers, packed into panels once for all calls.

`packed_panels` tells how panels lie in memory. What is kept serves as long as the weight is the
same tensor, in the same memory, and torch counts no write to it.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fxkit.analysis.type_inference.own_operators import define_operator
from fxkit.ir.types import TensorType
from fxkit.lower.loop_ir.packed_panels import COLUMNS, in_panels, panel_bytes

_SCHEMA = "packed_weight(Tensor weight, int slot) -> Tensor"


@dataclass(frozen=True, eq=False)
class _Kept:
    """A weight that was packed.

    Attributes:
        weight: What it was made of, not kept alive.
        state: The version and the memory that it had then.
        packed: Its panels.
    """

    weight: weakref.ref[Tensor]
    state: tuple[int, int]
    packed: Tensor


_slots: dict[int, _Kept] = {}
_numbers = itertools.count()


def new_slot() -> int:
    """Return a number for a layer, under which its weight will be kept."""
    return next(_numbers)


@functools.cache
def operator() -> Any:
    """Return the operator, registered when it is first needed."""
    return define_operator(_SCHEMA, packed_weight, _type)


def without_dispatcher(target: Any) -> Any:
    """Return the function that the operator ends in, in its place, else what is given."""
    is_defined = operator.cache_info().currsize > 0
    return packed_weight if is_defined and target is operator() else target


def _type(weight: TensorType, slot: int) -> TensorType:
    shape = packed_shape(weight.shape)
    return replace(
        weight, shape=shape, stride=(shape[1], 1), dtype=torch.uint8, requires_grad=False
    )


def packed_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return how many panels there are of a weight, and the bytes of each.

    Args:
        shape: [N, K], or [N, C, h, w] of a convolution.
    """
    columns, depth = shape[0], _product(shape[1:])
    return -(-columns // COLUMNS), panel_bytes(depth)


def packed_weight(weight: Tensor, slot: int) -> Tensor:
    """Return the panels of a weight, made when it has changed.

    Args:
        weight: int8[N, K], or int8[N, C, h, w] of a convolution, whose terms are those of a window,
            row by row, each element with all its channels.
        slot: Where it is kept: one of `new_slot`. What is found there only serves when it was made
            of the same weight, so that a slot in use costs time, no more.

    Returns:
        uint8[panels, bytes], which nobody may write to.
    """
    if weight.is_inference():
        return pack(weight)
    kept, state = _slots.get(slot), (weight._version, weight.data_ptr())
    if kept is None or kept.weight() is not weight or kept.state != state:
        gone = weakref.ref(weight, functools.partial(_forget, slot))
        kept = _slots[slot] = _Kept(gone, state, pack(weight))
    return kept.packed


@torch.no_grad()
def pack(weight: Tensor) -> Tensor:
    """Return the panels of a weight; see `packed_weight`."""
    in_order = weight.detach()
    if weight.dim() > 2:
        in_order = in_order.movedim(1, -1)
    return in_panels(in_order.reshape(weight.shape[0], -1))


def _forget(slot: int, weight: weakref.ref[Tensor]) -> None:
    kept = _slots.get(slot)
    if kept is not None and kept.weight is weight:
        del _slots[slot]


def _product(sizes: Sequence[int]) -> int:
    return functools.reduce(int.__mul__, map(int, sizes), 1)
