"""Indices that are numbers in tensors: the place that they tell has no part in a result's type."""

from __future__ import annotations

import operator
from typing import Any

import torch

_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8})


def with_any_place(target: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a call, where it indexes, with a place for each number in a tensor.

    Python reads such a number, which a tensor without data can't give. Whatever it is, what lies
    there has the same type. The bounds of a slice stay: sizes follow from them.

    Args:
        target: What is called.
        args: What it is given.
    """
    is_indexing = target is operator.getitem or target is operator.setitem
    if not is_indexing or len(args) < 2 or not isinstance(args[0], torch.Tensor):
        return args
    index = args[1]
    if isinstance(index, tuple):
        return args[0], tuple(map(_any_place, index)), *args[2:]
    return args[0], _any_place(index), *args[2:]


def _any_place(index: Any) -> Any:
    """Return the first place for an integer in a tensor without dimensions, else the index."""
    is_number = isinstance(index, torch.Tensor) and index.dim() == 0 and index.dtype in _INTEGERS
    return 0 if is_number else index
