"""The operator `fxkit::innermost_weight`: a weight of integers, each element with all its channels.

Kernels read weights of convolutions so. Those that lie in another order are copied, once for all
calls: what is kept serves as long as the weight is the same tensor, in the same memory, and torch
counts no write to it.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fxkit.analysis.type_inference.own_operators import define_operator
from fxkit.ir.types import TensorType
from fxkit.torch_adapters.tensors import version_counter_of

_SCHEMA = "innermost_weight(Tensor weight, int slot) -> Tensor"


@dataclass(frozen=True, eq=False)
class _Kept:
    """A weight that was copied.

    Attributes:
        weight: What it was made of, not kept alive.
        state: The version and the memory that it had then.
        copy: The copy.
    """

    weight: weakref.ref[Tensor]
    state: tuple[int, int]
    copy: Tensor


_slots: dict[int, _Kept] = {}
_numbers = itertools.count()


def new_slot() -> int:
    """Return a number for a layer, under which its weight will be kept."""
    return next(_numbers)


@functools.cache
def operator() -> Any:
    """Return the operator, registered when it is first needed."""
    return define_operator(_SCHEMA, innermost_weight, _type)


def without_dispatcher(target: Any) -> Any:
    """Return the function that the operator ends in, in its place, else what is given."""
    is_defined = operator.cache_info().currsize > 0
    return innermost_weight if is_defined and target is operator() else target


def _type(weight: TensorType, slot: int) -> TensorType:
    return replace(weight, stride=innermost_strides(weight.shape), requires_grad=False)


def innermost_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a weight whose elements lie with all their channels.

    Args:
        shape: [N, C, w] or [N, C, h, w].
    """
    _, channels, *window = shape
    steps = [channels * math.prod(window[axis + 1 :]) for axis in range(len(window))]
    return (channels * math.prod(window), 1, *steps)


def innermost_weight(weight: Tensor, slot: int) -> Tensor:
    """Return a copy of a weight, each element with all its channels, made when it has changed.

    Args:
        weight: int8[N, C, w] or int8[N, C, h, w].
        slot: Where it is kept: one of `new_slot`. What is found there only serves when it was made
            of the same weight, so that a slot in use costs time, no more.

    Returns:
        The same numbers, channels innermost, which nobody may write to.
    """
    if weight.is_inference():
        return with_channels_innermost(weight)
    kept, state = _slots.get(slot), (version_counter_of(weight), weight.data_ptr())
    if kept is None or kept.weight() is not weight or kept.state != state:
        gone = weakref.ref(weight, functools.partial(_forget, slot))
        kept = _slots[slot] = _Kept(gone, state, with_channels_innermost(weight))
    return kept.copy


@torch.no_grad()
def with_channels_innermost(weight: Tensor) -> Tensor:
    """Return a copy of a weight with its channels innermost."""
    return (
        weight.detach().movedim(1, -1).clone(memory_format=torch.contiguous_format).movedim(-1, 1)
    )


def _forget(slot: int, weight: weakref.ref[Tensor]) -> None:
    kept = _slots.get(slot)
    if kept is not None and kept.weight is weight:
        del _slots[slot]
