"""Casts and moves that do nothing, or that one cast does alone."""

from __future__ import annotations

import torch

from fxkit.ir.types import TensorType
from fxkit.patterns.conditions import UNKNOWN, keeps_type
from fxkit.patterns.language import any_of, operand
from fxkit.patterns.match_results import Match
from fxkit.patterns.rewriting import rule


@rule(at="aten.to", where=keeps_type)
def cast_to_same(x, dtype):
    """A cast to the dtype that is there already; torch returns the tensor itself.

    Rewrites:
        x.to(dtype)  →  x
    """
    return x.to(dtype=dtype), x


@rule(at=("aten.type_as", "aten.to"), where=keeps_type)
def cast_like_same(x, y):
    """A cast to the dtype of another tensor, which is the same.

    Rewrites:
        x.type_as(y)  →  x
    """
    return any_of(lambda v, w: v.type_as(w), torch.ops.aten.to.other)(x, y), x


@rule(at=("aten.to", "aten.cpu"), where=keeps_type, samples=({"device": "cpu"},))
def move_to_same(x, device):
    """A move to the device where the tensor is.

    Rewrites:
        x.to(device)  →  x
    """
    return any_of(lambda v: v.to(device=device), lambda v: v.cpu())(x), x


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def holds_all(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Tell whether one dtype has every number of another."""
    if wide == narrow or narrow == torch.bool:
        return wide != torch.bool or narrow == torch.bool
    if wide.is_floating_point and narrow.is_floating_point:
        big, small = torch.finfo(wide), torch.finfo(narrow)
        return big.max >= small.max and big.eps <= small.eps and big.tiny <= small.tiny
    if narrow.is_floating_point or wide == torch.bool:
        return False
    held = torch.iinfo(narrow)
    if wide.is_floating_point:
        return held.max <= 2 / torch.finfo(wide).eps and held.max < torch.finfo(wide).max
    return torch.iinfo(wide).min <= held.min and held.max <= torch.iinfo(wide).max


def _loses_nothing(match: Match) -> bool | str:
    known, middle, last = match.type("x"), match["wide"], match["last"]
    if not isinstance(known, TensorType):
        return UNKNOWN
    first = known.dtype
    if not {first, middle, last} <= {*_FLOATS, *_INTEGERS}:
        return f"expected real dtypes, got {first}, {middle} and {last}"
    if not holds_all(middle, first):
        return f"the cast from {first} to {middle} may round"
    if first.is_floating_point and not last.is_floating_point:
        return f"what is out of range of {last} depends on the dtype it comes from"
    # Backwards the casts run the other way: the middle one must not have rounded there either.
    if known.requires_grad and not holds_all(middle, last):
        return f"the gradient would not be rounded to {middle}"
    return True


_DTYPE = operand(value=lambda value: isinstance(value, torch.dtype))


@rule(
    at="aten.to",
    where=[_loses_nothing, {"wide": _DTYPE, "last": _DTYPE}],
    samples=(
        {"wide": torch.float64, "last": torch.float32},
        {"wide": torch.float32, "last": torch.bfloat16},
        {"wide": torch.float32, "last": torch.float64},
        {"wide": torch.int64, "last": torch.float32},
    ),
)
def cast_of_wider_cast(x, wide, last):
    """A cast that keeps every number does not matter for the next one.

    Rewrites:
        x.to(wide).to(last)  →  x.to(last)
    """
    return x.to(dtype=wide).to(dtype=last), x.to(dtype=last)
