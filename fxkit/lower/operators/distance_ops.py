"""Norms and distances: more entries of the table of reductions, see `reduction_ops`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fxkit.lower.loop_ir.builder import Ref
from fxkit.lower.loop_ir.loop_ir import Unfusable
from fxkit.lower.operators.reduction_table import (
    Arguments,
    at_least,
    by_dim,
    dims_of,
    every_dim,
    function,
    largest,
    last_dim,
    row,
    smallest,
    total,
)

# --- norms


def vector_norm(x: Ref, order: float) -> Ref:
    """Return a vector norm along the row."""
    if order == 2:
        return function("sqrt", total(x * x))
    if order == 0:
        return total(x.differs(0).cast(x.dtype))
    magnitude = function("abs", x)
    if order == 1:
        return total(magnitude)
    if order == math.inf:
        return largest(magnitude)
    if order == -math.inf:
        return smallest(magnitude)
    powers = x.builder.scalar("pow", magnitude, float(order))
    return x.builder.scalar("pow", total(powers), 1.0 / order)


@row("aten.linalg_vector_norm", axes=by_dim)
def _vector_norm(self: Ref, *, ord: float) -> Ref:
    return vector_norm(self, ord)


@row("aten.norm", axes=by_dim)
def _norm(self: Ref, *, p: float | None) -> Ref:
    return vector_norm(self, 2 if p is None else p)


@row("torch.norm", axes=by_dim)
def _torch_norm(self: Ref, *, p: float | str | None) -> Ref:
    if p == "nuc":
        raise Unfusable("the nuclear norm needs singular values")
    return vector_norm(self, 2 if p is None or isinstance(p, str) else p)


def _matrix_dims(arguments: Arguments, rank: int) -> tuple[int, ...]:
    order, dim = arguments.get("ord"), arguments.get("dim")
    dims = dims_of(dim, rank)
    if order is not None and not (order == "fro" and len(dims) == 2) and len(dims) != 1:
        raise Unfusable(f"a matrix norm of order {order} reduces twice")
    return dims


@row("aten.linalg_norm", axes=_matrix_dims)
def _linalg_norm(self: Ref, *, ord: float | str | None) -> Ref:
    return vector_norm(self, 2 if ord is None or isinstance(ord, str) else ord)


@row("aten.linalg_matrix_norm", axes=_matrix_dims)
def _linalg_matrix_norm(self: Ref) -> Ref:
    return vector_norm(self, 2)


# --- distances


@row("aten.dist", axes=every_dim)
def _dist(self: Ref, other: Ref, *, p: float) -> Ref:
    return vector_norm(self - other, p)


@row("aten.pairwise_distance", axes=last_dim)
def _pairwise_distance(x1: Ref, x2: Ref, *, p: float, eps: float) -> Ref:
    return vector_norm(x1 - x2 + eps, p)


@row("aten.cosine_similarity", axes=by_dim)
def cosine_similarity(x1: Ref, x2: Ref, *, eps: float) -> Ref:
    first = x1 / at_least(vector_norm(x1, 2), eps)
    second = x2 / at_least(vector_norm(x2, 2), eps)
    return total(first * second)


# More vectors than this eager multiplies with each other to find their distances.
_MANY = 25


def _pairs(ranks: Mapping[str, int]) -> dict[str, Sequence[int]]:
    """Align two lists of vectors so that each of one meets each of the other."""
    first, second = ranks.values()
    batch = max(first, second) - 2
    lead = {name: range(batch - (rank - 2), batch) for name, rank in ranks.items()}
    return {name: (*lead[name], batch + position, batch + 2) for position, name in enumerate(ranks)}


@row("torch.cdist", axes=last_dim, alignment=_pairs)
def _cdist(x1: Ref, x2: Ref, *, p: float, compute_mode: str | None, sizes: Sequence[int]) -> Ref:
    asked = compute_mode or "use_mm_for_euclid_dist_if_necessary"
    has_many = asked.endswith("_if_necessary") and max(sizes[-3:-1]) > _MANY
    if p == 2 and (has_many or asked == "use_mm_for_euclid_dist"):
        raise Unfusable("eager multiplies matrices for it, which is faster")
    return vector_norm(x1 - x2, p)


@row("torch.nn.functional.normalize", axes=by_dim, keeps_row=1)
def _normalize(self: Ref, *, p: float, eps: float) -> Ref:
    return self / at_least(vector_norm(self, p), eps)
