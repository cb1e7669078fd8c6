"""Tensors that are taken apart and put together again."""

from __future__ import annotations

import torch

from fxkit.patterns.conditions import keeps_type
from fxkit.patterns.language import any_of
from fxkit.patterns.rewriting import rule


@rule(at="aten.cat", where=keeps_type)
def concatenation_of_one(x, dim):
    """One tensor, concatenated with nothing.

    Rewrites:
        torch.cat([x], dim)  →  x
    """
    return torch.cat([x], dim), x


@rule(
    at="aten.cat",
    where=keeps_type,
    samples=({"x": (3, 4), "n": 2, "dim": 1}, {"x": (5, 2), "n": 2, "dim": 0}),
)
def concatenation_of_parts(x, n, dim):
    """All parts of a tensor, put together in the same order.

    Rewrites:
        torch.cat(x.chunk(n, dim), dim)  →  x
    """
    parts = any_of(lambda v: v.chunk(n, dim), lambda v: v.split(n, dim=dim))(x)
    return torch.cat(parts, dim=dim), x


# Where the result has the shape of the operand, the two parts are all that there are.
@rule(
    at="aten.cat",
    where=keeps_type,
    samples=({"x": (3, 4), "n": 2, "dim": 1}, {"x": (4, 2), "n": 2, "dim": 0}),
)
def concatenation_of_halves(x, n, dim):
    """Both halves of a tensor, named and put together in the same order.

    Rewrites:
        torch.cat([(parts := x.chunk(n, dim))[0], parts[1]], dim)  →  x
    """
    parts = any_of(lambda v: v.chunk(n, dim), lambda v: v.split(n, dim=dim))(x)
    return torch.cat([parts[0], parts[1]], dim), x


@rule(
    at="aten.stack", where=keeps_type, samples=({"x": (3, 4), "dim": 1}, {"x": (2, 3, 4), "dim": 0})
)
def stack_of_slices(x, dim):
    """All slices of a tensor, stacked where they came from.

    Rewrites:
        torch.stack(x.unbind(dim), dim)  →  x
    """
    return torch.stack(x.unbind(dim), dim=dim), x
