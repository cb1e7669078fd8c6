"""Products of matrices that are a linear layer, or that were written as something else."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fxkit.ir.types import TensorType
from fxkit.patterns.conditions import (
    UNKNOWN,
    einsum_form,
    every,
    floating,
    letters_agree,
    types_of,
)
from fxkit.patterns.language import any_of, operand
from fxkit.patterns.match_results import Match
from fxkit.patterns.rewriting import Where, rule


def _flipped(w):
    """The transpose of a matrix."""
    return any_of(
        lambda v: v.t(), lambda v: v.T, lambda v: v.mT, lambda v: v.transpose(0, 1),
        lambda v: v.transpose(-2, -1), lambda v: v.transpose(-1, -2),
    )(w)  # fmt: skip


def _of_ranks(**ranks: int) -> Where:
    """Accept tensors of one floating-point dtype with these ranks."""

    def accept(match: Match) -> bool | str:
        known = types_of(match, tuple(ranks))
        if known is None:
            return UNKNOWN
        dtypes = {one.dtype for one in known}
        fits = all(len(one.shape) == r for one, r in zip(known, ranks.values(), strict=True))
        if not fits or len(dtypes) > 1 or not known[0].dtype.is_floating_point:
            return f"expected ranks {ranks} of one dtype, got {' and '.join(map(str, known))}"
        return True

    return accept


def _is_linear(match: Match) -> bool | str:
    x, weight, bias = (match.type(name) if name in match.bindings else None for name in "xwb")
    if not isinstance(x, TensorType) or not isinstance(weight, TensorType):
        return UNKNOWN
    if len(weight.shape) != 2 or len(x.shape) < 2:
        return f"expected x: [..., in] and w: [out, in], got {x} and {weight}"
    if x.dtype != weight.dtype or not x.dtype.is_floating_point:
        return f"expected one floating-point dtype, got {x} and {weight}"
    if "b" not in match.bindings:
        return True
    if not isinstance(bias, TensorType):
        return UNKNOWN
    fits = bias.shape == weight.shape[:1] and bias.dtype == weight.dtype
    return True if fits else f"expected b: [out], got {bias}"


_LINEAR = {"x": (2, 3, 4), "w": (5, 4), "b": (5,)}
_MATRICES = {**_LINEAR, "x": (3, 4)}


@rule(at="aten.add", where=_is_linear, exact=False, benefit=3, samples=(_MATRICES, _LINEAR))
def linear_by_matmul(x, w, b):
    """A linear layer written as a product and a sum.

    Rewrites:
        x @ w.t() + b  →  F.linear(x, w, b)
    """
    return any_of(torch.matmul, torch.mm)(x, _flipped(w)) + b, F.linear(x, w, b)


@rule(
    at=("aten.matmul", "aten.mm"),
    where=_is_linear,
    exact=False,
    benefit=2,
    samples=(_MATRICES, _LINEAR),
)
def linear_without_bias(x, w):
    """A linear layer without bias written as a product.

    Rewrites:
        x @ w.t()  →  F.linear(x, w)
    """
    return any_of(torch.matmul, torch.mm)(x, _flipped(w)), F.linear(x, w)


@rule(at="aten.add", where=_is_linear, exact=False, benefit=3, samples=(_LINEAR, _MATRICES))
def linear_then_bias(x, w, b):
    """A bias that is added after a linear layer without one.

    Rewrites:
        F.linear(x, w) + b  →  F.linear(x, w, b)
    """
    return F.linear(x, w) + b, F.linear(x, w, b)


@rule(at="aten.addmm", where=_is_linear, exact=False, benefit=3, samples=(_MATRICES,))
def linear_by_addmm(x, w, b):
    """A linear layer of matrices, as some exporters write it.

    Rewrites:
        torch.addmm(b, x, w.t())  →  F.linear(x, w, b)
    """
    return torch.addmm(b, x, _flipped(w)), F.linear(x, w, b)


def _is_addable(match: Match) -> bool | str:
    verdict = _of_ranks(x=2, y=2)(match)
    if verdict is not True:
        return verdict
    x, y, b = (match.type(name) for name in "xyb")
    fits = isinstance(b, TensorType) and b.dtype == x.dtype
    fits = fits and b.shape in ((y.shape[1],), (x.shape[0], y.shape[1]))
    return True if fits else f"expected a bias of [{y.shape[1]}], got {b}"


@rule(
    at="aten.add",
    where=_is_addable,
    exact=False,
    samples=({"x": (3, 4), "y": (4, 5), "b": (5,)}, {"x": (3, 4), "y": (4, 5), "b": (3, 5)}),
)
def sum_with_product(x, y, b):
    """A product of matrices and a sum, in one call.

    Rewrites:
        x @ y + b  →  torch.addmm(b, x, y)
    """
    return any_of(torch.matmul, torch.mm)(x, y) + b, torch.addmm(b, x, y)


def _is_any(*forms: str) -> Any:
    return operand(value=einsum_form(*forms))


_MULTIPLIES = every(floating("x", "y"), letters_agree("x", "y"))
_BATCHED = ("ik,kj->ij", "bik,bkj->bij", "abik,abkj->abij")


@rule(
    at="aten.einsum",
    where=[_MULTIPLIES, {"equation": _is_any(*_BATCHED)}],
    exact=False,
    samples=(
        {"x": (3, 4), "y": (4, 5), "equation": "ij,jk->ik"},
        {"x": (2, 3, 4), "y": (2, 4, 5), "equation": "bij, bjk -> bik"},
        {"x": (2, 3, 5, 4), "y": (2, 3, 4, 2), "equation": "bhqk,bhkd->bhqd"},
    ),
)
def matmul_by_einsum(x, y, equation):
    """A batched product in the notation of Einstein; the letters may be others.

    Rewrites:
        torch.einsum(equation, x, y)  →  x @ y
    """
    return torch.einsum(equation, x, y), torch.matmul(x, y)


_WITH_TRANSPOSE = ("bik,bjk->bij", "abik,abjk->abij")


@rule(
    at="aten.einsum",
    where=[_MULTIPLIES, {"equation": _is_any(*_WITH_TRANSPOSE)}],
    exact=False,
    samples=(
        {"x": (2, 3, 4), "y": (2, 5, 4), "equation": "bid,bjd->bij"},
        {"x": (2, 3, 5, 4), "y": (2, 3, 6, 4), "equation": "bhqd,bhkd->bhqk"},
    ),
)
def transposed_matmul_by_einsum(x, y, equation):
    """Scores of queries and keys in the notation of Einstein; the letters may be others.

    Rewrites:
        torch.einsum(equation, x, y)  →  x @ y.transpose(-2, -1)
    """
    return torch.einsum(equation, x, y), torch.matmul(x, y.transpose(-2, -1))


@rule(
    at="aten.einsum",
    where=[
        every(_is_linear, letters_agree("x", "w")),
        {"equation": _is_any("ik,jk->ij", "aik,jk->aij", "abik,jk->abij")},
    ],
    exact=False,
    samples=(
        {"x": (3, 4), "w": (5, 4), "equation": "ni,oi->no"},
        {"x": (2, 3, 4), "w": (5, 4), "equation": "bti,oi->bto"},
    ),
)
def linear_by_einsum(x, w, equation):
    """A linear layer in the notation of Einstein; the letters may be others.

    Rewrites:
        torch.einsum(equation, x, w)  →  F.linear(x, w)
    """
    return torch.einsum(equation, x, w), F.linear(x, w)
