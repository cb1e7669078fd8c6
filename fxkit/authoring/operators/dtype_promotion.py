"""What operands of an operator promote to, as those of torch's own operators do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce

import torch

from fxkit.authoring.operators.evaluation import Dtypes, kind_of_dtype, kind_of_number
from fxkit.authoring.operators.primitives import Kind
from fxkit.lower.loop_ir.bits import Number


def dtypes_of(tensors: Sequence[torch.Tensor]) -> Dtypes:
    """Return in which dtypes an operator computes with tensors.

    Raises:
        TypeError: When one of them is complex.
    """
    kinds = [kind_of_dtype(tensor.dtype) for tensor in tensors]
    common = _common(tensors)
    whole = [t.dtype for t, kind in zip(tensors, kinds, strict=True) if kind is Kind.INTEGER]
    return Dtypes.of(common, whole)


def result_dtype(kind: Kind, dtypes: Dtypes) -> torch.dtype:
    """Return the dtype of a result of a kind."""
    return {Kind.BOOL: torch.bool, Kind.INTEGER: dtypes.integers, Kind.FLOAT: dtypes.floats}[kind]


def number_as_tensor(
    value: Number, tensors: Sequence[torch.Tensor], device: torch.device | None = None
) -> torch.Tensor:
    """Return a Python number as a tensor that counts no more than the number would.

    Args:
        value: The number.
        tensors: The operands that are tensors.
        device: Where it lies; the processor when left out, from which each device reads numbers.
    """
    kind = kind_of_number(value)
    dtype = result_dtype(kind, dtypes_of(tensors))
    is_narrow = dtype.is_floating_point and dtype.itemsize < 4
    if is_narrow and any(x.ndim and x.dtype.is_floating_point for x in tensors):
        dtype = torch.float32  # which is computed in, and counts less beside what has dimensions
    return torch.full((), value, dtype=dtype, device=device or "cpu")


def _common(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    """Return what tensors promote to; those without dimensions count less, as in torch."""
    groups: tuple[list[torch.dtype], list[torch.dtype]] = ([], [])
    for tensor in tensors:
        groups[tensor.ndim == 0].append(tensor.dtype)
    found = [reduce(torch.promote_types, group) for group in groups if group]
    if not found:
        raise TypeError("expected at least one tensor, got none")
    return found[0] if len(found) == 1 else _with_lower(*found)


def _with_lower(higher: torch.dtype, lower: torch.dtype) -> torch.dtype:
    """Return what tensors promote to with others that count only by their kind."""
    if kind_of_dtype(lower) > kind_of_dtype(higher):
        return torch.promote_types(higher, lower)
    return higher
