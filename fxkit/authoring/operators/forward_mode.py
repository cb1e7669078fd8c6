"""Tangents of the results of an operator, by the derivatives of its gradients.

A gradient is linear in the gradients of the results. Its own derivative by one of these, applied
to the tangent of an operand, is what that adds to the tangent of the result. So rows, and gradients
of one's own, need no rules beside those of gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, Protocol

import torch

from fxkit.authoring.operators.definition import Definition
from fxkit.torch_adapters.operator_derivatives import zeros_like_result


class OperatorWithGradients(Protocol):
    """An operator that is registered with torch, and its gradients, which are operators too."""

    definition: Definition
    overload: Any

    def gradient(self, by: str) -> OperatorWithGradients: ...


def tangents_of(
    registration: OperatorWithGradients, ctx: Any, args: Sequence[Any], tangents: Sequence[Any]
) -> Any:
    """Return the tangent of each result; see `register_derivatives`."""
    definition = registration.definition
    names = [p.name for p in definition.parameters]
    # Arguments that are left to their defaults are not among those given.
    given = {**definition.numbers, **dict(zip(names, args, strict=False))}
    named = dict(zip(names, tangents, strict=False))
    moving = {n: named[n] for n in definition.tensors if named.get(n) is not None}
    arguments = [given[name] for name in names]
    grads = [zeros_like_result(like) for like in ctx.likes]
    found: list[Any] = []
    for name, (shape, dtype, _) in zip(definition.grad_names, ctx.likes, strict=True):
        parts = [
            registration.gradient(by).gradient(name).overload(tangent, *grads, *arguments)
            for by, tangent in moving.items()
            if dtype.is_floating_point
        ]
        found.append(reduce(torch.add, parts).to(dtype).expand(shape) if parts else None)
    return tuple(found) if definition.is_tuple else found[0]
