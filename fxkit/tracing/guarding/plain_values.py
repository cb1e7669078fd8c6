"""Values that are no tensors: those that a node may hold, and those that a guard may expect."""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex, cast

import numpy as np
import torch
from torch import fx

from fxkit.tracing.guarding.guards import shorten
from fxkit.tracing.values.refusals import Refusal

ATOMS = frozenset(
    {
        *(type(None), bool, int, float, str, complex, type(...)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)
_NUMBER_TYPES = (bool, int, float, complex)
READABLE = ATOMS - {type(...)}
_MAX_READ = 4096
_WITH_DTYPES = (np.generic, np.ndarray, torch.SymInt)
_FROM_PYTHON = frozenset({"tensor", "as_tensor", "asarray", "scalar_tensor", "new_tensor"})


def plain_argument(value: Any, func: Any) -> Any:
    """Turn what is no plain value into the one that torch takes it for.

    That is a subclass of a plain type, a NumPy scalar, or what Python takes for an integer, such as
    an enumeration of torch.
    """
    name = getattr(func, "__name__", str(func))
    if isinstance(value, np.generic) and name not in _FROM_PYTHON:
        return value.item()
    for kind in (int, str, float):
        if isinstance(value, kind) and not isinstance(value, np.generic):
            return kind(value)
    if isinstance(value, type) and value in _NUMBER_TYPES:
        return value
    is_number = isinstance(value, SupportsIndex) and not isinstance(value, _WITH_DTYPES)
    if is_number and name not in _FROM_PYTHON:
        return operator.index(cast(SupportsIndex, value))
    raise Refusal(
        f"{name} is given a {type(value).__qualname__}, which a graph can't hold",
        "make a tensor of it outside, and pass that as an argument",
    )


def plain_result(result: Any, node: fx.Node) -> Any:
    """Return the value that a guard expects, made of lists, tuples and plain values only."""
    left = [_MAX_READ]

    def plain(value: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise Refusal(
                f"the program turns more than {_MAX_READ} numbers of a tensor into Python values",
                "keep the computation in torch",
            )
        if type(value) in READABLE:
            return value
        if isinstance(value, tuple):
            return tuple(map(plain, value))
        if type(value) is list:
            return list(map(plain, value))
        if type(value) is dict and all(type(key) in READABLE for key in value):
            return {key: plain(item) for key, item in value.items()}
        raise Refusal(
            f"{node.name} gives the program a {type(value).__qualname__} made from a tensor: "
            f"{shorten(value)}"
        )

    return plain(result)
