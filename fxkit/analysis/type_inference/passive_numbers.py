"""Numbers that a call takes and that its result's type does not depend on."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fxkit.ir.op import resolve
from fxkit.torch_adapters.operators import schema_of

# Stands for a passive number that is not known: neither of the values that switch a dropout off.
ANY_NUMBER = 0.5


def passive_numbers(node: fx.Node) -> frozenset[fx.Node]:
    """Return the operands that a call takes as no more than a `float`, such as a momentum.

    Sizes are never computed from such a parameter: those that decide them are lists, or optional.

    Args:
        node: A call; one that takes no tensor has no passive numbers.
    """
    call = resolve(node)
    if call is None or call.operator.overload is None:
        return frozenset()
    names = _float_parameters(call.operator.overload)
    given = [call.arguments[name] for name in names]
    passive = {value for value in given if isinstance(value, fx.Node)}
    others = (value for name, value in call.arguments.items() if name not in names)
    elsewhere: set[Any] = set()
    map_arg(tuple(others), elsewhere.add)
    return frozenset(passive - elsewhere)


@functools.cache
def _float_parameters(overload: Any) -> tuple[str, ...]:
    arguments = schema_of(overload).arguments
    if not any(isinstance(a.type, torch.TensorType) for a in arguments):
        return ()
    return tuple(a.name for a in arguments if isinstance(a.type, torch.FloatType))
