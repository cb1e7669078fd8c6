"""Losses: entries of the tables of pointwise operators and of reductions.

A loss is written once, for one element. It stands in the table of pointwise operators; where it is
reduced to a single number, the body is the sum or the mean of its elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fxkit.lower.loop_ir.builder import Ref
from fxkit.lower.loop_ir.loop_ir import Unfusable
from fxkit.lower.operators import reduction_table, scalar_table
from fxkit.lower.operators.distance_ops import vector_norm
from fxkit.lower.operators.reduction_table import (
    at_least,
    every_dim,
    function,
    last_dim,
    no_dim,
    row,
    total,
)
from fxkit.lower.operators.scalar_table import (
    Computes,
    call,
    const_like,
    floats_only,
    needs_full_width,
    select,
)

_REDUCTIONS: Mapping[Any, str] = {0: "none", 1: "mean", 2: "sum"}


def _loss(
    *names: str, tolerance: float = 4, in_steps: bool = False
) -> Callable[[Callable[..., Ref]], Callable[..., Ref]]:
    """Add a loss to both tables.

    Args:
        names: Operator identities.
        tolerance: Of an element, as in the table of pointwise operators.
        in_steps: Whether eager computes it in several operators, each rounded to 16 bits.
    """

    def add_rows(element: Callable[..., Ref]) -> Callable[..., Ref]:
        def alone(*operands: Ref, result_dtype: torch.dtype, **attributes: Any) -> Ref:
            floats_only(operands[0], "a loss")
            if in_steps:
                needs_full_width(operands[0], result_dtype)
            return element(*operands, **attributes)

        def reduced(
            *operands: Ref, reduction: Any, count: int, sizes: Sequence[int], **attributes: Any
        ) -> Ref:
            sum_ = total(alone(*operands, **attributes))
            kind = _REDUCTIONS.get(reduction, reduction)
            if kind == "batchmean":
                return sum_ / sizes[0]
            return sum_ / count if kind == "mean" else sum_

        # The result of some has the dtype of the first operand.
        scalar_table.row(*names, tolerance=tolerance, computes=Computes.COMMON)(element)
        for name in names:
            known = scalar_table.TABLE[name]
            known = replace(known, build=alone, attributes=(*known.attributes, "result_dtype"))
            scalar_table.TABLE[name] = known
            reduction_table.row(f"{name}.reduced", axes=every_dim)(reduced)
            found = reduction_table.TABLE[f"{name}.reduced"]
            attributes = (*known.attributes, "reduction", "count", "sizes")
            reduction_table.TABLE[found.name] = replace(
                found, operands=known.operands, attributes=attributes, checks=known.checks
            )
        return element

    return add_rows


@_loss("aten.mse_loss", tolerance=1)
def _mse_loss(self: Ref, target: Ref) -> Ref:
    return (self - target) * (self - target)


@_loss("aten.l1_loss", tolerance=0)
def _l1_loss(self: Ref, target: Ref) -> Ref:
    return call("abs", self - target)


@_loss("aten.smooth_l1_loss", tolerance=2)
def _smooth_l1_loss(self: Ref, target: Ref, *, beta: float) -> Ref:
    distance = call("abs", self - target)
    if beta == 0:
        return distance
    near = 0.5 * distance * distance / beta
    return select(distance < beta, near, distance - 0.5 * beta)


@_loss("aten.huber_loss", tolerance=2)
def _huber_loss(self: Ref, target: Ref, *, delta: float) -> Ref:
    distance = call("abs", self - target)
    near = 0.5 * distance * distance
    return select(distance < delta, near, delta * (distance - 0.5 * delta))


@_loss("aten.soft_margin_loss", tolerance=5, in_steps=True)
def _soft_margin_loss(self: Ref, target: Ref) -> Ref:
    return call("log1p", call("exp", -target * self))


Requirement = Callable[[Ref], None]


@_loss("aten.binary_cross_entropy", tolerance=8, in_steps=True)
def _binary_cross_entropy(
    self: Ref, target: Ref, weight: Ref | None, *, require: Requirement
) -> Ref:
    require((target >= 0.0) & (target <= 1.0))
    unlikely = at_least(call("log1p", -self), -100.0)
    loss = (target - 1.0) * unlikely - target * at_least(call("log", self), -100.0)
    # The one or the other logarithm is NaN where no probability is given. Of a function such as
    # sigmoid, whose ends are selected, compilers would make jumps if it was compared itself.
    require(loss.equals(loss))
    return loss if weight is None else loss * weight


@_loss("aten.binary_cross_entropy_with_logits", tolerance=8, in_steps=True)
def _bce_with_logits(self: Ref, target: Ref, weight: Ref | None, pos_weight: Ref | None) -> Ref:
    factor = _log_sigmoid(self)
    if pos_weight is not None:
        factor = ((pos_weight - 1.0) * target + 1.0) * factor
    loss = (1.0 - target) * self - factor
    return loss if weight is None else loss * weight


@_loss("aten.kl_div", "torch.nn.functional.kl_div", tolerance=8, in_steps=True)
def _kl_div(self: Ref, target: Ref, *, log_target: bool) -> Ref:
    if log_target:
        return function("exp", target) * (target - self)
    return _times_log(target) - target * self


@_loss(
    "aten.hinge_embedding_loss", "torch.nn.functional.hinge_embedding_loss", tolerance=1,
    in_steps=True,
)  # fmt: skip
def _hinge_embedding_loss(self: Ref, target: Ref, *, margin: float) -> Ref:
    zero = const_like(self, 0)
    apart = select(target.differs(1), at_least(margin - self, 0), zero)
    return apart + select(target.differs(-1), self, zero)


@_loss(
    "aten.margin_ranking_loss", "torch.nn.functional.margin_ranking_loss", tolerance=2,
    in_steps=True,
)  # fmt: skip
def _margin_ranking_loss(input1: Ref, input2: Ref, target: Ref, *, margin: float) -> Ref:
    return at_least(-target * (input1 - input2) + margin, 0)


@_loss("torch.nn.functional.poisson_nll_loss", tolerance=8, in_steps=True)
def _poisson_nll_loss(input: Ref, target: Ref, *, log_input: bool, full: bool, eps: float) -> Ref:
    if log_input:
        loss = function("exp", input) - target * input
    else:
        loss = input - target * function("log", input + eps)
    if not full:
        return loss
    stirling = target * function("log", target) - target
    stirling = stirling + 0.5 * function("log", 2 * math.pi * target)
    return loss + select(target <= 1, const_like(input, 0), stirling)


def _times_log(x: Ref) -> Ref:
    """Return x log(x), which is 0 for 0."""
    return select(x.equals(0), const_like(x, 0), x * function("log", x))


def _log_sigmoid(x: Ref) -> Ref:
    return call("min", x, 0.0) - call("log1p", call("exp", -call("abs", x)))


# --- a loss with a variance for each row, or for each element

_GAUSSIAN = "torch.nn.functional.gaussian_nll_loss"


def _variances(ranks: Mapping[str, int]) -> Mapping[str, Sequence[int]]:
    """Align variances that lack the last dimension from the left."""
    is_short = ranks.get("var") == ranks["input"] - 1
    return {"var": range(ranks["var"])} if is_short else {}


@row(_GAUSSIAN, axes=no_dim, alignment=_variances)
def _gaussian_nll_loss(
    input: Ref,
    target: Ref,
    var: Ref,
    *,
    full: bool,
    eps: float,
    require: Requirement,
    result_dtype: torch.dtype,
) -> Ref:
    floats_only(input, "a loss")
    needs_full_width(input, result_dtype)
    require(~(var < 0.0))
    raised = at_least(var, eps)
    distance = input - target
    loss = 0.5 * (call("log", raised) + distance * distance / raised)
    return loss + 0.5 * math.log(2 * math.pi) if full else loss


@row(f"{_GAUSSIAN}.reduced", axes=every_dim, alignment=_variances)
def _reduced_gaussian_loss(
    input: Ref,
    target: Ref,
    var: Ref,
    *,
    full: bool,
    eps: float,
    require: Requirement,
    result_dtype: torch.dtype,
    reduction: str,
    count: int,
) -> Ref:
    loss = _gaussian_nll_loss(
        input, target, var, full=full, eps=eps, require=require, result_dtype=result_dtype
    )
    return total(loss) / count if reduction == "mean" else total(loss)


# --- losses that reduce a dimension of their own


_MULTILABEL = "torch.nn.functional.multilabel_soft_margin_loss"


@row(_MULTILABEL, axes=last_dim)
def _multilabel_soft_margin_loss(
    input: Ref, target: Ref, weight: Ref | None, *, sizes: Sequence[int]
) -> Ref:
    loss = -(target * _log_sigmoid(input) + (1.0 - target) * _log_sigmoid(-input))
    loss = loss if weight is None else loss * weight
    return total(loss) / sizes[-1]


@row(f"{_MULTILABEL}.reduced", axes=every_dim)
def _reduced_multilabel_loss(
    input: Ref, target: Ref, weight: Ref | None, *, sizes: Sequence[int], reduction: str, count: int
) -> Ref:
    sum_ = _multilabel_soft_margin_loss(input, target, weight, sizes=sizes)
    return sum_ / (count // sizes[-1]) if reduction == "mean" else sum_


@row("aten.triplet_margin_loss", "torch.nn.functional.triplet_margin_loss", axes=last_dim)
def _triplet_margin_loss(
    anchor: Ref,
    positive: Ref,
    negative: Ref,
    *,
    margin: float,
    p: float,
    eps: float,
    swap: bool,
    reduction: Any,
) -> Ref:
    _needs_no_reduction(reduction)
    near = vector_norm(anchor - positive + eps, p)
    far = vector_norm(anchor - negative + eps, p)
    if swap:
        far = call("min", far, vector_norm(positive - negative + eps, p))
    return at_least(margin + near - far, 0)


@row(
    "aten.cosine_embedding_loss", "torch.nn.functional.cosine_embedding_loss", axes=last_dim,
    alignment=lambda ranks: {"target": range(ranks["target"])},
)  # fmt: skip
def _cosine_embedding_loss(
    input1: Ref, input2: Ref, target: Ref, *, margin: float, reduction: Any
) -> Ref:
    _needs_no_reduction(reduction)
    lengths = (total(input1 * input1) + 1e-12) * (total(input2 * input2) + 1e-12)
    cosine = total(input1 * input2) / function("sqrt", lengths)
    zero = const_like(cosine, 0)
    alike = select(target.equals(1), 1.0 - cosine, zero)
    return alike + select(target.equals(-1), at_least(cosine - margin, 0), zero)


def _needs_no_reduction(reduction: Any) -> None:
    if _REDUCTIONS.get(reduction, reduction) != "none":
        raise Unfusable("it reduces what was reduced before")
